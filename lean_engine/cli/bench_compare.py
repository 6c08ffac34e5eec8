"""`lean-engine bench compare`: two sets of kept results, and which differences are more than noise."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence

import click

from lean_engine.bench.results import Row, compare, differences, read_set
from lean_engine.cli.bench_serve_options import BenchCommand
from lean_engine.cli.options import Option

RULE = (
    "Ratio: of geometric means, B / A, with its 95 % interval (Student's t on logarithms{}). An interval that holds 1 "
    "is within noise."
)
EXAMPLES = (
    "lean-engine bench compare before/serve.jsonl after/serve.jsonl",
    "lean-engine bench compare results/serve.jsonl@commit=1a2b3c4 results/serve.jsonl@commit=5d6e7f8",
)


@click.command("compare", cls=BenchCommand, examples=EXAMPLES)
@click.argument("a")
@click.argument("b")
@click.option(
    "--paired",
    "is_paired",
    is_flag=True,
    cls=Option,
    section="Comparison",
    help="Run i of A was made beside run i of B (A B A B …): compare them in pairs, so that drifts cancel.",
)
@click.option("--json", "as_json", is_flag=True, cls=Option, section="Output", help="Print a JSON object.")
def command(a: str, b: str, is_paired: bool, as_json: bool) -> None:
    """Compare repeated runs A and B.

    A and B are files that --result-dir, --save-result or --output-json wrote, of several runs each; FILE@KEY=VALUE
    takes those whose result, configuration or environment has this value. Prints for each figure the medians, the
    ratio with its spread, and whether it is more than noise; and what else was different.
    """
    set_a, set_b = read_set(a), read_set(b)
    rows = compare(set_a, set_b, is_paired)
    changes = differences(set_a, set_b)
    if as_json:
        click.echo(json.dumps({"rows": [row.figures() for row in rows], "differences": changes}, ensure_ascii=False))
        return
    click.echo(table(rows))
    click.echo("\n" + RULE.format(", of pairs" if is_paired else ", Welch's"))
    if changes:
        click.echo("\nNot the same in both:")
        for change in changes:
            click.echo(f"  {change}")


def table(rows: Sequence[Row]) -> str:
    """Figures in columns, a block per configuration."""
    lines: list[str] = []
    width = max(len(row.metric) for row in rows)
    for point in dict.fromkeys(row.point for row in rows):
        lines += ["", point] if point else []
        lines.append(f"{'':<{width}}  {'A':>24}  {'B':>24}  B / A")
        lines += [line(row, width) for row in rows if row.point == point]
    return "\n".join(lines).lstrip("\n")


def line(row: Row, width: int) -> str:
    ratio = row.ratio
    interval = f" ({ratio.low:.3f}–{ratio.high:.3f})" if ratio.low > 0 else ""
    cells = f"{spread(row.a):>24}  {spread(row.b):>24}  {ratio.value:.3f}{interval}"
    return f"{row.metric:<{width}}  {cells}  {row.verdict}"


def spread(values: Sequence[float]) -> str:
    """Median, least to most."""
    median = statistics.median(values)
    return f"{number(median)} ({number(min(values))}–{number(max(values))})" if len(values) > 1 else number(median)


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
