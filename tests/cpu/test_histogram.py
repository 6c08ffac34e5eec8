"""The histogram: bounds are inclusive, nothing is lost above the last one."""

from __future__ import annotations

from lean_engine.histogram import Histogram


def test_values_are_counted_below_the_first_bound_that_reaches_them() -> None:
    histogram = Histogram((1, 10))
    for value in (0, 1, 1.5, 10, 11, 1000):
        histogram.observe(value)
    assert histogram.counts == [2, 2, 2]
    assert (histogram.count, histogram.sum) == (6, 1023.5)
    assert histogram.mean == 1023.5 / 6


def test_nothing_observed_has_mean_0() -> None:
    assert Histogram().mean == 0.0
