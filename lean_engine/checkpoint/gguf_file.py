"""Reads one .gguf file: metadata, tensor table, tensors as float32 or as they are stored.

gguf.GGUFReader makes NumPy arrays of every string of a vocabulary, which takes seconds; this parser only notes where
100k strings stand, in 12 ms, and reads those that are asked for. The block formats themselves are dequantised by the
gguf package, which is imported when it is needed: that takes longer than to read the header.
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import os
import struct
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from lean_engine.checkpoint.mapped_file import MappedFile
from lean_engine.dtypes import numpy_dtype
from lean_engine.errors import CheckpointError

VERSIONS = (2, 3)
# Value types of the format: number → struct code, and the two that have a length.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_FLOAT32, _STRING, _ARRAY = 6, 8, 9
_LENGTH_BYTES = 8  # before a string
_MAX_DIMS = 4
_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}  # stored element by element
_USUAL_TYPES = {  # type number → name, elements and bytes of a block; the gguf package knows these and all others
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}
_USUAL_NAMES = frozenset(name for name, _, _ in _USUAL_TYPES.values())
_SPAN_ELEMENTS = 1 << 17  # dequantised at a time: temporaries stay in the cache and small
_MAX_THREADS = 4


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One entry of the tensor table."""

    shape: tuple[int, ...]  # slowest first, as NumPy and PyTorch have it; the file stores it the other way round
    type_name: str  # "Q4_1"
    block_elements: int  # elements of one quantised block, along the last axis
    block_bytes: int
    offset: int  # bytes from the start of the file

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) // self.block_elements * self.block_bytes

    @property
    def stored_type(self) -> str:
        """Our name of the type: "float32", "float16", "bfloat16", else that of the blocks in lower case, "q4_1"."""
        return _FLOATS.get(self.type_name, self.type_name.lower())


class GgufFile:
    """Metadata and tensors of one file.

    Attributes:
        metadata: all key/value pairs by full key. A float32 is the shortest decimal that rounds to it: 1e-05. An array
            of strings is a StringArray, any other a list.
        tensors: the tensor table by GGUF name.

    Raises:
        CheckpointError: not a GGUF file, of an unknown version or value type, truncated, or one of several split files.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mapped = MappedFile(path)
        reader = _Reader(self._mapped)
        reader.check_version()
        num_tensors, num_pairs = reader.scalars("Q", 2)
        self.metadata: dict[str, Any] = dict(reader.read_pair() for _ in range(num_pairs))
        if self.metadata.get("split.count", 1) != 1:
            raise CheckpointError(
                f"{path}: is one of {self.metadata['split.count']} split files; "
                "join them first (llama-gguf-split --merge)"
            )
        entries = [reader.read_tensor_entry() for _ in range(num_tensors)]
        data_start = _round_up(reader.offset, self._alignment())
        self.tensors = dict(self._checked(entry, data_start) for entry in entries)
        if len(self.tensors) != num_tensors:
            raise CheckpointError(f"{path}: lists {num_tensors} tensors but only {len(self.tensors)} different names")

    def tensor(self, name: str, index: int | None = None) -> NDArray[np.float32]:
        """A tensor, or its index-th slice along the first axis, as float32 (float32 data is a read-only view).

        Raises:
            CheckpointError: no such tensor, or of a type that cannot be dequantised.
        """
        tensor = self.stored(name)
        self.check_loadable(name)
        shape = tensor.shape if index is None else tensor.shape[1:]
        offset, num_bytes = self._range(tensor, index)
        if tensor.type_name == "F32":
            return self._mapped.array(offset, shape, np.float32)
        return dequantise(self._mapped.array(offset, (num_bytes,), np.uint8), tensor).reshape(shape)

    def stored_rows(self, name: str, index: int | None = None) -> NDArray[Any]:
        """A tensor, or its index-th slice, as it is stored, a read-only view: elements, or uint8 [..., bytes per row].

        Raises:
            CheckpointError: no such tensor.
        """
        tensor = self.stored(name)
        shape = tensor.shape if index is None else tensor.shape[1:]
        offset, _ = self._range(tensor, index)
        if tensor.type_name in _FLOATS:
            return self._mapped.array(offset, shape, numpy_dtype(tensor.stored_type))
        row_bytes = shape[-1] // tensor.block_elements * tensor.block_bytes
        return self._mapped.array(offset, (*shape[:-1], row_bytes), np.uint8)

    def release(self, name: str, index: int | None = None) -> None:
        """Give back the file pages of a tensor or of one slice."""
        self._mapped.release(*self._range(self.stored(name), index))

    def stored(self, name: str) -> GgufTensor:
        try:
            return self.tensors[name]
        except KeyError:
            raise CheckpointError(f"{self.path}: holds no tensor {name}") from None

    def check_loadable(self, name: str) -> None:
        """CheckpointError unless the tensor's type can be turned into float32."""
        type_name = self.stored(name).type_name
        if type_name in _USUAL_NAMES:
            return
        from gguf import quants

        if not hasattr(quants, type_name):
            raise CheckpointError(f"{self.path}: tensor {name} has the type {type_name}, which cannot be dequantised")

    def _range(self, tensor: GgufTensor, index: int | None) -> tuple[int, int]:
        """Byte offset and length of a tensor or of one slice along its first axis."""
        if index is None:
            return tensor.offset, tensor.num_bytes
        slice_bytes = tensor.num_bytes // tensor.shape[0]
        return tensor.offset + index * slice_bytes, slice_bytes

    def _alignment(self) -> int:
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise CheckpointError(f"{self.path}: general.alignment is {alignment!r}, must be a power of two")
        return alignment

    def _checked(self, entry: tuple[str, tuple[int, ...], int, int], data_start: int) -> tuple[str, GgufTensor]:
        name, shape, type_number, offset = entry
        type_name, block_elements, block_bytes = self._block_type(name, type_number)
        tensor = GgufTensor(shape, type_name, block_elements, block_bytes, data_start + offset)
        if shape and shape[-1] % block_elements:
            raise CheckpointError(
                f"{self.path}: tensor {name} has rows of {shape[-1]} elements, "
                f"{tensor.type_name} needs a multiple of {block_elements}"
            )
        if tensor.offset + tensor.num_bytes > self._mapped.num_bytes:
            raise CheckpointError(
                f"{self.path}: is truncated: tensor {name} ends at byte {tensor.offset + tensor.num_bytes}, "
                f"the file has {self._mapped.num_bytes}; download it again"
            )
        return name, tensor

    def _block_type(self, tensor_name: str, type_number: int) -> tuple[str, int, int]:
        """A type's name, and the elements and bytes of its blocks."""
        if type_number in _USUAL_TYPES:
            return _USUAL_TYPES[type_number]
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        try:
            quantisation = GGMLQuantizationType(type_number)
        except ValueError:
            raise CheckpointError(
                f"{self.path}: tensor {tensor_name} has the unknown type number {type_number}"
            ) from None
        return (quantisation.name, *GGML_QUANT_SIZES[quantisation])


class StringArray(Sequence[str]):
    """An array of strings, each made when it is asked for; the file may change or go meanwhile.

    Args:
        starts: where each string's length stands, then where the last string ends; bytes from the start of the file.

    Raises:
        CheckpointError: by the access to a string that is not UTF-8.
    """

    def __init__(self, mapped: MappedFile, starts: array[int]) -> None:
        self._path = mapped.path
        self._starts = starts
        self._data = bytes(mapped.buffer[starts[0] : starts[-1]])

    def __repr__(self) -> str:
        return f"[{self[0]!r}, …]" if len(self) else "[]"

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...

    @overload
    def __getitem__(self, index: slice) -> list[str]: ...

    def __getitem__(self, index: int | slice) -> str | list[str]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self._read(range(len(self))[index])

    def __iter__(self) -> Iterator[str]:
        """All of them: out of one copy, twice as fast as one by one."""
        data, starts = self._data, [start - self._starts[0] for start in self._starts]
        try:
            return iter([str(data[a + _LENGTH_BYTES : b], "utf-8") for a, b in pairwise(starts)])
        except UnicodeDecodeError:
            return map(self._read, range(len(self)))  # which says where

    def _read(self, index: int) -> str:
        first, start = self._starts[0], self._starts[index] + _LENGTH_BYTES
        try:
            return str(self._data[start - first : self._starts[index + 1] - first], "utf-8")
        except UnicodeDecodeError:
            raise CheckpointError(f"{self._path}: the string at byte {start} is not UTF-8") from None


class _Reader:
    """A cursor over the part of the file before the tensor data."""

    def __init__(self, mapped: MappedFile) -> None:
        self._mapped = mapped
        self._path = mapped.path
        self._buffer = mapped.buffer
        self._num_bytes = mapped.num_bytes
        self.offset = 0

    def check_version(self) -> None:
        if self._buffer[:4] != b"GGUF":
            raise CheckpointError(f"{self._path}: is not a GGUF file: it begins with {self._buffer[:4]!r}")
        self.offset = 4
        version = int(self.scalar("I"))
        if version & 0xFFFF == 0:
            raise CheckpointError(f"{self._path}: is a big-endian GGUF file; only little-endian ones are read")
        if version not in VERSIONS:
            raise CheckpointError(f"{self._path}: has GGUF version {version}; known: {', '.join(map(str, VERSIONS))}")

    def read_pair(self) -> tuple[str, Any]:
        key = self.string()
        value_type = int(self.scalar("I"))
        if value_type == _STRING:
            return key, self.string()
        if value_type == _ARRAY:
            return key, self._array(key)
        value = self.scalar(self._code(key, value_type))
        return key, float(str(np.float32(value))) if value_type == _FLOAT32 else value

    def read_tensor_entry(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape (slowest first), type number and byte offset inside the tensor data."""
        name = self.string()
        num_dims = int(self.scalar("I"))
        if not 1 <= num_dims <= _MAX_DIMS:
            raise CheckpointError(f"{self._path}: tensor {name} has {num_dims} dimensions, must be 1 to {_MAX_DIMS}")
        dims = self.scalars("Q", num_dims)
        return name, tuple(reversed(dims)), int(self.scalar("I")), int(self.scalar("Q"))

    def scalar(self, code: str) -> Any:
        return self.scalars(code, 1)[0]

    def scalars(self, code: str, count: int) -> tuple[Any, ...]:
        start = self._advance(struct.calcsize(code) * count)
        return struct.unpack_from(f"<{count}{code}", self._buffer, start)

    def string(self) -> str:
        return self._strings(1)[0]

    def _strings(self, count: int) -> StringArray:
        """Vocabularies have 100k strings: this is the parser's inner loop."""
        buffer, read_length = self._buffer, struct.Struct("<Q").unpack_from
        offset = self.offset
        starts = [offset]
        try:
            for _ in range(count):
                offset += _LENGTH_BYTES + read_length(buffer, offset)[0]
                starts.append(offset)
        except (struct.error, OverflowError):  # there is no length: the file ends before or in it
            offset = self._num_bytes + 1
        if offset > self._num_bytes:
            raise self._truncated(max(start for start in starts[-2:] if start <= self._num_bytes))
        self.offset = offset
        return StringArray(self._mapped, array("Q", starts))

    def _array(self, key: str) -> Sequence[Any]:
        element_type, count = int(self.scalar("I")), int(self.scalar("Q"))
        if element_type == _STRING:
            return self._strings(count)
        if element_type == _ARRAY:
            raise CheckpointError(f"{self._path}: {key} is an array of arrays, which is not read")
        return list(self.scalars(self._code(key, element_type), count))

    def _code(self, key: str, value_type: int) -> str:
        if value_type not in _SCALARS:
            raise CheckpointError(f"{self._path}: {key} has the unknown value type {value_type}")
        return _SCALARS[value_type]

    def _advance(self, num_bytes: int) -> int:
        """Step over num_bytes and return where they begin."""
        start = self.offset
        self.offset += num_bytes
        if self.offset > self._num_bytes:
            raise self._truncated(start)
        return start

    def _truncated(self, start: int) -> CheckpointError:
        return CheckpointError(
            f"{self._path}: is truncated: its header continues at byte {start}, the file has {self._num_bytes}"
        )


def dequantise(raw: NDArray[np.uint8], tensor: GgufTensor) -> NDArray[np.float32]:
    """Whole blocks of a tensor as float32, flat: [num_blocks * block_bytes] → [num_blocks * block_elements].

    Rows mean nothing to a block format, so the gguf package is handed long spans instead of the tensor's rows: it takes
    the rows it gets in groups of 16, which costs 2.7 times as much on a model with short rows. Spans run in threads.
    """
    from concurrent.futures import ThreadPoolExecutor

    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize

    quantisation = GGMLQuantizationType[tensor.type_name]
    span_blocks = _SPAN_ELEMENTS // tensor.block_elements
    num_blocks = raw.size // tensor.block_bytes
    blocks = raw.reshape(num_blocks, tensor.block_bytes)
    out = np.empty((num_blocks, tensor.block_elements), np.float32)

    def dequantise_span(start: int) -> None:
        span = blocks[start : start + span_blocks]
        out[start : start + span_blocks] = dequantize(span.reshape(1, -1), quantisation).reshape(span.shape[0], -1)

    starts = range(0, num_blocks, span_blocks)
    if len(starts) > 1:
        with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as threads:
            list(threads.map(dequantise_span, starts))
    else:
        dequantise_span(0)
    return out.reshape(-1)


def _round_up(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment
