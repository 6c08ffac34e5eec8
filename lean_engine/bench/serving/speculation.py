"""How speculative decoding did during a run, from a server's /metrics before and after it."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from lean_engine.bench.serving.target import Headers, ServerError, fetch

_SAMPLE = re.compile(r"\w+:spec_decode_(\w+?)_total(?:\{(.*)\})? ([\d.eE+]+)")  # whatever the engine's prefix
_POSITION = re.compile(r'position="(\d+)"')


@dataclass(frozen=True, slots=True)
class DraftCounts:
    """Totals of a server."""

    drafts: int
    draft_tokens: int
    accepted_tokens: int
    accepted_at: tuple[int, ...]  # by position in the draft


def parse_counts(text: str) -> DraftCounts | None:
    """Counts in a Prometheus exposition, those of several engines added up; None where there are none."""
    totals: Counter[str] = Counter()
    positions: Counter[int] = Counter()
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match is None:
            continue
        name, labels, value = match[1], match[2] or "", int(float(match[3]))
        position = _POSITION.search(labels)
        if name == "num_accepted_tokens_per_pos" and position is not None:
            positions[int(position[1])] += value
        else:
            totals[name] += value
    if not totals:
        return None
    at = tuple(positions[i] for i in range(max(positions, default=-1) + 1))
    return DraftCounts(totals["num_drafts"], totals["num_draft_tokens"], totals["num_accepted_tokens"], at)


async def fetch_counts(base_url: str, headers: Headers, checks_certificate: bool) -> DraftCounts | None:
    try:
        status, body = await fetch(base_url, "/metrics", headers, checks_certificate)
    except ServerError:
        return None
    return parse_counts(body.decode("utf-8", errors="replace")) if status == 200 else None


def speculation(before: DraftCounts | None, after: DraftCounts | None) -> dict[str, Any]:
    """vLLM's spec_decode_* keys for what happened in between; empty where nothing was drafted."""
    if after is None:
        return {}
    before = before or DraftCounts(0, 0, 0, ())
    drafts, drafted = after.drafts - before.drafts, after.draft_tokens - before.draft_tokens
    accepted = after.accepted_tokens - before.accepted_tokens
    if drafts <= 0 or drafted <= 0:
        return {}
    earlier = [*before.accepted_at, *[0] * len(after.accepted_at)]
    return {
        "spec_decode_acceptance_rate": 100 * accepted / drafted,
        "spec_decode_acceptance_length": 1 + accepted / drafts,
        "spec_decode_num_drafts": drafts,
        "spec_decode_draft_tokens": drafted,
        "spec_decode_accepted_tokens": accepted,
        "spec_decode_per_position_acceptance_rates": [
            (now - then) / drafts for now, then in zip(after.accepted_at, earlier, strict=False)
        ],
    }
