"""Where the CUDA sources are: inside an installed wheel, or beside the package in a checkout."""

from __future__ import annotations

from pathlib import Path

from lean_engine.errors import ConfigError

PACKAGE = Path(__file__).resolve().parents[2]


def cuda_source_directory() -> Path:
    """The directory that holds common.cuh and the kernels' .cu files; ConfigError if the installation lacks it."""
    candidates = (PACKAGE / "_cuda", PACKAGE.parent / "cuda")
    for directory in candidates:
        if (directory / "common.cuh").is_file():
            return directory
    raise ConfigError(f"the CUDA sources are in neither {candidates[0]} nor {candidates[1]}; install lean-engine again")
