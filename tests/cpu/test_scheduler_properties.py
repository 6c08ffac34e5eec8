"""Properties of the scheduler under random loads, on a device of a few lines; step by step, and one step ahead.

The device keeps one token per KV slot and "computes" the next token as a checksum of what it reads back through the
block table: a block granted twice, shared wrongly or cached under another's key, a token skipped or computed twice in
the wrong place, or a stop judged wrongly changes the output, which must be what the request gets alone.
One file, though long: the device, the loads and the state machine are one model of an engine.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lean_engine.errors import RequestError
from lean_engine.memory.block_pool import BlockPool
from lean_engine.memory.prefix_cache import BlockKey, BlockKeys, ExtraKey
from lean_engine.scheduling.plan import ScheduledChunk, StepPlan
from lean_engine.scheduling.request import Request
from lean_engine.scheduling.scheduler import Scheduler

VOCAB_SIZE = 23
EOS = frozenset({1})
STOP = frozenset({2, 3})
CACHES = (None, "sha256", "builtin", "constant")  # None: no prefix cache; constant: every hash collides
PREFIXES = ([5, 6, 7, 8] * 6, [5, 6, 7, 8, 5, 6, 7, 9] * 3)  # equal in their first blocks


def make_keys(block_size: int, cache: str | None) -> BlockKeys | None:
    if cache == "constant":
        return BlockKeys(block_size, "builtin", lambda _: 0)
    return None if cache is None else BlockKeys(block_size, cache)


def next_token(token_ids: list[int]) -> int:
    return zlib.crc32(bytes(token_ids)) % VOCAB_SIZE


def output_alone(request: Request, max_model_len: int) -> tuple[list[int], str, int | None]:
    """Output, finish_reason and stop_reason by the definition of a request, without blocks, chunks or a scheduler."""
    tokens = request.prompt_token_ids
    for num_output in range(1, request.max_tokens + 1):
        tokens.append(next_token(tokens))
        output = tokens[request.num_prompt_tokens :]
        if num_output >= request.min_tokens and tokens[-1] in request.eos_token_ids:
            return output, "stop", None
        if num_output >= request.min_tokens and tokens[-1] in request.stop_token_ids:
            return output, "stop", tokens[-1]
        if len(tokens) == max_model_len:
            break
    return tokens[request.num_prompt_tokens :], "length", None


class Device:
    """KV slots that hold token ids. It knows what it has sampled before anybody else does, and which answers ended."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self.slots = [-1] * (num_blocks * block_size)
        self.token_ids: dict[Request, list[int]] = {}

    def compute(self, chunk: ScheduledChunk, num_sampled: int) -> list[int]:
        """Write the chunk's tokens, then continue what is read back by `num_sampled` tokens if the chunk samples."""
        request, end = chunk.request, chunk.start + chunk.num_tokens
        own = self.token_ids.setdefault(request, request.prompt_token_ids)
        if has_ended(request, own):
            return []
        assert own[: request.num_tokens] == request.token_ids
        slots = [
            request.block_table[position // self.block_size] * self.block_size + position % self.block_size
            for position in range(end)
        ]
        for position in range(chunk.start, end):
            self.slots[slots[position]] = own[position]
        if not chunk.samples:
            return []
        context = [self.slots[slot] for slot in slots]
        for _ in range(num_sampled):
            context.append(next_token(context))
            own.append(context[-1])
            if has_ended(request, own):
                break
        return context[end:]


def has_ended(request: Request, token_ids: list[int]) -> bool:
    num_output = len(token_ids) - request.num_prompt_tokens
    if num_output == 0:
        return False
    can_stop = num_output >= request.min_tokens
    return len(token_ids) >= request.max_total_tokens or (can_stop and token_ids[-1] in request.ending_token_ids)


class Simulation:
    """A scheduler over a device; every step is checked against what any step promises.

    Args:
        depth: 1 plans and computes a step before the one before it is applied.
    """

    def __init__(
        self,
        *,
        num_blocks: int = 11,
        block_size: int = 4,
        max_model_len: int = 64,
        max_num_seqs: int = 8,
        max_num_batched_tokens: int = 16,
        max_num_logit_rows: int = 8,
        enable_chunked_prefill: bool = True,
        cache: str | None = None,
        policy: str = "fcfs",
        long_prefill_token_threshold: int | None = 0,
        depth: int = 0,
    ) -> None:
        self.pool = BlockPool(num_blocks)
        self.device = Device(num_blocks, block_size)
        self.scheduler = Scheduler(
            self.pool,
            block_size=block_size,
            max_model_len=max_model_len,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_num_logit_rows=max_num_logit_rows,
            enable_chunked_prefill=enable_chunked_prefill,
            block_keys=make_keys(block_size, cache),
            policy=policy,
            long_prefill_token_threshold=long_prefill_token_threshold,
        )
        self.block_size = block_size
        self.is_cached = cache is not None
        is_plain = cache is None and long_prefill_token_threshold == 0  # otherwise some may pass others
        self.is_in_order = is_plain and policy == "fcfs"  # one of higher priority waits for what those that run leave
        self.content: dict[BlockKey, tuple[object, list[int]]] = {}  # key → extra keys and tokens it stands for
        self.num_hits = 0
        self.max_num_seqs = max_num_seqs
        self.requests: dict[str, Request] = {}  # unfinished, in the order added
        self.delivered: dict[str, list[int]] = {}
        self.logit_positions: dict[str, list[int]] = {}
        self.num_tokens_at_preemption: dict[str, int] = {}
        self.num_preemptions = 0
        # The reserve reckons with one new token per request and step, and with chunks that only the token budget cuts.
        self.is_reserve_exact = is_plain
        self.num_finished = 0
        self.depth = depth
        self.in_flight: list[tuple[StepPlan, list[ScheduledChunk], list[list[int]]]] = []
        self.num_ahead = 0
        self.num_discarded = 0  # tokens sampled for a request that had ended

    def add(self, request: Request) -> None:
        self.scheduler.add(request)
        self.requests[request.request_id] = request
        self.delivered[request.request_id] = []
        self.logit_positions[request.request_id] = []
        self.is_reserve_exact &= not request.needs_prompt_logits

    def abort(self, request_id: str) -> None:
        assert self.scheduler.abort(request_id)
        assert not self.scheduler.abort(request_id)
        request = self.requests.pop(request_id)
        assert request.is_finished
        assert request.finish_reason == "abort"
        assert request.block_table == []

    def step(self, num_sampled: int = 1, between: Callable[[], None] = lambda: None) -> None:
        self.is_reserve_exact &= num_sampled == 1
        while len(self.in_flight) <= (self.depth if num_sampled == 1 else 0) and self.launch(num_sampled):
            pass
        between()
        if self.in_flight:
            self.take()
        else:
            assert not self.requests

    def launch(self, num_sampled: int) -> bool:
        """Plan and compute a step; False if there is none."""
        plan = self.scheduler.plan(now=1.0)
        if plan is None:
            assert self.in_flight or not self.requests
            return False
        self._check_plan(plan)
        self.scheduler.check()
        self._check_sharing()
        self.num_ahead += bool(self.in_flight)
        chunks = plan.scheduled
        self.in_flight.append((plan, chunks, [self.device.compute(chunk, num_sampled) for chunk in chunks]))
        return True

    def take(self) -> None:
        """Apply the oldest step."""
        plan, chunks, sampled = self.in_flight.pop(0)
        live = [chunk for chunk in chunks if not chunk.request.is_finished]
        self.num_discarded += sum(c.samples and c.request.is_finished for c in chunks)
        updates = self.scheduler.apply(plan, sampled, now=2.0)
        for chunk in live:
            end = chunk.start + chunk.num_tokens
            positions = range(end - chunk.num_logit_rows, min(end, chunk.request.num_prompt_tokens))
            self.logit_positions[chunk.request.request_id].extend(positions)
        for request, new_token_ids in updates:
            self.delivered[request.request_id].extend(new_token_ids)
            assert request.is_finished == (request.finish_reason is not None)
            if request.is_finished:
                self._check_finished(request)
        self.scheduler.check()
        self._check_published()

    def _check_sharing(self) -> None:
        """A block that several requests hold is at the same place in each, behind the same tokens."""
        holders: dict[int, tuple[int, Request]] = {}
        for request in self.scheduler._running:
            for place, block_id in enumerate(request.block_table):
                first_place, first = holders.setdefault(block_id, (place, request))
                if first is not request:
                    end = (place + 1) * self.block_size
                    assert self.is_cached
                    assert place == first_place
                    assert first.token_ids[:end] == request.token_ids[:end]
                    assert first.extra_keys == request.extra_keys

    def _check_published(self) -> None:
        """Every published block holds what its key stands for, and no key stands for two things."""
        for request in self.requests.values():
            for place, key in enumerate(request.block_keys):
                tokens = request.token_ids[: (place + 1) * self.block_size]
                assert self.content.setdefault(key, (request.extra_keys, tokens)) == (request.extra_keys, tokens)
        for key, block_id in self.pool._published.items():
            start = block_id * self.block_size
            if key in self.content:
                held = self.device.slots[start : start + self.block_size]
                assert held == self.content[key][1][-self.block_size :]

    def _check_plan(self, plan: StepPlan) -> None:
        scheduler, chunks = self.scheduler, plan.scheduled
        assert 0 < plan.num_tokens == sum(chunk.num_tokens for chunk in chunks) <= scheduler.max_num_batched_tokens
        assert plan.num_logit_rows == sum(chunk.num_logit_rows for chunk in chunks) <= scheduler.max_num_logit_rows
        scheduled = {chunk.request for chunk in chunks}
        ending = [request for request in scheduler._running if request not in scheduled]
        assert len(chunks) + len(ending) == scheduler.num_running <= self.max_num_seqs
        assert all(self.in_flight and r.num_tokens + 1 >= r.max_total_tokens for r in ending)
        assert all(chunk.num_tokens > 0 for chunk in chunks)
        assert all(chunk.start + chunk.num_tokens == chunk.request.num_computed_tokens for chunk in chunks)
        assert not (plan.preempted and self.in_flight)
        running = {request.request_id for request in scheduler._running}
        if self.is_in_order:
            in_order = sorted(self.requests.values(), key=lambda request: request.order)
            assert running == {request.request_id for request in in_order[: len(running)]}
        self.num_hits += sum(c.request.num_cached_tokens for c in plan.chunks if c.request.first_scheduled_time == 1.0)
        for request in plan.preempted:
            assert request.request_id not in running, "preempted and admitted again in one step"
            before = self.num_tokens_at_preemption.get(request.request_id, 0)
            if self.is_reserve_exact:
                assert request.num_tokens > before, "preempted again without a new token"
            self.num_tokens_at_preemption[request.request_id] = request.num_tokens
        self.num_preemptions += len(plan.preempted)

    def _check_finished(self, request: Request) -> None:
        del self.requests[request.request_id]
        output, finish_reason, stop_reason = output_alone(request, self.scheduler.max_model_len)
        assert request.output_token_ids == output
        assert self.delivered.pop(request.request_id) == output, "every token once"
        assert (request.finish_reason, request.stop_reason) == (finish_reason, stop_reason)
        positions = self.logit_positions.pop(request.request_id)
        if request.needs_prompt_logits:
            assert positions == list(range(request.num_prompt_tokens)), "every prompt position's logits once"
        self.num_finished += 1

    def check_idle(self) -> None:
        while self.in_flight:
            self.take()
        assert not self.scheduler.has_work()
        assert (self.scheduler.num_running, self.scheduler.num_waiting) == (0, 0)
        assert self.scheduler._requests == {}
        assert self.pool.num_free == self.pool.num_usable


def random_request(rng: random.Random, request_id: str, *, plain: bool = False) -> Request:
    prefix = rng.choice(PREFIXES)[: rng.randint(0, 12)]
    return Request(
        request_id,
        prefix + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 16 - len(prefix)))],
        max_tokens=rng.randint(0, 48),
        min_tokens=rng.randint(0, 4),
        eos_token_ids=EOS if rng.random() < 0.2 else frozenset(),
        stop_token_ids=STOP if rng.random() < 0.2 else frozenset(),
        needs_prompt_logits=not plain and rng.random() < 0.2,
        priority=rng.randint(-1, 1),
        extra_keys=(ExtraKey("salt", "s"),) if rng.random() < 0.1 else (),
    )


class SchedulerMachine(RuleBasedStateMachine):
    """Hypothesis chooses the limits, the requests and the order of events."""

    @initialize(
        block_size=st.sampled_from([1, 2, 4, 16]),
        num_usable=st.integers(1, 24),
        max_model_len=st.integers(2, 64),
        max_num_seqs=st.integers(1, 6),
        max_num_batched_tokens=st.sampled_from([1, 2, 8, 64]),
        max_num_logit_rows=st.sampled_from([1, 3, 16]),
        enable_chunked_prefill=st.booleans(),
        cache=st.sampled_from(CACHES),
        policy=st.sampled_from(["fcfs", "priority"]),
        long_prefill_token_threshold=st.sampled_from([None, 0, 1, 5]),
        depth=st.integers(0, 1),
    )
    def start(self, num_usable: int, enable_chunked_prefill: bool, **limits: Any) -> None:
        if not enable_chunked_prefill:
            limits |= {"max_num_batched_tokens": 64, "long_prefill_token_threshold": None}
        self.simulation = Simulation(num_blocks=num_usable + 1, enable_chunked_prefill=enable_chunked_prefill, **limits)
        self.num_added = 0

    @rule(
        prefix=st.sampled_from([[], *PREFIXES]),
        prefix_len=st.integers(0, 24),
        tail=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=12),
        max_tokens=st.integers(0, 40),
        min_tokens=st.integers(0, 4),
        eos_token_ids=st.sampled_from([EOS, frozenset()]),
        stop_token_ids=st.sampled_from([STOP, frozenset()]),
        needs_prompt_logits=st.sampled_from([False, False, True]),
        priority=st.integers(-1, 1),
        extra_keys=st.sampled_from([(), (), (ExtraKey("salt", "x"),), (ExtraKey("lora", "x"),)]),
        reads_cache=st.sampled_from([True, True, False]),
    )
    def add(self, prefix: list[int], prefix_len: int, tail: list[int], **parameters: Any) -> None:
        prompt = prefix[:prefix_len] + tail
        scheduler, pool = self.simulation.scheduler, self.simulation.pool
        request = Request(f"r{self.num_added}", prompt, **parameters)
        self.num_added += 1
        num_total = min(len(prompt) + request.max_tokens, scheduler.max_model_len)
        fits = 0 < len(prompt) < scheduler.max_model_len and num_total <= pool.num_usable * scheduler.block_size
        if request.needs_prompt_logits and not scheduler.enable_chunked_prefill:
            fits &= len(prompt) <= scheduler.max_num_logit_rows
        if fits:
            self.simulation.add(request)
        else:
            with pytest.raises(RequestError):
                self.simulation.add(request)

    @rule(num_sampled=st.sampled_from([1, 1, 1, 4]))
    def step(self, num_sampled: int) -> None:
        self.simulation.step(num_sampled)

    @rule()
    def reset(self) -> None:
        self.simulation.scheduler.reset_prefix_cache()
        assert self.simulation.pool.num_cached == 0

    @precondition(lambda self: self.simulation.requests)
    @rule(data=st.data(), is_in_flight=st.booleans())
    def abort(self, data: st.DataObject, is_in_flight: bool) -> None:
        request_id = data.draw(st.sampled_from(list(self.simulation.requests)))
        if is_in_flight:
            self.simulation.step(between=lambda: self.simulation.abort(request_id))
        else:
            self.simulation.abort(request_id)

    @invariant()
    def blocks_are_conserved(self) -> None:
        self.simulation.scheduler.check()
        pool = self.simulation.pool
        assert pool.num_empty + pool.num_cached + pool.num_held == pool.num_usable
        assert self.simulation.scheduler.has_work() == bool(self.simulation.requests)

    def teardown(self) -> None:
        if hasattr(self, "simulation"):
            while self.simulation.requests:
                self.simulation.step()
            self.simulation.check_idle()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=200, stateful_step_count=50, deadline=None, database=None)


def run_mix(rng: random.Random, num_requests: int, num_waiting: int, *, plain: bool, **limits: Any) -> Simulation:
    """Keep up to `num_waiting` unfinished requests in the scheduler until `num_requests` have been through it."""
    simulation = Simulation(**limits)
    num_added = 0
    while num_added < num_requests or simulation.requests:
        while num_added < num_requests and len(simulation.requests) < num_waiting:
            request = random_request(rng, f"r{num_added}", plain=plain)
            simulation.add(request)
            num_added += 1
        if not plain and rng.random() < 0.1:
            victim = rng.choice(list(simulation.requests))
            if rng.random() < 0.5:
                simulation.abort(victim)
            else:
                simulation.step(between=lambda victim=victim: simulation.abort(victim))
        simulation.step()
    simulation.check_idle()
    return simulation


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("cache", CACHES[:3])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_thousand_requests_leave_nothing_behind(cache: str | None, policy: str, depth: int) -> None:
    simulation = run_mix(
        random.Random(0),
        1000,
        24,
        plain=False,
        num_blocks=30,
        max_num_batched_tokens=32,
        cache=cache,
        policy=policy,
        long_prefill_token_threshold=None,
        depth=depth,
    )
    assert simulation.num_finished > 600, "the others were aborted"
    assert (simulation.num_ahead > 1000) == (depth == 1)
    assert simulation.num_discarded <= 1000 - simulation.num_finished + depth * 1000, "one token a request"
    assert simulation.num_preemptions > 20
    assert (simulation.num_hits > 1000) == (cache is not None)


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("block_size", [1, 4, 8])
@pytest.mark.parametrize("max_num_batched_tokens", [4, 8, 64])
def test_no_request_is_preempted_again_without_a_new_token(
    block_size: int, max_num_batched_tokens: int, depth: int
) -> None:
    simulation = run_mix(
        random.Random(block_size),
        100,
        10,
        plain=True,
        block_size=block_size,
        num_blocks=1 + 96 // block_size,
        max_num_batched_tokens=max_num_batched_tokens,
        depth=depth,
    )
    assert simulation.num_finished == 100
    assert simulation.num_preemptions > 0
    assert simulation.is_reserve_exact


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("cache", CACHES)
def test_output_depends_on_no_limit(seed: int, cache: str | None) -> None:
    """Every run is compared, inside the simulation, with what each request gets alone."""
    for block_size in (4, 16):
        for max_num_batched_tokens in (8, 64):
            for num_blocks in (1 + 64 // block_size, 1000):
                limits = {"block_size": block_size, "num_blocks": num_blocks, "cache": cache}
                limits |= {"max_num_batched_tokens": max_num_batched_tokens, "long_prefill_token_threshold": None}
                for depth in (0, 1):
                    assert run_mix(random.Random(seed), 20, 20, plain=True, depth=depth, **limits).num_finished == 20
