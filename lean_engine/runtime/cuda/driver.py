"""What the CUDA device needs of a GPU: memory, one stream, kernels, matrix products, graphs.

Two things have it: a GPU through CuPy (cupy_driver.py), and a model of one for tests (emulated_driver.py). Whatever is
decided above this line, which kernels run with which arguments and in which order, is therefore the same code for both.

Everything runs on one stream in order. While a graph is captured nothing runs: launches and products are recorded with
the addresses they have, and what CUDA refuses then (allocating, compiling, copying, waiting) is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from numpy.typing import NDArray

from lean_engine.runtime.cuda.cublaslt import Algorithm
from lean_engine.runtime.cuda.gemm_kernels import Gemm, Problem, Way
from lean_engine.runtime.cuda.instances import Instance, KernelCall
from lean_engine.runtime.device import Array, Replay

HostArray = NDArray[Any]
Candidate = Way | Algorithm  # of gemm_choice, which measures them over a Driver


class Driver(Protocol):
    name: str  # of the GPU, for messages and caches
    arch: str  # "sm_90"
    num_sms: int

    def allocate(self, shape: Sequence[int], dtype: str) -> Array:
        """Device memory with undefined content, aligned to 256 bytes; it lives as long as the array.

        Raises:
            OutOfMemory: with the numbers.
        """

    def allocate_host(self, shape: Sequence[int], dtype: str) -> HostArray:
        """Page-locked host memory, which copies read and write without waiting."""

    def upload(self, source: HostArray, target: Array) -> None:
        """Host → device, in stream order; `source` must not change before that is waited for."""

    def upload_corner(self, source: HostArray, target: Array, num_rows: int, num_columns: int) -> None:
        """`upload` of the first columns of the first rows, between arrays of one shape [rows, columns]."""

    def download(self, source: Array, target: HostArray) -> None:
        """Device → host, in stream order; `target` is valid once that is waited for."""

    def synchronize(self) -> None:
        """Wait for everything that was launched."""

    def mark(self) -> Callable[[], None]:
        """Mark this place in the stream; the result waits until everything before it is done. Not while capturing."""

    def prepare(self, instances: Iterable[Instance]) -> None:
        """Compile and load kernels; those that are there cost nothing."""

    def launch(self, call: KernelCall) -> None:
        """Run a prepared kernel."""

    def choose_gemm(self, problem: Problem) -> Candidate:
        """The best way for a product: a kernel of ours, or an algorithm for `multiply`. Not while capturing."""

    def multiply(self, gemm: Gemm, algorithm: Algorithm) -> None:
        """Run a product by a chosen algorithm of the library, accumulated in float32."""

    def capture(self, run: Callable[[], None]) -> Replay:
        """Record what `run` launches as a graph; the result launches the graph."""

    def memory_bytes(self) -> tuple[int, int]:
        """Free and in all."""

    def close(self) -> None:
        """Give everything back."""
