"""Where CUDA's shared libraries are: in pip's wheels, in a toolkit, or where the system's loader finds them."""

from __future__ import annotations

import ctypes.util
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

WHEEL_PLACES = ("*/lib", "*/bin", "*/bin/x86_64")  # nvidia/cublas/lib for CUDA 12, nvidia/cu13/lib for CUDA 13


def library_paths(name: str) -> Iterator[Path]:
    """Every place where a library is, the one to be tried first first.

    Of several wheels the oldest comes first, since a driver runs nothing of a toolkit newer than itself.

    Args:
        name: without prefix and version, "cublasLt".
    """
    pattern = f"{name}64_*.dll" if sys.platform == "win32" else f"lib{name}.so*"
    spec = importlib.util.find_spec("nvidia")
    wheels = [
        path
        for folder in (spec.submodule_search_locations or [] if spec else [])
        for place in WHEEL_PLACES
        for path in Path(folder).glob(f"{place}/{pattern}")
    ]
    toolkits = [
        path
        for root in filter(None, (os.environ.get("CUDA_PATH"), os.environ.get("CUDA_HOME"), "/usr/local/cuda"))
        for place in ("lib64", "lib", "bin")
        for path in sorted(Path(root, place).glob(pattern))
    ]
    yield from sorted(wheels, key=major_version)
    yield from toolkits
    if system := ctypes.util.find_library(name):
        yield Path(system)


def major_version(library: Path) -> int:
    """The number in libcublasLt.so.12 or cublasLt64_12.dll."""
    match = re.search(r"(?:\.so\.|64_)(\d+)", library.name)
    return int(match[1]) if match else 0
