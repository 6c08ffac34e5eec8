"""`lean-engine bench compare`: which differences of repeated runs are more than noise."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lean_engine.bench.results import compare, read_set
from lean_engine.cli import run
from lean_engine.errors import ConfigError

Capture = pytest.CaptureFixture[str]


def runs(*values: float, **more: Any) -> list[dict[str, Any]]:
    return [
        {"benchmark": "serve", "output_throughput": v, "mean_ttft_ms": 1000 / v, "completed": 3, **more} for v in values
    ]


def write(path: Path, results: Sequence[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(result) + "\n" for result in results))
    return str(path)


def verdicts(a: Sequence[dict[str, Any]], b: Sequence[dict[str, Any]], **more: Any) -> dict[str, str]:
    return {f"{row.point} {row.metric}".strip(): row.verdict for row in compare(a, b, **more)}


def test_a_difference_beyond_the_spread_is_better_or_worse_by_the_metric() -> None:
    assert verdicts(runs(100, 101, 99), runs(120, 121, 119)) == {
        "output_throughput": "better",
        "mean_ttft_ms": "better",
    }
    assert set(verdicts(runs(120, 121), runs(100, 101)).values()) == {"worse"}


def test_a_difference_within_the_spread_is_noise() -> None:
    assert set(verdicts(runs(100, 120, 90), runs(105, 125, 95)).values()) == {"within noise"}
    paired = verdicts(runs(100, 120, 90), runs(105, 126.3, 94.4), is_paired=True)
    assert paired["output_throughput"] == "better"


def test_one_run_decides_nothing() -> None:
    assert set(verdicts(runs(100), runs(200, 201)).values()) == {"undecided: needs 2 runs of each"}


def test_configurations_are_compared_each_with_its_own() -> None:
    a = runs(10, 11, max_concurrency=1) + runs(100, 101, max_concurrency=8)
    b = runs(90, 91, max_concurrency=8) + runs(20, 21, max_concurrency=1) + runs(5, 6, max_concurrency=4)
    found = verdicts(a, b)
    assert found["max_concurrency=1 output_throughput"] == "better"
    assert found["max_concurrency=8 output_throughput"] == "worse"
    assert len(found) == 4
    together = [run for n in (8, 16) for run in runs(10, 11, sweep={"block-size": n})]
    assert "block-size=8 mean_ttft_ms" in verdicts(together, together)


def test_two_configurations_can_be_set_against_each_other() -> None:
    found = verdicts(runs(10, 11, max_concurrency=1), runs(20, 21, max_concurrency=2))
    assert found["output_throughput"] == "better"


def test_runs_are_chosen_by_their_values(tmp_path: Path) -> None:
    results = [{**r, "environment": {"commit": c}} for c in ("a", "b") for r in runs(1, 2)]
    path = write(tmp_path / "r.jsonl", results)
    assert len(read_set(path)) == 4
    assert len(read_set(f"{path}@commit=b")) == 2
    assert len(read_set(f"{path}@commit=b,output_throughput=2")) == 1
    with pytest.raises(ConfigError, match="holds no result with commit=c"):
        read_set(f"{path}@commit=c")
    with pytest.raises(ConfigError, match="'commit' is not KEY=VALUE"):
        read_set(f"{path}@commit")


def test_the_table_states_its_rule_and_what_else_differed(capsys: Capture, tmp_path: Path) -> None:
    a = write(tmp_path / "a", runs(100, 101, 99, configuration={"seed": 0, "port": 1}, environment={"commit": "a"}))
    b = write(tmp_path / "b", runs(120, 121, 119, configuration={"seed": 1, "port": 1}, environment={"commit": "a"}))
    assert run(["bench", "compare", a, b]) == 0
    out = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[1].startswith("output_throughput 100 (99–101) 120 (119–121) 1.200 (1.17")
    assert lines[1].endswith(") better")
    assert "An interval that holds 1 is within noise" in out
    assert "Not the same in both:\n  seed: 0 in A, 1 in B\n" in out
    assert run(["bench", "compare", a, b, "--paired", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["verdict"] for row in found["rows"]] == ["better", "better"]
    assert found["rows"][0]["ratio_low"] < found["rows"][0]["ratio"] < found["rows"][0]["ratio_high"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "cannot be read: No such file"),
        ('{"a": 1}\n{', ":2: is not valid JSON"),
        ("[1]", "holds int, must be JSON objects"),
        ('{"a": 1}', "the two sets have no figure in common"),
        ("[]", "holds no result"),
    ],
)
def test_what_cannot_be_compared_is_one_line(
    content: str | None, expected: str, capsys: Capture, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "x").write_text(content)
    assert run(["bench", "compare", str(tmp_path / "x"), str(tmp_path / "x")]) == 2
    err = capsys.readouterr().err
    assert expected in err
    assert err.count("\n") == 1


def test_sets_of_different_sizes_cannot_be_paired() -> None:
    with pytest.raises(ConfigError, match="2 and 3 runs cannot be paired"):
        compare(runs(1, 2), runs(1, 2, 3), is_paired=True)
