"""Memory of packed weights: regions taken from the system directly, in huge pages where it has them.

Matrices lie one behind the other. Taken from the C library one by one, those of a small model would each have pages of
4 KiB, which cost a fault each when weights are loaded and a place in the processor's table when they are read.
"""

from __future__ import annotations

import math
import mmap
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lean_engine.errors import OutOfMemory
from lean_engine.memory.budget import available_memory_bytes
from lean_engine.passes.plan_memory import ALIGNMENT

PAGE = 1 << 21  # a huge page
REGION = 1 << 26  # at least; what is not written takes no memory


class WeightMemory:
    """Hands out arrays; a region is given back when the last array in it is gone."""

    def __init__(self) -> None:
        self._region = np.empty(0, np.uint8)
        self._used = 0

    def take(self, shape: tuple[int, ...], dtype: Any) -> NDArray[Any]:
        """Zeroed memory that begins at a cache line.

        Raises:
            OutOfMemory: with the numbers of bytes asked for and free.
        """
        num_bytes = math.prod(shape) * np.dtype(dtype).itemsize
        if self._used + num_bytes > self._region.nbytes:
            self._region, self._used = new_region(max(REGION, num_bytes)), 0
        start = self._used
        self._used += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return self._region[start : start + num_bytes].view(dtype).reshape(shape)


def new_region(num_bytes: int) -> NDArray[np.uint8]:
    """Whole huge pages."""
    size = -(-num_bytes // PAGE) * PAGE
    try:
        memory = mmap.mmap(-1, size + PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError):
        free = available_memory_bytes()
        raise OutOfMemory(
            f"cannot allocate {num_bytes:,} bytes of weights; {free:,} bytes of memory are free"
        ) from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # a kernel without huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    whole = np.frombuffer(memory, np.uint8)
    start = -whole.ctypes.data % PAGE
    return whole[start : start + size]
