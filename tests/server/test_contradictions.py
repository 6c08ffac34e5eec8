"""Requests whose own constraints leave no token: a 400 that names them, not a fault of the server."""

import json
from typing import Any

import pytest
from live_server import Live

CHOICE = {"structured_outputs": {"choice": ["yes"]}}


def id_of(live: Live, text: str) -> int:
    (token_id,) = live.engine.tokenizer.encode(text, add_special_tokens=False)
    return int(token_id)


def outcome(live: Live, body: dict[str, Any], stream: bool) -> dict[str, Any]:
    """The error of a response whose status is 400."""
    status, answer, _ = live.request("/v1/completions", {"prompt": "hello", **body, "stream": stream})
    assert status == 400, answer
    live.wait_until_idle()
    error: dict[str, Any] = answer["error"]
    assert (error["type"], error["code"]) == ("BadRequestError", 400)
    return error


@pytest.mark.parametrize("stream", [False, True])
def test_a_contradiction_in_the_first_token_is_refused(live: Live, stream: bool) -> None:
    a, eos = id_of(live, "a"), sorted(live.engine.eos_token_ids)
    error = outcome(live, {**CHOICE, "allowed_token_ids": [a]}, stream)
    assert error["param"] == "structured_outputs"
    assert "structured_outputs and allowed_token_ids contradict each other" in error["message"]
    error = outcome(live, {"allowed_token_ids": eos, "min_tokens": 2}, stream)
    assert error["param"] == "allowed_token_ids"
    assert "min_tokens" in error["message"]
    error = outcome(live, {"allowed_token_ids": [a], "bad_words": ["a"]}, stream)
    assert "allowed_token_ids and bad_words contradict each other" in error["message"]
    error = outcome(live, {"structured_outputs": {"regex": "a"}, "bad_words": ["a"]}, stream)
    assert "structured_outputs and bad_words contradict each other" in error["message"]


def test_constraints_that_leave_a_token_are_honoured(live: Live) -> None:
    y, a = id_of(live, "y"), id_of(live, "a")
    _, body = live.complete(
        max_tokens=1, allowed_token_ids=[y, a], bad_words=["a"], structured_outputs={"regex": "[ay]"}
    )
    assert body["choices"][0]["text"] == "y"
    _, body = live.complete(max_tokens=4, structured_outputs={"regex": "y|a"}, allowed_token_ids=[a], ignore_eos=True)
    assert body["choices"][0]["text"] == "a"
    assert body["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_a_penalty_that_overflows_is_the_requests_fault(live: Live, stream: bool) -> None:
    error = outcome(live, {"repetition_penalty": 1e-300, "prompt": list(range(200, 300)), "max_tokens": 20}, stream)
    assert "repetition_penalty 1e-300 leaves none with a finite logit" in error["message"]


def test_a_penalty_of_any_size_that_does_not_overflow_is_served(live: Live) -> None:
    for penalty in (1e-9, 1e9, 1e300):
        assert live.complete(repetition_penalty=penalty, max_tokens=4)[0] == 200


def test_a_contradiction_that_comes_up_later_names_the_constraints(live: Live) -> None:
    y = id_of(live, "y")  # the form wants an e behind it
    body = {"structured_outputs": {"regex": "y{60}es"}, "allowed_token_ids": [y], "max_tokens": 80, "temperature": 0}
    said = "no token can be chosen: structured_outputs and allowed_token_ids leave none"
    assert said in outcome(live, body, stream=False)["message"]
    *some, error, done = live.events("/v1/completions", {"prompt": "hello", **body})
    assert "".join(json.loads(event)["choices"][0]["text"] for event in some) == "y" * 60
    assert json.loads(error)["error"]["code"] == 400
    assert said in json.loads(error)["error"]["message"]
    assert done == "[DONE]"
    live.wait_until_idle()


@pytest.mark.parametrize("stream", [False, True])
def test_chat_says_the_same(live: Live, stream: bool) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], **CHOICE, "allowed_token_ids": [id_of(live, "a")]}
    status, answer, _ = live.request("/v1/chat/completions", {**body, "stream": stream})
    assert status == 400
    assert answer["error"]["param"] == "structured_outputs"


def test_damaged_logits_stay_the_servers_fault(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    from lean_engine.sampling.sampler import Sampler

    sample = Sampler.sample

    def damaged(self: Any, logits: Any, *rest: Any) -> Any:
        logits[:] = float("nan")
        return sample(self, logits, *rest)

    monkeypatch.setattr(Sampler, "sample", damaged)
    for stream in (False, True):
        status, answer, _ = live.request("/v1/completions", {"prompt": "hello", "stream": stream})
        assert status == 500
        assert "NaN" in answer["error"]["message"]
    live.wait_until_idle()
