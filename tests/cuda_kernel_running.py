"""Runs one CUDA kernel in the emulator, all accesses checked, poison in and around its arrays, and asks the oracle.

Inputs are read-only; each array stands between guards that must not change; outputs hold NaN before each run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from lean_engine.dtypes import numpy_dtype
from lean_engine.errors import ConfigError
from lean_engine.ir import reference
from lean_engine.ir.graph import TensorType
from lean_engine.ir.ops import OPS, infer_types
from lean_engine.passes.lower import KERNELS as KERNEL_NAMES
from lean_engine.runtime.cuda.emulator import EmulatedKernels
from lean_engine.runtime.cuda.instances import REAL_DTYPES, Instance, KernelCall, instances, kernel_calls
from lean_engine.runtime.device import LaunchArgs
from lean_engine.runtime.kernels import KERNELS

Array = NDArray[Any]
GUARD_BYTES = 256
ORDERS = ((0, 0), (1, 0), (7, 20))  # (order, preempt): ascending, descending, random with threads that interrupt others


@cache
def checked_kernels() -> EmulatedKernels:
    """All instances, built once; skips the test where they cannot be."""
    return build_checked(i for dtype in (*REAL_DTYPES, "float32") for i in instances(dtype))


def build_checked(wanted: Iterable[Instance]) -> EmulatedKernels:
    """Instances built for checked runs, others when asked for; skips the test where they cannot be built."""
    try:
        kernels = EmulatedKernels(is_checked=True)
    except ConfigError as error:
        pytest.skip(str(error))
    kernels.build(wanted)
    return kernels


class GuardedMemory:
    """Arrays that begin at a multiple of 256 bytes, each with guards of 0xFF, NaN or -1 in every type, around it."""

    def __init__(self) -> None:
        self._guards: list[Array] = []

    def allocate(self, shape: Sequence[int], dtype: str) -> Array:
        element = numpy_dtype(dtype)
        num_bytes = int(np.prod(shape)) * element.itemsize
        raw = np.full(num_bytes + 3 * GUARD_BYTES, 0xFF, np.uint8)
        start = GUARD_BYTES + -raw.ctypes.data % GUARD_BYTES
        self._guards += [raw[start - GUARD_BYTES : start], raw[start + num_bytes : start + num_bytes + GUARD_BYTES]]
        return raw[start : start + num_bytes].view(element).reshape(tuple(shape))

    def assert_guards_are_whole(self) -> None:
        assert all((guard == 0xFF).all() for guard in self._guards), "a kernel wrote beside an array"


class CudaRun:
    """A launch of the kernel of one op kind.

    Args:
        inputs: float arrays take the element type, or float32 where the kernel table says so.
        in_place: output → input whose storage it takes over.
    """

    def __init__(
        self,
        kind: str,
        inputs: Sequence[Array],
        dtype: str,
        attrs: Mapping[str, Any] | None = None,
        in_place: Mapping[int, int] | None = None,
    ) -> None:
        self.kind, self.attrs = kind, dict(attrs or {})
        self.memory = GuardedMemory()
        name = KERNEL_NAMES.get(kind, kind)
        params = KERNELS[name].inputs[: len(inputs)]
        dtypes = [{"f32": "float32", "i32": "int32"}.get(p.dtype, dtype) for p in params]
        self.inputs = [self.place(array, d) for array, d in zip(inputs, dtypes, strict=True)]
        types = tuple(TensorType(a.shape, d) for a, d in zip(self.inputs, dtypes, strict=True))
        out_types = infer_types(kind, types, self.attrs)
        self._shared = {**OPS[kind].aliases, **(in_place or {})}
        self._before = [array.copy() for array in self.inputs]
        self.outputs = [
            self.inputs[self._shared[i]]
            if i in self._shared
            else self.memory.allocate([int(n) for n in t.shape], t.dtype)
            for i, t in enumerate(out_types)
        ]
        for i, array in enumerate(self.inputs):
            array.flags.writeable = i in self._shared.values()
        scalars = KERNELS[name].check(self.inputs, self.outputs, self.attrs, dtype)
        self.launch = LaunchArgs(name, self.inputs, self.outputs, scalars, np.zeros(0, np.uint8))

    def place(self, array: Array, dtype: str) -> Array:
        placed = self.memory.allocate(array.shape, dtype)
        placed[...] = array.astype(placed.dtype)
        return placed

    def calls(self) -> list[KernelCall]:
        return kernel_calls(self.launch)

    def reset(self) -> None:
        """NaN in every output of its own, the first values in the others."""
        for i, output in enumerate(self.outputs):
            output[...] = self._before[self._shared[i]] if i in self._shared else np.nan

    def run(self, order: int = 0, preempt: int = 0) -> list[Array]:
        """The outputs of one run."""
        self.reset()
        for call in self.calls():
            checked_kernels().bind(call)(order, preempt)
        self.memory.assert_guards_are_whole()
        return [output.copy() for output in self.outputs]

    def expected(self) -> list[Array]:
        """The oracle's outputs, in float64."""
        copies = [a.copy() if a.dtype == np.int32 else a.astype(np.float64) for a in self._before]
        with np.errstate(over="ignore"):
            results = reference.OPS[self.kind](*copies, **self.attrs)
        return list(results) if isinstance(results, tuple) else [results]


def check(
    kind: str,
    inputs: Sequence[Array],
    dtype: str,
    in_place: Mapping[int, int] | None = None,
    orders: Sequence[tuple[int, int]] = ORDERS,
    **attrs: Any,
) -> list[Array]:
    """Compare the outputs with the oracle's, in each order; return the last ones."""
    run = CudaRun(kind, inputs, dtype, attrs, in_place)
    expected = run.expected()
    for order, preempt in orders:
        found = run.run(order, preempt)
        for array, wanted in zip(found, expected, strict=True):
            assert_rounded(array, wanted)
    return found


def assert_rounded(found: Array, wanted: Array) -> None:
    """`found` is `wanted` rounded to its type, within float32's arithmetic; NaN where and only where NaN is wanted."""
    assert found.shape == wanted.shape
    assert np.array_equal(np.isnan(found.astype(np.float64)), np.isnan(wanted))
    if np.isnan(wanted).all():
        return
    info = ml_dtypes.finfo(found.dtype)
    relative = 0.5 * float(info.eps) if found.dtype.itemsize == 2 else 2e-6
    absolute = 2e-6 * np.nanmax(np.abs(wanted)) + float(info.smallest_subnormal)
    error = np.abs(found.astype(np.float64) - wanted) - 1.01 * relative * np.abs(wanted)
    assert np.nanmax(error) <= absolute, f"off by {np.nanmax(error)} beyond rounding, {absolute} is allowed"


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([*shape, seed]).standard_normal(shape)
