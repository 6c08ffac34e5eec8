"""Faster: two ways to do the same work; the one that was faster when last tried is taken.

What is faster can change while a program runs. The BLAS's threads spin between two products, which saves the wake-ups
of a decode step on a quiet machine; where another process wants the processor they make it many times slower.
"""

from __future__ import annotations

import time
from collections.abc import Callable

Way = Callable[[], None]
TRY_OTHER_EVERY = 32  # calls


class Faster:
    def __init__(self, first: Way, second: Way, clock: Callable[[], float] = time.perf_counter) -> None:
        self._ways = (first, second)
        self._seconds = [0.0, 0.0]  # of the last call of each way; 0 = not tried yet, so it is tried first
        self._num_calls = 0
        self._clock = clock

    def __call__(self) -> None:
        self._num_calls += 1
        way = int(self._seconds[1] < self._seconds[0])
        if self._num_calls % TRY_OTHER_EVERY == 0:
            way = 1 - way
        start = self._clock()
        self._ways[way]()
        self._seconds[way] = self._clock() - start
