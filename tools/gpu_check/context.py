"""What a part is given, and how it speaks: rows and its end go to the parent as marked lines of JSON on stdout."""

from __future__ import annotations

import importlib
import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MARK = "\x1e"  # begins a line that is meant for the parent; everything else is passed on as it is
TRACEBACK_LINES = 12

Row = dict[str, Any]


class CheckError(Exception):
    """A check of a part failed; its rows say which."""


class SkippedError(Exception):
    """A part has nothing to do here; the message says why."""


@dataclass(frozen=True)
class Context:
    """A part's surroundings.

    Attributes:
        deadline: when the part is ended, on time.monotonic's clock.
    """

    out: Path
    is_emulated: bool
    deadline: float

    def row(self, title: str, **values: Any) -> None:
        """Record a row and show it, at once. None values are left out."""
        send({"row": {"title": title, **{k: v for k, v in values.items() if v is not None}}})

    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    def rows_of(self, part: str) -> list[Row]:
        """The rows of a part that ended earlier in the same directory; the latest run counts."""
        rows: list[Row] = []
        for record in read_lines(self.out / "results.jsonl"):
            if record.get("part") == part:
                rows = record.get("rows", [])
        return rows


def read_lines(path: Path) -> list[Row]:
    """A file of JSON lines; empty where there is none, and without a last line that was cut."""
    records = []
    for line in path.read_text().splitlines() if path.is_file() else []:
        try:
            records.append(json.loads(line))
        except ValueError:
            continue
    return records


def send(message: dict[str, Any]) -> None:
    text = json.dumps(message, default=as_plain)
    sys.stdout.write(f"{MARK}{text}\n")
    sys.stdout.flush()


def as_plain(value: Any) -> Any:
    """NumPy's scalars as Python's, anything else as text."""
    return value.item() if hasattr(value, "item") else str(value)


def run_child(target: str, context: Context) -> int:
    """Run a part's function "module:name" in this process and report how it ended."""
    end: dict[str, Any] = {"status": "ok"}
    try:
        module, _, name = target.partition(":")
        function: Callable[[Context], None] = getattr(importlib.import_module(module), name)
        function(context)
    except SkippedError as reason:
        end = {"status": "skipped", "error": {"type": "SkippedError", "message": str(reason), "traceback": []}}
    except Exception as error:
        end = {"status": "failed", "error": describe(error)}
    send({"end": end})
    return 0 if end["status"] != "failed" else 1


def describe(error: BaseException) -> dict[str, Any]:
    lines = "".join(traceback.format_exception(error)).rstrip().splitlines()
    return {"type": type(error).__name__, "message": str(error)[:2000], "traceback": lines[-TRACEBACK_LINES:]}
