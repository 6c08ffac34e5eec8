"""A histogram of fixed buckets: counts, a sum, and the quantiles that can be read from them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

SECONDS = (0.001, 0.01, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0)  # of lives and waits


class Histogram:
    """Counts values by bucket; O(log buckets) and no allocation per value.

    Attributes:
        bounds: upper bounds, ascending; a value equal to one belongs below it. A last bucket takes what is larger.
        counts: values in each bucket, one more than `bounds`.
        sum: of all values.
    """

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def count(self) -> int:
        """How many values were observed."""
        return sum(self.counts)

    @property
    def mean(self) -> float:
        """0 where nothing was observed."""
        count = self.count
        return self.sum / count if count else 0.0
