"""A sweep as one figure: throughput against latency, TTFT and ITL percentiles by load. Needs the extra "plot"."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lean_engine.bench.plots import load_figure
from lean_engine.bench.sweep import Measured, axis_of, finite

PERCENTS = (50.0, 90.0, 99.0)
COLOURS = ("#2a6f97", "#f4a259", "#6a994e", "#bc4749", "#7b2cbf", "#495057")
DASHES = ("-", "--", ":")  # of PERCENTS


def draw_sweep(path: str, title: str, measured: Sequence[Measured]) -> None:
    """Write the figure; the end of `path` says whether as PNG or SVG."""
    figure = load_figure(path)(figsize=(14, 4.8), layout="constrained")
    figure.suptitle(title)
    left, middle, right = figure.subplots(1, 3)
    axis = axis_of(measured)
    for index, line in enumerate(lines_of(measured, axis)):
        colour = COLOURS[index % len(COLOURS)]
        draw_trade(left, line, axis, colour)
        draw_percentiles(middle, line, axis, "ttft", colour)
        draw_percentiles(right, line, axis, "itl", colour)
    left.set(xlabel="output tokens per second", ylabel="end-to-end latency, median (ms)")
    left.set_title("Throughput and latency", loc="left")
    for axes, name, text in ((middle, "TTFT", "Time to first token"), (right, "ITL", "Inter-token latency")):
        axes.set(xlabel=axis or "run", ylabel=f"{name}: p50, p90 dashed, p99 dotted (ms)")
        axes.set_title(f"{text} by load", loc="left")
    for axes in (left, middle, right):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    if left.get_legend_handles_labels()[1]:
        left.legend(frameon=False)
    is_svg = Path(path).suffix.lower() == ".svg"
    figure.savefig(path, dpi=150, metadata={"Date": None} if is_svg else None)


def lines_of(measured: Sequence[Measured], axis: str | None) -> list[list[Measured]]:
    """Points that differ in the load alone belong to one line, by ascending load."""
    lines: dict[str, list[Measured]] = {}
    for one in measured:
        rest = {name: value for name, value in one.point.items() if name != axis}
        lines.setdefault(str(rest), []).append(one)
    return [sorted(line, key=lambda m: m.load.get(axis or "", 0)) for line in lines.values()]


def draw_trade(axes: Any, line: Sequence[Measured], axis: str | None, colour: str) -> None:
    x = [m.median("output_throughput") for m in line]
    y = [nan_for_none(m.median("median_e2el_ms")) for m in line]
    label = " ".join(f"{k}={finite(v)}" for k, v in line[0].point.items() if k != axis)
    axes.plot(x, y, "o-", color=colour, label=label or None)
    if axis is not None:
        for m, at_x, at_y in zip(line, x, y, strict=True):
            axes.annotate(str(finite(m.load[axis])), (at_x, at_y), xytext=(4, 4), textcoords="offset points", size=8)


def draw_percentiles(axes: Any, line: Sequence[Measured], axis: str | None, metric: str, colour: str) -> None:
    places = [str(finite(m.load[axis])) if axis else str(i) for i, m in enumerate(line, 1)]
    for percent, dash in zip(PERCENTS, DASHES, strict=True):
        values = [nan_for_none(m.median(f"p{percent:g}_{metric}_ms")) for m in line]
        axes.plot(places, values, marker="o", linestyle=dash, color=colour)


def nan_for_none(value: float | None) -> float:
    return math.nan if value is None else value
