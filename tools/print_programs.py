#!/usr/bin/env python3
"""Writes the optimized program of every model of tests/data/tiny to tests/data/programs, for review as a diff.

python tools/print_programs.py
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import tiny  # noqa: E402 - found through the path above

from lean_engine.ir.text import format_graph  # noqa: E402


def main() -> None:
    for name in tiny.NAMES:
        path = tiny.DATA / "programs" / f"{name}.txt"
        path.write_text(format_graph(tiny.optimized(name)), encoding="utf-8")
        print(path.relative_to(ROOT))


if __name__ == "__main__":
    main()
