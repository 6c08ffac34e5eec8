"""What is wrong with a body is a 400 that names the field; nothing of it reaches the engine."""

import time
from typing import Any

import pytest
from live_server import Live

from lean_engine.errors import RequestError
from lean_engine.server.bodies import decode
from lean_engine.server.protocol import CompletionRequest, DetokenizeRequest

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
COMPLETION = {"prompt": "hi", "max_tokens": 2}
PATHS = {"/v1/completions": COMPLETION, "/v1/chat/completions": CHAT}


def refusal(live: Live, path: str, body: Any, status: int = 400) -> dict[str, Any]:
    """The error of a response, whose form is checked."""
    found, answer, headers = live.request(path, body)
    assert found == status, answer
    assert headers["content-type"] == "application/json"
    assert set(answer) == {"error"}
    error: dict[str, Any] = answer["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    assert "\n" not in error["message"]
    return error


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", "hot"),
        ("temperature", True),
        ("temperature", [1]),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", 2),
        ("n", 0),
        ("n", "2"),
        ("n", 10**9),
        ("seed", 2**70),
        ("seed", 1.5),
        ("stop", ""),
        ("stop", [1]),
        ("stop", {"a": 1}),
        ("stop", ["x"] * 1000),
        ("stop_token_ids", [512]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [2**31]),
        ("stop_token_ids", "1"),
        ("logit_bias", {"512": 1}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", [1]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [10**30]),
        ("bad_words", [""]),
        ("presence_penalty", 3),
        ("frequency_penalty", -3),
        ("repetition_penalty", 0),
        ("min_tokens", -1),
        ("min_tokens", 5),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", 10**30),
        ("max_tokens", 300),
        ("prompt_logprobs", 21),
        ("cache_salt", ""),
        ("cache_salt", "x" * 2000),
        ("priority", 1),
        ("priority", "high"),
        ("stream", "yes"),
        ("stream_options", {"include_usage": True}),
        ("stream_options", {"unknown": True}),
        ("request_id", ""),
        ("request_id", "a\nb"),
        ("echo", 1),
        ("ignore_eos", "no"),
        ("best_of", 2),
        ("use_beam_search", True),
        ("length_penalty", 0.5),
        ("truncate_prompt_tokens", 4),
        ("guided_json", {}),
        ("nonsense", 1),
        ("logits_processors", ["x"]),
        ("response_format", {"type": "xml"}),
    ],
)
def test_a_wrong_value_is_named(live: Live, path: str, field: str, value: Any) -> None:
    error = refusal(live, path, {**PATHS[path], field: value})
    assert error["param"].split(".")[0].split("[")[0] == field
    live.wait_until_idle()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("literal", "param"),
    [
        ('"temperature": NaN', "temperature"),
        ('"temperature": Infinity', "temperature"),
        ('"temperature": 1e999', "temperature"),
        ('"logit_bias": {"1": NaN}', "logit_bias.1"),
        ('"logit_bias": {"1": 1e400}', "logit_bias"),
        ('"logit_bias": {"1": "x"}', "logit_bias"),
        ('"user": "\\ud800"', "user"),
        ('"stop": ["a", "\\udfff"]', "stop[1]"),
        ('"seed": 1' + "0" * 5000, "seed"),
        ('"\\ud800": 1', None),
        ('"metadata": ' + "[" * 100_000, "metadata"),
        ('"metadata": {"a": ' + "[" * 2000 + "]" * 2000 + "}", None),
        ('"metadata": {"a": ' + "{" * 5, None),
    ],
)
def test_what_json_does_not_know_is_refused(live: Live, path: str, literal: str, param: str | None) -> None:
    assert refusal(live, path, f"{{{literal}}}".encode())["param"] == param


@pytest.mark.parametrize("path", [*PATHS, "/tokenize", "/detokenize"])
@pytest.mark.parametrize(
    "body", [b"", b"null", b"[]", b"1", b'"x"', b"{", b"garbage", b"\xff\xfe", b"{}", b'\xef\xbb\xbf{"prompt": "x"}']
)
def test_garbage_bodies(live: Live, path: str, body: bytes) -> None:
    refusal(live, path, body)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ('{"prompt": "a", "max_tokens": 1, "prompt": "b"}', "prompt"),
        ('{"prompt": "a", "max_tokens": 1, "max_tok\\u0065ns": 1}', "max_tokens"),
        ('{"prompt": "a", "unheard_of": null, "unheard_of": null}', "unheard_of"),
        ('{"prompt": "a", "logit_bias": {"1": 1, "2": 1, "1": 2}}', "logit_bias.1"),
        (
            '{"prompt": "a", "metadata": {"x": %s, "a": [{}, {"b": {"c": 1, "c": 1e3}}]}}' % ("9" * 300),
            "metadata.a[1].b.c",
        ),
    ],
)
def test_a_key_that_stands_twice_is_named(live: Live, body: str, param: str) -> None:
    error = refusal(live, "/v1/completions", body.encode())
    assert (error["param"], error["message"]) == (param, f"{param} is given twice; should be given once")


def test_a_key_that_a_message_has_twice_is_named(live: Live) -> None:
    body = b'{"messages": [{"role": "user", "content": "a"}, {"role": "user", "content": "b", "role": "assistant"}]}'
    for path in ("/v1/chat/completions", "/tokenize"):
        assert refusal(live, path, body)["param"] == "messages[1].role"


def test_many_keys_of_which_one_stands_twice_are_found_in_linear_time() -> None:
    keys = ", ".join(f'"k{n}": 1' for n in range(80_000))
    body = f'{{"prompt": "a", "metadata": {{{keys}, "k79999": 2}}}}'.encode()
    began = time.monotonic()
    with pytest.raises(RequestError, match=r"metadata\.k79999 is given twice"):
        decode(body, CompletionRequest)
    assert time.monotonic() - began < 5


def test_a_very_large_body_is_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lean_engine.server.bodies.json.loads", lambda *_, **__: pytest.fail("it was searched"))
    assert len(decode(b'{"tokens": [%b1]}' % (b"1," * 2**19), DetokenizeRequest).tokens) == 2**19 + 1


@pytest.mark.parametrize("depth", [500, 990, 1100, 50_000])
@pytest.mark.parametrize("is_closed", [True, False])
def test_a_body_nested_deeply_in_an_unknown_field(live: Live, depth: int, is_closed: bool) -> None:
    refusal(live, "/v1/completions", b'{"a":' * depth + (b"1" + b"}" * depth if is_closed else b""))


def test_why_a_body_is_no_json_is_said_in_one_sentence(live: Live) -> None:
    said = {body: refusal(live, "/v1/completions", body)["message"] for body in (b"{", b"\x00", b'{"a" 1}')}
    assert said[b"{"] == "the body is not JSON: input data was truncated"
    assert said[b"\x00"] == "the body is not JSON: invalid character (byte 0)"


def test_bytes_that_are_not_utf8_are_named(live: Live) -> None:
    assert refusal(live, "/v1/completions", b'{"prompt": "a\xffb"}')["param"] == "prompt"


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([], "prompt"),
        ([[]], "prompt"),
        ([[], []], "prompt"),
        (["", ""], "prompt"),
        (["a", 1], "prompt"),
        ([512], "prompt"),
        ([-1], "prompt"),
        ([2**31], "prompt"),
        ([10**30], "prompt"),
        ([1.5], "prompt[0]"),
        ([True], "prompt[0]"),
        ([None], "prompt[0]"),
        ({"a": 1}, "prompt"),
        (None, "prompt"),
        ([[1], "a"], "prompt"),
        ([1] * 256, "prompt"),
        (["a"] * 3000, "prompt"),
    ],
)
def test_prompts_that_cannot_be_served(live: Live, prompt: Any, param: str) -> None:
    assert refusal(live, "/v1/completions", {"prompt": prompt, "max_tokens": 1})["param"] == param
    live.wait_until_idle()


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "non-empty"),
        ([{"role": "user"}], "messages[0] has no content"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": 1, "content": "x"}], "messages[0].role"),
        ([{"role": "user", "content": 1}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}], "'image_url'"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ],
)
def test_messages_that_are_malformed(live: Live, messages: Any, said: str) -> None:
    error = refusal(live, "/v1/chat/completions", {"messages": messages})
    assert error["param"] == "messages"
    assert said in error["message"]


def test_a_prompt_that_is_too_long_says_both_numbers(live: Live) -> None:
    error = refusal(live, "/v1/completions", {"prompt": [5] * 300})
    assert "300" in error["message"]
    assert "256" in error["message"]
    error = refusal(live, "/v1/completions", {"prompt": [5] * 200, "max_tokens": 100})
    assert error["param"] == "max_tokens"
    assert all(number in error["message"] for number in ("200", "100", "256"))


def test_a_hopelessly_long_text_is_refused_before_it_is_tokenised(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = live.engine.tokenizer
    monkeypatch.setattr(tokenizer, "encode", lambda *_, **__: pytest.fail("it was tokenised"))
    long = "hello " * 100_000
    assert refusal(live, "/v1/completions", {"prompt": long})["param"] == "prompt"
    chat = {"messages": [{"role": "user", "content": long}]}
    assert refusal(live, "/v1/chat/completions", chat)["param"] == "messages"


def test_fields_are_named_as_chat_names_them(live: Live) -> None:
    path = "/v1/chat/completions"
    assert refusal(live, path, {**CHAT, "logprobs": True, "top_logprobs": 21})["param"] == "top_logprobs"
    assert refusal(live, path, {**CHAT, "top_logprobs": 2})["param"] == "top_logprobs"
    assert refusal(live, path, {**CHAT, "max_completion_tokens": 1000})["param"] == "max_completion_tokens"
    long = {"messages": [{"role": "user", "content": "word " * 300}]}
    assert refusal(live, path, long)["param"] == "messages"


def test_a_template_that_refuses_is_a_400_with_its_message(start: Any) -> None:
    template = "{{ raise_exception('roles must alternate') }}"
    server = start(chat_template=template)
    error = refusal(server, "/v1/chat/completions", CHAT)
    assert "roles must alternate" in error["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_an_answer_begins_a_message_or_continues_one(live: Live, path: str) -> None:
    body = {"messages": [*CHAT["messages"], {"role": "assistant", "content": "well"}], "continue_final_message": True}
    error = refusal(live, path, {**body, "add_generation_prompt": True})
    assert error["param"] == "continue_final_message"
    assert "add_generation_prompt" in error["message"]
    expected = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nwell"
    for fields in ({}, {"add_generation_prompt": None}, {"add_generation_prompt": False}):
        status, answer, _ = live.request(path, {**body, **fields, **({"max_tokens": 1} if "chat" in path else {})})
        assert status == 200, answer
        num_tokens = answer["count"] if path == "/tokenize" else answer["usage"]["prompt_tokens"]
        assert num_tokens == len(live.engine.tokenizer.encode(expected, add_special_tokens=False))


def test_templates_of_requests_need_the_flag(live: Live, start: Any) -> None:
    body = {**CHAT, "chat_template": "{{ messages[0].content }}"}
    assert refusal(live, "/v1/chat/completions", body)["param"] == "chat_template"
    trusting = start(trust_request_chat_template=True)
    status, _, _ = trusting.request("/v1/chat/completions", body)
    assert status == 200
    # A request's template is text, never the path of a file.
    _, answer, _ = trusting.request("/v1/chat/completions", {**CHAT, "chat_template": "/etc/passwd"})
    assert answer["usage"]["prompt_tokens"] == len(trusting.engine.tokenizer.encode("/etc/passwd"))


def test_template_variables_that_are_fields_of_their_own_are_refused(live: Live) -> None:
    for name in ("messages", "chat_template", "tools", "bos_token", "add_generation_prompt"):
        error = refusal(live, "/v1/chat/completions", {**CHAT, "chat_template_kwargs": {name: "x"}})
        assert error["param"] == "chat_template_kwargs"


def test_fields_that_are_null_or_ask_for_nothing_are_accepted(live: Live) -> None:
    for path, body in PATHS.items():
        neutral = {"best_of": 1, "use_beam_search": False, "stop": None, "audio": None, "unheard_of": None, "n": None}
        status, answer, _ = live.request(path, {**body, **neutral})
        assert status == 200, answer


def test_addresses_that_do_not_exist(live: Live) -> None:
    for path in ("/nothing", "/v1", "/v1/embeddings", "/v1/completions/"):
        assert refusal(live, path, {"x": 1}, 404)["param"] is None
    refusal(live, "/v1/completions", None, 405)
    status, _, headers = live.request("/v1/models", {"x": 1})
    assert status == 405
    assert "GET" in headers["allow"]
    assert refusal(live, "/v1/completions", {**COMPLETION, "model": "other"}, 404)["param"] == "model"


def test_tokenize_and_detokenize(live: Live) -> None:
    tokenizer = live.engine.tokenizer
    ids = tokenizer.encode("hello world")
    status, body, _ = live.request("/tokenize", {"prompt": "hello world", "return_token_strs": True})
    assert status == 200
    assert body["tokens"] == ids
    assert body["count"] == len(ids)
    assert body["max_model_len"] == 256
    assert "".join(body["token_strs"]) == "hello world"
    status, body, _ = live.request("/tokenize", {"messages": CHAT["messages"], "add_generation_prompt": False})
    assert tokenizer.decode(body["tokens"], skip_special_tokens=False) == "<|im_start|>user\nhi<|im_end|>\n"
    assert live.request("/detokenize", {"tokens": ids})[1] == {"prompt": "hello world"}
    assert refusal(live, "/detokenize", {"tokens": [10**6]})["param"] == "tokens"
    assert refusal(live, "/tokenize", {"prompt": "a", "messages": []})["param"] == "prompt"
