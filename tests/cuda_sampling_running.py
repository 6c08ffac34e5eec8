"""Samples on the emulated device, all accesses checked, and with the CPU's sampler, on the same logits.

Logits are read-only; every array stands between guards; scratch and outputs hold 0xFF before each run, and so does what
no request has a use for in a slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
from cuda_kernel_running import ORDERS, Array, GuardedMemory, build_checked

from lean_engine.engine.device_sampling import sample_result, slot_setup, token_logprobs
from lean_engine.runtime.cuda.emulator import EmulatedKernels
from lean_engine.runtime.cuda.instances import KernelCall
from lean_engine.runtime.cuda.sampling import (
    NO_FORM,
    NO_SLOT,
    SamplingArrays,
    SamplingKind,
    SamplingSizes,
    SlotSetup,
    form_of,
    sampling_calls,
    sampling_instances,
    start_call,
    start_record,
)
from lean_engine.sampling import SamplingParams
from lean_engine.sampling.sampler import Sampler, SampleResult, SamplingState

EOS = (2,)


@cache
def checked_kernels() -> EmulatedKernels:
    return build_checked(sampling_instances())


def run_calls(calls: Sequence[KernelCall], order: int = 0, preempt: int = 0) -> None:
    for call in calls:
        checked_kernels().bind(call)(order, preempt)


@dataclass
class Form:
    """Stands in for a grammar's matcher: the tokens that are allowed next, and whether it is finished."""

    allowed: Sequence[int]
    vocab_size: int
    is_done: bool = False
    error: str | None = None
    is_reasoning = True  # what it allows does not come from llguidance
    inner = None

    @property
    def words(self) -> Array:
        bits = np.zeros(-(-self.vocab_size // 32) * 32, np.uint8)
        bits[list(self.allowed)] = 1
        return np.packbits(bits, bitorder="little").view(np.uint32)

    def mask(self) -> Array:
        return self.words

    def complete(self, words: Array) -> None:
        words[:] = self.words

    def accept(self, token_id: int) -> None:
        pass


@dataclass
class Answer:
    """A request with some output already: what either sampler is told of it."""

    params: SamplingParams
    prompt: Sequence[int] = (1,)
    output: Sequence[int] = ()
    bad_words: Sequence[tuple[int, ...]] = ()
    index: int = 0
    eos: Sequence[int] = EOS
    max_total_tokens: int = 10_000
    form: Form | None = None
    state: SamplingState = field(init=False)

    def __post_init__(self) -> None:
        self.state = SamplingState(
            self.params,
            self.prompt,
            eos_token_ids=self.eos,
            bad_words_token_ids=list(self.bad_words),
            answer_index=self.index,
            matcher=self.form,  # type: ignore[arg-type]
        )
        for token in self.output:
            self.state.accept(token)

    @property
    def token_ids(self) -> list[int]:
        return [*self.prompt, *self.output]

    def setup(self) -> SlotSetup:
        return slot_setup(
            self.params,
            self.token_ids,
            num_prompt=len(self.prompt),
            seed=self.state.seed,
            max_total_tokens=self.max_total_tokens,
            eos_token_ids=self.eos,
            bad_words_token_ids=self.bad_words,
        )


def ask(prompt: Sequence[int] = (1,), output: Sequence[int] = (), **options: Any) -> Answer:
    """An Answer; options are SamplingParams' and Answer's."""
    names = ("bad_words", "index", "eos", "max_total_tokens", "form")
    own = {name: options.pop(name) for name in names if name in options}
    return Answer(SamplingParams(**{"seed": 7, **options}), prompt, output, **own)


class DeviceSampler:
    """Slots of an emulated device, one per answer, in an order that is not the rows'."""

    def __init__(self, vocab_size: int, answers: Sequence[Answer], num_rows: int | None = None) -> None:
        self.answers = answers
        self.sizes = SamplingSizes(vocab_size, len(answers) + 1, num_rows or len(answers), list_words=256)
        self.memory = GuardedMemory()
        self.arrays = SamplingArrays.allocate(self.sizes, self.memory.allocate)
        self.slots = [len(answers) - row for row in range(len(answers))]
        setups = [answer.setup() for answer in answers]
        assert [setup.limit(self.sizes.list_words) for setup in setups] == [None] * len(setups)
        self.kind = SamplingKind()
        for setup in setups:
            self.kind |= setup.kind()
        self.start(setups)
        self.place_rows(self.slots)
        self.place_forms()

    def place_forms(self) -> None:
        """The form of each answer that has one."""
        self.arrays.row_forms[:] = NO_FORM
        held = [row for row, answer in enumerate(self.answers) if answer.form is not None]
        for index, row in enumerate(held):
            self.kind |= SamplingKind(forms=True)
            form = self.answers[row].form
            assert form is not None
            self.arrays.forms[index] = form.words
            self.arrays.row_forms[row] = form_of(index, form.is_done)

    def start(self, setups: Sequence[SlotSetup]) -> None:
        records = [
            start_record(setup, slot, self.sizes.vocab_size) for setup, slot in zip(setups, self.slots, strict=True)
        ]
        starts = np.cumsum([0, *map(len, records)])[:-1]
        words = self.place(np.concatenate(records))
        words.flags.writeable = False
        run_calls([start_call(self.arrays, words, self.place(starts), self.sizes.vocab_size)], order=3, preempt=20)
        self.memory.assert_guards_are_whole()

    def place(self, values: Any, dtype: str = "int32") -> Array:
        array = self.memory.allocate(np.shape(values), dtype)
        array[...] = values
        return array

    def place_rows(self, row_slots: Sequence[int]) -> None:
        self.arrays.row_slots[:] = NO_SLOT
        self.arrays.row_slots[: len(row_slots)] = row_slots

    def step(self, logits: Array, order: int = 0, preempt: int = 0) -> list[tuple[int, int]]:
        """(token, outcome) of each row."""
        a = self.arrays
        for scratch in (a.scan, a.cuts, a.drawn, a.ranks, a.results, a.logprob_ids, a.logprob_values, a.logprob_ranks):
            scratch.view(np.uint8)[...] = 0xFF
        run_calls(sampling_calls(a, logits, self.kind), order, preempt)
        self.memory.assert_guards_are_whole()
        return [(token, outcome) for token, outcome in a.results[: len(logits)].tolist()]

    def result(self, num_rows: int) -> SampleResult:
        a = self.arrays
        entries = zip(a.logprob_ids, a.logprob_values, a.logprob_ranks, self.answers, strict=False)
        logprobs = [token_logprobs(i, v, r, answer.params.logprobs) for i, v, r, answer in entries]
        return sample_result(a.results[:num_rows], logprobs)


def sample_on_device(logits: Array, answers: Sequence[Answer], orders: Sequence[tuple[int, int]]) -> SampleResult:
    """The result of the last order; that of all is the same."""
    device = DeviceSampler(logits.shape[1], answers)
    placed = device.place(logits, "float32")
    placed.flags.writeable = False
    states, seen = device.arrays.states.copy(), device.arrays.seen.copy()
    first = None
    for order, preempt in orders:
        device.arrays.states[...], device.arrays.seen[...] = states, seen
        found = (device.step(placed, order, preempt), device.arrays.logprob_values.tobytes())
        assert first in (None, found), f"order {order} gives another result"
        first = found
    return device.result(len(logits))


def sample_on_cpu(logits: Array, answers: Sequence[Answer]) -> SampleResult:
    positions = [len(answer.token_ids) for answer in answers]
    return Sampler(logits.shape[1]).sample(logits.copy(), [answer.state for answer in answers], positions)


def compare(logits: Array, answers: Sequence[Answer], orders: Sequence[tuple[int, int]] = ORDERS) -> SampleResult:
    """Tokens and errors are equal, log-probabilities equal up to a few units in the last place."""
    logits = logits.astype(np.float32)
    expected, found = sample_on_cpu(logits, answers), sample_on_device(logits, answers, orders)
    assert found.errors == expected.errors
    assert found.token_ids == expected.token_ids
    if any(answer.params.logprobs is not None for answer in answers):
        for mine, theirs in zip(found.logprobs, expected.logprobs, strict=True):
            assert (mine is None) == (theirs is None)
            if mine is None or theirs is None:
                continue
            assert (mine.ids.tolist(), mine.ranks.tolist()) == (theirs.ids.tolist(), theirs.ranks.tolist())
            np.testing.assert_allclose(mine.logprobs, theirs.logprobs, rtol=3e-7, atol=3e-7)
    return found
