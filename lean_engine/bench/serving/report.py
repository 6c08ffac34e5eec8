"""From the Records of a run to its figures. Only completed requests enter them; all others are counted.

Names are those of vLLM's serving benchmark: TTFT from sending a request to its first token, TPOT the time per token
after it, ITL between neighbouring deltas, E2EL from sending to the end. The same from the moment a request was due
(`from_schedule`) shows what a user would have waited where sending was late or held back by a cap.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lean_engine.bench.serving.load import LoadResult
from lean_engine.bench.serving.record import Record
from lean_engine.bench.summary import Distribution, distribution, percentile

METRICS = {  # name → as the printed block calls it, its heading
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl": ("ITL", "Inter-token Latency"),
    "e2el": ("E2EL", "End-to-end Latency"),
}
SLO_NAMES = ("ttft", "tpot", "e2el")
FAILURES = ("error", "refused", "cut")
LATE = 0.005  # seconds after it was due: a request is sent late
MAX_CPU_SHARE = 0.85  # of one CPU, which is all that the client can use
MAX_LAG = 0.005  # seconds, 99th percentile


@dataclass(frozen=True, slots=True)
class Slos:
    """What a good request keeps to, milliseconds by SLO_NAMES."""

    limits_ms: Mapping[str, float]

    def is_kept(self, record: Record) -> bool:
        seconds = {"ttft": record.ttft, "tpot": record.tpot or 0.0, "e2el": record.latency}
        return all(1000 * seconds[name] <= limit for name, limit in self.limits_ms.items())


@dataclass(frozen=True, slots=True)
class ClientReport:
    """How far the client itself can be trusted."""

    cpu_share: float  # of one CPU
    loop_lag_p99_ms: float
    loop_lag_max_ms: float
    num_late_sends: int  # more than 5 ms after the request was due and the cap allowed it
    late_send_p99_ms: float
    late_send_max_ms: float
    num_connections: int
    has_schedule: bool  # requests were due at times of their own: sending late means something

    @property
    def is_bottleneck(self) -> bool:
        return bool(self.warnings())

    def warnings(self) -> list[str]:
        found = []
        if self.cpu_share > MAX_CPU_SHARE:
            found.append(f"the client used {100 * self.cpu_share:.0f} % of a CPU, which is about all it can use")
        if self.loop_lag_p99_ms > 1000 * MAX_LAG:
            found.append(f"the client was up to {self.loop_lag_p99_ms:.1f} ms (p99) late in reading answers")
        if self.has_schedule and self.late_send_p99_ms > 1000 * LATE:
            found.append(f"{self.num_late_sends} requests were sent late, p99 {self.late_send_p99_ms:.1f} ms")
        return found


@dataclass(frozen=True, slots=True)
class ServeReport:
    """A run's figures. Times in seconds unless the name says otherwise."""

    records: Sequence[Record]
    duration: float
    distributions: Mapping[str, Distribution | None]  # by METRICS
    from_schedule: Mapping[str, Distribution | None]  # ttft, e2el; empty where everything was due at once
    num_good: int | None  # requests that keep the SLOs; None without any
    peak_tokens_per_s: float  # in the best second since the start
    max_concurrent: int
    client: ClientReport
    was_interrupted: bool
    num_unsent: int

    @property
    def completed(self) -> list[Record]:
        return [record for record in self.records if record.is_completed]

    def count(self, outcome: str) -> int:
        return sum(record.outcome == outcome for record in self.records)

    @property
    def num_failed(self) -> int:
        return sum(self.count(outcome) for outcome in FAILURES)

    def per_second(self, number: float) -> float:
        return number / self.duration if self.duration > 0 else 0.0

    def totals(self) -> dict[str, Any]:
        """vLLM's keys of the whole run."""
        done = self.completed
        num_input = sum(record.num_input_tokens for record in done)
        num_output = sum(record.num_output_tokens for record in done)
        return {
            "duration": self.duration,
            "completed": len(done),
            "failed": self.num_failed,
            "total_input_tokens": num_input,
            "total_output_tokens": num_output,
            "request_throughput": self.per_second(len(done)),
            "request_goodput": None if self.num_good is None else self.per_second(self.num_good),
            "output_throughput": self.per_second(num_output),
            "total_token_throughput": self.per_second(num_input + num_output),
            "max_output_tokens_per_s": self.peak_tokens_per_s,
            "max_concurrent_requests": self.max_concurrent,
        }

    def latencies(self) -> dict[str, float | None]:
        """vLLM's keys of distributions, milliseconds; None where there was nothing to measure."""
        found: dict[str, float | None] = {}
        for name, values in self.distributions.items():
            found |= distribution_ms(name, values)
        return found

    def counts(self) -> dict[str, Any]:
        """What vLLM's keys do not say: failures by kind, tokens checked, the schedule, the client."""
        done = self.completed
        by_error = Counter(record.error for record in self.records if record.outcome in FAILURES)
        cached = [record.cached_tokens for record in done if record.cached_tokens is not None]
        return {
            "failures": {outcome: self.count(outcome) for outcome in FAILURES} | {"messages": dict(by_error)},
            "unfinished": self.count("unfinished"),
            "unsent": self.num_unsent,
            "interrupted": self.was_interrupted,
            "without_usage": sum(record.usage_completion_tokens is None for record in done),
            "usage_differs_from_deltas": sum(differs(record) for record in done),
            "shorter_than_asked": sum(record.num_output_tokens < record.max_tokens for record in done),
            "total_cached_tokens": sum(cached) if cached else None,
            "from_schedule": {
                key: value for name, d in self.from_schedule.items() for key, value in distribution_ms(name, d).items()
            },
            "client": {name: getattr(self.client, name) for name in ClientReport.__dataclass_fields__}
            | {"is_bottleneck": self.client.is_bottleneck, "warnings": self.client.warnings()},
        }

    def details(self) -> dict[str, Any]:
        """A value per request sent, in their order. What failed has null where a figure would mislead."""
        rs = self.records
        return {
            "input_lens": [r.num_input_tokens for r in rs],
            "output_lens": [r.num_output_tokens if r.is_completed else 0 for r in rs],
            "ttfts": [r.ttft if r.is_completed else None for r in rs],
            "itls": [r.itls if r.is_completed else [] for r in rs],
            "latencies": [r.latency if r.is_completed else None for r in rs],
            "scheduled_times": [r.scheduled_at for r in rs],
            "start_times": [r.sent_at for r in rs],
            "queue_times": [r.due_at - r.scheduled_at for r in rs],
            "generated_texts": [r.text for r in rs],
            "outcomes": [r.outcome for r in rs],
            "errors": [r.error for r in rs],
        }


def make_report(
    result: LoadResult,
    percents: Sequence[float] = (99.0,),
    slos: Slos | None = None,
    has_schedule: bool = False,
) -> ServeReport:
    """The figures of a run.

    Args:
        percents: percentiles, 0 to 100.
        has_schedule: requests were due at times of their own, not all at once.
    """
    done = [record for record in result.records if record.is_completed]
    samples: dict[str, list[float]] = {
        "ttft": [r.ttft for r in done],
        "tpot": [r.tpot for r in done if r.tpot is not None],
        "itl": [gap for r in done for gap in r.itls],
        "e2el": [r.latency for r in done],
    }
    waits = {
        "ttft": [r.delta_times[0] - r.scheduled_at for r in done],
        "e2el": [(r.ended_at or 0.0) - r.scheduled_at for r in done],
    }
    return ServeReport(
        records=result.records,
        duration=result.duration,
        distributions={name: distribution(values, percents) for name, values in samples.items()},
        from_schedule={n: distribution(values, percents) for n, values in waits.items()} if has_schedule else {},
        num_good=None if slos is None else sum(map(slos.is_kept, done)),
        peak_tokens_per_s=peak_tokens_per_second(done),
        max_concurrent=max_concurrent(result.records),
        client=client_report(result, has_schedule),
        was_interrupted=result.was_interrupted,
        num_unsent=result.num_unsent,
    )


def distribution_ms(name: str, values: Distribution | None) -> dict[str, float | None]:
    """mean_NAME_ms, median_…, std_…, p99_…."""
    if values is None:
        return {f"{what}_{name}_ms": None for what in ("mean", "median", "std")}
    found = {"mean": values.mean, "median": values.median, "std": values.std}
    found |= {f"p{percent:g}": value for percent, value in values.percentiles.items()}
    return {f"{what}_{name}_ms": 1000 * value for what, value in found.items()}


def differs(record: Record) -> bool:
    """Whether the server counted other than it sent: it merges tokens into one delta, or sends some without text."""
    counted = record.usage_completion_tokens
    return counted is not None and counted != len(record.delta_times)


def peak_tokens_per_second(records: Sequence[Record]) -> float:
    """Tokens in the best of the seconds 0 to 1, 1 to 2, …; each delta counts for its share of the answer's tokens."""
    tokens: defaultdict[int, float] = defaultdict(float)
    for record in records:
        share = record.num_output_tokens / len(record.delta_times)
        for moment in record.delta_times:
            tokens[math.floor(moment)] += share
    return max(tokens.values(), default=0.0)


def max_concurrent(records: Sequence[Record]) -> int:
    """Requests under way at one moment, at most."""
    changes = [(r.sent_at, 1) for r in records] + [(r.ended_at, -1) for r in records if r.ended_at is not None]
    running = most = 0
    for _, change in sorted(changes):  # at one moment, ends come first
        running += change
        most = max(most, running)
    return most


def client_report(result: LoadResult, has_schedule: bool) -> ClientReport:
    late = sorted(max(0.0, r.sent_at - r.due_at) for r in result.records) or [0.0]
    lags = sorted(result.health.loop_lags) or [0.0]
    return ClientReport(
        cpu_share=result.health.cpu_seconds / result.duration if result.duration > 0 else 0.0,
        loop_lag_p99_ms=1000 * percentile(lags, 99),
        loop_lag_max_ms=1000 * lags[-1],
        num_late_sends=sum(seconds > LATE for seconds in late),
        late_send_p99_ms=1000 * percentile(late, 99),
        late_send_max_ms=1000 * late[-1],
        num_connections=result.health.num_connections,
        has_schedule=has_schedule,
    )
