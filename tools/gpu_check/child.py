"""Runs one part in a process group of its own, listens to it, and ends it when its time is over."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpu_check.context import MARK, TRACEBACK_LINES
from gpu_check.parts import Part

Say = Callable[[str], None]


def run_part(part: Part, command: Sequence[str], seconds: float, out: Path, say: Say) -> dict[str, Any]:
    """A part's record: part, status (ok, failed, skipped, cut), seconds, rows, error."""
    record: dict[str, Any] = {"part": part.name, "status": "failed", "seconds": 0.0, "rows": []}
    tail: deque[str] = deque(maxlen=TRACEBACK_LINES)  # of what it said besides rows
    started = time.monotonic()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace", process_group=0
    )
    is_over = threading.Event()

    def cut() -> None:
        is_over.set()
        end_group(process)

    timer = threading.Timer(seconds, cut)
    timer.start()
    end: dict[str, Any] | None = None
    try:
        assert process.stdout is not None
        with process.stdout, (out / "rows.jsonl").open("a") as rows:
            for line in process.stdout:
                message = parse(line)
                if message is None:
                    tail.append(line.rstrip())
                    say(f"   | {line.rstrip()}")
                elif "row" in message:
                    record["rows"].append(message["row"])
                    rows.write(json.dumps({"part": part.name, **message["row"]}) + "\n")
                    rows.flush()
                    say(show(message["row"]))
                else:
                    end = message["end"]
        process.wait()
    finally:
        timer.cancel()
        end_group(process)
        process.wait()
    record["seconds"] = round(time.monotonic() - started, 2)
    return record | (end or unfinished(is_over.is_set(), seconds, process.returncode, list(tail)))


def unfinished(is_cut: bool, seconds: float, code: int, tail: list[str]) -> dict[str, Any]:
    """The end of a part that could not tell it."""
    if is_cut:
        error = {"type": "TimeLimit", "message": f"ended after {seconds:.3g} s", "traceback": tail}
        return {"status": "cut", "error": error}
    error = {"type": "ProcessDied", "message": f"the part's process ended with code {code}", "traceback": tail}
    return {"status": "failed", "error": error}


def end_group(process: subprocess.Popen[str]) -> None:
    """End the part's process and those it started."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def parse(line: str) -> dict[str, Any] | None:
    """A message to the parent; None for any other line. The mark need not be first: a library may have written."""
    _, mark, text = line.partition(MARK)
    if not mark:
        return None
    try:
        message: dict[str, Any] = json.loads(text)
    except ValueError:
        return None
    return message


def show(row: dict[str, Any]) -> str:
    """A row as a line: tables in it are left to the file, an error comes with the end of its traceback."""
    shown = {name: value for name, value in row.items() if name not in ("title", "measured")}
    error = shown.get("error")
    lines: list[str] = []
    if isinstance(error, dict):
        shown["error"] = f"{error.get('type')}: {error.get('message')}"
        lines = [f"      {line}" for line in error.get("traceback", [])[-4:]]
    values = (f"{name}={text_of(value)}" for name, value in shown.items() if not isinstance(value, dict))
    return "\n".join([f"   {row['title']}  {' '.join(values)}", *lines])


def text_of(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value)
