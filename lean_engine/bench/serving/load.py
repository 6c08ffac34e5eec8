"""The run: conversations sent on schedule, whatever the server does.

The schedule is made before the run and never waits for an answer, so a slow server does not slow the clients down
that measure it (no coordinated omission); only a concurrency cap holds requests back, and then what they waited is
kept. A conversation's next turn is due a while after its previous answer. The client watches itself: how late it sends,
how late its own event loop is, how much of a CPU it uses.
"""

from __future__ import annotations

import asyncio
import gc
import resource
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, nullcontext
from dataclasses import dataclass, field

from lean_engine.bench.serving.connection import ConnectionPool
from lean_engine.bench.serving.datasets import Conversation, History, ServeTurn
from lean_engine.bench.serving.record import Record
from lean_engine.bench.serving.target import Prompt, Target

OnProgress = Callable[[int, int], None]  # done, in all
HEARTBEAT = 0.01  # seconds between looks at how late the event loop is
NUM_SPARE_FILES = 64  # open files besides connections


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A conversation and when it begins, in seconds since the start."""

    time: float
    conversation: Conversation


@dataclass(slots=True)
class ClientHealth:
    """How well the client kept up."""

    cpu_seconds: float = 0.0  # user and system, of this process
    loop_lags: list[float] = field(default_factory=list)  # seconds that a timer of the event loop was late
    num_connections: int = 0


@dataclass(slots=True)
class LoadResult:
    """Everything that was seen."""

    records: list[Record]  # of what was sent, and of what was due when the run was interrupted
    duration: float  # seconds, from the start until the last answer ended
    health: ClientHealth
    was_interrupted: bool
    num_unsent: int  # turns after a failed one, and what was not due yet when the run was interrupted


class Load:
    """One run.

    Args:
        max_concurrency: requests under way at most; None = no cap.
        timeout: seconds that a request may take.
    """

    def __init__(
        self,
        target: Target,
        schedule: Sequence[Scheduled],
        history: History,
        max_concurrency: int | None = None,
        timeout: float = 6 * 3600.0,
        on_progress: OnProgress | None = None,
    ) -> None:
        self.target = target
        self.schedule = schedule
        self.history = history
        self.timeout = timeout
        self.on_progress = on_progress
        self.records: list[Record] = []
        self.num_requests = sum(len(s.conversation.turns) for s in schedule)
        self._slots = asyncio.Semaphore(max_concurrency) if max_concurrency is not None else None
        self._num_done = 0
        self._num_skipped = 0  # turns after a failed one
        self._stopped = asyncio.Event()
        self._all_done = asyncio.Event()
        self._is_all_sent = False
        self._last_grant = 0.0  # when a request that had waited for the cap was let go
        self._tasks: set[asyncio.Task[None]] = set()
        self._start = 0.0

    async def run(self, catches_interrupts: bool = False) -> LoadResult:
        """To the end, or until Ctrl-C where it is caught: then what was under way counts as unfinished."""
        allow_connections(self.num_requests)
        pool = ConnectionPool(self.target.address, self.timeout, self._now)
        gc.collect()  # not during the run: see watch_client
        self._start = time.perf_counter()
        async with watch_client(self._now) as health:
            with interrupts(lambda: self._stop(pool)) if catches_interrupts else nullcontext():
                await self._dispatch(pool)
                await self._all_done.wait()
        interrupted_at = self._now()
        await pool.close()
        if self._tasks:  # of an interrupted run
            await asyncio.wait([*self._tasks])
        health.num_connections = pool.num_connections
        ended = [record.ended_at for record in self.records if record.ended_at is not None]
        duration = interrupted_at if self._stopped.is_set() else max(ended, default=interrupted_at)
        num_unsent = self.num_requests - len(self.records)
        return LoadResult(self.records, duration, health, self._stopped.is_set(), num_unsent)

    # -- inside

    def _now(self) -> float:
        return time.perf_counter() - self._start

    async def _dispatch(self, pool: ConnectionPool) -> None:
        for scheduled in self.schedule:
            first = scheduled.conversation.turns[0]
            request = self._request(first, first.prompt)  # made while there is time
            await self._sleep_until(scheduled.time)
            due = await self._take_slot(scheduled.time)
            if self._stopped.is_set():
                break
            task = asyncio.create_task(self._converse(pool, scheduled, request, due))
            self._tasks.add(task)
            task.add_done_callback(self._forget)
        self._is_all_sent = True
        if not self._tasks:
            self._all_done.set()

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._is_all_sent and not self._tasks:
            self._all_done.set()

    async def _take_slot(self, due: float) -> float:
        """Wait for room under the cap; since when the client has been free to send what is due at `due`."""
        if self._slots is None:
            return due
        if self._slots.locked():
            await self._slots.acquire()
            self._last_grant = self._now()
        else:
            await self._slots.acquire()
        return max(due, self._last_grant)

    async def _sleep_until(self, moment: float) -> None:
        delay = moment - self._now()
        if delay <= 0:
            await asyncio.sleep(0)  # lets answers in
        elif self._stopped.is_set():
            return
        elif delay > 1:  # Ctrl-C must not wait for it
            try:
                async with asyncio.timeout(delay):
                    await self._stopped.wait()
            except TimeoutError:
                return
        else:
            await asyncio.sleep(delay)

    async def _converse(self, pool: ConnectionPool, scheduled: Scheduled, request: bytes, due: float) -> None:
        """All turns of a conversation; a slot is held for each turn, not between them."""
        turns = scheduled.conversation.turns
        scheduled_at, prompt = scheduled.time, turns[0].prompt
        for number, turn in enumerate(turns, 1):
            record = Record(len(self.records), turn.output_len, turn.prompt_len, scheduled_at, due)
            self.records.append(record)
            await pool.send(record, request)
            if self._slots is not None:
                self._slots.release()
            self._num_done += 1
            if not record.is_completed:
                self._num_skipped += len(turns) - number
            if self.on_progress is not None:
                self.on_progress(self._num_done + self._num_skipped, self.num_requests)
            if number == len(turns) or not record.is_completed:
                return
            following = turns[number]
            scheduled_at = (record.ended_at or 0.0) + following.delay
            prompt = self.history(prompt, record.text, following.prompt)
            request = self._request(following, prompt)
            await self._sleep_until(scheduled_at)
            due = await self._take_slot(scheduled_at)
            if self._stopped.is_set():
                return

    def _request(self, turn: ServeTurn, prompt: Prompt) -> bytes:
        return self.target.request(prompt, turn.output_len, **turn.fields)

    def _stop(self, pool: ConnectionPool) -> None:
        """At the first Ctrl-C; the second one ends the program."""
        if self._stopped.is_set():
            raise KeyboardInterrupt
        self._stopped.set()
        self._all_done.set()
        pool.interrupt("unfinished", "interrupted")


@contextmanager
def interrupts(stop: Callable[[], None]) -> Iterator[None]:
    """Within, Ctrl-C calls `stop` between two callbacks of the event loop."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, stop)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


@asynccontextmanager
async def watch_client(now: Callable[[], float]) -> AsyncIterator[ClientHealth]:
    """Within, measure this process. No garbage is collected meanwhile, since that would make answers look late."""
    health, loop = ClientHealth(), asyncio.get_running_loop()
    beat: asyncio.TimerHandle | None = None

    def look(expected: float) -> None:
        nonlocal beat
        health.loop_lags.append(max(0.0, now() - expected))
        beat = loop.call_later(HEARTBEAT, look, now() + HEARTBEAT)

    was_enabled = gc.isenabled()
    gc.disable()
    started = cpu_seconds()
    look(now())
    try:
        yield health
    finally:
        health.cpu_seconds = cpu_seconds() - started
        if beat is not None:
            beat.cancel()
        if was_enabled:
            gc.enable()


def cpu_seconds() -> float:
    """User and system time of this process so far."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def allow_connections(num_connections: int) -> None:
    """Raise the limit of open files as far as the system lets, so that each request can have a connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_connections + NUM_SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        raised = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, raised), hard))
