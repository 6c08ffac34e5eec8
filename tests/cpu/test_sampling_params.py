"""SamplingParams: defaults, normal forms, and one clear error that names the field for each wrong value."""

from __future__ import annotations

import copy
import dataclasses
import math
import pickle
from typing import Any

import numpy as np
import pytest

from lean_engine.errors import RequestError
from lean_engine.sampling import SamplingParams


def refused(**options: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        SamplingParams(**options)
    message = str(caught.value)
    assert "\n" not in message
    assert caught.value.status == 400
    return caught.value


def test_defaults_are_those_of_vllm() -> None:
    assert dataclasses.asdict(SamplingParams()) == {
        "n": 1,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": None,
        "stop": (),
        "stop_token_ids": (),
        "include_stop_str_in_output": False,
        "ignore_eos": False,
        "max_tokens": 16,
        "min_tokens": 0,
        "logprobs": None,
        "prompt_logprobs": None,
        "detokenize": True,
        "skip_special_tokens": True,
        "spaces_between_special_tokens": True,
        "logit_bias": {},
        "allowed_token_ids": None,
        "bad_words": (),
        "skip_reading_prefix_cache": False,
        "structured_outputs": None,
    }


WRONG_VALUES: dict[str, tuple[object, ...]] = {
    "n": (0, -1, True, 1.0, "1", None, 16_385),
    "presence_penalty": (-2.01, 2.01, math.nan, math.inf, "0", None, False),
    "frequency_penalty": (-2.01, 2.01, math.nan, -math.inf, "0", None, True),
    "repetition_penalty": (0, -1.0, math.nan, math.inf, "1", None, True),
    "temperature": (-0.1, math.nan, math.inf, -math.inf, "hot", "1", None, True, 10**400, [1]),
    "top_p": (0, 0.0, -0.5, 1.01, math.nan, math.inf, "1", None, True),
    "top_k": (-2, 1.5, 50.0, "50", None, True),
    "min_p": (-0.01, 1.01, math.nan, "0", None, False),
    "seed": (2**64, -(2**63) - 1, 1.0, -1.0, "1", True),
    "stop": ("", [""], ["a", ""], [1], 1, {"a": 1}, ["a", None]),
    "stop_token_ids": ([-1], [1.0], ["1"], [True], 1, "12", [[1]]),
    "include_stop_str_in_output": (1, 0, "true", None),
    "ignore_eos": (1, "false", None),
    "max_tokens": (-1, 1.0, "16", True, math.inf),
    "min_tokens": (-1, 1.0, "1", None, False),
    "logprobs": (-2, True, False, 1.0, "1"),
    "prompt_logprobs": (-2, True, 1.5, "1"),
    "detokenize": (1, None),
    "skip_special_tokens": (0, "no"),
    "spaces_between_special_tokens": (0, []),
    "logit_bias": (
        *(
            [1],
            "1",
            {-1: 1},
            {"-1": 1},
            {"x": 1},
            {"1.0": 1},
            {1.0: 1},
            {True: 1},
            {None: 1},
            {"9" * 5000: 1},
            {"٣": 1},
        ),
        *({1: 100.1}, {1: -100.1}, {1: math.nan}, {1: math.inf}, {1: "1"}, {1: None}, {1: True}),
    ),
    "allowed_token_ids": ([], [-1], [1.0], ["1"], 1),
    "bad_words": ([""], "word", [1], 1),
    "skip_reading_prefix_cache": ("yes", 1.5),
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG_VALUES.items() for value in values]
)
def test_a_wrong_value_is_refused_and_the_error_names_its_field(name: str, value: object) -> None:
    error = refused(**{name: value})
    assert error.param == name
    assert str(error).startswith(f"{name} must be ")


def test_the_error_says_what_was_found_and_what_would_be_right() -> None:
    assert str(refused(temperature="hot")) == "temperature must be a finite number of at least 0, found 'hot'"
    assert str(refused(top_p=0)) == "top_p must be a finite number above 0 and at most 1, found 0"
    assert str(refused(top_k=-2)) == "top_k must be an integer of at least -1, found -2"


def test_a_long_wrong_value_does_not_make_a_long_message() -> None:
    assert len(str(refused(stop=["a" * 10_000, ""]))) < 300


@pytest.mark.parametrize("name", ["best_of", "use_beam_search", "length_penalty", "temprature", "n_"])
def test_an_unknown_keyword_is_refused_by_name(name: str) -> None:
    error = refused(**{name: 1})
    assert error.param == name
    assert name in str(error)


@pytest.mark.parametrize(
    ("name", "given", "kept"),
    [
        ("temperature", 0, 0.0),
        ("temperature", 1e-9, 0.01),
        ("temperature", 0.01, 0.01),
        ("temperature", 2, 2.0),
        ("top_k", -1, 0),
        ("top_k", np.int64(5), 5),
        ("top_p", 1, 1.0),
        ("min_p", np.float32(0.5), 0.5),
        ("seed", -1, None),
        ("seed", 2**64 - 1, 2**64 - 1),
        ("seed", -(2**63), -(2**63)),
        ("stop", "end", ("end",)),
        ("stop", ["a", "b"], ("a", "b")),
        ("stop", [], ()),
        ("stop_token_ids", [3, 2], (3, 2)),
        ("max_tokens", None, None),
        ("max_tokens", 0, 0),
        ("logprobs", 0, 0),
        ("logprobs", -1, -1),
        ("logit_bias", {"50256": -100, 7: 1}, {50256: -100.0, 7: 1.0}),
        ("allowed_token_ids", [1, 2], (1, 2)),
        ("bad_words", ["x y"], ("x y",)),
    ],
)
def test_a_good_value_is_kept_in_its_normal_form(name: str, given: Any, kept: object) -> None:
    found = getattr(SamplingParams(**{name: given}), name)
    assert found == kept
    assert type(found) is type(kept)


def test_greedy_means_temperature_zero_only() -> None:
    assert SamplingParams(temperature=0).is_greedy
    assert not SamplingParams(temperature=1e-12).is_greedy


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"n": 2, "temperature": 0}, "n"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"stop": "x", "detokenize": False}, "stop"),
    ],
)
def test_contradicting_values_are_refused(options: dict[str, Any], param: str) -> None:
    assert refused(**options).param == param


def test_values_that_only_look_contradicting_pass() -> None:
    SamplingParams(n=2, temperature=0.5)
    SamplingParams(min_tokens=100, max_tokens=None)
    SamplingParams(min_tokens=16)
    SamplingParams(stop_token_ids=[1], detokenize=False)


@pytest.mark.parametrize("token_id", [100, 2**31, 2**70])
@pytest.mark.parametrize("name", ["logit_bias", "stop_token_ids", "allowed_token_ids"])
def test_an_id_outside_the_vocabulary_is_refused_with_both_numbers(name: str, token_id: int) -> None:
    value: Any = {token_id: 1.0} if name == "logit_bias" else [0, token_id]
    params = SamplingParams(**{name: value})
    with pytest.raises(RequestError, match=rf"{name}.* 99 .*{token_id}") as caught:
        params.validate_for_model(100, 20)
    assert caught.value.param == name


def test_the_last_id_of_the_vocabulary_is_accepted() -> None:
    SamplingParams(logit_bias={99: 1}, stop_token_ids=[99], allowed_token_ids=[0, 99]).validate_for_model(100, 20)


@pytest.mark.parametrize("name", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize(
    ("asked", "limit", "is_allowed"),
    [(20, 20, True), (21, 20, False), (0, 0, True), (-1, 20, False), (-1, -1, True), (-1, 100, True), (500, -1, True)],
)
def test_logprobs_are_bounded_by_the_engines_limit(name: str, asked: Any, limit: int, is_allowed: bool) -> None:
    params = SamplingParams(**{name: asked})
    if is_allowed:
        params.validate_for_model(100, limit)
        return
    with pytest.raises(RequestError, match=f"{name} must be at most {limit}") as caught:
        params.validate_for_model(100, limit)
    assert caught.value.param == name
    if asked == -1:
        assert str(caught.value).endswith("found -1, which is the whole vocabulary of 100")


def test_params_cannot_be_changed_but_replaced_and_copied() -> None:
    params = SamplingParams(stop="x", logit_bias={1: 2}, seed=-1, top_k=-1, temperature=0.001)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.temperature = 2.0  # type: ignore[misc]
    assert dataclasses.replace(params) == params
    assert dataclasses.replace(params, max_tokens=3).max_tokens == 3
    assert copy.deepcopy(params) == params
    assert pickle.loads(pickle.dumps(params)) == params
    with pytest.raises(RequestError, match="top_p"):
        dataclasses.replace(params, top_p=2.0)


def test_the_callers_containers_are_not_shared() -> None:
    bias, stop = {1: 1.0}, ["x"]
    params = SamplingParams(logit_bias=bias, stop=stop)
    bias[2] = 1.0
    stop.append("y")
    assert params.logit_bias == {1: 1.0}
    assert params.stop == ("x",)
