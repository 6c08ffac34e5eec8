"""Sampling on a CUDA device: its arrays, its launches, and the record that starts a request.

A slot holds one running request; the host says which row of the logits, and which decode of the next step, belongs to
which slot, and never uploads what a slot holds again. The kernels (sampling.cu, step_update.cu, logprobs.cu) choose the
tokens that sampling/sampler.py chooses on the same logits, up to the last bit of logarithms and exponentials.

Launches follow a step's logits in the order that `sampling_calls` gives; `decodes_call` comes first in the next step;
`start_call` comes between steps. Letters: R rows, V vocabulary, P parts of a row. Over 400 lines because the arrays and
the launches that take them, argument by argument, are read side by side.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from lean_engine.errors import LaunchError
from lean_engine.runtime.cuda.instances import WARP, Instance, KernelCall, ceil_div, i32
from lean_engine.runtime.device import Array

PART_TOKENS = 8192
HISTORY_TOKENS = 32
MAX_TOP_LOGPROBS = 20
MAX_VOCAB_SIZE = 2**20 - 1  # shares of so many tokens add up in 64 bits
MAX_SEEN_COUNT = 2**16 - 2  # penalties take a token generated more often as generated so often
PART_RANKS_WORDS = 2 + MAX_TOP_LOGPROBS

SCAN_THREADS, CUT_THREADS, DRAW_THREADS, RANK_THREADS, DECODE_THREADS, START_THREADS = 256, 768, 128, 256, 128, 1024
NO_SLOT = -1
NO_FORM = -1
NO_TOKEN = -1

# Outcomes: of a request after its row was sampled.
RUNNING, ENDED_BY_EOS, ENDED_BY_STOP_ID, ENDED_BY_LENGTH, IS_NAN, IS_INFINITE, IS_EMPTY, NOTHING_LEFT, SKIPPED = range(
    9
)

HAS_MASK, HAS_PENALTIES = 1, 2
MAX_INT32 = 2**31 - 1
MAX_FLOAT32 = float(np.finfo(np.float32).max)

SLOT_PARAMS = np.dtype(
    [
        ("seed", np.uint64),
        ("repetition", np.float64),
        ("presence", np.float64),
        ("min_p_reach", np.float64),  # temperature * ln(min_p)
        ("hopeless_reach", np.float64),
        ("top_p", np.float64),
        ("frequency", np.float32),
        ("temperature", np.float32),
        ("top_k", np.int32),
        ("flags", np.int32),
        ("num_prompt", np.int32),
        ("min_tokens", np.int32),
        ("max_total_tokens", np.int32),
        ("num_logprobs", np.int32),
        ("num_specials", np.int32),
        ("first_stop", np.int32),
        ("num_eos", np.int32),
        ("num_stop", np.int32),
    ]
)
SLOT_STATE = np.dtype(
    [
        ("num_tokens", np.int32),
        ("outcome", np.int32),
        ("unused", np.int32, 2),
        ("history", np.int32, HISTORY_TOKENS),
    ]
)
PARAMS_WORDS, STATE_WORDS = SLOT_PARAMS.itemsize // 4, SLOT_STATE.itemsize // 4

KERNELS = {
    "sampling.cu": ("scan_logits", "cut_logits", "draw_tokens"),
    "step_update.cu": ("accept_tokens", "write_decodes", "start_requests"),
    "logprobs.cu": ("rank_logprobs", "merge_logprobs"),
}


def sampling_instances() -> list[Instance]:
    """Every kernel of this module, the same for all models and architectures, sorted."""
    return sorted(Instance(source, name) for source, names in KERNELS.items() for name in names)


INSTANCES = {instance.expression: instance for instance in sampling_instances()}


# ---- arrays


@dataclass(frozen=True, slots=True)
class SamplingSizes:
    vocab_size: int
    num_slots: int  # requests that run at once
    max_rows: int  # R of the largest step
    list_words: int = 4096  # per slot: 4 for a token with a bias, bad words, ids that end the request

    def __post_init__(self) -> None:
        if self.vocab_size > MAX_VOCAB_SIZE:
            raise LaunchError(
                f"the vocabulary has {self.vocab_size} tokens, sampling on a GPU takes at most {MAX_VOCAB_SIZE}"
            )

    @property
    def num_parts(self) -> int:
        return ceil_div(self.vocab_size, PART_TOKENS)

    def arrays(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Shape and dtype of each array of SamplingArrays."""
        slots, rows, parts = self.num_slots, self.max_rows, self.num_parts
        entries = (rows, 1 + MAX_TOP_LOGPROBS)
        return {
            "params": ((slots, PARAMS_WORDS), "int32"),
            "states": ((slots, STATE_WORDS), "int32"),
            "masks": ((slots, ceil_div(self.vocab_size, 32)), "uint32"),
            "seen": ((slots, ceil_div(self.vocab_size, 8) * 8), "uint16"),
            "lists": ((slots, self.list_words), "int32"),
            "forms": ((rows, ceil_div(self.vocab_size, 32)), "uint32"),
            "row_forms": ((rows,), "int32"),
            "row_slots": ((rows,), "int32"),
            "decode_slots": ((slots,), "int32"),
            "scan": ((rows, parts, 2), "uint64"),
            "cuts": ((rows, 4), "int32"),
            "drawn": ((rows, parts), "uint64"),
            "ranks": ((rows, parts, PART_RANKS_WORDS), "uint64"),
            "results": ((rows, 2), "int32"),
            "logprob_ids": (entries, "int32"),
            "logprob_values": (entries, "float32"),
            "logprob_ranks": (entries, "int32"),
        }

    def num_bytes(self) -> int:
        """Device memory of all arrays."""
        return sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in self.arrays().values())


@dataclass(frozen=True, slots=True, eq=False)
class SamplingArrays:
    """Everything in device memory. The host writes row_slots, decode_slots, forms, and reads results and logprob_*."""

    params: Array  # int32 [slots, PARAMS_WORDS], SLOT_PARAMS
    states: Array  # int32 [slots, STATE_WORDS], SLOT_STATE; changed by each step
    masks: Array  # uint32 [slots, ceil(V / 32)], a bit per token
    seen: Array  # uint16 [slots, V rounded up to 8]: 0, or 1 + how often it was generated; changed by each step
    lists: Array  # int32 [slots, list_words]
    forms: Array  # uint32 [R, ceil(V / 32)], a bit per token that is allowed; the host writes it where kind.forms
    row_forms: Array  # int32 [R]: NO_FORM, or form_of; likewise
    row_slots: Array  # int32 [R]: the slot of each row of logits; NO_SLOT where nothing is to be sampled
    decode_slots: Array  # int32 [slots]: the slot of each token of a step that is a decode; NO_SLOT elsewhere
    scan: Array  # uint64 [R, P, 2]
    cuts: Array  # int32 [R, 4]
    drawn: Array  # uint64 [R, P]
    ranks: Array  # uint64 [R, P, PART_RANKS_WORDS]
    results: Array  # int32 [R, 2]: token or NO_TOKEN, outcome
    logprob_ids: Array  # int32 [R, 21]: the chosen token, then the likeliest; NO_TOKEN behind the last
    logprob_values: Array  # float32 [R, 21]
    logprob_ranks: Array  # int32 [R, 21]

    @classmethod
    def allocate(cls, sizes: SamplingSizes, allocate: Callable[[Sequence[int], str], Array]) -> SamplingArrays:
        """Take the memory, of a device's `allocate`, once."""
        arrays = {}
        for name, (shape, dtype) in sizes.arrays().items():
            num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
            arrays[name] = allocate((num_bytes,), "uint8").view(dtype).reshape(shape)
        return cls(**{field.name: arrays[field.name] for field in fields(cls)})


# ---- launches


@dataclass(frozen=True, slots=True)
class SamplingKind:
    """What the rows of a step need at most; a graph is captured for each kind."""

    draws: bool = False  # some row is not greedy
    cuts: bool = False  # some of them has top_k or top_p
    logprobs: bool = False  # some row wants log-probabilities
    forms: bool = False  # some row is held to a form

    def __or__(self, other: SamplingKind) -> SamplingKind:
        return SamplingKind(
            self.draws or other.draws,
            self.cuts or other.cuts,
            self.logprobs or other.logprobs,
            self.forms or other.forms,
        )


def form_of(index: int, is_done: bool) -> int:
    """An entry of row_forms: the row of forms, and whether nothing but the form counts any more."""
    return 2 * index + is_done


def sampling_calls(arrays: SamplingArrays, logits: Array, kind: SamplingKind) -> list[KernelCall]:
    """Sample the rows of logits, float32 [R, V], for their slots and note the tokens there."""
    num_rows, vocab_size = logits.shape
    num_parts = ceil_div(vocab_size, PART_TOKENS)
    a, parts, rows = arrays, (num_parts, num_rows), (num_rows,)
    forms = (a.forms, a.row_forms) if kind.forms else (None, None)
    slots = (a.row_slots, a.params, a.states, a.masks, a.seen, *forms, a.lists)
    sizes = i32(vocab_size, a.lists.shape[1])
    groups = ceil_div(vocab_size, 4)  # a thread takes four tokens at once
    calls = [call("scan_logits", parts, threads(SCAN_THREADS, groups), a.scan, logits, *slots, *sizes)]
    if kind.cuts:
        args: tuple[Any, ...] = (a.cuts, logits, a.scan, *slots, *sizes, *i32(num_parts))
        calls.append(call("cut_logits", rows, threads(CUT_THREADS, groups), *args))
    if kind.draws:
        args = (a.drawn, logits, a.scan, a.cuts, *slots, *sizes)
        calls.append(call("draw_tokens", parts, threads(DRAW_THREADS, groups), *args))
    drawn = a.drawn if kind.draws else None
    changed = (a.results, a.states, a.seen)
    sizes = i32(vocab_size, a.lists.shape[1], num_parts)
    calls.append(call("accept_tokens", rows, 32, *changed, a.scan, drawn, a.row_slots, a.params, a.lists, *sizes))
    if kind.logprobs:
        chosen = (logits, a.scan, a.results, a.row_slots, a.params)
        args = (a.ranks, *chosen, *i32(vocab_size))
        calls.append(call("rank_logprobs", parts, threads(RANK_THREADS, vocab_size), *args))
        entries = (a.logprob_ids, a.logprob_values, a.logprob_ranks)
        calls.append(call("merge_logprobs", rows, 32, *entries, a.ranks, *chosen, *i32(vocab_size, num_parts)))
    return calls


def decodes_call(arrays: SamplingArrays, inputs: Mapping[str, Array], num_decodes: int, block_size: int) -> KernelCall:
    """Write the inputs of a step's decodes, which are its first tokens and requests, from their slots.

    Args:
        inputs: input_ids, positions, slot_mapping [T], seq_lens [B], block_tables [B, M], int32; block_tables covers
            the tokens to be computed.
        num_decodes: how many entries of decode_slots are looked at; at most T, B and the number of slots.
    """
    written = [inputs[name] for name in ("input_ids", "positions", "slot_mapping", "seq_lens")]
    tables = inputs["block_tables"]
    sizes = i32(block_size, tables.shape[1], num_decodes)
    blocks = (ceil_div(num_decodes, DECODE_THREADS),)
    args = (*written, arrays.decode_slots, tables, arrays.states, *sizes)
    return call("write_decodes", blocks, DECODE_THREADS, *args)


def start_call(arrays: SamplingArrays, records: Array, starts: Array, vocab_size: int) -> KernelCall:
    """Fill a slot per record.

    Args:
        records: int32, what start_record gave, one after the other.
        starts: int32, where each begins.
    """
    a = arrays
    slots = (a.params, a.states, a.masks, a.seen, a.lists)
    sizes = i32(vocab_size, a.lists.shape[1])
    return call("start_requests", (len(starts),), START_THREADS, *slots, records, starts, *sizes)


def threads(most: int, count: int) -> int:
    """Whole warps, no more than there is work for."""
    return min(most, ceil_div(count, WARP) * WARP)


def call(name: str, grid: tuple[int, ...], num_threads: int, *args: Any) -> KernelCall:
    return KernelCall(INSTANCES[name], grid, (num_threads,), args)


# ---- the record of a request


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotSetup:
    """What a request is sampled by; ids are inside the vocabulary.

    Numbers mean what they mean in SamplingParams. A request that was preempted comes back with the tokens it has.
    """

    token_ids: Sequence[int]  # prompt and output so far
    num_prompt: int
    max_total_tokens: int  # of prompt and output: the last one ends the request
    seed: int  # the Philox key, 0 … 2^64 - 1
    temperature: float
    hopeless_reach: float  # in units of temperature: a logit so far below the best cannot be drawn
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    min_tokens: int = 0
    excluded_until_min_tokens: Collection[int] = ()
    eos_token_ids: Collection[int] = ()  # that end the request
    stop_token_ids: Collection[int] = ()
    logit_bias: Mapping[int, float] | None = None
    allowed_token_ids: Sequence[int] | None = None
    bad_words: Sequence[Sequence[int]] = ()
    num_logprobs: int | None = None

    @property
    def has_penalties(self) -> bool:
        return (self.repetition_penalty, self.frequency_penalty, self.presence_penalty) != (1.0, 0.0, 0.0)

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    def kind(self) -> SamplingKind:
        draws = self.temperature > 0
        return SamplingKind(draws, draws and (self.top_k > 0 or self.top_p < 1), self.num_logprobs is not None)

    def limit(self, list_words: int) -> str | None:
        """Why the device cannot sample this request, which is left to the host then; None if it can."""
        if self.num_logprobs is not None and not 0 <= self.num_logprobs <= MAX_TOP_LOGPROBS:
            return f"logprobs is {self.num_logprobs}, on the device at most {MAX_TOP_LOGPROBS}"
        longest = max((len(word) for word in self.bad_words), default=0)
        if longest > HISTORY_TOKENS + 1:
            return f"a bad word has {longest} tokens, on the device at most {HISTORY_TOKENS + 1}"
        num_words = len(slot_list(self).words)
        if num_words > list_words:
            return f"biases, bad words and stop token ids take {num_words} words, on the device at most {list_words}"
        return None


@dataclass(frozen=True, slots=True)
class SlotList:
    words: npt.NDArray[np.int32]
    num_specials: int
    first_stop: int


def slot_list(setup: SlotSetup) -> SlotList:
    """Specials (token, bias, whether min_tokens excludes it, where its bad words are), bad words, ids that end."""
    bias = setup.logit_bias or {}
    excluded = set(setup.excluded_until_min_tokens) if setup.num_output < setup.min_tokens else set()
    prefixes: dict[int, list[Sequence[int]]] = {}
    for *before, last in setup.bad_words:
        prefixes.setdefault(last, []).append(before)
    tokens = {*bias, *excluded, *prefixes}
    if setup.allowed_token_ids is not None:
        tokens &= set(setup.allowed_token_ids)
    specials = np.zeros((len(tokens), 4), np.int32)
    words: list[int] = []
    for special, token in zip(specials, sorted(tokens), strict=True):
        special[:] = token, np.float32(bias.get(token, 0)).view(np.int32), token in excluded, 0
        if token in prefixes:
            special[3] = specials.size + len(words)
            words.append(len(prefixes[token]))
            for prefix in prefixes[token]:
                words += [len(prefix), *prefix]
    stops = [*setup.eos_token_ids, *setup.stop_token_ids]
    flat = np.concatenate((specials.ravel(), np.array([*words, *stops], np.int32)))
    return SlotList(flat, len(specials), specials.size + len(words))


def start_record(setup: SlotSetup, slot: int, vocab_size: int) -> npt.NDArray[np.int32]:
    """The words that start_requests reads for one request; setup.limit() is None."""
    lists = slot_list(setup)
    allowed = np.array([] if setup.allowed_token_ids is None else setup.allowed_token_ids, np.int32)
    ids, counts = seen_tokens(setup) if setup.has_penalties else (np.empty(0, np.int32),) * 2
    num_allowed = -1 if setup.allowed_token_ids is None else len(allowed)
    header = np.array([slot, len(lists.words), num_allowed, len(ids)], np.int32)
    params, state = slot_params(setup, lists, vocab_size), slot_state(setup)
    own = (header, params.reshape(1).view(np.int32), state.reshape(1).view(np.int32))
    return np.concatenate((*own, lists.words, allowed, ids, counts))


def seen_tokens(setup: SlotSetup) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Distinct tokens, and 1 + how often each was generated."""
    ids, places = np.unique(np.asarray(setup.token_ids, np.int32), return_inverse=True)
    counts = np.bincount(places[setup.num_prompt :], minlength=len(ids))
    return ids, (1 + np.minimum(counts, MAX_SEEN_COUNT)).astype(np.int32)


def slot_params(setup: SlotSetup, lists: SlotList, vocab_size: int) -> npt.NDArray[np.void]:
    temperature = min(setup.temperature, MAX_FLOAT32)
    has_mask = lists.num_specials > 0 or setup.allowed_token_ids is not None
    params = np.zeros((), SLOT_PARAMS)
    values = {
        "seed": setup.seed,
        "repetition": setup.repetition_penalty,
        "presence": setup.presence_penalty,
        "min_p_reach": temperature * math.log(setup.min_p) if setup.min_p > 0 else -math.inf,
        "hopeless_reach": -setup.hopeless_reach * temperature,
        "top_p": setup.top_p,
        "frequency": setup.frequency_penalty,
        "temperature": temperature,
        "top_k": setup.top_k if setup.top_k < vocab_size else 0,
        "flags": HAS_MASK * has_mask | HAS_PENALTIES * setup.has_penalties,
        "num_prompt": setup.num_prompt,
        "min_tokens": min(setup.min_tokens, MAX_INT32),
        "max_total_tokens": min(setup.max_total_tokens, MAX_INT32),
        "num_logprobs": -1 if setup.num_logprobs is None else setup.num_logprobs,
        "num_specials": lists.num_specials,
        "first_stop": lists.first_stop,
        "num_eos": len(setup.eos_token_ids),
        "num_stop": len(setup.stop_token_ids),
    }
    for name, value in values.items():
        params[name] = value
    return params


def slot_state(setup: SlotSetup) -> npt.NDArray[np.void]:
    state = np.zeros((), SLOT_STATE)
    state["num_tokens"] = len(setup.token_ids)
    recent = setup.token_ids[max(setup.num_prompt, len(setup.token_ids) - HISTORY_TOKENS) :]
    history = np.zeros(HISTORY_TOKENS, np.int32)
    history[HISTORY_TOKENS - len(recent) :] = recent
    state["history"] = history
    return state
