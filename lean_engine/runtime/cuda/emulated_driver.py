"""A GPU on the host, for tests: the kernels' sources run in tools/cuda_host, and CUDA's rules are kept.

Memory that nobody has written holds NaN (and -1 as an integer). A graph replays the very launches it has recorded, at
the addresses they had. Inside a capture it refuses what CUDA refuses. Products of few rows go through our kernels; the
others, which would take the emulator long, are NumPy's, accumulated in float32 and rounded once.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np

from lean_engine.dtypes import numpy_dtype
from lean_engine.errors import LaunchError
from lean_engine.memory.budget import available_memory_bytes, total_memory_bytes
from lean_engine.runtime.cuda.cublaslt import Algorithm
from lean_engine.runtime.cuda.driver import Candidate, HostArray
from lean_engine.runtime.cuda.emulator import EmulatedKernels
from lean_engine.runtime.cuda.gemm_kernels import Gemm, Problem, skinny_ways
from lean_engine.runtime.cuda.instances import Instance, KernelCall
from lean_engine.runtime.device import Array, Replay

ALIGNMENT = 256  # bytes, as CUDA's allocations
MAX_EMULATED_ROWS = 4  # of a product by our kernels
NUMPY = Algorithm(b"NumPy", 0)


class EmulatedDriver:
    """See runtime.cuda.driver.Driver.

    Args:
        arch: whose tile shapes and limits are taken.
        num_sms: few, since every block of a grid is run, busy or not.
        is_checked: check each memory access of each kernel, about twice as slow.
        is_lazy: nothing runs before it is waited for. So what the host changes too early, or reads without waiting,
            gives wrong results; a real GPU is anywhere between this and the opposite.

    Raises:
        ConfigError: this is no source checkout, or there is no g++.
    """

    name = "emulated GPU"

    def __init__(self, arch: str = "sm_90", num_sms: int = 2, is_checked: bool = False, is_lazy: bool = False) -> None:
        self.arch = arch
        self.num_sms = num_sms
        self._kernels = EmulatedKernels(is_checked)
        self._prepared: set[Instance] = set()
        self._recorded: list[Replay] | None = None  # of the graph being captured
        self._is_lazy = is_lazy
        self._waiting: deque[Replay] = deque()  # launched and not run
        self._num_run = 0

    def allocate(self, shape: Sequence[int], dtype: str) -> Array:
        self._refuse_in_capture("memory is allocated")
        element = numpy_dtype(dtype)
        num_bytes = math.prod(shape) * element.itemsize
        raw = np.full(num_bytes + ALIGNMENT, 0xFF, np.uint8)
        start = -raw.ctypes.data % ALIGNMENT
        return raw[start : start + num_bytes].view(element).reshape(tuple(shape))

    def allocate_host(self, shape: Sequence[int], dtype: str) -> HostArray:
        self._refuse_in_capture("host memory is page-locked")
        return np.full(tuple(shape), 0, numpy_dtype(dtype))

    def upload(self, source: HostArray, target: Array) -> None:
        self._refuse_in_capture("memory is copied")
        self._run(partial(copy, source, target))

    def upload_corner(self, source: HostArray, target: Array, num_rows: int, num_columns: int) -> None:
        self.upload(source[:num_rows, :num_columns], target[:num_rows, :num_columns])

    def download(self, source: Array, target: HostArray) -> None:
        self._refuse_in_capture("memory is copied")
        self._run(partial(copy, source, target))

    def synchronize(self) -> None:
        self._refuse_in_capture("the host waits")
        self._run_until(self._num_run + len(self._waiting))

    def mark(self) -> Callable[[], None]:
        self._refuse_in_capture("an event is recorded")
        return partial(self._run_until, self._num_run + len(self._waiting))

    def _run_until(self, num_commands: int) -> None:
        while self._num_run < num_commands:
            command = self._waiting.popleft()
            self._num_run += 1
            command()

    def prepare(self, instances: Iterable[Instance]) -> None:
        missing = set(instances) - self._prepared
        if missing:
            self._refuse_in_capture("a kernel is compiled")
            self._kernels.build(missing)
            self._prepared |= missing

    def launch(self, call: KernelCall) -> None:
        if call.instance not in self._prepared:
            raise LaunchError(f"{call.instance.expression} is launched but was never prepared")
        self._run(self._kernels.bind(call))

    def choose_gemm(self, problem: Problem) -> Candidate:
        if problem.num_rows <= MAX_EMULATED_ROWS:
            return skinny_ways(problem, self.arch)[0]
        return NUMPY

    def multiply(self, gemm: Gemm, algorithm: Algorithm) -> None:
        self._run(partial(multiply, gemm))

    def capture(self, run: Callable[[], None]) -> Replay:
        self._refuse_in_capture("another capture begins")
        self._recorded = []
        try:
            run()
            return partial(self._run, partial(run_all, self._recorded))
        finally:
            self._recorded = None

    def memory_bytes(self) -> tuple[int, int]:
        return available_memory_bytes(), total_memory_bytes()

    def close(self) -> None:
        self._prepared.clear()

    def _run(self, command: Replay) -> None:
        if self._recorded is not None:
            self._recorded.append(command)
        elif self._is_lazy:
            self._waiting.append(command)
        else:
            command()

    def _refuse_in_capture(self, what: str) -> None:
        if self._recorded is not None:
            raise LaunchError(f"{what} while a graph is captured, which CUDA refuses")


def copy(source: Array, target: Array) -> None:
    target[...] = source


def run_all(commands: Sequence[Replay]) -> None:
    for command in commands:
        command()


def multiply(gemm: Gemm) -> None:
    product = gemm.x.astype(np.float32) @ gemm.weight.astype(np.float32).T
    for term in (gemm.bias, gemm.residual):
        if term is not None:
            product += term.astype(np.float32)
    gemm.out[...] = product.astype(gemm.out.dtype)
