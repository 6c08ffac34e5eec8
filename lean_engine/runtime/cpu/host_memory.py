"""The part of a device that CPU devices share: arrays are NumPy's, in host memory, and steps are not padded."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from lean_engine.dtypes import numpy_dtype
from lean_engine.errors import OutOfMemory
from lean_engine.ir.graph import Dims
from lean_engine.memory.budget import available_memory_bytes, total_memory_bytes
from lean_engine.passes.plan_memory import ALIGNMENT
from lean_engine.runtime.device import Array, StepInputs


def usable_cpus() -> int:
    """CPUs this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class HostMemory:
    """See runtime.device.Device."""

    def allocate(self, shape: Sequence[int], dtype: str) -> Array:
        """Zeroed memory that begins at a cache line; pages are taken when they are first written.

        Raises:
            OutOfMemory: with the numbers of bytes asked for and free.
        """
        element = numpy_dtype(dtype)
        num_bytes = math.prod(shape) * element.itemsize
        try:
            raw = np.zeros(num_bytes + ALIGNMENT, np.uint8)
        except (MemoryError, ValueError):  # ValueError: more than an array can have
            free = self.memory_bytes()
            raise OutOfMemory(f"cannot allocate {num_bytes:,} bytes; {free:,} bytes of memory are free") from None
        start = -raw.ctypes.data % ALIGNMENT
        return raw[start : start + num_bytes].view(element).reshape(tuple(shape))

    def fill(self, array: Array, write: Callable[[Array], None]) -> None:
        write(array)

    def read(self, array: Array) -> Array:
        return array

    def make_inputs(self, shapes: Mapping[str, Sequence[int]]) -> StepInputs:
        arrays = {name: self.allocate(shape, "int32") for name, shape in shapes.items()}
        return StepInputs(arrays, arrays, lambda num_requests, num_blocks: None)

    def padded(self, num_tokens: int, num_requests: int, num_rows: int, limits: Dims) -> tuple[int, int, int]:
        return num_tokens, num_requests, num_rows

    def memory_bytes(self) -> int:
        return available_memory_bytes()

    def total_memory_bytes(self) -> int:
        return total_memory_bytes()
