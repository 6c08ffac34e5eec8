"""A scheduler driven step by step in tests: short calls that check its integrity each time. No model runs."""

from __future__ import annotations

from typing import Any

from lean_engine.memory.block_pool import BlockPool
from lean_engine.scheduling.plan import StepPlan, StepUpdate
from lean_engine.scheduling.request import Request
from lean_engine.scheduling.scheduler import Scheduler

EOS, STOP, WORD = 1, 2, 7


def make_scheduler(num_usable: int = 100, **changes: Any) -> Scheduler:
    """Blocks of 4 tokens unless said; limits wide enough not to matter unless said."""
    arguments: dict[str, Any] = {
        "block_size": 4,
        "max_model_len": 400,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 400,
        "max_num_logit_rows": 16,
    }
    return Scheduler(BlockPool(num_usable + 1), **arguments | changes)


def make_request(request_id: str, num_prompt: int, max_tokens: int = 100, **changes: Any) -> Request:
    return Request(request_id, range(10, 10 + num_prompt), max_tokens=max_tokens, **changes)


def add(scheduler: Scheduler, request_id: str, num_prompt: int, max_tokens: int = 100, **changes: Any) -> Request:
    request = make_request(request_id, num_prompt, max_tokens, **changes)
    scheduler.add(request)
    return request


def plan(scheduler: Scheduler) -> StepPlan:
    step = scheduler.plan(now=1.0)
    assert step is not None
    scheduler.check()
    return step


def chunks(step: StepPlan) -> list[tuple[str, int, int, bool]]:
    return [(c.request.request_id, c.start, c.num_tokens, c.samples) for c in step.scheduled]


def apply(scheduler: Scheduler, step: StepPlan, token_id: int = WORD) -> list[StepUpdate]:
    """Every chunk that samples gets `token_id`."""
    updates = scheduler.apply(step, [[token_id] if c.samples else [] for c in step.scheduled], now=2.0)
    scheduler.check()
    return updates


def step(scheduler: Scheduler) -> list[tuple[str, int, int, bool]]:
    planned = plan(scheduler)
    scheduled = chunks(planned)
    apply(scheduler, planned)
    return scheduled
