"""What `lean-engine bench memory` prints: one run as aligned figures with units, a sweep as one table."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from lean_engine.bench.grid import Point
from lean_engine.bench.memory import MemoryReport
from lean_engine.units import plural

STATE = {"running": "requests decode", "waiting": "wait"}
Row = tuple[str, str, str]  # what, how much, in what unit or of what


def report_text(report: MemoryReport) -> str:
    """One run."""
    lines = [f"{name:<9} {value}" for name, value in head(report.configuration, report.steps).items()]
    for title, rows in groups(report).items():
        lines += ["", title]
        lines += [f"  {name:<24} {value:>12}  {unit}".rstrip() for name, value, unit in rows]
    return "\n".join(lines)


def head(c: Mapping[str, Any], steps: int) -> dict[str, str]:
    """What was run."""
    tokens = c["num_blocks"] * c["block_size"]
    chunks = "prompts in chunks" if c["enable_chunked_prefill"] else "whole prompts"
    caching = f"prefix cache by {c['prefix_caching_hash_algo']}" if c["enable_prefix_caching"] else "no prefix cache"
    collection = "on" if c["gc_enabled"] else "off"
    return {
        "workload": describe_workload(c),
        "pool": f"{c['num_blocks']:,} blocks of {c['block_size']} tokens, {tokens:,} tokens; {caching}",
        "step": f"at most {c['max_num_batched_tokens']:,} tokens of {c['max_num_seqs']:,} requests, {chunks}; context "
        f"{c['max_model_len']:,} tokens",
        "run": f"{steps:,} steps; Python {c['python']}, garbage collection {collection}",
    }


def describe_workload(c: Mapping[str, Any], swept: Collection[str] = ()) -> str:
    """In words, without what is swept."""
    if "running" in c:
        facts = [f"{c[name]:,} {what}" for name, what in STATE.items() if name not in swept]
        return "steady state: " + ", ".join([*facts, f"seed {c['seed']}"])
    arrivals = f"{c['request_rate']} conversations per step; " if "request_rate" in c else ""
    return f"{c['workload']}: {plural(c['num_requests'], 'request')}; {arrivals}seed {c['seed']}"


def groups(r: MemoryReport) -> dict[str, list[Row]]:
    return {
        "requests": requests(r),
        "KV memory": memory(r),
        "prefix cache": cache(r),
        "steps": steps(r),
        "Python": times(r),
    }


def requests(r: MemoryReport) -> list[Row]:
    rows: list[Row] = [
        ("finished", f"{r.num_finished:,}", f"of {r.num_requests:,}"),
        ("refused", f"{r.num_refused:,}", "" if r.first_refusal is None else f"the first because {r.first_refusal}"),
    ]
    if r.num_unsent:
        rows.append(("never sent", f"{r.num_unsent:,}", "turns after a refused one"))
    if r.num_truncated:
        rows.append(("cut short", f"{r.num_truncated:,}", "at the context's end"))
    rows += [
        ("running", f"{r.running_mean:,.1f}", "requests, mean over steps"),
        ("waiting", f"{r.waiting_mean:,.1f}", "requests, mean over steps"),
        ("queued", f"{r.queue_steps_p50:,.0f}", f"steps, p50; p99 {r.queue_steps_p99:,.0f}"),
        ("preemptions", f"{r.num_preemptions:,}", ""),
    ]
    return rows


def memory(r: MemoryReport) -> list[Row]:
    return [
        ("waste", percent(r.waste_ratio), "of the slots in held blocks have no token"),
        ("use", percent(r.kv_usage_mean), f"of the blocks held, mean over steps; at most {percent(r.kv_usage_max)}"),
        ("block lifetime", f"{r.block_lifetime_mean:,.1f}", "steps from grant until the content is dropped, mean"),
    ]


def cache(r: MemoryReport) -> list[Row]:
    return [
        ("hits", percent(r.prefix_hit_ratio), f"{r.prefix_hit_tokens:,} of {r.prefix_query_tokens:,} prompt tokens"),
        ("optimum", percent(r.optimal_prefix_hit_ratio), "with unlimited memory, in the same order"),
        ("evictions", f"{r.num_evictions:,}", f"blocks, idle for {r.idle_before_evict_mean:,.1f} steps on average"),
    ]


def steps(r: MemoryReport) -> list[Row]:
    return [
        ("tokens per step", f"{r.tokens_per_step:,.1f}", f"{percent(r.budget_used)} of the budget"),
        ("of prompts", f"{r.num_prefill_tokens:,}", "tokens"),
        ("generated", f"{r.num_decode_tokens:,}", "tokens"),
        ("computed again", f"{r.num_recomputed_tokens:,}", "tokens, lost by preemption"),
        ("stalled decodes", f"{r.num_stalled:,}", "that a step did not move"),
    ]


def times(r: MemoryReport) -> list[Row]:
    return [
        ("step", f"{r.step_us_p50:,.1f}", f"µs, p50; p99 {r.step_us_p99:,.1f}, mean {r.step_us_mean:,.1f}"),
        ("of it plan, apply", f"{r.plan_us_p50:,.1f}", f"µs and {r.apply_us_p50:,.1f} µs, p50"),
        ("per request in a step", f"{r.us_per_request:,.2f}", "µs"),
        ("per block granted", f"{r.us_per_block:,.2f}", "µs of all steps"),
        ("add", f"{r.add_us_p50:,.1f}", "µs per request, p50, block keys of its prompt included"),
    ]


COLUMNS: dict[str, Callable[[MemoryReport], str]] = {
    "waste": lambda r: percent(r.waste_ratio),
    "use": lambda r: percent(r.kv_usage_mean),
    "hits": lambda r: percent(r.prefix_hit_ratio),
    "optimum": lambda r: percent(r.optimal_prefix_hit_ratio),
    "evictions": lambda r: f"{r.num_evictions:,}",
    "preempted": lambda r: f"{r.num_preemptions:,}",
    "refused": lambda r: f"{r.num_refused:,}",
    "running": lambda r: f"{r.running_mean:,.1f}",
    "waiting": lambda r: f"{r.waiting_mean:,.1f}",
    "queued p99": lambda r: f"{r.queue_steps_p99:,.0f}",
    "steps": lambda r: f"{r.steps:,}",
    "tokens/step": lambda r: f"{r.tokens_per_step:,.1f}",
    "step µs p50": lambda r: f"{r.step_us_p50:,.1f}",
    "p99": lambda r: f"{r.step_us_p99:,.1f}",
    "add µs": lambda r: f"{r.add_us_p50:,.1f}",
}


def sweep_text(points: Sequence[Point], reports: Sequence[MemoryReport]) -> str:
    """What was run, and a line per run."""
    rows = [[*points[0], *COLUMNS]]
    rows += [
        [*map(shown, point.values()), *(column(report) for column in COLUMNS.values())]
        for point, report in zip(points, reports, strict=True)
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join([f"workload  {describe_workload(reports[0].configuration, points[0])}", "", *lines])


def shown(value: int | bool) -> str:
    return f"{value:,}" if not isinstance(value, bool) else "on" if value else "off"


def percent(ratio: float) -> str:
    return f"{100 * ratio:.2f} %"
