"""What a device promises: memory, and programs captured once and replayed each step.

Arrays have NumPy's attributes (shape, dtype, flags), whatever memory they are in. Capturing does all checking, slicing
and choosing, so that a replay only launches.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from numpy.typing import NDArray

from lean_engine.ir.graph import Dims
from lean_engine.ir.sources import Source
from lean_engine.passes import Launch

Array = NDArray[Any]
Replay = Callable[[], None]


class Matrix(Protocol):
    """A weight matrix, or a stack of them, in a form that only its device reads."""

    @property
    def shape(self) -> tuple[int, ...]:
        """[O, C], or [E, O, C] of a stack: what it means, however it is stored."""

    @property
    def format(self) -> str:
        """The name of the form: "bfloat16", "int8", "q4_1", …"""

    @property
    def nbytes(self) -> int: ...


Operand = Array | Matrix  # what a launch reads


class TensorStore(Protocol):
    """What is needed of a checkpoint."""

    def tensor(self, name: str) -> NDArray[Any]:
        """The values, in some floating-point type."""

    def stored_type(self, name: str) -> str:
        """How the tensor is stored: "float32", "float16", "bfloat16", or a GGUF block type, such as "q4_1"."""

    def stored(self, name: str) -> NDArray[Any]:
        """The tensor as it is stored: elements of its type, or rows of blocks, uint8 [O, bytes per row]."""

    def release(self, name: str) -> None:
        """Its file pages are not needed for now."""


@dataclass(frozen=True, slots=True, eq=False)
class LaunchArgs:
    """A launch with addresses: everything a device needs to run it."""

    kernel: str
    inputs: Sequence[Any]  # arrays, and matrices where the kernel table says so
    outputs: Sequence[Array]
    scalars: Mapping[str, Any]  # wrapped in their declared types
    workspace: Array  # uint8, what workspace_bytes asked for


@dataclass(frozen=True, slots=True, eq=False)
class StepInputs:
    """A step's int32 inputs, of the largest size: where they are written, and where launches read them."""

    host: Mapping[str, Array]
    device: Mapping[str, Array]
    upload: Callable[[int, int], None]  # makes `device` hold `host`: of block_tables so many requests and blocks each
    twin: StepInputs | None = None  # other host memory for the same `device`: to be written with a step in flight


class Device(Protocol):
    name: str  # "cpu", "cuda"
    compute_dtype: str  # of activations, and of weights but matrices in a form of the device's own
    kv_cache_dtype: str

    @property
    def matrix_formats(self) -> Collection[str]:
        """Forms of its own that weight matrices may have; none: they are arrays of compute_dtype."""

    def allocate(self, shape: Sequence[int], dtype: str) -> Array:
        """Memory that lives as long as the array; what it holds is undefined."""

    def fill(self, array: Array, write: Callable[[NDArray[Any]], None]) -> None:
        """Let `write` fill an array of the same form in host memory, and bring it to the device."""

    def read(self, array: Array) -> NDArray[Any]:
        """An array's content in host memory, valid until the next call of `read` or `fill`."""

    def load_matrix(self, source: Source, store: TensorStore) -> Operand:
        """A weight matrix (or stack) made from the checkpoint, in the device's form."""

    def matrix_bytes(self, source: Source, store: TensorStore) -> int:
        """Memory that `load_matrix` will take, found without reading a tensor."""

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
