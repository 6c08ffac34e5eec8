"""What answers hold, over HTTP: stop strings, characters of several tokens, ends, damaged logits, what never fits."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from live_server import MODEL, Live
from safetensors.numpy import load_file, save_file

Start = Callable[..., Live]


def said(text: str, **fields: Any) -> dict[str, Any]:
    """A request whose answer is this text."""
    grammar = f"start: {json.dumps(text, ensure_ascii=False)}"
    return {"prompt": "hi", "max_tokens": 100, "structured_outputs": {"grammar": grammar}, **fields}


def deltas(live: Live, body: dict[str, Any]) -> list[dict[str, Any]]:
    return [json.loads(event)["choices"][0] for event in live.events("/v1/completions", body)[:-1]]


@pytest.mark.parametrize("text", ["안녕하세요", "👩‍👩‍👧‍👦 ok", "naïve – “quotes”", "a🏳️‍🌈b", "\u0301e\u0301"])
def test_characters_of_several_tokens_come_whole(live: Live, text: str) -> None:
    chunks = deltas(live, said(text))
    assert "".join(c["text"] for c in chunks) == text
    assert not any("\ufffd" in c["text"] for c in chunks)
    assert live.request("/v1/completions", said(text))[1]["choices"][0]["text"] == text


@pytest.mark.parametrize("interval", [1, 3])
def test_a_streams_log_probabilities_are_those_of_the_whole_answer(live: Live, interval: int) -> None:
    """Their offsets too, where the text of a token is held back."""
    for text in ("안녕하세요 ok", "one STOP two"):
        body = said(text, echo=True, logprobs=2, temperature=0, prompt="hi 日本")
        whole = live.request("/v1/completions", body)[1]["choices"][0]["logprobs"]
        chunks = deltas(live, {**body, "stream_interval": interval})
        for key in ("tokens", "text_offset", "token_logprobs", "top_logprobs"):
            assert [value for chunk in chunks for value in chunk["logprobs"][key]] == whole[key], key


def test_no_part_of_a_stop_string_is_streamed(live: Live) -> None:
    chunks = deltas(live, said("one STOP STOPPING two", stop=["STOPPING"]))
    assert "".join(c["text"] for c in chunks) == "one STOP "
    assert chunks[-1]["finish_reason"] == "stop"
    assert chunks[-1]["stop_reason"] == "STOPPING"
    assert not any(c["text"].endswith(("S", "ST", "STO")) for c in chunks)


def test_what_might_have_become_a_stop_string_is_given_out_at_the_end(live: Live) -> None:
    chunks = deltas(live, said("one STOP", stop=["STOPPING"]))
    assert "".join(c["text"] for c in chunks) == "one STOP"
    assert chunks[-1]["stop_reason"] is None


def test_an_end_token_ends_the_answer_and_is_not_shown(live: Live) -> None:
    status, body = live.complete(logit_bias={"1": 100}, max_tokens=5)
    assert status == 200
    assert body["choices"][0] | {"logprobs": None} == {
        "index": 0,
        "text": "",
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": None,
    }
    assert body["usage"]["completion_tokens"] == 1
    _, body = live.complete(logit_bias={"1": 100}, max_tokens=5, ignore_eos=True)
    assert body["choices"][0]["finish_reason"] == "length"
    _, body = live.complete(logit_bias={"77": 100}, max_tokens=5, ignore_eos=True, stop_token_ids=[77])
    assert (body["choices"][0]["finish_reason"], body["choices"][0]["stop_reason"]) == ("stop", 77)


def test_chat_prompts_get_no_second_bos_and_completions_get_the_tokenizers(live: Live) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1, "return_token_ids": True}
    tokenizer = live.engine.tokenizer
    _, body, _ = live.request("/v1/chat/completions", chat)
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert body["prompt_token_ids"] == tokenizer.encode(text, add_special_tokens=False)
    _, body = live.complete("hi", max_tokens=1, return_token_ids=True)
    assert body["choices"][0]["prompt_token_ids"] == tokenizer.encode("hi")


def test_a_cache_salt_keeps_prefixes_apart(live: Live) -> None:
    prompt = [*range(100, 140)]

    def cached(salt: str | None) -> int:
        _, body = live.complete(prompt, max_tokens=1, cache_salt=salt)
        found: int = body["usage"]["prompt_tokens_details"]["cached_tokens"]
        return found

    assert [cached("a"), cached("a"), cached("b"), cached(None)] == [0, 32, 0, 0]
    assert live.request("/reset_prefix_cache", b"")[0] == 200
    assert cached("a") == 0


def test_what_can_never_fit_is_refused_at_once(start: Start) -> None:
    server = start(num_gpu_blocks_override=2, max_model_len=32)
    status, body = server.complete([5] * 40, max_tokens=1)
    assert status == 400
    assert "40 tokens" in body["error"]["message"]
    assert server.complete([5] * 10, max_tokens=3)[0] == 200


def test_an_order_of_priority(start: Start) -> None:
    server = start(scheduling_policy="priority")
    assert server.complete(priority=-3, max_tokens=1)[0] == 200


def test_damaged_logits_fail_their_request_with_a_reason(start: Start, tmp_path: Path) -> None:
    model = tmp_path / "damaged"
    shutil.copytree(MODEL, model)
    weights = load_file(model / "model.safetensors")
    weights["model.norm.weight"] = np.full_like(weights["model.norm.weight"], np.nan)
    save_file(weights, model / "model.safetensors")
    server = start(model=model)
    status, body = server.complete(max_tokens=3)
    assert status == 500
    assert "logits are NaN" in body["error"]["message"]
    status, body, _ = server.request("/v1/completions", {"prompt": "a", "stream": True})
    assert status == 500  # nothing of the stream was sent yet
    assert "logits are NaN" in body["error"]["message"]
    assert server.request("/health")[0] == 200
    server.wait_until_idle()


def test_a_model_without_a_tokenizer_takes_token_ids(start: Start, tmp_path: Path) -> None:
    model = tmp_path / "bare"
    model.mkdir()
    shutil.copy(MODEL / "config.json", model)
    server = start(model=model, load_format="dummy")
    status, body = server.complete([5, 6, 7], max_tokens=3, logprobs=1, return_token_ids=True)
    assert status == 200
    choice = body["choices"][0]
    assert choice["text"] == ""
    assert choice["logprobs"]["tokens"] == [f"token_id:{i}" for i in choice["token_ids"]]
    assert server.complete("text")[0] == 400
    assert server.request("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]})[0] == 400
    assert server.request("/detokenize", {"tokens": [1]})[0] == 400
