"""What a device promises: memory, and programs captured once and replayed each step.

Arrays have NumPy's attributes (shape, dtype, flags), whatever memory they are in. Capturing does all checking, slicing
and choosing, so that a replay only launches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from lean_engine.ir.graph import Dims
from lean_engine.passes import Launch

Array = NDArray[Any]
Replay = Callable[[], None]


@dataclass(frozen=True, slots=True, eq=False)
class LaunchArgs:
    """A launch with addresses: everything a device needs to run it."""

    kernel: str
    inputs: Sequence[Array]
    outputs: Sequence[Array]
    scalars: Mapping[str, Any]  # wrapped in their declared types
    workspace: Array  # uint8, what workspace_bytes asked for


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """A step's int32 inputs, of the largest size: where they are written, and where launches read them."""

    host: Mapping[str, Array]
    device: Mapping[str, Array]
    upload: Replay  # makes `device` hold what `host` holds


class Device(Protocol):
    name: str  # "cpu", "cuda"
    compute_dtype: str  # of weights, activations and KV cache

    def allocate(self, shape: Sequence[int], dtype: str) -> Array:
        """Memory that lives as long as the array; what it holds is undefined."""

    def fill(self, array: Array, write: Callable[[NDArray[Any]], None]) -> None:
        """Let `write` fill an array of the same form in host memory, and bring it to the device."""

    def read(self, array: Array) -> NDArray[Any]:
        """An array's content in host memory, valid until the next call of `read` or `fill`."""

    def make_inputs(self, shapes: Mapping[str, Sequence[int]]) -> StepInputs:
        """Memory for the inputs of steps."""

    def padded(self, num_tokens: int, num_requests: int, num_rows: int, limits: Dims) -> tuple[int, int, int]:
        """T, B and R with which a step of these sizes runs: at least as large, and within those of `limits`."""

    def workspace_bytes(self, launch: Launch, dims: Dims) -> int:
        """Scratch that a launch needs at most, for steps of at most these sizes."""

    def capture(self, launches: Sequence[LaunchArgs]) -> Replay:
        """Prepare launches over fixed arrays; the result runs them in order on what the arrays then hold."""

    def memory_bytes(self) -> int:
        """Memory that is free for the KV cache now."""

    def total_memory_bytes(self) -> int:
        """The device's whole memory."""

    def close(self) -> None:
        """Give threads and memory back; the device is not used again."""
