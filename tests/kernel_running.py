"""Runs one kernel on a device, with poison in whatever it must write before it reads, and asks the oracle too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from meaning import assert_close
from numpy.typing import NDArray

from lean_engine.dtypes import numpy_dtype
from lean_engine.ir import reference
from lean_engine.ir.graph import TensorType, Value
from lean_engine.ir.ops import OPS, infer_types
from lean_engine.ir.sources import Stack, Tensor
from lean_engine.passes.lower import KERNELS as KERNEL_NAMES
from lean_engine.passes.lower import Launch
from lean_engine.runtime.device import Device, LaunchArgs, Operand, Replay
from lean_engine.runtime.kernels import KERNELS

Array = NDArray[Any]


class KernelRun:
    """A launch of the kernel of one op kind.

    Args:
        inputs: float arrays become float32, caches what the device keeps, integer arrays int32.
        in_place: output → input whose storage it takes over.
    """

    def __init__(
        self,
        device: Device,
        kind: str,
        inputs: Sequence[Array],
        attrs: Mapping[str, Any] | None = None,
        in_place: Mapping[int, int] | None = None,
    ) -> None:
        self.kind, self.attrs = kind, dict(attrs or {})
        params = KERNELS[KERNEL_NAMES.get(kind, kind)].inputs
        self.inputs = [
            place(device, array, device.kv_cache_dtype if param.dtype == "kv" else "float32")
            for param, array in zip(params, inputs, strict=False)
        ]
        self._operands: list[Any] = [  # the inputs, matrices in the device's form: what they hold then, they hold on
            load_matrix(device, array) if param.dtype == "matrix" else array
            for param, array in zip(params, self.inputs, strict=False)
        ]
        types = tuple(TensorType(a.shape, a.dtype.name) for a in self.inputs)
        attention_like = [TensorType(("B", "M"), "int32"), TensorType(("B+1",), "int32"), TensorType(("B",), "int32")]
        inferred = types[:3] + tuple(attention_like) if kind == "paged_attention" else types
        out_types = infer_types(kind, inferred, {**self.attrs, **({"dtype": "float32"} if kind == "linear" else {})})
        shared = {**OPS[kind].aliases, **(in_place or {})}
        self.outputs = [
            self.inputs[shared[i]] if i in shared else device.allocate([int(n) for n in t.shape], t.dtype)
            for i, t in enumerate(out_types)
        ]
        self._own = [output for i, output in enumerate(self.outputs) if i not in shared]
        self.poison()
        self.replay = self._capture(device, types, out_types)

    def _capture(self, device: Device, types: Sequence[TensorType], out_types: Sequence[TensorType]) -> Replay:
        name = KERNEL_NAMES.get(self.kind, self.kind)
        inputs = tuple(Value(f"in{i}", t) for i, t in enumerate(types))
        outputs = tuple(Value(f"out{i}", t) for i, t in enumerate(out_types))
        num_bytes = device.workspace_bytes(Launch(name, inputs, outputs, self.attrs), {})
        workspace = device.allocate((num_bytes,), "uint8")
        workspace[...] = 0xFF  # NaN as float32
        scalars = KERNELS[name].check(
            self._operands,
            self.outputs,
            self.attrs,
            device.compute_dtype,
            device.kv_cache_dtype,
            device.matrix_formats,
        )
        return device.capture([LaunchArgs(name, self._operands, self.outputs, scalars, workspace)])

    def poison(self) -> None:
        """NaN, or a wild number, in every output that has storage of its own."""
        for output in self._own:
            output[...] = np.nan if output.dtype == np.float32 else -987654321

    def expected(self) -> list[Array]:
        """The oracle's outputs for what the inputs hold now."""
        copies = [a.astype(np.float64) if a.dtype == np.float32 else a.copy() for a in self.inputs]
        attrs = {k: v for k, v in self.attrs.items() if k != "dtype"}
        with np.errstate(over="ignore"):
            results = reference.OPS[self.kind](*copies, **attrs)
        return list(results) if isinstance(results, tuple) else [results]


def place(device: Device, array: Array, real: str = "float32") -> Array:
    dtype = "int32" if np.issubdtype(array.dtype, np.integer) else real
    placed = device.allocate(array.shape, dtype)
    placed[...] = array.astype(numpy_dtype(dtype))
    return placed


class OneTensor:
    """A checkpoint of one array."""

    def __init__(self, array: Array) -> None:
        self.array = array

    def tensor(self, name: str) -> Array:
        return self.array

    stored = tensor

    def stored_type(self, name: str) -> str:
        return self.array.dtype.name

    def release(self, name: str) -> None:
        pass


class Experts(OneTensor):
    """A checkpoint with a tensor for each matrix of a stack, named by its number."""

    def tensor(self, name: str) -> Array:
        return self.array[int(name)]

    stored = tensor


def load_matrix(device: Device, array: Array) -> Operand:
    """A matrix or a stack of them in the device's form."""
    if array.ndim == 2:
        return device.load_matrix(Tensor("0", array.shape), OneTensor(array))
    return device.load_matrix(Stack(tuple(Tensor(str(e), array.shape[1:]) for e in range(len(array)))), Experts(array))


def run_kernel(
    device: Device,
    kind: str,
    inputs: Sequence[Array],
    attrs: Mapping[str, Any] | None = None,
    in_place: Mapping[int, int] | None = None,
) -> list[tuple[Array, Array]]:
    """(the kernel's output, the oracle's) for each output, of two replays unless the first has changed the inputs."""
    run = KernelRun(device, kind, inputs, attrs, in_place)
    pairs: list[tuple[Array, Array]] = []
    for _ in range(1 if in_place else 2):
        expected = run.expected()
        run.poison()
        run.replay()
        pairs += zip([output.copy() for output in run.outputs], expected, strict=True)
    return pairs


def check_one_capture(
    device: Device, kind: str, steps: Sequence[Sequence[Array]], attrs: Mapping[str, Any], tolerance: float
) -> None:
    """One capture serves what its inputs come to hold: each step's, and then the first's again."""
    run = KernelRun(device, kind, steps[0], attrs)
    for inputs in (*steps, steps[0]):
        for held, array in zip(run.inputs, inputs, strict=True):
            held[...] = array
        (expected,) = run.expected()
        run.replay()
        assert_close(run.outputs[0], expected, tolerance)
