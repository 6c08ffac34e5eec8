"""Times on a device: CUDA events on CuPy's stream, or the wall clock where the device is emulated.

A time is the median over rounds; a round is one pair of events around as many launches back to back as fill a few
milliseconds, so that the start of the first does not count. Clocks are left as they are.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any, Protocol

from lean_engine.runtime.cuda.cupy_driver import CupyDriver
from lean_engine.runtime.cuda.driver import Driver

Launch = Callable[[], None]

WARM_UP = 2
ROUNDS = 5
ROUND_MICROSECONDS = 3000.0
MAX_LAUNCHES = 50  # of a round


class Clock(Protocol):
    name: str

    def microseconds(self, launch: Launch, times: int) -> float:
        """From the beginning of the first of so many launches to the end of the last."""


class EventClock:
    """CUDA events on the stream of a CupyDriver."""

    name = "CUDA events"

    def __init__(self, cuda: Any, stream: Any) -> None:
        self._cuda, self._stream = cuda, stream
        self._begin, self._end = cuda.Event(), cuda.Event()

    def microseconds(self, launch: Launch, times: int) -> float:
        self._begin.record(self._stream)
        for _ in range(times):
            launch()
        self._end.record(self._stream)
        self._end.synchronize()
        return 1000.0 * float(self._cuda.get_elapsed_time(self._begin, self._end))


class WallClock:
    """For the emulated device, whose launches return when they are done."""

    name = "wall clock"

    def microseconds(self, launch: Launch, times: int) -> float:
        begin = time.perf_counter()
        for _ in range(times):
            launch()
        return 1e6 * (time.perf_counter() - begin)


def clock_of(driver: Driver) -> Clock:
    if isinstance(driver, CupyDriver):
        return EventClock(driver._cuda, driver._stream)
    return WallClock()


class Timeline:
    """When the device began and ended the work of each step of an engine, whose runner it listens to.

    A beginning is marked on the stream before a step's first copy and an end behind its last, so what lies between an
    end and the next beginning is time in which the device had nothing to do.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._marks: list[tuple[Any, Any]] = []

    def listen(self, runner: Any) -> None:
        launch = runner.launch

        def marked(plan: Any, **options: Any) -> Any:
            begin = self._mark()
            step = launch(plan, **options)
            self._marks.append((begin, self._mark()))
            return step

        runner.launch = marked

    def _mark(self) -> Any:
        if not isinstance(self._driver, CupyDriver):
            return time.perf_counter()
        event = self._driver._cuda.Event()
        event.record(self._driver._stream)
        return event

    def idle_share(self, first: int, last: int) -> float:
        """Of the time from the end of step `first` to the end of step `last`, in the order of launches."""
        self._driver.synchronize()
        marks = self._marks[first : last + 1]
        gaps = sum(max(0.0, self._between(end, begin)) for (_, end), (begin, _) in pairwise(marks))
        return gaps / self._between(marks[0][1], marks[-1][1])

    def _between(self, earlier: Any, later: Any) -> float:
        if not isinstance(self._driver, CupyDriver):
            return float(later - earlier)
        return float(self._driver._cuda.get_elapsed_time(earlier, later))

    @property
    def num_steps(self) -> int:
        return len(self._marks)


class Stopwatch:
    """Times launches on a driver's stream."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.clock = clock_of(driver)
        self.is_emulated = not isinstance(self.clock, EventClock)

    def median_us(self, launch: Launch, parts: int = 1, rounds: int = ROUNDS) -> float:
        """Microseconds of a launch, divided by the number of equal parts it has."""
        if self.is_emulated:
            return self.clock.microseconds(launch, 1) / parts
        for _ in range(WARM_UP):
            launch()
        self.driver.synchronize()
        pilot = self.clock.microseconds(launch, 2) / 2
        times = int(min(MAX_LAUNCHES, max(1.0, ROUND_MICROSECONDS / max(pilot, 1.0))))
        return statistics.median(self.clock.microseconds(launch, times) for _ in range(rounds)) / times / parts

    def graph_us(self, launches: Iterable[Launch], rounds: int = ROUNDS) -> float:
        """Microseconds of one of several like launches, replayed together as one graph.

        Over different arrays whose bytes together exceed the L2 cache, each reads memory. All run once before.
        """
        every = list(launches)

        def run() -> None:
            for launch in every:
                launch()

        run()
        self.driver.synchronize()
        return self.median_us(self.driver.capture(run), len(every), rounds)
