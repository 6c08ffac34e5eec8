"""Requests whose own constraints leave no token: found when they are submitted where that can be seen, else told well.

What excludes tokens together: structured_outputs, allowed_token_ids, bad_words, and min_tokens with the tokens that end
an answer. Penalties and biases exclude none, but a repetition_penalty near 0 makes logits infinite.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from lean_engine.errors import RequestError
from lean_engine.sampling.params import SamplingParams

if TYPE_CHECKING:
    from lean_engine.sampling.grammar import Matcher

CONSTRAINTS = (  # fields of SamplingParams
    "structured_outputs",
    "allowed_token_ids",
    "bad_words",
    "min_tokens",
    "ignore_eos",
    "logit_bias",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
)
NEUTRAL = SamplingParams()


class RequestFault(str):
    """The error of an answer that its own request has caused, unlike that of damaged logits."""

    __slots__ = ()


NOTHING_LEFT = RequestFault("no token can be chosen: the request's constraints leave none")  # see `explained`


def explained(error: str, params: SamplingParams) -> str:
    """A row's error, with the constraints named where it is NOTHING_LEFT."""
    if error != NOTHING_LEFT:
        return error
    names = given(params)
    leave = "leaves" if len(names) == 1 else "leave"
    return RequestFault(f"no token can be chosen: {' and '.join(names)} {leave} none with a finite logit")


def given(params: SamplingParams) -> list[str]:
    """The constraints of a request; the value of the penalty that can make logits infinite stands behind its name."""
    names = [name for name in CONSTRAINTS if getattr(params, name) != getattr(NEUTRAL, name)]
    return [f"{n} {params.repetition_penalty:g}" if n == "repetition_penalty" else n for n in names]


def check_start(
    params: SamplingParams,
    eos_token_ids: Iterable[int],
    bad_words_token_ids: Sequence[Sequence[int]],
    matcher: Matcher | None,
) -> None:
    """Refuse a request that has no first token, whatever the logits.

    Args:
        matcher: of an answer that has not begun.

    Raises:
        RequestError: it names the fields; its param is the first of them.
    """
    banned = {word[0] for word in bad_words_token_ids if len(word) == 1}
    if params.min_tokens > 0:
        banned.update(eos_token_ids, params.stop_token_ids)
    elif matcher is not None and params.ignore_eos:
        banned.update(eos_token_ids)
    allowed = params.allowed_token_ids
    if matcher is None:
        is_possible = allowed is None or not banned.issuperset(allowed)
    elif allowed is None and not banned:
        is_possible = True
    else:
        is_possible = leaves_one(matcher, allowed, banned)
    if not is_possible:
        fields = [name for name in CONSTRAINTS[:5] if getattr(params, name) != getattr(NEUTRAL, name)]
        raise RequestError(f"{' and '.join(fields)} contradict each other: no first token is left", param=fields[0])


def leaves_one(matcher: Matcher, allowed: Sequence[int] | None, banned: Iterable[int]) -> bool:
    """Whether a form allows a first token beside those lists. One that is finished, or has failed, goes its own way."""
    bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
    if matcher.is_done or matcher.error is not None:
        return True
    bits[list(banned)] = 0
    return bool(bits.any() if allowed is None else bits[list(allowed)].any())
