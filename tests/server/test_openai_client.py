"""The real openai client against a live server; answers are those of the library."""

import math
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from live_server import ENGINE, MODEL, Live

from lean_engine import LLM, RequestOutput, SamplingParams

MESSAGES: Any = [{"role": "user", "content": "hello world"}]
GREEDY: dict[str, Any] = {"model": "tiny", "temperature": 0, "max_tokens": 12}


@pytest.fixture(scope="module")
def client(live: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def offline() -> Iterator[LLM]:
    with LLM(MODEL, **ENGINE) as llm:
        yield llm


def answer(output: RequestOutput) -> str:
    return output.outputs[0].text


def test_completion(client: openai.OpenAI, offline: LLM) -> None:
    expected = offline.generate("hello world", SamplingParams(temperature=0, max_tokens=12))[0]
    got = client.completions.create(prompt="hello world", **GREEDY)
    assert got.object == "text_completion"
    assert got.id.startswith("cmpl-")
    assert got.model == "tiny"
    assert got.choices[0].text == answer(expected)
    assert got.choices[0].finish_reason == "length"
    assert got.usage is not None
    assert got.usage.prompt_tokens == len(expected.prompt_token_ids)
    assert got.usage.completion_tokens == 12
    assert got.usage.total_tokens == len(expected.prompt_token_ids) + 12


def test_completion_streamed(client: openai.OpenAI) -> None:
    whole = client.completions.create(prompt="hello world", **GREEDY)
    chunks = list(client.completions.create(prompt="hello world", stream=True, **GREEDY))
    assert "".join(c.choices[0].text for c in chunks) == whole.choices[0].text
    assert {c.id for c in chunks} == {chunks[0].id}
    assert [c.choices[0].finish_reason for c in chunks][-1] == "length"
    assert all(c.choices[0].finish_reason is None for c in chunks[:-1])
    assert all(c.usage is None for c in chunks)


def test_every_form_of_prompt(client: openai.OpenAI, offline: LLM) -> None:
    ids = [offline.tokenizer.encode(text) for text in ("hello", "world peace")]
    expected = [
        answer(o) for o in offline.generate(["hello", "world peace"], SamplingParams(temperature=0, max_tokens=12))
    ]
    prompts: list[Any] = [["hello", "world peace"], ids]
    for prompt in prompts:
        choices = client.completions.create(prompt=prompt, **GREEDY).choices
        assert [c.text for c in choices] == expected
        assert [c.index for c in choices] == [0, 1]
    assert client.completions.create(prompt=ids[1], **GREEDY).choices[0].text == expected[1]


def test_chat(client: openai.OpenAI, offline: LLM) -> None:
    expected = offline.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=12))[0]
    got = client.chat.completions.create(messages=MESSAGES, **GREEDY)
    assert got.object == "chat.completion"
    assert got.id.startswith("chatcmpl-")
    assert got.choices[0].message.role == "assistant"
    assert got.choices[0].message.content == answer(expected)
    assert got.choices[0].finish_reason == "length"
    assert got.usage is not None
    assert got.usage.prompt_tokens == len(expected.prompt_token_ids)


def test_chat_streamed(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=MESSAGES, **GREEDY)
    chunks = list(client.chat.completions.create(messages=MESSAGES, stream=True, **GREEDY))
    assert chunks[0].object == "chat.completion.chunk"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(c.choices[0].delta.role is None for c in chunks[1:])
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "length"


def test_content_parts_are_joined(client: openai.OpenAI) -> None:
    parts: Any = [{"role": "user", "content": [{"type": "text", "text": "hello world"}]}]
    texts = [client.chat.completions.create(messages=m, **GREEDY).choices[0].message.content for m in (MESSAGES, parts)]
    assert texts[0] == texts[1]


def test_usage_of_a_stream_comes_only_when_asked_for(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(messages=MESSAGES, stream=True, stream_options={"include_usage": True}, **GREEDY)
    )
    assert [bool(c.choices) for c in chunks] == [True] * (len(chunks) - 1) + [False]
    assert [c.usage is not None for c in chunks] == [False] * (len(chunks) - 1) + [True]
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12


def test_continuous_usage(client: openai.OpenAI) -> None:
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(client.completions.create(prompt="hello", stream=True, stream_options=options, **GREEDY))
    counts = [c.usage.completion_tokens for c in chunks if c.usage is not None]
    assert len(counts) == len(chunks)
    assert counts == sorted(counts)
    assert counts[-1] == 12


def test_cached_tokens_are_reported(client: openai.OpenAI) -> None:
    prompt = "a long sentence that fills some blocks, " * 3
    for expected in (0, 16):
        usage = client.completions.create(prompt=prompt, extra_body={"cache_salt": "own"}, **GREEDY).usage
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        cached = usage.prompt_tokens_details.cached_tokens or 0
        assert cached >= expected
        assert cached % 16 == 0
        assert (cached > 0) == (expected > 0)


def test_n_answers(client: openai.OpenAI) -> None:
    wanted: Any = {"model": "tiny", "messages": MESSAGES, "n": 3, "temperature": 1.0, "seed": 3, "max_tokens": 8}
    got = client.chat.completions.create(**wanted)
    assert [c.index for c in got.choices] == [0, 1, 2]
    assert len({c.message.content for c in got.choices}) == 3
    assert got.usage is not None
    assert got.usage.completion_tokens == 24
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(stream=True, **wanted):
        texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert texts == [c.message.content for c in got.choices]


def test_a_seed_is_reproducible(client: openai.OpenAI) -> None:
    texts = [
        client.completions.create(model="tiny", prompt="hello", seed=seed, temperature=1, max_tokens=16).choices[0].text
        for seed in (5, 5, 6)
    ]
    assert texts[0] == texts[1] != texts[2]


def test_chat_logprobs(client: openai.OpenAI, offline: LLM) -> None:
    expected = offline.chat(MESSAGES, SamplingParams(temperature=0, max_tokens=12, logprobs=3))[0].outputs[0]
    got = client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=3, **GREEDY).choices[0]
    assert got.logprobs is not None
    entries = got.logprobs.content or []
    assert len(entries) == 12
    for entry, token_id, theirs in zip(entries, expected.token_ids, expected.logprobs or [], strict=True):
        assert math.isclose(entry.logprob, theirs[token_id].logprob, rel_tol=1e-6)
        assert bytes(entry.bytes or []) == offline.tokenizer.token_bytes(token_id)
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == max(t.logprob for t in entry.top_logprobs)
    streamed = client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=3, stream=True, **GREEDY)
    found = [e for c in streamed if c.choices[0].logprobs for e in c.choices[0].logprobs.content or []]
    assert found == entries


def test_completion_logprobs_and_offsets(client: openai.OpenAI) -> None:
    got = client.completions.create(prompt="hello", logprobs=2, **GREEDY).choices[0].logprobs
    assert got is not None
    assert len(got.tokens or []) == len(got.token_logprobs or []) == len(got.top_logprobs or []) == 12
    assert got.text_offset is not None
    assert got.text_offset[0] == len("hello")
    zero = client.completions.create(prompt="hello", logprobs=0, **GREEDY).choices[0].logprobs
    assert zero is not None
    assert zero.token_logprobs == got.token_logprobs
    assert all(len(top) == 1 for top in zero.top_logprobs or [])


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs_is_that_of_the_prompt(client: openai.OpenAI, offline: LLM, stream: bool) -> None:
    prompt = "hello world"
    params = SamplingParams(temperature=0, max_tokens=12, logprobs=1, prompt_logprobs=1)
    expected = offline.generate(prompt, params)[0]
    got: Any = client.completions.create(prompt=prompt, echo=True, logprobs=1, stream=stream, **GREEDY)
    chunks = list(got) if stream else [got]
    assert "".join(c.choices[0].text for c in chunks) == prompt + answer(expected)
    values = [p for c in chunks if c.choices[0].logprobs for p in c.choices[0].logprobs.token_logprobs]
    num_prompt = len(expected.prompt_token_ids)
    assert len(values) == num_prompt + 12
    assert values[0] is None
    prompts = zip(
        values[1:num_prompt], expected.prompt_token_ids[1:], (expected.prompt_logprobs or [])[1:], strict=True
    )
    for value, token_id, entry in prompts:
        assert entry is not None
        assert math.isclose(value, entry[token_id].logprob, rel_tol=1e-6)


def test_echo_without_generation_scores_the_prompt(client: openai.OpenAI) -> None:
    got = client.completions.create(
        model="tiny", prompt="hello world", echo=True, logprobs=1, max_tokens=0, temperature=0
    )
    assert got.choices[0].text == "hello world"
    assert got.choices[0].finish_reason == "length"
    assert got.choices[0].logprobs is not None
    assert len(got.choices[0].logprobs.token_logprobs or []) == got.usage.prompt_tokens  # type: ignore[union-attr]
    assert got.usage.completion_tokens == 0  # type: ignore[union-attr]


def test_stop_string_ends_and_is_left_out(client: openai.OpenAI) -> None:
    text = client.completions.create(prompt="hello world", **GREEDY).choices[0].text
    stop = text[4:7]
    cut = client.completions.create(prompt="hello world", stop=[stop, "never"], **GREEDY).choices[0]
    assert cut.text == text[: text.index(stop)]
    assert cut.finish_reason == "stop"
    assert cut.stop_reason == stop  # type: ignore[attr-defined]
    kept = client.completions.create(
        prompt="hello world", stop=stop, extra_body={"include_stop_str_in_output": True}, **GREEDY
    ).choices[0]
    assert kept.text == cut.text + stop
    chunks = client.completions.create(prompt="hello world", stop=stop, stream=True, **GREEDY)
    assert "".join(c.choices[0].text for c in chunks) == cut.text


def test_logit_bias_and_token_lists(client: openai.OpenAI, offline: LLM) -> None:
    ask: dict[str, Any] = {"model": "tiny", "prompt": "hello", "temperature": 0, "max_tokens": 3}

    def ids(**fields: Any) -> list[int]:
        body = {"return_token_ids": True, **fields.pop("extra", {})}
        return client.completions.create(**ask, **fields, extra_body=body).choices[0].token_ids  # type: ignore

    assert ids(logit_bias={"77": 100}) == [77, 77, 77]
    assert ids(extra={"allowed_token_ids": [99]}) == [99, 99, 99]
    plain = ids()
    assert ids(extra={"stop_token_ids": [plain[1]]}) == plain[:2]
    assert ids(extra={"bad_words": [offline.tokenizer.token_text(plain[0])]})[0] != plain[0]


def test_penalties_min_p_top_k_and_min_tokens_are_honoured(client: openai.OpenAI, offline: LLM) -> None:
    values: dict[str, Any] = {
        "temperature": 0.9,
        "top_p": 0.9,
        "seed": 11,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "max_tokens": 20,
    }
    extra = {"top_k": 40, "min_p": 0.01, "repetition_penalty": 1.1, "min_tokens": 5, "ignore_eos": True}
    expected = offline.generate("hello", SamplingParams(**values, **extra))[0]
    got = client.completions.create(model="tiny", prompt="hello", extra_body=extra, **values)
    assert got.choices[0].text == answer(expected)


def test_max_completion_tokens_and_the_rest_of_the_context(client: openai.OpenAI, live: Live) -> None:
    got = client.chat.completions.create(model="tiny", messages=MESSAGES, max_completion_tokens=3, temperature=0)
    assert got.usage is not None
    assert got.usage.completion_tokens == 3
    open_end = client.chat.completions.create(
        model="tiny", messages=MESSAGES, temperature=0, extra_body={"ignore_eos": True}
    )
    assert open_end.usage is not None
    assert open_end.usage.total_tokens == live.http.service.model.max_model_len  # type: ignore[union-attr]


def test_continue_final_message_and_echo(client: openai.OpenAI, offline: LLM) -> None:
    messages: Any = [*MESSAGES, {"role": "assistant", "content": "The answer is"}]
    extra = {"continue_final_message": True, "add_generation_prompt": False, "echo": True}
    params = SamplingParams(temperature=0, max_tokens=12)
    expected = offline.chat(messages, params, add_generation_prompt=False, continue_final_message=True)[0]
    got = client.chat.completions.create(messages=messages, extra_body=extra, **GREEDY)
    assert got.choices[0].message.content == "The answer is" + answer(expected)


def test_prompt_logprobs_of_chat(client: openai.OpenAI) -> None:
    got: Any = client.chat.completions.create(messages=MESSAGES, extra_body={"prompt_logprobs": 1}, **GREEDY)
    assert len(got.prompt_logprobs) == got.usage.prompt_tokens
    assert got.prompt_logprobs[0] is None
    assert all({"logprob", "rank", "decoded_token"} == set(e) for p in got.prompt_logprobs[1:] for e in p.values())


def test_token_ids_in_place_of_texts(client: openai.OpenAI) -> None:
    extra = {"return_tokens_as_token_ids": True, "return_token_ids": True}
    got: Any = client.chat.completions.create(messages=MESSAGES, logprobs=True, extra_body=extra, **GREEDY)
    assert [e.token for e in got.choices[0].logprobs.content] == [f"token_id:{i}" for i in got.choices[0].token_ids]
    assert len(got.prompt_token_ids) == got.usage.prompt_tokens


def test_bookkeeping_fields_of_clients_are_accepted(client: openai.OpenAI) -> None:
    got = client.chat.completions.create(
        messages=MESSAGES, user="me", metadata={"a": "b"}, store=False, service_tier="auto", **GREEDY
    )
    assert got.choices[0].finish_reason == "length"


def test_models(client: openai.OpenAI) -> None:
    (model,) = client.models.list().data
    assert model.id == "tiny"
    assert model.max_model_len == 256  # type: ignore[attr-defined]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_an_error_has_the_fields_that_the_client_reads(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="tiny", messages=MESSAGES, temperature=-1)
    assert caught.value.param == "temperature"
    assert caught.value.body["message"].startswith("temperature must be")  # type: ignore[index]
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-4", messages=MESSAGES)
    assert missing.value.param == "model"
