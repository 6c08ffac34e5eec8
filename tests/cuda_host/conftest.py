"""Makes tools/cuda_host importable, and skips the suite where kernels cannot be built."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tools"))

from cuda_host import missing_reason  # noqa: E402


@pytest.fixture(autouse=True, scope="session")
def _needs_a_compiler() -> None:
    if (reason := missing_reason()) is not None:
        pytest.skip(reason)
