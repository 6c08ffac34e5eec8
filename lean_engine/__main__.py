"""`python -m lean_engine` is the command `lean-engine`."""

from __future__ import annotations

from lean_engine.cli import main

if __name__ == "__main__":
    main()
