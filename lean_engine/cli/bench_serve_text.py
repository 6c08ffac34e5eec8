"""What `lean-engine bench serve` prints: vLLM's block, then what it does not say."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lean_engine.bench.serving.benchmark import LoadOptions
from lean_engine.bench.serving.report import METRICS, ServeReport

WIDTH = 50


def block_text(
    report: ServeReport, options: LoadOptions, metrics: Sequence[str], speculation: Mapping[str, Any]
) -> str:
    """The block of vLLM's serving benchmark, line for line."""
    totals = report.totals()
    lines = [" Serving Benchmark Result ".center(WIDTH, "=")]
    lines += [row("Successful requests:", totals["completed"]), row("Failed requests:", totals["failed"])]
    if options.max_concurrency is not None:
        lines.append(row("Maximum request concurrency:", options.max_concurrency))
    if options.request_rate != math.inf:
        lines.append(row("Request rate configured (RPS):", float(options.request_rate)))
    lines += [
        row("Benchmark duration (s):", totals["duration"]),
        row("Total input tokens:", totals["total_input_tokens"]),
        row("Total generated tokens:", totals["total_output_tokens"]),
        row("Request throughput (req/s):", totals["request_throughput"]),
    ]
    if totals["request_goodput"] is not None:
        lines.append(row("Request goodput (req/s):", totals["request_goodput"]))
    lines += [
        row("Output token throughput (tok/s):", totals["output_throughput"]),
        row("Peak output token throughput (tok/s):", totals["max_output_tokens_per_s"]),
        row("Peak concurrent requests:", float(totals["max_concurrent_requests"])),
        row("Total token throughput (tok/s):", totals["total_token_throughput"]),
    ]
    latencies = report.latencies()
    for name in metrics:
        label, heading = METRICS[name]
        lines.append(heading.center(WIDTH, "-"))
        lines += [
            row(f"{what} {label} (ms):", latencies.get(f"{what.lower()}_{name}_ms")) for what in ("Mean", "Median")
        ]
        lines += [
            row(f"P{percent:g} {label} (ms):", latencies.get(f"p{percent:g}_{name}_ms")) for percent in options.percents
        ]
    lines += speculation_lines(speculation)
    return "\n".join([*lines, "=" * WIDTH])


def row(label: str, value: float | None) -> str:
    """A float has two decimals; what could not be measured is a dash."""
    shown = "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)
    return f"{label:<40} {shown:<10}"


def speculation_lines(figures: Mapping[str, Any]) -> list[str]:
    if not figures:
        return []
    lines = [
        "Speculative Decoding".center(WIDTH, "-"),
        row("Acceptance rate (%):", figures["spec_decode_acceptance_rate"]),
        row("Acceptance length:", figures["spec_decode_acceptance_length"]),
        row("Drafts:", figures["spec_decode_num_drafts"]),
        row("Draft tokens:", figures["spec_decode_draft_tokens"]),
        row("Accepted tokens:", figures["spec_decode_accepted_tokens"]),
    ]
    rates = figures["spec_decode_per_position_acceptance_rates"]
    if rates:
        lines.append("Per-position acceptance (%):")
        lines += [row(f"  Position {i}:", 100 * float(rate)) for i, rate in enumerate(rates)]
    return lines


def notes_text(report: ServeReport) -> str:
    """What the block leaves out: failures by kind, tokens that do not add up, the schedule, the client."""
    counts = report.counts()
    lines = [*failure_lines(counts), *token_lines(counts)]
    for name, values in report.from_schedule.items():
        if values is not None:
            high = ", ".join(f"P{percent:g} {1000 * value:.2f}" for percent, value in values.percentiles.items())
            label = f"{METRICS[name][0]} from schedule (ms):"
            lines.append(f"{label:<40} mean {1000 * values.mean:.2f}, median {1000 * values.median:.2f}, {high}")
    client = report.client
    lines.append(
        f"{'Client:':<40} {100 * client.cpu_share:.0f} % of a CPU; sends p99 {client.late_send_p99_ms:.2f} ms late, "
        f"reads p99 {client.loop_lag_p99_ms:.2f} ms late; {client.num_connections} connections"
    )
    return "\n".join(lines)


def failure_lines(counts: Mapping[str, Any]) -> list[str]:
    failures = counts["failures"]
    lines = []
    if any(failures[kind] for kind in ("error", "refused", "cut")):
        kinds = f"{failures['error']} errors, {failures['refused']} refused (429), {failures['cut']} cut streams"
        lines.append(f"{'Failures:':<40} {kinds}")
        most = sorted(failures["messages"].items(), key=lambda item: -item[1])
        lines += [f"  {count} × {message}" for message, count in most[:5]]
        if len(most) > 5:
            lines.append(f"  … and {len(most) - 5} other messages")
    if counts["unfinished"] or counts["unsent"]:
        shown = f"{counts['unfinished']} requests under way, {counts['unsent']} not sent"
        lines.append(f"{'Not counted:':<40} {shown}")
    return lines


def token_lines(counts: Mapping[str, Any]) -> list[str]:
    rows = {
        "without_usage": "answers had no usage; their deltas were counted",
        "usage_differs_from_deltas": "answers had other than one token per delta; ITL is between deltas",
        "shorter_than_asked": "answers were shorter than asked for",
    }
    lines = [f"{'Tokens:':<40} {counts[key]} {text}" for key, text in rows.items() if counts[key]]
    if counts["total_cached_tokens"]:
        lines.append(f"{'Cached input tokens:':<40} {counts['total_cached_tokens']}")
    return lines
