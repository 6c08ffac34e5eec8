"""Requests whose constraints leave no token: refused where the first token shows it, else told by their names."""

import pickle
from typing import Any

import pytest

from lean_engine.errors import RequestError
from lean_engine.sampling.constraints import NOTHING_LEFT, RequestFault, explained
from lean_engine.sampling.params import SamplingParams
from lean_engine.sampling.sampler import SamplingState

EOS = 1


def state_of(words: list[tuple[int, ...]] | None = None, **values: Any) -> SamplingState:
    return SamplingState(SamplingParams(**values), [4], eos_token_ids={EOS}, bad_words_token_ids=words or [])


@pytest.mark.parametrize(
    ("values", "bad_words", "fields"),
    [
        ({"allowed_token_ids": [EOS], "min_tokens": 1}, [], "allowed_token_ids and min_tokens"),
        (
            {"allowed_token_ids": [EOS, 3], "stop_token_ids": [3], "min_tokens": 2},
            [],
            "allowed_token_ids and min_tokens",
        ),
        ({"allowed_token_ids": [3], "bad_words": ["x"]}, [(3,)], "allowed_token_ids and bad_words"),
    ],
)
def test_a_first_token_that_cannot_be_is_refused(values: dict[str, Any], bad_words: Any, fields: str) -> None:
    with pytest.raises(RequestError, match=f"^{fields} contradict each other") as caught:
        state_of(bad_words, **values)
    assert caught.value.param == "allowed_token_ids"
    assert caught.value.status == 400


def test_constraints_that_leave_one_first_token_are_not() -> None:
    state_of(allowed_token_ids=[EOS])
    state_of(allowed_token_ids=[EOS, 2], min_tokens=1)
    state_of([(3, 3)], allowed_token_ids=[3], bad_words=["x"])
    state_of(repetition_penalty=1e-300)


def test_the_error_names_what_the_request_asks_for() -> None:
    params = SamplingParams(repetition_penalty=1e-300, allowed_token_ids=[3], temperature=0)
    error = explained(NOTHING_LEFT, params)
    said = "no token can be chosen: allowed_token_ids and repetition_penalty 1e-300 leave none with a finite logit"
    assert error == said
    assert isinstance(error, RequestFault)
    assert isinstance(pickle.loads(pickle.dumps(error)), RequestFault)
    assert type(explained("the logits are damaged", params)) is str
