"""Log-probabilities of tokens under the model's raw logits: before masks, biases, penalties and temperature.

Computed row by row, so that a long prompt never needs a second prompt-by-vocabulary array. A rank is 1 plus the number
of tokens with a greater logit: equal tokens share a rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lean_engine.errors import RequestError

FloatArray = npt.NDArray[np.float32]

WHOLE_VOCABULARY = -1  # as a number of top tokens


@dataclass(slots=True)
class Logprob:
    """One token's entry in what the user gets."""

    logprob: float  # natural logarithm; -inf where the model excludes the token
    rank: int | None  # from 1
    decoded_token: str | None = None  # None when the request has detokenize=False


@dataclass(frozen=True, slots=True, eq=False)
class TokenLogprobs:
    """The chosen token (entry 0), then the likeliest ones in order of rank; the chosen one may be among them again."""

    ids: npt.NDArray[np.int32]  # [1 + k]
    logprobs: FloatArray  # [1 + k]
    ranks: npt.NDArray[np.int32]  # [1 + k]


def logits_error(peak: float) -> str | None:
    """Why a row whose greatest logit (NaN if there is any) is `peak` has no distribution; None if it has one."""
    if math.isfinite(peak):
        return None
    found = "NaN" if math.isnan(peak) else "infinite" if peak > 0 else "minus infinity for every token"
    return f"the model's logits are {found}: its activations overflowed or its weights are damaged; try dtype float32"


def row_logprobs(row: FloatArray, chosen_id: int, num_top: int) -> TokenLogprobs:
    """Log-probabilities of one row.

    Args:
        row: raw logits [V], their maximum finite.
        chosen_id: the token reported first.
        num_top: how many of the likeliest follow it; WHOLE_VOCABULARY, or more than there are, means all.
    """
    chosen_rank = 1 + int(np.count_nonzero(row > row[chosen_id]))
    return logprobs_entry(row, chosen_id, _log_sum_exp(row), chosen_rank, _top_ids(row, num_top))


def logprobs_entry(
    row: FloatArray, chosen_id: int, log_sum: float, chosen_rank: int, top_ids: npt.NDArray[np.integer]
) -> TokenLogprobs:
    """What is told of one row, by ln Σ e^logit, the chosen token's rank and the ids of the likeliest."""
    top_logits = row[top_ids]
    # In a descending list, the first place of an equal value is the number of greater ones.
    top_ranks = 1 + np.searchsorted(-top_logits, -top_logits, side="left")
    logits = np.concatenate((row[chosen_id : chosen_id + 1], top_logits)).astype(np.float64)
    return TokenLogprobs(
        ids=np.concatenate(([chosen_id], top_ids)).astype(np.int32),
        logprobs=(logits - log_sum).astype(np.float32),
        ranks=np.concatenate(([chosen_rank], top_ranks)).astype(np.int32),
    )


def token_logprobs(logits: FloatArray, chosen_ids: Sequence[int], num_top: Sequence[int]) -> list[TokenLogprobs]:
    """`row_logprobs` of each row of logits [R, V], with a chosen id and a number of top tokens per row."""
    return [row_logprobs(*row) for row in zip(logits, chosen_ids, num_top, strict=True)]


def prompt_logprobs(logits: FloatArray, target_ids: Sequence[int], num_top: int) -> list[TokenLogprobs]:
    """Log-probabilities of a chunk of one request's prompt.

    Args:
        logits: raw logits [T, V] of prompt positions p … p + T - 1.
        target_ids: the prompt tokens they predict, at p + 1 … p + T.
        num_top: the request's prompt_logprobs.

    Returns:
        Entry i belongs to prompt position p + 1 + i; position 0 of a prompt has none.

    Raises:
        RequestError: status 500, a row is NaN or infinite.
    """
    for peak in logits.max(axis=1).tolist():
        error = logits_error(peak)
        if error is not None:
            raise RequestError(error, status=500)
    return token_logprobs(logits, target_ids, [num_top] * len(target_ids))


def to_dicts(entry: TokenLogprobs, decode: Callable[[int], str] | None) -> dict[int, Logprob]:
    """The user's form: token id → Logprob, the chosen token first, then the likeliest in order of rank.

    Args:
        entry: the compact form.
        decode: gives the text of one token id; None leaves `decoded_token` None.
    """
    triples = zip(entry.ids.tolist(), entry.logprobs.tolist(), entry.ranks.tolist(), strict=True)
    return {
        token_id: Logprob(logprob, rank, None if decode is None else decode(token_id))
        for token_id, logprob, rank in triples
    }


def _top_ids(row: FloatArray, num_top: int) -> npt.NDArray[np.intp]:
    """Ids of the `num_top` greatest logits, descending; equal ones by id."""
    if num_top == 0:
        return np.empty(0, dtype=np.intp)
    vocab_size = row.shape[0]
    if num_top == WHOLE_VOCABULARY or num_top >= vocab_size:
        return np.argsort(-row, kind="stable")
    smallest = np.partition(row, vocab_size - num_top)[vocab_size - num_top]
    ids = np.flatnonzero(row >= smallest)
    return ids[np.argsort(-row[ids], kind="stable")[:num_top]]


@np.errstate(over="ignore")  # a difference beyond float32 is -inf, whose exponential is 0
def _log_sum_exp(row: FloatArray) -> float:
    peak = row.max()
    return float(peak) + math.log(float(np.exp(row - peak).sum(dtype=np.float64)))
