"""Tokens chosen on a CUDA device, which knows of each running request what sampling needs and tells only the outcome.

A request gets a slot when it is sampled for the first time, and again after a preemption; what the host tells the
device then is its start record. Afterwards a step carries only the slot of each row. The device feeds a token back to
the next step itself, so that step can be launched before the host has read the token, and it knows the ends that tokens
bring about: a request that has ended is a padded row of a step that was launched too early.

What the device cannot do, the host's sampler does on that row's logits, and the step's results are then taken before
the next is planned: requests beyond the device's limits, and log-probabilities of prompts. Where an answer is held to a
form, the host must follow it to say what may come next: a step ahead then runs up to its logits, and the choice among
them is launched when the host has read the tokens before.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial, reduce
from operator import or_
from typing import Any

import numpy as np
import numpy.typing as npt

from lean_engine.engine.device_sampling import ERRORS, slot_setup, token_logprobs
from lean_engine.engine.token_choice import (
    NO_ROW,
    StepTokens,
    TokensToCome,
    prompt_targets,
    requests_of,
    sample_on_host,
    sampled_rows,
    take_prompt_logprobs,
    take_samples,
)
from lean_engine.runtime.cuda import sampling as device
from lean_engine.runtime.cuda.device import CudaDevice
from lean_engine.runtime.cuda.instances import KernelCall
from lean_engine.runtime.cuda.sampling import (
    NO_FORM,
    NO_SLOT,
    SamplingArrays,
    SamplingKind,
    SamplingSizes,
    SlotSetup,
    decodes_call,
    form_of,
    sampling_calls,
    sampling_instances,
    start_call,
    start_record,
)
from lean_engine.runtime.device import Array, Replay
from lean_engine.sampling.grammar import fill_masks, words_of
from lean_engine.sampling.logprobs import FloatArray
from lean_engine.sampling.sampler import Sampler, SampleResult, SamplingState
from lean_engine.scheduling.plan import StepPlan
from lean_engine.scheduling.request import Request

Int32s = npt.NDArray[np.int32]
USUAL_KINDS = (SamplingKind(), SamplingKind(draws=True), SamplingKind(draws=True, cuts=True))
NUM_RECORDS = 2  # of page-locked memory: one may be in use by the step in flight


class Slots:
    """Which request is sampled in which slot, and which ones on the host.

    Args:
        num_slots: requests that run at once.
    """

    def __init__(self, num_slots: int) -> None:
        self.of: dict[Request, int] = {}  # NO_SLOT: sampled on the host
        self._kinds: dict[Request, SamplingKind] = {}
        self._num_of_kind: Counter[SamplingKind] = Counter()
        self._free = list(range(num_slots - 1, -1, -1))

    def take(self, request: Request, kind: SamplingKind) -> int:
        slot = self.of[request] = self._free.pop()
        self._kinds[request] = kind
        self._num_of_kind[kind] += 1
        return slot

    def take_none(self, request: Request) -> None:
        self.of[request] = NO_SLOT

    def give_back(self, request: Request) -> None:
        slot = self.of.pop(request, NO_SLOT)
        if slot != NO_SLOT:
            self._free.append(slot)
            self._num_of_kind[self._kinds.pop(request)] -= 1

    def kind(self) -> SamplingKind:
        """What the requests in slots need at most."""
        return reduce(or_, (kind for kind, num in self._num_of_kind.items() if num), SamplingKind())


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """Page-locked memory of one step: what the device reads, and what it tells."""

    row_slots: Int32s
    decode_slots: Int32s
    forms: npt.NDArray[np.uint32]
    row_forms: Int32s
    results: Int32s
    logprob_ids: Int32s
    logprob_values: FloatArray
    logprob_ranks: Int32s


class DeviceChooser:
    """See engine.token_choice.TokenChooser.

    Args:
        inputs: the program's step inputs on the device, of the largest size.
        eos_token_ids: those that are given to every SamplingState.

    Attributes:
        num_host_rows: rows that the host has sampled.
    """

    def __init__(
        self,
        cuda: CudaDevice,
        sizes: SamplingSizes,
        inputs: Mapping[str, Array],
        block_size: int,
        eos_token_ids: Collection[int],
    ) -> None:
        self.num_host_rows = 0
        self._device, self._driver = cuda, cuda.driver
        self._sizes = sizes
        self._eos_token_ids = eos_token_ids
        self._driver.prepare(sampling_instances())
        self._arrays = SamplingArrays.allocate(sizes, cuda.allocate)
        for array in (self._arrays.row_slots, self._arrays.decode_slots):
            cuda.fill(array, lambda host: host.fill(NO_SLOT))
        num_decodes = min(len(inputs["input_ids"]), len(inputs["seq_lens"]), sizes.num_slots)
        cuda.begin_steps_with(decodes_call(self._arrays, inputs, num_decodes, block_size))
        self._slots = Slots(sizes.num_slots)
        self._records = [self._allocate_record() for _ in range(NUM_RECORDS)]
        self._starts: list[tuple[Array, Array]] = [(np.empty(0, np.int32),) * 2] * NUM_RECORDS  # host, device
        self._turn = 0
        self._graphs: dict[tuple[int, SamplingKind], Replay] = {}  # by rows of logits
        self._sampler = Sampler(sizes.vocab_size)
        self._eos_words = words_of(eos_token_ids, -(-sizes.vocab_size // 32))

    def _allocate_record(self) -> Record:
        arrays: dict[str, Any] = {}
        for field in fields(Record):
            shape, dtype = self._sizes.arrays()[field.name]
            num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
            arrays[field.name] = self._driver.allocate_host((num_bytes,), "uint8").view(dtype).reshape(shape)
        return Record(**arrays)

    # -- before the program runs

    def prepare(self, plan: StepPlan) -> None:
        self._turn = (self._turn + 1) % NUM_RECORDS
        slots, record, rows = self._slots.of, self._records[self._turn], sampled_rows(plan)
        sampled = [*plan.decodes, *(chunk.request for chunk in plan.chunks if chunk.samples)]
        self._start([request for request in sampled if request not in slots])
        num_decodes = len(plan.decodes)
        record.decode_slots.fill(NO_SLOT)
        record.row_slots.fill(NO_SLOT)
        record.decode_slots[:num_decodes] = record.row_slots[:num_decodes] = [slots[r] for r in plan.decodes]
        for chunk, row in zip(plan.chunks, rows[num_decodes:], strict=True):
            if row != NO_ROW:
                record.row_slots[row] = slots[chunk.request]
        self._driver.upload(record.row_slots, self._arrays.row_slots)
        self._driver.upload(record.decode_slots, self._arrays.decode_slots)

    def _start(self, requests: Sequence[Request]) -> None:
        """Give requests slots and tell the device of them; or leave them to the host. Once a step: the memory for their
        records is that of the step.
        """
        records = []
        for request in requests:
            setup = self._setup(request)
            if setup.limit(self._sizes.list_words) is not None:
                self._slots.take_none(request)
            else:
                slot = self._slots.take(request, setup.kind())
                records.append(start_record(setup, slot, self._sizes.vocab_size))
        if records:
            starts = np.cumsum([0, *map(len, records)])[:-1]
            self._launch_start(np.concatenate((starts, *records)).astype(np.int32), len(records))

    def _launch_start(self, words: Int32s, num_records: int) -> None:
        host, target = self._starts[self._turn]
        if len(host) < len(words):
            size = 2 * len(words)
            host, target = self._driver.allocate_host((size,), "int32"), self._driver.allocate((size,), "int32")
            self._starts[self._turn] = (host, target)
        host[: len(words)] = words
        self._driver.upload(host[: len(words)], target[: len(words)])
        starts, records = target[:num_records], target[num_records : len(words)]
        self._driver.launch(start_call(self._arrays, records, starts, self._sizes.vocab_size))

    def _setup(self, request: Request) -> SlotSetup:
        state: SamplingState = request.payload.state
        return slot_setup(
            state.params,
            request.token_ids,
            num_prompt=request.num_prompt_tokens,
            seed=state.seed,
            max_total_tokens=request.max_total_tokens,
            eos_token_ids=self._eos_token_ids,
            bad_words_token_ids=state.bad_words,
        )

    # -- after it

    def choose(self, plan: StepPlan, logits: Array, is_ahead: bool) -> TokensToCome:
        slots = self._slots.of
        requests, rows = requests_of(plan), sampled_rows(plan)
        sampled = [(place, row) for place, row in enumerate(rows) if row != NO_ROW]
        on_device = [(place, row) for place, row in sampled if slots[requests[place]] != NO_SLOT]
        on_host = [(place, row) for place, row in sampled if slots[requests[place]] == NO_SLOT]
        held = [(requests[place], row) for place, row in on_device if requests[place].payload.state.matcher is not None]
        kind = self._slots.kind() | SamplingKind(forms=bool(held))
        tokens = DeviceTokens(plan, logits, on_device, on_host, held, kind, self._records[self._turn], self)
        if not (held and is_ahead):
            tokens.launch_choice()
        return tokens

    def launch_choice(self, tokens: DeviceTokens) -> Callable[[], None]:
        """Choose on the device, and send the outcome to the record; the result waits for it."""
        record, kind = tokens.record, tokens.kind
        if tokens.held:
            self._upload_forms(tokens.held, record)
        if tokens.on_device:
            self._graph(tokens.logits, kind)()
            self._driver.download(self._arrays.results, record.results)
            if kind.logprobs:
                for name in ("logprob_ids", "logprob_values", "logprob_ranks"):
                    self._driver.download(getattr(self._arrays, name), getattr(record, name))
        return self._driver.mark()

    def _upload_forms(self, held: Sequence[tuple[Request, int]], record: Record) -> None:
        """Tell the device which tokens the forms allow next. A row whose form has failed is left without any."""
        states: list[SamplingState] = [request.payload.state for request, _ in held]
        matchers = [state.matcher for state in states if state.matcher is not None]
        words = record.forms[: len(held)]
        words.fill(0)
        fill_masks(matchers, words)
        record.row_forms.fill(NO_FORM)
        for index, ((_, row), state, matcher) in enumerate(zip(held, states, matchers, strict=True)):
            if state.params.ignore_eos and not matcher.is_done:
                words[index] &= ~self._eos_words
            record.row_forms[row] = form_of(index, matcher.is_done)
        self._driver.upload(words, self._arrays.forms[: len(held)])
        self._driver.upload(record.row_forms, self._arrays.row_forms)

    def _graph(self, logits: Array, kind: SamplingKind) -> Replay:
        """The launches that sample so many rows."""
        key = (len(logits), kind)
        if key not in self._graphs:
            calls = sampling_calls(self._arrays, logits, kind)
            self._graphs[key] = self._device.graph(partial(self._launch_all, calls))
        return self._graphs[key]

    def capture(self, logits: Array) -> None:
        for kind in USUAL_KINDS if self._device.uses_graphs else ():
            self._graph(logits, kind)

    def _launch_all(self, calls: Sequence[KernelCall]) -> None:
        for call in calls:
            self._driver.launch(call)

    def read(self, logits: Array) -> FloatArray:
        return self._device.read(logits)

    def sample_on_host(self, logits: FloatArray, requests: Sequence[Request]) -> SampleResult:
        self.num_host_rows += len(requests)
        return sample_on_host(self._sampler, logits, requests)

    def settle(self) -> None:
        self._driver.synchronize()

    def release(self, request: Request) -> None:
        self._slots.give_back(request)


@dataclass(slots=True, eq=False)
class DeviceTokens:
    """See engine.token_choice.TokensToCome."""

    plan: StepPlan
    logits: Array
    on_device: list[tuple[int, int]]  # place in the plan, row of logits
    on_host: list[tuple[int, int]]
    held: list[tuple[Request, int]]  # to a form, and its row; each is one of on_device
    kind: SamplingKind
    record: Record
    chooser: DeviceChooser
    _wait_for_choice: Callable[[], None] | None = None  # None: it is not launched
    _tokens: StepTokens | None = None  # once they are taken

    @property
    def needs_host(self) -> bool:
        return bool(self.on_host) or any(prompt_targets(chunk) for chunk in self.plan.chunks)

    def launch_choice(self) -> None:
        if self._wait_for_choice is None:
            self._wait_for_choice = self.chooser.launch_choice(self)

    def wait(self) -> StepTokens:
        if self._tokens is None:
            self.launch_choice()
            assert self._wait_for_choice is not None
            self._wait_for_choice()
            self._tokens = self._take()
        return self._tokens

    def _take(self) -> StepTokens:
        requests = requests_of(self.plan)
        tokens = StepTokens([()] * len(requests))
        take_prompt_logprobs(self.plan, self._read, tokens)
        self._take_from_device(tokens, requests)
        self._take_from_host(tokens, requests)
        return tokens

    def _read(self, start: int, end: int) -> FloatArray:
        return self.chooser.read(self.logits[start:end])

    def _take_from_device(self, tokens: StepTokens, requests: Sequence[Request]) -> None:
        results = self.record.results.tolist()
        for place, row in self.on_device:
            token_id, outcome = results[row]
            if token_id != device.NO_TOKEN:
                tokens.token_ids[place] = (token_id,)
            elif outcome != device.SKIPPED and requests[place] not in tokens.errors:
                tokens.errors[requests[place]] = ERRORS[outcome] or ""
        if self.kind.forms:
            self._follow_forms(tokens, requests)
        if self.kind.logprobs:
            self._take_logprobs(tokens, requests)

    def _follow_forms(self, tokens: StepTokens, requests: Sequence[Request]) -> None:
        for place, _ in self.on_device:
            state: SamplingState = requests[place].payload.state
            matcher = state.matcher
            if matcher is not None and matcher.error is not None:
                tokens.errors[requests[place]] = matcher.error
                tokens.token_ids[place] = ()
            elif matcher is not None and tokens.token_ids[place]:
                state.accept(tokens.token_ids[place][0])

    def _take_logprobs(self, tokens: StepTokens, requests: Sequence[Request]) -> None:
        r = self.record
        for place, row in self.on_device:
            num_logprobs = requests[place].payload.params.logprobs
            entry = token_logprobs(r.logprob_ids[row], r.logprob_values[row], r.logprob_ranks[row], num_logprobs)
            if entry is not None and tokens.token_ids[place]:
                tokens.logprobs[requests[place]] = entry

    def _take_from_host(self, tokens: StepTokens, requests: Sequence[Request]) -> None:
        chosen = [(place, row) for place, row in self.on_host if requests[place] not in tokens.errors]
        if chosen:
            logits = np.concatenate([self._read(row, row + 1).copy() for _, row in chosen])
            sampled = [requests[place] for place, _ in chosen]
            take_samples(tokens, [place for place, _ in chosen], sampled, self.chooser.sample_on_host(logits, sampled))
