"""One figure of a run: KV use over time, waste by block size, hit rate by pool size. Needs the extra "plot".

matplotlib is imported by name, so that neither this module nor its types depend on it.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from lean_engine.bench.grid import config_at
from lean_engine.bench.memory import MemoryReport, OnProgress, simulate
from lean_engine.bench.null_engine import StepRecord
from lean_engine.bench.workloads import Workload
from lean_engine.config import EngineConfig
from lean_engine.errors import ConfigError
from lean_engine.memory.budget import num_blocks_for

FORMATS = (".png", ".svg")
BLOCK_SIZES = (8, 16, 32, 64, 128)  # tokens
POOL_SHARES = (0.125, 0.25, 0.5, 1, 2, 4)  # of the run's own pool
MAX_POINTS = 2000  # over time: more than a figure has dots
BLUE, ORANGE, GREY = "#2a6f97", "#f4a259", "#e5e5e5"


def load_figure(path: str) -> Any:
    """matplotlib's Figure class, once it is sure that `path` can become a figure.

    Raises:
        ConfigError: matplotlib is missing, the format is unknown, or there is no such directory.
    """
    if Path(path).suffix.lower() not in FORMATS:
        raise ConfigError(f"plot file is {path!r}, must end in {' or '.join(FORMATS)}")
    if not Path(path).absolute().parent.is_dir():
        raise ConfigError(f"plot file is {path!r}, but there is no directory {str(Path(path).parent)!r}")
    try:
        return import_module("matplotlib.figure").Figure
    except ImportError:
        raise ConfigError("a plot needs matplotlib, which is not installed: pip install 'lean-engine[plot]'") from None


class KvUsage:
    """Blocks by state after each step of a run; its `add` is an OnStep."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.held: list[int] = []
        self.cached: list[int] = []
        self.empty: list[int] = []

    def add(self, record: StepRecord) -> None:
        self.steps.append(record.stats.step)
        self.held.append(record.stats.num_held_blocks)
        self.cached.append(record.stats.num_cached_blocks)
        self.empty.append(record.stats.num_empty_blocks)


def sweep_for_plot(
    workload: Workload, config: EngineConfig, on_progress: OnProgress | None = None
) -> tuple[list[MemoryReport], list[MemoryReport]]:
    """The workload by block size, the pool's tokens unchanged, and by pool size, as far as every request fits."""
    num_blocks = config.num_gpu_blocks_override or 0
    num_needed = num_blocks_for(workload.max_num_tokens, config.block_size)
    pools = [int(num_blocks * share) for share in POOL_SHARES if num_blocks * share >= num_needed]
    points = [{"block-size": size} for size in BLOCK_SIZES] + [{"num-blocks": number} for number in pools]
    reports: list[MemoryReport] = []
    for point in points:
        reports.append(simulate(workload, config_at(config, point)))
        if on_progress is not None:
            on_progress(len(reports), len(points))
    return reports[: len(BLOCK_SIZES)], reports[len(BLOCK_SIZES) :]


def draw(
    path: str, title: str, usage: KvUsage, by_block_size: Sequence[MemoryReport], by_num_blocks: Sequence[MemoryReport]
) -> None:
    """Write the figure; the end of `path` says whether as PNG or SVG."""
    figure = load_figure(path)(figsize=(11, 7), layout="constrained")
    figure.suptitle(title)
    top, bottom = figure.subfigures(2, 1)
    draw_usage(top.subplots(), usage)
    left, right = bottom.subplots(1, 2)
    draw_waste(left, by_block_size)
    draw_hits(right, by_num_blocks)
    is_svg = Path(path).suffix.lower() == ".svg"
    figure.savefig(path, dpi=150, metadata={"Date": None} if is_svg else None)


def draw_usage(axes: Any, usage: KvUsage) -> None:
    labels = ("held by requests", "cached, free", "empty")
    stride = -(-len(usage.steps) // MAX_POINTS) or 1
    steps, *stacked = (series[::stride] for series in (usage.steps, usage.held, usage.cached, usage.empty))
    axes.stackplot(steps, *stacked, labels=labels, colors=(BLUE, ORANGE, GREY))
    axes.set_title("KV use", loc="left")
    axes.set(xlabel="step", ylabel="blocks")
    axes.margins(0)
    axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=3, frameon=False)


def draw_waste(axes: Any, reports: Sequence[MemoryReport]) -> None:
    sizes = [str(r.configuration["block_size"]) for r in reports]
    bars = axes.bar(sizes, [100 * r.waste_ratio for r in reports], color=BLUE)
    axes.bar_label(bars, fmt="%.1f")
    axes.margins(y=0.12)
    axes.set_title("Waste by block size", loc="left")
    axes.set(xlabel="tokens per block", ylabel="% of the slots in held blocks")


def draw_hits(axes: Any, reports: Sequence[MemoryReport]) -> None:
    pools = [r.configuration["num_blocks"] for r in reports]
    axes.plot(pools, [100 * r.prefix_hit_ratio for r in reports], "o-", color=BLUE, label="found")
    best = [100 * r.optimal_prefix_hit_ratio for r in reports]
    axes.plot(pools, best, "--", color=ORANGE, label="with unlimited memory")
    axes.set_xscale("log", base=2)
    axes.set_xticks(pools, [f"{number:,}" for number in pools])
    axes.set_title("Prefix hits by pool size", loc="left")
    axes.set(xlabel="blocks", ylabel="% of prompt tokens", ylim=(0, 105))
    axes.minorticks_off()
    axes.legend(loc="lower right")
