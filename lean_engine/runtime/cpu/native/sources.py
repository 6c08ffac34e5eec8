"""The C sources of the CPU kernels: every .c file of their directory, and the headers they share."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lean_engine.runtime.source_files import source_directory


@dataclass(frozen=True, slots=True)
class Sources:
    """Files that are compiled one by one and linked into one library."""

    files: Sequence[Path]  # .c
    include: Path  # the directory of common.h

    def digest(self) -> str:
        """SHA-256 over names and contents of files and headers, hexadecimal."""
        digest = hashlib.sha256()
        for path in (*self.files, *sorted(self.include.glob("*.h"))):
            text = path.read_bytes()
            digest.update(f"{path.name}\0{len(text)}\0".encode() + text)
        return digest.hexdigest()


def kernel_sources() -> Sources:
    """The installation's sources; ConfigError if it lacks them."""
    directory = source_directory("cpu", "common.h")
    return Sources(sorted(directory.glob("*.c")), directory)
