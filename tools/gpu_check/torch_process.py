"""Asks torch_peers.py, a process of its own, and passes its rows on: torch may be absent, hang or run out of memory."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_check.context import MARK, Context

SCRIPT = Path(__file__).with_name("torch_peers.py")
LAST_LINES = 8
MIN_SECONDS = 3.0  # with less, torch is not started


def torch_rows(
    context: Context, subject: str, questions: Sequence[dict[str, Any]], seconds: float, device: str = "cuda"
) -> list[dict[str, Any]]:
    """The rows that came within the time; what went wrong is a row too."""
    if importlib.util.find_spec("torch") is None:
        context.row(f"torch {subject}", left_out="torch is not installed")
        return []
    if seconds < MIN_SECONDS:
        context.row(f"torch {subject}", left_out="no time is left")
        return []
    command = [sys.executable, "-u", "-P", str(SCRIPT), subject, json.dumps(questions), device]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace")
    timer = threading.Timer(seconds, process.kill)
    timer.start()
    rows, said = [], []
    try:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                _, mark, text = line.partition(MARK)
                if mark:
                    row = json.loads(text)
                    rows.append(row)
                    context.row(**row)
                else:
                    said.append(line.rstrip())
        code = process.wait()
    finally:
        timer.cancel()
        process.kill()
    if code:
        reason = f"cut after {seconds:.3g} s" if code == -9 else f"ended with code {code}"
        context.row(f"torch {subject}", error=reason, said=said[-LAST_LINES:])
    return rows
