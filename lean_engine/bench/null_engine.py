"""The engine without a model: the real scheduler, block pool and prefix cache over a device that computes nothing.

A request says beforehand what it will generate; its payload holds those tokens, and the null device samples them. The
clock counts steps. Only three calls are timed: making and adding a request, the scheduler's plan, and its apply.
Python's garbage collector runs as it does in an engine, so its pauses are in these times.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter

from lean_engine.config import EngineConfig
from lean_engine.memory.block_pool import IntegrityError
from lean_engine.memory.budget import num_blocks_for
from lean_engine.scheduling.plan import StepPlan
from lean_engine.scheduling.request import Request
from lean_engine.scheduling.setup import make_scheduler, step_limits
from lean_engine.scheduling.statistics import StepStats

MICROSECONDS = 1e6


def complete(config: EngineConfig, max_num_tokens: int) -> EngineConfig:
    """Fill in what was left open, as the engine does; the context is then that of the longest request."""
    max_model_len = config.max_model_len or max_num_tokens
    budget, _ = step_limits(config, max_model_len)
    return replace(config, max_model_len=max_model_len, max_num_batched_tokens=budget)


@dataclass(frozen=True, slots=True)
class StepRecord:
    """What one step did."""

    plan: StepPlan
    stats: StepStats  # after it
    budget: int  # tokens it may compute at most
    num_decoding: int  # requests that had a token to decode when it began, and kept their blocks
    num_stalled: int  # of those, the ones that it did not move: none, or the scheduler is broken
    max_chunk_tokens: int  # the longest chunk of a prompt
    num_granted_blocks: int
    num_evictions: int  # cached blocks that it granted for something else
    admitted: list[Request]  # for the first time
    finished: list[Request]
    plan_us: float
    apply_us: float

    @property
    def step_us(self) -> float:
        return self.plan_us + self.apply_us


class NullEngine:
    """Steps a scheduler.

    Args:
        config: complete, with the blocks that requests can hold in num_gpu_blocks_override.

    Attributes:
        now: steps so far, and those skipped because there was nothing to do.
        add_us: time to make and add each request, block keys of its prompt included, microseconds.
    """

    def __init__(self, config: EngineConfig) -> None:
        assert config.num_gpu_blocks_override is not None
        assert config.max_model_len is not None
        self.scheduler = make_scheduler(config, config.num_gpu_blocks_override + 1, config.max_model_len)
        self.now = 0
        self.add_us: list[float] = []
        self._decoding: set[Request] = set()  # have sampled a token and hold blocks
        self._num_added = 0

    def add(self, prompt_token_ids: Sequence[int], output_token_ids: Sequence[int], priority: int = 0) -> Request:
        """Queue a request that will generate `output_token_ids`.

        Raises:
            RequestError: the scheduler refuses it; the message holds the numbers.
        """
        self._num_added += 1
        request_id = f"request-{self._num_added}"
        started = perf_counter()
        request = Request(
            request_id,
            prompt_token_ids,
            max_tokens=len(output_token_ids),
            arrival_time=self.now,
            priority=priority,
            payload=output_token_ids,
        )
        self.scheduler.add(request)
        self.add_us.append((perf_counter() - started) * MICROSECONDS)
        return request

    def step(self) -> StepRecord:
        """One step; only where the scheduler has work.

        Raises:
            IntegrityError: it plans nothing, or gives a request up, though all blocks are its own to grant.
        """
        scheduler, now, num_evictions = self.scheduler, self.now, self.scheduler.pool.num_evictions
        started = perf_counter()
        plan = scheduler.plan(now)
        plan_us = (perf_counter() - started) * MICROSECONDS
        if plan is None or plan.failed:
            raise IntegrityError(f"{scheduler.num_running} requests run, {scheduler.num_waiting} wait, none moves")
        admitted = [c.request for c in plan.chunks if c.request.first_scheduled_time == now]
        num_granted_blocks = self._num_granted_blocks(plan)
        decoding = self._decoding.difference(plan.preempted)
        num_stalled = len(decoding.difference(plan.decodes))
        sampled = sample(plan)
        started = perf_counter()
        updates = scheduler.apply(plan, sampled, now + 1)
        apply_us = (perf_counter() - started) * MICROSECONDS
        self.now += 1
        finished = [request for request, _ in updates if request.finish_reason is not None]
        self._decoding = decoding.union(request for request, _ in updates).difference(finished)
        return StepRecord(
            plan=plan,
            stats=scheduler.step_stats(),
            budget=scheduler.max_num_batched_tokens,
            num_decoding=len(decoding),
            num_stalled=num_stalled,
            max_chunk_tokens=max((chunk.num_tokens for chunk in plan.chunks), default=0),
            num_granted_blocks=num_granted_blocks,
            num_evictions=scheduler.pool.num_evictions - num_evictions,
            admitted=admitted,
            finished=finished,
            plan_us=plan_us,
            apply_us=apply_us,
        )

    def abort(self, request: Request) -> None:
        self.scheduler.abort(request.request_id, now=self.now)
        self._decoding.discard(request)

    def _num_granted_blocks(self, plan: StepPlan) -> int:
        """Before the plan is applied: block tables cover what was computed and what the plan computes, no more."""
        size = self.scheduler.block_size
        of_decodes = sum(request.num_computed_tokens % size == 1 % size for request in plan.decodes)
        of_chunks = sum(
            num_blocks_for(c.start + c.num_tokens, size) - num_blocks_for(c.start, size) for c in plan.chunks
        )
        return of_decodes + of_chunks

    def check_idle(self) -> None:
        """Prove that nothing is left, of requests and of blocks they hold; IntegrityError names what is."""
        self.scheduler.check()  # among others that nothing holds a block but a request
        if self.scheduler.has_work():
            raise IntegrityError(
                f"at the end {self.scheduler.num_running} requests run, {self.scheduler.num_waiting} wait and "
                f"{self.scheduler.pool.num_held} blocks are held"
            )


def sample(plan: StepPlan) -> list[list[int]]:
    """The tokens that the plan's requests generate next: one per decode, and per chunk that samples."""
    sampled = [next_token(request) for request in plan.decodes]
    sampled += [next_token(chunk.request) if chunk.samples else [] for chunk in plan.chunks]
    return sampled


def next_token(request: Request) -> list[int]:
    return [request.payload[len(request.token_ids) - request.num_prompt_tokens]]
