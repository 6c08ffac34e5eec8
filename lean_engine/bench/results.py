"""Kept results: read them back, and compare two sets of them.

When is a difference one? A set is the repeated runs of one configuration. For each figure the ratio of the sets'
geometric means is taken with its 95 % interval (Student's t on logarithms, Welch's for two sets, paired where run i of
one was made beside run i of the other). An interval that holds 1 is noise: these runs do not show a difference. Fewer
than two runs in a set have no interval, and nothing is decided.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lean_engine.bench.summary import Ratio, ratio_of
from lean_engine.errors import ConfigError

Result = Mapping[str, Any]
HIGHER_IS_BETTER = re.compile(
    r".*_throughput|request_goodput|.*_per_second|.*_tok_s|max_output_tokens_per_s|spec_decode_acceptance_\w+"
)
LOWER_IS_BETTER = re.compile(
    r"(?!std_).*_(ttft|tpot|itl|e2el)_ms|avg_latency|elapsed_time|p\d+_latency|median_\w+_s|.*_bytes"
)
POINT = ("benchmark", "sweep", "request_rate", "burstiness", "max_concurrency", "kernel", "shape")  # tell runs apart


@dataclass(frozen=True, slots=True)
class Row:
    """One figure of two sets."""

    point: str  # which of several configurations in the sets; "" where there is one
    metric: str
    a: Sequence[float]  # a value per run
    b: Sequence[float]
    ratio: Ratio  # b / a
    is_higher_better: bool

    @property
    def verdict(self) -> str:
        if min(len(self.a), len(self.b)) < 2:
            return "undecided: needs 2 runs of each"
        if self.ratio.is_noise:
            return "within noise"
        return "better" if (self.ratio.value > 1) == self.is_higher_better else "worse"

    def figures(self) -> dict[str, Any]:
        """Everything, for JSON; an interval that is not known is null."""
        is_known = self.ratio.low > 0
        return {
            "point": self.point,
            "metric": self.metric,
            "a": list(self.a),
            "b": list(self.b),
            "median_a": statistics.median(self.a),
            "median_b": statistics.median(self.b),
            "ratio": self.ratio.value,
            "ratio_low": self.ratio.low if is_known else None,
            "ratio_high": self.ratio.high if is_known else None,
            "verdict": self.verdict,
        }


def read_set(text: str) -> list[Result]:
    """FILE, or FILE@KEY=VALUE,… for those of its runs whose result, configuration or environment has these values.

    Raises:
        ConfigError: the file holds none.
    """
    name, at, wanted = text.rpartition("@")
    if not at or Path(text).exists():
        name, wanted = text, ""
    pairs = [pair.partition("=") for pair in wanted.split(",") if pair]
    for key, equals, _ in pairs:
        if not equals:
            raise ConfigError(f"{text}: {key!r} is not KEY=VALUE")
    results = [r for r in read_results(name) if all(str(value_of(r, key)) == value for key, _, value in pairs)]
    if not results:
        raise ConfigError(f"{text}: holds no result" + (f" with {wanted}" if wanted else ""))
    return results


def read_results(path: str | Path) -> list[Result]:
    """Of a file of JSON lines, or of one JSON object."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    try:
        whole = json.loads(text)
        found = whole if isinstance(whole, list) else [whole]
    except ValueError:
        found = [parse(line, f"{path}:{i}") for i, line in enumerate(text.splitlines(), 1) if line.strip()]
    for result in found:
        if not isinstance(result, dict):
            raise ConfigError(f"{path}: holds {type(result).__name__}, must be JSON objects")
    return found


def parse(line: str, where: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where}: is not valid JSON: {error}") from None


def value_of(result: Result, key: str) -> Any:
    """A value of the result itself, else of its configuration, else of its environment; None where there is none."""
    for part in (result, result.get("configuration") or {}, result.get("environment") or {}):
        if key in part:
            return part[key]
    return None


def compare(a: Sequence[Result], b: Sequence[Result], is_paired: bool = False) -> list[Row]:
    """A row per figure that both sets have, by configuration.

    Raises:
        ConfigError: the sets have none in common, or cannot be paired.
    """
    sets_a, sets_b = by_point(a), by_point(b)
    common = [point for point in sets_a if point in sets_b]
    if len(sets_a) == len(sets_b) == 1 and not common:  # two configurations that are to be compared
        sets_b = dict(zip(sets_a, sets_b.values(), strict=True))
        common = list(sets_a)
    varied = varying(common)
    rows = [row for point in common for row in rows_of(shown(point, varied), sets_a[point], sets_b[point], is_paired)]
    if not rows:
        raise ConfigError("the two sets have no figure in common")
    return rows


def by_point(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Runs of one configuration together."""
    sets: dict[str, list[Result]] = {}
    for result in results:
        keys = ("benchmark", "sweep") if result.get("sweep") else POINT
        point = {key: result[key] for key in keys if result.get(key) is not None}
        sets.setdefault(json.dumps(point, sort_keys=True), []).append(result)
    return sets


def varying(points: Sequence[str]) -> list[str]:
    """What tells the points apart."""
    parsed = [json.loads(point) for point in points]
    return [key for key in POINT if len({json.dumps(p.get(key)) for p in parsed}) > 1]


def shown(point: str, keys: Sequence[str]) -> str:
    values = json.loads(point)
    parts: list[str] = []
    for key in keys:
        value = values.get(key)
        parts += [f"{k}={v}" for k, v in value.items()] if isinstance(value, dict) else [f"{key}={value}"]
    return " ".join(parts)


def rows_of(point: str, a: Sequence[Result], b: Sequence[Result], is_paired: bool) -> list[Row]:
    if is_paired and len(a) != len(b):
        raise ConfigError(f"{len(a)} and {len(b)} runs cannot be paired{f' ({point})' if point else ''}")
    rows = []
    for metric in a[0]:
        is_higher = HIGHER_IS_BETTER.fullmatch(metric) is not None
        if not is_higher and LOWER_IS_BETTER.fullmatch(metric) is None:
            continue
        values_a, values_b = ([r[metric] for r in runs if is_number(r.get(metric))] for runs in (a, b))
        if len(values_a) != len(a) or len(values_b) != len(b):
            continue
        ratio = ratio_of(values_a, values_b, is_paired)
        if ratio is not None:
            rows.append(Row(point, metric, values_a, values_b, ratio, is_higher))
    return rows


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def differences(a: Sequence[Result], b: Sequence[Result]) -> list[str]:
    """Settings, machines and versions that are not the same in both sets: "seed: 0, 1"."""
    found = []
    for part in ("configuration", "environment"):
        keys = dict.fromkeys(key for r in (*a, *b) for key in r.get(part) or {})
        for key in keys:
            if key in ("date", "command", "result_dir", "result_filename"):
                continue
            seen = [sorted({json.dumps((r.get(part) or {}).get(key)) for r in runs}) for runs in (a, b)]
            if seen[0] != seen[1]:
                found.append(f"{key}: {' or '.join(seen[0])} in A, {' or '.join(seen[1])} in B")
    return found
