"""A serving benchmark from end to end: wait for the server, warm it up, send the load, and report."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lean_engine.bench.serving.arrivals import Ramp, arrival_times
from lean_engine.bench.serving.datasets import Conversation, History
from lean_engine.bench.serving.load import Load, OnProgress, Scheduled
from lean_engine.bench.serving.report import ServeReport, Slos, make_report
from lean_engine.bench.serving.speculation import fetch_counts, speculation
from lean_engine.bench.serving.target import Headers, ServerError, Target, fetch
from lean_engine.errors import ConfigError

POLL_SECONDS = 0.2  # between looks at a server that is starting
NOT_READY = (502, 503)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How requests are sent and what is asked of them."""

    request_rate: float = math.inf  # requests per second
    burstiness: float = 1.0
    ramp: Ramp | None = None
    max_concurrency: int | None = None
    num_warmups: int = 0  # requests before the run that are not counted
    seed: int = 0
    timeout: float = 6 * 3600.0  # seconds that a request may take
    percents: tuple[float, ...] = (99.0,)
    slos: Slos | None = None

    def __post_init__(self) -> None:
        if self.ramp is not None and self.request_rate != math.inf:
            raise ConfigError("a ramp-up says the request rate itself; leave --request-rate out")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ConfigError(f"max concurrency is {self.max_concurrency}, must be at least 1")
        if not 0 < self.timeout < math.inf:
            raise ConfigError(f"timeout is {self.timeout:g} s, must be above 0")
        for percent in self.percents:
            if not 0 <= percent <= 100:
                raise ConfigError(f"a percentile is {percent:g}, must be from 0 to 100")


async def measure(
    target: Target,
    conversations: Sequence[Conversation],
    options: LoadOptions,
    history: History,
    on_progress: OnProgress | None = None,
    catches_interrupts: bool = False,
) -> tuple[ServeReport, dict[str, Any]]:
    """The report of a run, and vLLM's spec_decode_* keys where the server speculates.

    Args:
        catches_interrupts: Ctrl-C ends the run and what has been measured is reported.
    """
    schedule = make_schedule(conversations, options)
    await warm_up(target, conversations, options, history)
    before = await fetch_counts(target.base_url, target.headers, target.checks_certificate)
    load = Load(target, schedule, history, options.max_concurrency, options.timeout, on_progress)
    result = await load.run(catches_interrupts)
    after = await fetch_counts(target.base_url, target.headers, target.checks_certificate)
    has_schedule = any(scheduled.time > 0 for scheduled in schedule)
    return make_report(result, options.percents, options.slos, has_schedule), speculation(before, after)


def make_schedule(conversations: Sequence[Conversation], options: LoadOptions) -> list[Scheduled]:
    """When each conversation begins: at its own time where it has one, else at the rate.

    Raises:
        ConfigError: a rate is given beside arrival times.
    """
    if all(c.arrival is not None for c in conversations):
        if options.request_rate != math.inf or options.ramp is not None:
            raise ConfigError("the data set has arrival times of its own; leave --request-rate and ramp-ups out")
        return [Scheduled(c.arrival or 0.0, c) for c in conversations]
    times = arrival_times(len(conversations), options.request_rate, options.seed, options.burstiness, options.ramp)
    return [Scheduled(time, c) for time, c in zip(times, conversations, strict=True)]


async def warm_up(
    target: Target, conversations: Sequence[Conversation], options: LoadOptions, history: History
) -> None:
    """Send the first requests and wait for their answers."""
    count = options.num_warmups
    if not count:
        return
    firsts = [Conversation(c.turns[:1]) for c in conversations]
    chosen = [Scheduled(0.0, firsts[i % len(firsts)]) for i in range(count)]
    await Load(target, chosen, history, options.max_concurrency, options.timeout).run()


async def wait_until_ready(
    base_url: str, headers: Headers, checks_certificate: bool = True, seconds: float = 0.0
) -> None:
    """Until /health is 200, or not there (a server that has none is ready when it answers).

    Raises:
        ServerError: it was not, within so many seconds.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds
    while True:
        try:
            status, _ = await fetch(base_url, "/health", headers, checks_certificate)
            if status not in NOT_READY:
                return
            reason = f"{base_url}/health: HTTP {status}"
        except ServerError as error:
            reason = str(error)
        if loop.time() >= deadline:
            raise ServerError(reason if not seconds else f"{reason} after {seconds:g} s")
        await asyncio.sleep(POLL_SECONDS)
