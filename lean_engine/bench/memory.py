"""A workload run through scheduler, block pool and prefix cache without a model, and what became of memory and time.

`simulate` runs a workload to its end; bench/steady measures a fixed state with the same tally. All means over steps
weigh each step alike. Times are those of Python alone: `plan` and `apply` of the scheduler are a step, making and
adding a request is an add (null_engine.py).
"""

from __future__ import annotations

import gc
import math
import platform
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from heapq import heappop, heappush
from typing import Any

from lean_engine.bench.null_engine import NullEngine, StepRecord, complete
from lean_engine.bench.optimum import PrefixOptimum
from lean_engine.bench.workloads import Conversation, Workload
from lean_engine.config import EngineConfig
from lean_engine.errors import RequestError
from lean_engine.scheduling.request import Request

OnStep = Callable[[StepRecord], None]
OnProgress = Callable[[int, int], None]  # done, in all


@dataclass(frozen=True, slots=True)
class MemoryReport:
    """What a run made of memory, the token budget and time. Ratios lie in [0, 1]; times are microseconds."""

    configuration: dict[str, Any]  # what was run

    num_requests: int  # in the workload
    num_finished: int
    num_refused: int  # can never fit
    num_unsent: int  # turns after a refused one
    num_truncated: int  # of the finished, those that max_model_len cut short
    first_refusal: str | None  # why
    steps: int

    waste_ratio: float  # slots without a token, of those in held blocks; all steps added up
    kv_usage_mean: float  # held blocks, of all
    kv_usage_max: float
    running_mean: float  # requests in a step
    waiting_mean: float  # after it
    num_preemptions: int
    num_recomputed_tokens: int  # computed again after a preemption
    block_lifetime_mean: float  # steps from a block's grant until its content is dropped
    idle_before_evict_mean: float  # steps from a cached block's last holder until its eviction

    prefix_hit_ratio: float  # of the prompt tokens of admitted requests, those found in the cache
    optimal_prefix_hit_ratio: float  # with unlimited memory, in the same order; see optimum.py
    prefix_query_tokens: int
    prefix_hit_tokens: int
    optimal_prefix_hit_tokens: int
    num_evictions: int  # cached blocks granted for something else

    tokens_per_step: float
    budget_used: float  # tokens per step, of the budget
    num_prefill_tokens: int  # of prompts, computed for the first time
    num_decode_tokens: int  # generated, computed for the first time
    num_stalled: int  # decodes that a step did not move: 0
    queue_steps_p50: float  # from arrival to first admission
    queue_steps_p99: float

    step_us_p50: float
    step_us_p99: float
    step_us_mean: float
    plan_us_p50: float
    apply_us_p50: float
    add_us_p50: float
    us_per_request: float  # time of all steps over the requests they scheduled, each step's counted
    us_per_block: float  # time of all steps over the blocks they granted

    def figures(self) -> dict[str, Any]:
        """Everything, for JSON."""
        return asdict(self)


class Tally:
    """Adds up the steps it is shown."""

    def __init__(self) -> None:
        self.plan_us: list[float] = []
        self.apply_us: list[float] = []
        self.queue_steps: list[float] = []
        self.total: Counter[str] = Counter()

    @property
    def num_steps(self) -> int:
        return len(self.plan_us)

    def add(self, record: StepRecord) -> None:
        plan, stats, total = record.plan, record.stats, self.total
        self.plan_us.append(record.plan_us)
        self.apply_us.append(record.apply_us)
        total["prefill"] += plan.num_prefill_tokens
        total["recomputed"] += plan.num_recompute_tokens
        total["decode"] += plan.num_decode_tokens
        total["scheduled"] += plan.num_requests
        total["preempted"] += len(plan.preempted)
        total["granted"] += record.num_granted_blocks
        total["evicted"] += record.num_evictions
        total["stalled"] += record.num_stalled
        total["waiting"] += stats.num_waiting
        total["held"] += stats.num_held_blocks
        total["unused slots"] += stats.num_unused_slots
        for request in record.admitted:
            self.queue_steps.append((request.first_scheduled_time or 0.0) - request.arrival_time)
            total["query"] += request.num_prompt_tokens
            total["hit"] += request.num_cached_tokens
        for request in record.finished:
            total["finished"] += 1
            total["truncated"] += request.num_output_tokens < request.max_tokens

    def report(
        self,
        engine: NullEngine,
        configuration: dict[str, Any],
        num_requests: int,
        optimum: PrefixOptimum,
        num_unsent: int = 0,
        refusals: Sequence[str] = (),
    ) -> MemoryReport:
        pool, total, num_steps = engine.scheduler.pool, self.total, self.num_steps
        step_us = [a + b for a, b in zip(self.plan_us, self.apply_us, strict=True)]
        num_tokens = total["prefill"] + total["recomputed"] + total["decode"]
        return MemoryReport(
            configuration=configuration,
            num_requests=num_requests,
            num_finished=total["finished"],
            num_refused=len(refusals),
            num_unsent=num_unsent,
            num_truncated=total["truncated"],
            first_refusal=refusals[0] if refusals else None,
            steps=num_steps,
            waste_ratio=ratio(total["unused slots"], total["held"] * engine.scheduler.block_size),
            kv_usage_mean=ratio(total["held"], num_steps * pool.num_usable),
            kv_usage_max=ratio(pool.max_held, pool.num_usable),
            running_mean=ratio(total["scheduled"], num_steps),
            waiting_mean=ratio(total["waiting"], num_steps),
            num_preemptions=total["preempted"],
            num_recomputed_tokens=total["recomputed"],
            block_lifetime_mean=pool.lifetime.mean,
            idle_before_evict_mean=pool.idle_before_evict.mean,
            prefix_hit_ratio=ratio(total["hit"], total["query"]),
            optimal_prefix_hit_ratio=optimum.hit_ratio,
            prefix_query_tokens=total["query"],
            prefix_hit_tokens=total["hit"],
            optimal_prefix_hit_tokens=optimum.num_hit_tokens,
            num_evictions=total["evicted"],
            tokens_per_step=ratio(num_tokens, num_steps),
            budget_used=ratio(num_tokens, num_steps * engine.scheduler.max_num_batched_tokens),
            num_prefill_tokens=total["prefill"],
            num_decode_tokens=total["decode"],
            num_stalled=total["stalled"],
            queue_steps_p50=percentile(self.queue_steps, 0.5),
            queue_steps_p99=percentile(self.queue_steps, 0.99),
            step_us_p50=percentile(step_us, 0.5),
            step_us_p99=percentile(step_us, 0.99),
            step_us_mean=ratio(math.fsum(step_us), num_steps),
            plan_us_p50=percentile(self.plan_us, 0.5),
            apply_us_p50=percentile(self.apply_us, 0.5),
            add_us_p50=percentile(engine.add_us, 0.5),
            us_per_request=ratio(math.fsum(step_us), total["scheduled"]),
            us_per_block=ratio(math.fsum(step_us), total["granted"]),
        )


class Simulation:
    """One run of a workload. Turns lie in a heap until their time comes; a turn that ends puts the next one there."""

    def __init__(self, workload: Workload, config: EngineConfig) -> None:
        self.workload = workload
        self.config = complete(config, workload.max_num_tokens)
        self.engine = NullEngine(self.config)
        self.tally = Tally()
        self.optimum = PrefixOptimum(config.block_size)
        self.refusals: list[str] = []
        self.num_unsent = 0
        self._num_coming = 0
        self._coming: list[tuple[float, int, Conversation, int, Sequence[int]]] = []  # see _expect
        self._sent: dict[Request, tuple[Conversation, int]] = {}
        for turns in workload.conversations:
            self._expect(turns[0].delay, turns, 0, ())

    def run(self, on_step: OnStep | None = None, on_progress: OnProgress | None = None) -> MemoryReport:
        """To the end. At the end everything is free; IntegrityError if not."""
        engine, num_requests = self.engine, self.workload.num_requests
        while self._coming or engine.scheduler.has_work():
            if not engine.scheduler.has_work():
                engine.now = max(engine.now, math.ceil(self._coming[0][0]))
            self._send_what_is_due()
            if not engine.scheduler.has_work():
                continue
            record = engine.step()
            self.tally.add(record)
            for request in record.admitted:
                self.optimum.admit(request.prompt_token_ids)
            for request in record.finished:
                self._go_on(request)
            if on_step is not None:
                on_step(record)
            if on_progress is not None and record.finished:
                on_progress(self.tally.total["finished"] + len(self.refusals) + self.num_unsent, num_requests)
        engine.check_idle()
        configuration = describe(self.workload.origin, self.config)
        return self.tally.report(engine, configuration, num_requests, self.optimum, self.num_unsent, self.refusals)

    def _expect(self, time: float, turns: Conversation, index: int, history: Sequence[int]) -> None:
        self._num_coming += 1  # tells equal times apart
        heappush(self._coming, (time, self._num_coming, turns, index, history))

    def _send_what_is_due(self) -> None:
        while self._coming and self._coming[0][0] <= self.engine.now:
            _, _, turns, index, history = heappop(self._coming)
            turn = turns[index]
            try:
                request = self.engine.add([*history, *turn.new_token_ids], turn.output_token_ids, turn.priority)
            except RequestError as error:
                self.refusals.append(str(error))
                self.num_unsent += len(turns) - index - 1
            else:
                self._sent[request] = turns, index

    def _go_on(self, request: Request) -> None:
        """A turn has ended: the next one follows after its delay."""
        self.optimum.finish(request.token_ids)
        turns, index = self._sent.pop(request)
        if index + 1 < len(turns):
            self._expect(self.engine.now + turns[index + 1].delay, turns, index + 1, array("I", request.token_ids))


def simulate(
    workload: Workload, config: EngineConfig, on_step: OnStep | None = None, on_progress: OnProgress | None = None
) -> MemoryReport:
    """Run a workload to its end.

    Args:
        config: num_gpu_blocks_override is the number of blocks that requests can hold; a max_model_len of None is the
            workload's longest request; fields that concern a model or a device are not looked at.

    Raises:
        ConfigError: limits contradict each other.
    """
    return Simulation(workload, config).run(on_step, on_progress)


def describe(origin: Mapping[str, Any], config: EngineConfig) -> dict[str, Any]:
    """What was run, and on what, for the report."""
    names = (
        "block_size",
        "max_model_len",
        "max_num_seqs",
        "max_num_batched_tokens",
        "enable_chunked_prefill",
        "enable_prefix_caching",
        "prefix_caching_hash_algo",
        "long_prefill_token_threshold",
    )
    engine = {"num_blocks": config.num_gpu_blocks_override} | {name: getattr(config, name) for name in names}
    return {**origin, **engine, "python": platform.python_version(), "gc_enabled": gc.isenabled()}


def ratio(part: float, whole: float) -> float:
    """0 where there is nothing to divide by."""
    return part / whole if whole else 0.0


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least this share of them does not exceed (nearest rank); 0 of nothing."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else 0.0
