"""Runs one kernel on a device, with poison in whatever it must write before it reads, and asks the oracle too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lean_engine.dtypes import numpy_dtype
from lean_engine.ir import reference
from lean_engine.ir.graph import TensorType, Value
from lean_engine.ir.ops import OPS, infer_types
from lean_engine.passes.lower import KERNELS as KERNEL_NAMES
from lean_engine.passes.lower import Launch
from lean_engine.runtime.device import Device, LaunchArgs, Replay
from lean_engine.runtime.kernels import KERNELS

Array = NDArray[Any]


class KernelRun:
    """A launch of the kernel of one op kind.

    Args:
        inputs: float arrays become float32, integer arrays int32.
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
        self.inputs = [place(device, array) for array in inputs]
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
        scalars = KERNELS[name].check(self.inputs, self.outputs, self.attrs, device.compute_dtype)
        return device.capture([LaunchArgs(name, self.inputs, self.outputs, scalars, workspace)])

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


def place(device: Device, array: Array) -> Array:
    dtype = "int32" if np.issubdtype(array.dtype, np.integer) else "float32"
    placed = device.allocate(array.shape, dtype)
    placed[...] = array.astype(numpy_dtype(dtype))
    return placed


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
