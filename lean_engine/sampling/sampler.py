"""The host's sampler: raw logits in, one token id per row out.

Order, that of vLLM V1; each step sees what the ones before left:

    raw log-probabilities (where asked for) · structured_outputs · allowed_token_ids · bad_words · min_tokens ·
    logit_bias · repetition, frequency, presence penalties · greedy: the greatest logit, the lowest id of equal ones
    otherwise: temperature · min_p · top_k · top_p · Gumbel noise (philox.py), the greatest sum

A row's token depends on its logits, its request's state and its position, on nothing else in the batch. A row without
a distribution (NaN, infinite, all excluded) gets an error instead of a token; the other rows go on. What the options
mean together with structured_outputs stands at the head of grammar.py.
"""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lean_engine.errors import LaunchError
from lean_engine.sampling.constraints import NOTHING_LEFT, check_start
from lean_engine.sampling.grammar import Matcher, WordArray, exclude, fill_masks
from lean_engine.sampling.logprobs import FloatArray, TokenLogprobs, logits_error, logprobs_entry, row_logprobs
from lean_engine.sampling.params import SamplingParams
from lean_engine.sampling.philox import MAX_GUMBEL, MIN_GUMBEL, gumbel, gumbel_rows
from lean_engine.sampling.row_kernels import Draw, RowKernels

IdArray = npt.NDArray[np.intp]

NO_TOKEN = -1  # the token id of a row with an error

_LOWEST = -float(np.finfo(np.float32).max)  # the least finite logit
_MAX_TEMPERATURE = float(np.finfo(np.float32).max)
# A scaled logit this far below the best loses whatever the noise; the slack covers rounding.
_HOPELESS = MAX_GUMBEL - MIN_GUMBEL + 0.5
_TOP_P_FIRST_LOOK = 1024  # tokens sorted before the whole row is


def resolve_seed(seed: int | None, answer_index: int = 0) -> int:
    """The 64-bit Philox key of one answer: seed + index modulo 2^64, or fresh entropy where no seed was given."""
    if seed is None:
        return int.from_bytes(os.urandom(8), "little")
    return (seed + answer_index) % 2**64


class SamplingState:
    """What sampling knows of one answer: made once, told of each accepted token, untouched by preemption.

    Attributes:
        seed: the Philox key.
        num_output: tokens accepted so far.
        matcher: of params.structured_outputs, None where there are none.
        bad_words: token sequences, none empty.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_token_ids: Sequence[int],
        *,
        eos_token_ids: Collection[int] = (),
        bad_words_token_ids: Sequence[tuple[int, ...]] = (),
        answer_index: int = 0,
        matcher: Matcher | None = None,
    ) -> None:
        """Start an answer; RequestError where the request's constraints leave no first token.

        Args:
            params: checked with `validate_for_model`.
            prompt_token_ids: seen by the repetition penalty; like all ids here, inside the vocabulary.
            eos_token_ids: excluded, with the stop token ids, until min_tokens are out.
            bad_words_token_ids: the token sequences of `params.bad_words`, none empty; the last token of one is
                excluded when the output ends with the others.
            answer_index: which of the request's n answers this is.
            matcher: this answer's own, of the compiled `params.structured_outputs`.
        """
        if answer_index == 0:
            check_start(params, eos_token_ids, bad_words_token_ids, matcher)
        self.params = params
        self.matcher = matcher
        self.seed = resolve_seed(params.seed, answer_index)
        self.num_output = 0
        self._allowed_ids = None if params.allowed_token_ids is None else _ids(params.allowed_token_ids)
        self.bad_words = tuple(bad_words_token_ids)
        self._recent: deque[int] = deque(maxlen=max((len(word) - 1 for word in self.bad_words), default=0))
        self._ending_ids = _ids({*eos_token_ids, *params.stop_token_ids})
        self._eos_ids = _ids(eos_token_ids)
        self._bias_ids = _ids(params.logit_bias)
        self._bias = np.array(list(params.logit_bias.values()), dtype=np.float32)
        penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        self._seen = _SeenTokens(prompt_token_ids) if penalties != (1.0, 0.0, 0.0) else None

    @property
    def changes_logits(self) -> bool:
        """Whether `apply` has anything to do for the next token."""
        return (
            self.matcher is not None
            or self._allowed_ids is not None
            or bool(self.bad_words)
            or self.num_output < self.params.min_tokens
            or len(self._bias_ids) > 0
            or self._seen is not None
        )

    def accept(self, token_id: int) -> None:
        """Note a token that became part of the output. Call it once per token, in order."""
        self.num_output += 1
        self._recent.append(token_id)
        if self._seen is not None:
            self._seen.add(token_id)
        if self.matcher is not None:
            self.matcher.accept(token_id)

    def apply(self, row: FloatArray, mask: WordArray | None = None) -> None:
        """Masks, bias and penalties for the next token, in place on its logits [V].

        Args:
            mask: the matcher's, where there is one.
        """
        if self.matcher is not None and mask is not None:
            exclude(row, mask)
            if self.matcher.is_done:
                return
            if self.params.ignore_eos:
                row[self._eos_ids] = -np.inf
        if self._allowed_ids is not None:
            kept = row[self._allowed_ids]
            row.fill(-np.inf)
            row[self._allowed_ids] = kept
        recent = tuple(self._recent)
        for word in self.bad_words:
            start = max(len(recent) - (len(word) - 1), 0)
            if recent[start:] == word[:-1]:
                row[word[-1]] = -np.inf
        if self.num_output < self.params.min_tokens:
            row[self._ending_ids] = -np.inf
        row[self._bias_ids] += self._bias
        if self._seen is not None:
            self._seen.penalise(row, self.params)


class _SeenTokens:
    """The distinct tokens of prompt and output, and how often each was generated; in arrays that grow by doubling."""

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        ids = np.unique(_ids(prompt_token_ids))
        self._slots = {token_id: slot for slot, token_id in enumerate(ids.tolist())}
        self._ids = np.concatenate((ids, np.zeros(64, dtype=np.intp)))
        self._num_generated = np.zeros(len(self._ids), dtype=np.float32)

    def add(self, token_id: int) -> None:
        slot = self._slots.setdefault(token_id, len(self._slots))
        if slot == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._num_generated = np.concatenate((self._num_generated, np.zeros_like(self._num_generated)))
        self._ids[slot] = token_id
        self._num_generated[slot] += 1

    def penalise(self, row: FloatArray, params: SamplingParams) -> None:
        """Repetition for every token seen, then frequency and presence for those generated; in place on [V]."""
        ids = self._ids[: len(self._slots)]
        num_generated = self._num_generated[: len(self._slots)]
        logits = row[ids].astype(np.float64)  # no penalty overflows it: 0 stays 0, -inf stays -inf
        if params.repetition_penalty != 1.0:
            # Towards minus infinity on either side of 0 (Keskar et al., "CTRL", 2019).
            penalty = params.repetition_penalty
            logits = np.where(logits > 0, logits / penalty, logits * penalty)
        logits -= params.frequency_penalty * num_generated
        logits -= params.presence_penalty * (num_generated > 0)
        row[ids] = logits


@dataclass(slots=True)
class SampleResult:
    """One entry per row of the logits."""

    token_ids: list[int]  # NO_TOKEN where there is an error
    logprobs: list[TokenLogprobs | None]  # None where the request asks for none, or there is an error
    errors: list[str | None]  # for the request's user; None where all is well


@dataclass(frozen=True, slots=True, eq=False)
class _Draw:
    """A row that waits for its noise."""

    row: int
    seed: int
    position: int
    ids: IdArray  # [C], ascending
    scaled: FloatArray  # [C]


class Sampler:
    """Chooses tokens for one vocabulary.

    Args:
        kernels: of a device, for what they can do; the tokens are the same with and without.
    """

    def __init__(self, vocab_size: int, kernels: RowKernels | None = None) -> None:
        self.vocab_size = vocab_size
        self._kernels = kernels

    @np.errstate(over="ignore")  # what a penalty or a difference pushes beyond float32 becomes infinite, and is checked
    def sample(self, logits: FloatArray, states: Sequence[SamplingState], positions: Sequence[int]) -> SampleResult:
        """Choose one token per row.

        Args:
            logits: raw logits [R, V] float32; rows may be changed in place.
            states: R answers; `accept` is left to the caller.
            positions: R indices, each that of the token to be drawn in its whole sequence (prompt and output).

        Raises:
            LaunchError: shape, dtype or counts do not fit (a bug of the caller).
        """
        self._check(logits, states, positions)
        # One pass serves greedy rows and finds damage: argmax stops at the first NaN.
        best = logits.argmax(axis=1) if self._kernels is None else self._kernels.greatest(logits)
        errors = [logits_error(peak) for peak in logits[np.arange(len(states)), best].tolist()]
        token_ids = best.tolist()
        masks = _masks(states, errors, self.vocab_size)
        raw_rows: dict[int, FloatArray] = {}
        drawn: list[tuple[int, SamplingState, int]] = []
        for row, state in enumerate(states):
            if errors[row] is not None:
                continue
            if state.params.logprobs is not None:
                raw_rows[row] = logits[row].copy() if state.changes_logits else logits[row]
            if state.changes_logits:
                state.apply(logits[row], masks.get(row))
                token_ids[row] = int(logits[row].argmax())
                if not math.isfinite(logits[row, token_ids[row]]):
                    errors[row] = NOTHING_LEFT
                    continue
            if not state.params.is_greedy:
                drawn.append((row, state, positions[row]))
        for row, token_id in _choose(self._draws(logits, drawn, token_ids), self.vocab_size):
            token_ids[row] = token_id
        return _result(token_ids, errors, raw_rows, states, self._kernels)

    def _draws(
        self, logits: FloatArray, rows: Sequence[tuple[int, SamplingState, int]], token_ids: list[int]
    ) -> list[_Draw]:
        """What is left to draw of (row, state, position). token_ids holds the token of each row's greatest logit, and
        then that of the draw where the kernels decide it."""
        contenders: list[list[int]] = [[] for _ in rows]
        if self._kernels is not None and rows:
            contenders = self._kernels.draw([_kernel_draw(logits[r], token_ids[r], state, p) for r, state, p in rows])
        draws: list[_Draw] = []
        for (row, state, position), left in zip(rows, contenders, strict=True):
            if len(left) == 1:
                token_ids[row] = left[0]
            elif left:
                ids, peak = _ids(left), float(logits[row, token_ids[row]])
                scaled = _scale(logits[row, ids], peak, min(state.params.temperature, _MAX_TEMPERATURE))
                draws.append(_Draw(row, state.seed, position, ids, scaled))
            else:
                draws.append(_Draw(row, state.seed, position, *candidates(logits[row], state.params)))
        return draws

    def _check(self, logits: FloatArray, states: Sequence[SamplingState], positions: Sequence[int]) -> None:
        expected = (len(states), self.vocab_size)
        if logits.shape != expected or logits.dtype != np.float32:
            raise LaunchError(f"logits must be float32 {expected}, found {logits.dtype} {logits.shape}")
        if len(positions) != len(states):
            raise LaunchError(f"positions must be one per row ({len(states)}), found {len(positions)}")


def _masks(states: Sequence[SamplingState], errors: list[str | None], vocab_size: int) -> dict[int, WordArray]:
    """Row → mask of each that is held to a form and has no error; the error of a form is added to `errors`."""
    held = [(row, state.matcher) for row, state in enumerate(states) if state.matcher is not None]
    found = [(row, matcher) for row, matcher in held if errors[row] is None]
    if not found:
        return {}
    words = np.zeros((len(found), (vocab_size + 31) // 32), dtype=np.uint32)
    fill_masks([matcher for _, matcher in found], words)
    for row, matcher in found:
        errors[row] = matcher.error
    return {row: mask for (row, matcher), mask in zip(found, words, strict=True) if matcher.error is None}


def candidates(row: FloatArray, params: SamplingParams) -> tuple[IdArray, FloatArray]:
    """What temperature, min_p, top_k and top_p leave of one row.

    Tokens whose noise could never make them win are left out too, which changes no outcome.

    Args:
        row: processed logits [V], their maximum finite; not changed.
        params: of a request that is not greedy.

    Returns:
        Token ids [C], ascending, and their logits [C] divided by the temperature, the greatest of them 0.
    """
    peak = float(row.max())
    temperature = min(params.temperature, _MAX_TEMPERATURE)
    lowest = _lowest_by_min_p(peak, temperature, params.min_p)
    if 0 < params.top_k < len(row):
        lowest = max(lowest, float(_kth_greatest(row, params.top_k)))
    if params.top_p < 1.0:
        ids = np.flatnonzero(row >= lowest)
        ids = ids[_nucleus(_scale(row[ids], peak, temperature), params.top_p)]
    else:
        ids = np.flatnonzero(row >= max(lowest, peak - _HOPELESS * temperature))
    return ids, _scale(row[ids], peak, temperature)


def _lowest_by_min_p(peak: float, temperature: float, min_p: float) -> float:
    return max(_LOWEST, peak + temperature * math.log(min_p)) if min_p > 0.0 else _LOWEST


def _kernel_draw(row: FloatArray, greatest_id: int, state: SamplingState, position: int) -> Draw:
    """A row as RowKernels.draw takes it."""
    params, peak = state.params, float(row[greatest_id])
    temperature = min(params.temperature, _MAX_TEMPERATURE)
    lowest = _lowest_by_min_p(peak, temperature, params.min_p)
    return row, state.seed, position, params.top_p, params.top_k, peak, temperature, lowest


def _nucleus(scaled: FloatArray, top_p: float) -> npt.NDArray[np.intp]:
    """Places of the smallest set of `scaled` [C] whose share of the mass is at least top_p; of equal ones the first.

    The greatest are sorted first; the whole only where they do not hold the mass.
    """
    wanted = top_p * float(np.exp(scaled).sum(dtype=np.float64))
    for size in (_TOP_P_FIRST_LOOK, len(scaled)):
        greatest = scaled if size >= len(scaled) else np.partition(scaled, len(scaled) - size)[len(scaled) - size :]
        descending = np.sort(greatest)[::-1]
        mass = np.exp(descending).cumsum(dtype=np.float64)
        if mass[-1] >= wanted:
            break
    num_kept = min(int(np.searchsorted(mass, wanted)) + 1, len(descending))
    smallest = descending[num_kept - 1]
    places = np.flatnonzero(scaled >= smallest)
    num_excess = len(places) - num_kept
    if num_excess == 0:
        return places
    equal = np.flatnonzero(scaled[places] == smallest)
    return np.delete(places, equal[len(equal) - num_excess :])


def _kth_greatest(row: FloatArray, k: int) -> np.float32:
    value: np.float32 = np.partition(row, len(row) - k)[len(row) - k]
    return value


def _scale(logits: FloatArray, peak: float, temperature: float) -> FloatArray:
    """Logits over temperature, shifted so that the greatest of the row is 0; what overflows is -inf."""
    return (logits - np.float32(peak)) / np.float32(temperature)


def _choose(draws: Sequence[_Draw], vocab_size: int) -> Iterator[tuple[int, int]]:
    """(row, token id) of each: the greatest sum of scaled logit and noise, the lowest id of equal ones.

    Where many tokens compete their noise is cheapest as a whole row; that of all the other rows is drawn at once.
    """
    few = [draw for draw in draws if len(draw.ids) * 4 <= vocab_size]
    many = [draw for draw in draws if len(draw.ids) * 4 > vocab_size]
    for draw in many:
        noise = gumbel_rows([draw.seed], [draw.position], vocab_size)[0]
        yield draw.row, int(draw.ids[np.argmax(draw.scaled + noise[draw.ids])])
    if not few:
        return
    counts = [len(draw.ids) for draw in few]
    seeds = np.repeat(np.array([draw.seed for draw in few], dtype=np.uint64), counts)
    positions = np.repeat(np.array([draw.position for draw in few], dtype=np.uint64), counts)
    noise = gumbel(seeds, positions, np.concatenate([draw.ids for draw in few]))
    for draw, own_noise in zip(few, np.split(noise, np.cumsum(counts)[:-1]), strict=True):
        yield draw.row, int(draw.ids[np.argmax(draw.scaled + own_noise)])


def _ids(token_ids: Iterable[int]) -> IdArray:
    return np.fromiter(token_ids, dtype=np.intp)


def _result(
    token_ids: list[int],
    errors: list[str | None],
    raw_rows: dict[int, FloatArray],
    states: Sequence[SamplingState],
    kernels: RowKernels | None,
) -> SampleResult:
    logprobs: list[TokenLogprobs | None] = [None] * len(token_ids)
    for row, error in enumerate(errors):
        if error is not None:
            token_ids[row] = NO_TOKEN
    rows = [row for row in raw_rows if errors[row] is None]
    wanted = [(raw_rows[row], token_ids[row], states[row].params.logprobs or 0) for row in rows]
    found = kernels.logprobs(wanted) if kernels is not None and wanted else [None] * len(rows)
    for row, (logits, chosen_id, num_top), entry in zip(rows, wanted, found, strict=True):
        if entry is None:
            logprobs[row] = row_logprobs(logits, chosen_id, num_top)
        else:
            logprobs[row] = logprobs_entry(logits, chosen_id, *entry)
    return SampleResult(token_ids, logprobs, errors)
