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


class Device(Protocol):
    name: str  # "cpu"
    compute_dtype: str  # of weights, activations and KV cache

    def allocate(self, shape: Sequence[int], dtype: str) -> Array:
        """Zeroed memory that lives as long as the array."""

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
