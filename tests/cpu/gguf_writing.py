"""Writes small GGUF files for tests, with the gguf package's own writer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter


def write_gguf(path: Path, fill: Callable[[GGUFWriter], None], architecture: str = "llama") -> Path:
    """Write what `fill` adds to a writer; returns path."""
    writer = GGUFWriter(path, architecture)
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tensor(writer: GGUFWriter, name: str, values: np.ndarray, kind: Type = Type.F32) -> None:
    """Add float32 values, quantised to `kind`."""
    writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
