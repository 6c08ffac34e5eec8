"""Figures from samples: percentiles, mean and spread, and intervals of ratios."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

T_975 = (  # 97.5 % quantiles of Student's t for 1, 2, … degrees of freedom
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
)  # fmt: skip
Z_975 = 1.960


def percentile(values: Sequence[float], percent: float) -> float:
    """Linear between the two nearest ranks, as NumPy's default; `values` ascending and not empty."""
    position = (len(values) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(values) - 1)
    return values[low] + (values[high] - values[low]) * (position - low)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Of samples of one quantity."""

    mean: float
    median: float
    std: float  # of the samples themselves, not an estimate of what they were drawn from
    percentiles: Mapping[float, float]  # percent → value


def distribution(samples: Sequence[float], percents: Sequence[float]) -> Distribution | None:
    """None of no samples: nothing is known then."""
    if not samples:
        return None
    values = sorted(samples)
    return Distribution(
        mean=math.fsum(values) / len(values),
        median=percentile(values, 50),
        std=statistics.pstdev(values),
        percentiles={percent: percentile(values, percent) for percent in percents},
    )


def t_975(degrees: float) -> float:
    """For fractional degrees linear in their inverse; beyond the table's end by a known expansion."""
    if degrees >= len(T_975):
        return Z_975 + (Z_975**3 + Z_975) / (4 * degrees)  # Abramowitz and Stegun 26.7.5, first term
    whole = max(1, math.floor(degrees))
    low, high = T_975[whole - 1], T_975[whole]
    share = (1 / whole - 1 / max(degrees, 1.0)) / (1 / whole - 1 / (whole + 1))
    return low + (high - low) * share


@dataclass(frozen=True, slots=True)
class Ratio:
    """b / a with its 95 % interval; the interval is (0, inf) where there are too few samples for one."""

    value: float
    low: float
    high: float

    @property
    def is_noise(self) -> bool:
        """Whether the interval holds 1: the samples do not show a difference."""
        return self.low <= 1 <= self.high


def ratio_of(a: Sequence[float], b: Sequence[float], is_paired: bool = False) -> Ratio | None:
    """Ratio of the geometric means of b and a; None where a sample is not above 0.

    The interval is Student's t on logarithms: Welch's for independent samples, that of the differences for pairs
    (a[i] with b[i], measured side by side).
    """
    if not a or not b or min(*a, *b) <= 0:
        return None
    log_a, log_b = [math.log(x) for x in a], [math.log(x) for x in b]
    if is_paired:
        differences = [y - x for x, y in zip(log_a, log_b, strict=True)]
        return interval(differences, [0.0, 0.0], has_one_side=True)
    return interval(log_b, log_a)


def interval(log_b: Sequence[float], log_a: Sequence[float], has_one_side: bool = False) -> Ratio:
    center = statistics.fmean(log_b) - statistics.fmean(log_a)
    if min(len(log_a), len(log_b)) < 2:
        return Ratio(math.exp(center), 0.0, math.inf)
    parts = [(statistics.variance(log_b) / len(log_b), len(log_b) - 1)]
    if not has_one_side:
        parts.append((statistics.variance(log_a) / len(log_a), len(log_a) - 1))
    error = math.sqrt(sum(part for part, _ in parts))
    if error == 0:
        return Ratio(math.exp(center), math.exp(center), math.exp(center))
    degrees = error**4 / sum(part**2 / n for part, n in parts)  # Welch and Satterthwaite
    reach = t_975(degrees) * error
    return Ratio(math.exp(center), math.exp(center - reach), math.exp(center + reach))
