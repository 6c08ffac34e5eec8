"""When requests are to be sent: seconds since the start, made before the run from a seed.

At an infinite rate all are due at once. At a finite one the gaps are gamma-distributed with mean 1 / rate; burstiness
is the shape: 1 is a Poisson process, less is burstier, more is steadier. Then all times are stretched so that the
last request comes after exactly num_requests / rate seconds: the offered rate is the one that was asked for, whatever
the draw. While it ramps up, the rate goes from the first request to the last linearly or exponentially and nothing is
stretched. (The definitions of burstiness, stretching and ramps are those of vLLM's serving benchmark.)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate
from random import Random

from lean_engine.errors import ConfigError

STRATEGIES = ("linear", "exponential")


@dataclass(frozen=True, slots=True)
class Ramp:
    """A rate that grows during the run, requests per second."""

    strategy: str
    start_rps: float
    end_rps: float

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise ConfigError(f"ramp-up strategy is {self.strategy!r}, must be one of: {', '.join(STRATEGIES)}")
        for name, rate in (("start", self.start_rps), ("end", self.end_rps)):
            if not 0 < rate < math.inf:
                raise ConfigError(f"ramp-up {name} is {rate:g} requests/s, must be above 0")

    def rate(self, progress: float) -> float:
        """At `progress` in [0, 1]."""
        if self.strategy == "linear":
            return self.start_rps + (self.end_rps - self.start_rps) * progress
        return self.start_rps * (self.end_rps / self.start_rps) ** progress


def arrival_times(
    num_requests: int, rate: float, seed: int, burstiness: float = 1.0, ramp: Ramp | None = None
) -> list[float]:
    """Ascending. rate: requests per second, infinity for all at once; not looked at beside a ramp.

    Raises:
        ConfigError: rate or burstiness is not above 0.
    """
    if not rate > 0:
        raise ConfigError(f"request rate is {rate:g}, must be above 0 (inf: all at once)")
    if not 0 < burstiness < math.inf:
        raise ConfigError(f"burstiness is {burstiness:g}, must be above 0 (1: a Poisson process)")
    if ramp is None and rate == math.inf:
        return [0.0] * num_requests
    random = Random(f"arrivals {seed}")
    last = max(1, num_requests - 1)
    rates = [rate if ramp is None else ramp.rate(i / last) for i in range(num_requests)]
    times = list(accumulate(random.gammavariate(burstiness, 1 / (burstiness * r)) for r in rates))
    if ramp is not None or not times or times[-1] == 0:
        return times
    stretch = num_requests / rate / times[-1]
    return [time * stretch for time in times]
