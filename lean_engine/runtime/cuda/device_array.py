"""DeviceArray: an address with a shape and a type, as far as launching needs it. No arithmetic, nothing is ever copied.

It has the attributes of NumPy's arrays that the runtime reads, so that what binds a program does not know whose memory
it deals with. CuPy's own arrays are not used: they know no bfloat16 that all of CuPy agrees on, and invite arithmetic
into the step loop.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Flags:
    c_contiguous: bool


class DeviceArray:
    """A C-contiguous array in device memory.

    Args:
        memory: what keeps the memory alive.
        address: of the first element, bytes.
    """

    __slots__ = ("address", "dtype", "memory", "shape")

    flags = Flags(c_contiguous=True)

    def __init__(self, memory: Any, address: int, shape: Sequence[int], dtype: np.dtype[Any]) -> None:
        self.memory = memory
        self.address = int(address)
        self.shape = tuple(int(n) for n in shape)
        self.dtype = np.dtype(dtype)

    def __repr__(self) -> str:
        return f"DeviceArray({list(self.shape)} {self.dtype} at {self.address:#x})"

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * self.dtype.itemsize

    def __getitem__(self, rows: slice) -> DeviceArray:
        """Neighbouring rows: [start:stop]. Anything else would not be contiguous."""
        if not isinstance(rows, slice):
            raise TypeError(f"{self!r}[{rows!r}]; only [start:stop] of the first axis can be taken")
        start, stop, step = rows.indices(self.shape[0])
        if step != 1:
            raise TypeError(f"{self!r}[{rows!r}]; rows cannot be taken in steps of {step}")
        row_bytes = math.prod(self.shape[1:]) * self.dtype.itemsize
        return DeviceArray(
            self.memory, self.address + start * row_bytes, (max(0, stop - start), *self.shape[1:]), self.dtype
        )

    def view(self, dtype: Any) -> DeviceArray:
        """The same bytes as elements of another type; the last axis changes its length."""
        element = np.dtype(dtype)
        num_bytes = self.shape[-1] * self.dtype.itemsize
        if num_bytes % element.itemsize:
            raise ValueError(f"{self!r}: rows of {num_bytes} bytes are no whole number of {element}")
        return DeviceArray(self.memory, self.address, (*self.shape[:-1], num_bytes // element.itemsize), element)

    def reshape(self, *shape: Any) -> DeviceArray:
        """The same elements in another shape, given as numbers or as a sequence; one may be -1."""
        wanted = list(shape[0]) if len(shape) == 1 and isinstance(shape[0], Sequence) else list(shape)
        if -1 in wanted:
            rest = math.prod(n for n in wanted if n != -1)
            wanted[wanted.index(-1)] = self.size // rest if rest else 0
        if math.prod(wanted) != self.size:
            raise ValueError(f"{self!r} cannot take the shape {list(shape)}")
        return DeviceArray(self.memory, self.address, wanted, self.dtype)
