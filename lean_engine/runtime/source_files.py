"""Where the sources of compiled kernels are: inside an installed wheel, or beside the package in a checkout."""

from __future__ import annotations

from pathlib import Path

from lean_engine.errors import ConfigError

PACKAGE = Path(__file__).resolve().parents[1]


def source_directory(kind: str, header: str) -> Path:
    """The directory of the sources for "cuda" or "cpu", which holds their common header.

    Raises:
        ConfigError: the installation lacks it.
    """
    candidates = (PACKAGE / f"_{kind}", PACKAGE.parent / kind)
    for directory in candidates:
        if (directory / header).is_file():
            return directory
    raise ConfigError(
        f"the {kind.upper()} sources are in neither {candidates[0]} nor {candidates[1]}; install lean-engine again"
    )
