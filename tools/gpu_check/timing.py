"""Times on a device: CUDA events on CuPy's stream, or the wall clock where the device is emulated.

A time is the median over rounds; a round is one pair of events around as many launches back to back as fill a few
milliseconds, so that the start of the first does not count. Clocks are left as they are.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
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
