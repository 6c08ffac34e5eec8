"""Reads one .safetensors file: a memory map, a checked header, tensors as views.

The safetensors package copies, and gives bfloat16 only to PyTorch; the format is small enough to read here:
8 bytes little-endian header length, a JSON header, then the data. https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lean_engine.checkpoint.mapped_file import MappedFile
from lean_engine.dtypes import numpy_dtype
from lean_engine.errors import CheckpointError

LOADABLE = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_BITS = dict(
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E8M0"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    F4=4,
)
_MAX_HEADER_BYTES = 100_000_000  # the format's own limit


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One header entry."""

    dtype: str  # as the format spells it: "BF16"
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    num_bytes: int


class SafetensorsFile:
    """One file's tensors by name.

    Raises:
        CheckpointError: not a safetensors file, truncated, or its header contradicts itself or the file's size.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mapped = MappedFile(path)
        self._tensors = self._read_header()

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored(name).shape

    def dtype(self, name: str) -> str:
        """Our name of a tensor's dtype; CheckpointError where it is not one weights are computed from."""
        stored = self._stored(name)
        if stored.dtype not in LOADABLE:
            raise CheckpointError(
                f"{self.path}: tensor {name} is stored as {stored.dtype}, which cannot be loaded; "
                f"loadable: {', '.join(LOADABLE)}"
            )
        return LOADABLE[stored.dtype]

    def tensor(self, name: str) -> np.ndarray:
        """A read-only view of a tensor in its own dtype."""
        stored = self._stored(name)
        return self._mapped.array(stored.offset, stored.shape, numpy_dtype(self.dtype(name)))

    def release(self, name: str) -> None:
        stored = self._stored(name)
        self._mapped.release(stored.offset, stored.num_bytes)

    def _stored(self, name: str) -> StoredTensor:
        try:
            return self._tensors[name]
        except KeyError:
            raise CheckpointError(f"{self.path}: holds no tensor {name}") from None

    def _read_header(self) -> dict[str, StoredTensor]:
        data_start = 8 + self._header_bytes()
        try:
            header = json.loads(self._mapped.buffer[8:data_start])
        except (ValueError, RecursionError):
            raise CheckpointError(f"{self.path}: is not a safetensors file: its header is not JSON") from None
        if not isinstance(header, dict):
            raise CheckpointError(f"{self.path}: is not a safetensors file: its header is not a JSON object")
        header.pop("__metadata__", None)
        tensors = {name: self._read_entry(name, entry, data_start) for name, entry in header.items()}
        described = max((t.offset + t.num_bytes for t in tensors.values()), default=data_start)
        if described != self._mapped.num_bytes:
            raise CheckpointError(
                f"{self.path}: its header describes {described} bytes, the file has {self._mapped.num_bytes}; "
                "download it again"
            )
        return tensors

    def _header_bytes(self) -> int:
        file_bytes = self._mapped.num_bytes
        announced = int.from_bytes(self._mapped.buffer[:8], "little")
        if file_bytes < 8 or announced > _MAX_HEADER_BYTES:
            raise CheckpointError(f"{self.path}: is not a safetensors file: it does not begin with a header length")
        if 8 + announced > file_bytes:
            raise CheckpointError(
                f"{self.path}: is truncated or not a safetensors file: "
                f"it announces a header of {announced} bytes, the file has {file_bytes}"
            )
        return announced

    def _read_entry(self, name: str, entry: Any, data_start: int) -> StoredTensor:
        try:
            dtype, shape, (begin, end) = str(entry["dtype"]), tuple(entry["shape"]), entry["data_offsets"]
            is_sound = all(type(n) is int and n >= 0 for n in (*shape, begin, end)) and begin <= end
        except (KeyError, TypeError, ValueError):
            is_sound = False
        if not is_sound:
            raise CheckpointError(f"{self.path}: the header entry of tensor {name} is damaged: {str(entry)[:100]!r}")
        needed_bits = math.prod(shape) * _BITS.get(dtype, 0)
        if dtype in _BITS and needed_bits != (end - begin) * 8:
            raise CheckpointError(
                f"{self.path}: tensor {name}, {dtype} of shape {list(shape)}, takes {needed_bits // 8} bytes, "
                f"its header entry gives it {end - begin}"
            )
        return StoredTensor(dtype, shape, data_start + begin, end - begin)
