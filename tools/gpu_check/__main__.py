"""`python tools/gpu_check`: finds the checkout it lies in and runs it, whatever the working directory."""

import sys
from pathlib import Path

TOOLS = Path(__file__).resolve().parents[1]
HERE = TOOLS / "gpu_check"  # whose modules have names that others look for: it must not be on the path itself
sys.path[:] = [str(TOOLS.parent), str(TOOLS), *(p for p in sys.path if Path(p).resolve() != HERE)]

if __name__ == "__main__":
    from gpu_check.main import main

    sys.exit(main())
