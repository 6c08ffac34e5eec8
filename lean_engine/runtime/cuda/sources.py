"""The CUDA sources: where they are (inside an installed wheel, or beside the package in a checkout), and their text."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from lean_engine.errors import ConfigError
from lean_engine.runtime.source_files import source_directory

INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


def cuda_source_directory() -> Path:
    """The directory that holds common.cuh and the kernels' .cu files; ConfigError if the installation lacks it."""
    return source_directory("cuda", "common.cuh")


@dataclass(frozen=True, slots=True)
class KernelSource:
    """One .cu file with everything it includes, so that it compiles without an include path."""

    name: str  # "norm.cu"
    text: str
    headers: Mapping[str, str]  # name, as it stands in #include "…" → text

    @property
    def digest(self) -> str:
        """SHA-256 over names and texts, hexadecimal."""
        parts = [self.name, self.text, *(part for item in sorted(self.headers.items()) for part in item)]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    def line(self, file: str, number: int) -> str | None:
        """A line of the source or of a header, counted from 1; None if there is none."""
        text = self.text if file == self.name else self.headers.get(file)
        lines = [] if text is None else text.splitlines()
        return lines[number - 1] if 1 <= number <= len(lines) else None


@cache
def kernel_source(name: str) -> KernelSource:
    """A source of the installation by its file name; ConfigError if it or a header is missing."""
    directory = cuda_source_directory()
    headers: dict[str, str] = {}
    text = read_source(directory, name)
    wanted = INCLUDE.findall(text)
    while wanted:
        header = wanted.pop()
        if header not in headers:
            headers[header] = read_source(directory, header)
            wanted += INCLUDE.findall(headers[header])
    return KernelSource(name, text, headers)


def read_source(directory: Path, name: str) -> str:
    try:
        return (directory / name).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{directory} has no {name}; install lean-engine again") from None
