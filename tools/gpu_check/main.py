"""The parent: runs the parts one after the other, each in a process with a time limit, and keeps what they say.

Nothing that a part does loses what was found before: rows are appended to rows.jsonl as they come, a part's record to
results.jsonl when it ends, however it ends.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from gpu_check.child import run_part
from gpu_check.context import Context, run_child
from gpu_check.parts import PARTS, Part

MIN_SECONDS = 3.0  # with less left, no part is begun
SCRIPT = Path(__file__).resolve().parent
Record = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    if options.child:
        context = Context(options.out, options.emulated, time.monotonic() + options.time_limit)
        return run_child(options.child, context)
    signal.signal(signal.SIGTERM, end_by_signal)
    return run_parts(choose(options.only, options.emulated), options.out, options.emulated, options.time_limit)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser("gpu_check", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="directory for results.jsonl, rows.jsonl, summary.txt")
    parser.add_argument("--emulated", action="store_true", help="tiny shapes on the emulated device; needs g++, no GPU")
    parser.add_argument("--time-limit", type=float, default=540.0, help="seconds in all (540)")
    parser.add_argument("--only", help=f"comma-separated parts of: {', '.join(part.name for part in PARTS)}")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def choose(only: str | None, is_emulated: bool) -> list[Part]:
    """The parts by name, in their order; on a GPU compile too, since the others load what it leaves in the cache."""
    if only is None:
        return list(PARTS)
    names = [name.strip() for name in only.split(",") if name.strip()]
    known = {part.name for part in PARTS}
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"--only has {', '.join(unknown)}; the parts are {', '.join(p.name for p in PARTS)}")
    if not is_emulated and set(names) - {"environment", "peers"}:
        names.append("compile")
    return [part for part in PARTS if part.name in names]


def end_by_signal(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def run_parts(parts: Sequence[Part], out: Path, is_emulated: bool, time_limit: float) -> int:
    """Run parts until the time is over.

    Returns:
        0 if all correctness parts among them passed, else 1.
    """
    deadline = time.monotonic() + time_limit
    records: list[Record] = []
    try:
        for place, part in enumerate(parts):
            say(f"== {part.name}")
            left = deadline - time.monotonic()
            seconds = min(left, max(part.seconds, left - sum(later.seconds for later in parts[place + 1 :])))
            if seconds < MIN_SECONDS:
                error = {"type": "NoTime", "message": "the time limit left none for it", "traceback": []}
                record = {"part": part.name, "status": "skipped", "seconds": 0.0, "rows": [], "error": error}
            else:
                record = run_part(part, command(part, out, is_emulated, seconds), seconds, out, say)
            append(out / "results.jsonl", record)
            records.append(record)
            say(f"== {part.name}: {record['status']} in {record['seconds']:.1f} s")
    finally:
        text = summary(records)
        (out / "summary.txt").write_text(text + "\n")
        say(text)
    wrong = [
        part.name
        for part, record in zip(parts, records, strict=False)
        if part.is_correctness and record["status"] != "ok"
    ]
    say(f"correctness: {'NOT shown by ' + ', '.join(wrong) if wrong else 'ok'}")
    return 1 if wrong else 0


def command(part: Part, out: Path, is_emulated: bool, seconds: float) -> list[str]:
    options = ["--child", part.target, "--out", str(out), "--time-limit", f"{seconds:.1f}"]
    return [sys.executable, "-u", str(SCRIPT), *options, *(["--emulated"] if is_emulated else [])]


def append(path: Path, record: Record) -> None:
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def say(text: str) -> None:
    print(text, flush=True)


def summary(records: Sequence[Record]) -> str:
    lines = [f"{'part':<12} {'status':<8} {'seconds':>8} {'rows':>5}  error"]
    for record in records:
        error = record.get("error")
        reason = f"{error['type']}: {error['message'].splitlines()[0] if error['message'] else ''}" if error else ""
        lines.append(
            f"{record['part']:<12} {record['status']:<8} {record['seconds']:>8.1f} {len(record['rows']):>5}  {reason}"
        )
    return "\n".join(lines)
