"""A GPU through CuPy: its allocator, streams, events and graphs, and modules loaded from cubins that NVRTC made.

Of CuPy it uses what its table of names says; tests check the table against an
installed CuPy and run this file over a fake one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np

from lean_engine.dtypes import numpy_dtype
from lean_engine.errors import ConfigError, LaunchError, OutOfMemory
from lean_engine.runtime.cuda.catalogue import by_source
from lean_engine.runtime.cuda.cubin_cache import CubinCache
from lean_engine.runtime.cuda.cublaslt import WORKSPACE_BYTES, Algorithm, CublasLt
from lean_engine.runtime.cuda.cupy_module import import_cupy
from lean_engine.runtime.cuda.device_array import DeviceArray
from lean_engine.runtime.cuda.driver import Candidate, HostArray
from lean_engine.runtime.cuda.gemm_choice import GemmChoices, candidates
from lean_engine.runtime.cuda.gemm_kernels import Gemm, Problem
from lean_engine.runtime.cuda.gemm_timing import GraphStopwatch, launch_gemm
from lean_engine.runtime.cuda.instances import ARCHITECTURES, Instance, KernelCall
from lean_engine.runtime.cuda.sources import kernel_source
from lean_engine.runtime.device import Array, Replay
from lean_engine.units import format_bytes

DEFAULT_SHARED_BYTES = 48 * 1024  # dynamic shared memory that a launch may have without asking
MAX_DYNAMIC_SHARED_SIZE_BYTES = 8  # CUfunction_attribute
NULL = np.uint64(0)

CUPY_NAMES = (  # everything of CuPy that is used, below cupy.cuda
    "Device",
    "Event",
    "Module",
    "Stream",
    "alloc",
    "alloc_pinned_memory",
    "driver.funcSetAttribute",
    "memory.OutOfMemoryError",
    "runtime.CUDARuntimeError",
    "runtime.getDeviceCount",
    "runtime.getDeviceProperties",
    "runtime.memGetInfo",
    "runtime.memcpy2DAsync",
    "runtime.memcpyAsync",
    "runtime.memcpyDeviceToHost",
    "runtime.memcpyHostToDevice",
)
STREAM_CAPTURE_MODE_GLOBAL = 0  # strict: what is unsafe in a capture is an error, in whatever thread


class CupyDriver:
    """See runtime.cuda.driver.Driver.

    Args:
        cubins: compiles kernels.
        choices: where choices of products are kept.
        make_blas: (address of a workspace) → cuBLASLt.
        cuda: cupy.cuda; None imports it.

    Raises:
        ConfigError: no CuPy, no GPU, or one that no kernel is compiled for.
    """

    def __init__(
        self,
        cubins: CubinCache,
        choices: Path,
        make_blas: Callable[[int], CublasLt] = CublasLt,
        cuda: Any = None,
    ) -> None:
        self._cuda = cuda or import_cupy()
        properties = self._cuda.runtime.getDeviceProperties(self._cuda.Device().id)
        self.name = as_text(properties["name"])
        self.arch = nearest_architecture(int(properties["major"]), int(properties["minor"]), self.name)
        self.num_sms = int(properties["multiProcessorCount"])
        self._stream = self._cuda.Stream(non_blocking=True)
        self._cubins = cubins
        self._functions: dict[Instance, Any] = {}
        self._shared_bytes: dict[Instance, int] = {}  # what was asked for beyond the default
        self._workspace = self.allocate((WORKSPACE_BYTES,), "uint8")
        self._blas = make_blas(device(self._workspace).address)
        self._choices = GemmChoices(choices, self.name, self._blas.version, GraphStopwatch(self, self._launch_gemm))

    # -- memory

    def allocate(self, shape: Sequence[int], dtype: str) -> Array:
        element = numpy_dtype(dtype)
        num_bytes = math.prod(shape) * element.itemsize
        try:
            memory = self._cuda.alloc(num_bytes)
        except self._cuda.memory.OutOfMemoryError:
            free, total = self.memory_bytes()
            raise OutOfMemory(
                f"cannot allocate {format_bytes(num_bytes)} on {self.name}; {format_bytes(free)} of "
                f"{format_bytes(total)} are free"
            ) from None
        return cast(Array, DeviceArray(memory, int(memory.ptr), shape, element))

    def allocate_host(self, shape: Sequence[int], dtype: str) -> HostArray:
        element = numpy_dtype(dtype)
        num_elements = math.prod(shape)
        memory = self._cuda.alloc_pinned_memory(max(1, num_elements * element.itemsize))
        raw = np.frombuffer(memory, np.uint8, num_elements * element.itemsize)
        return raw.view(element).reshape(tuple(shape))

    def upload(self, source: HostArray, target: Array) -> None:
        self._copy(source.ctypes.data, device(target).address, source.nbytes, target.nbytes, "memcpyHostToDevice")

    def upload_corner(self, source: HostArray, target: Array, num_rows: int, num_columns: int) -> None:
        if source.shape != target.shape or num_rows > len(source) or num_columns > source.shape[1]:
            raise LaunchError(f"{num_rows} × {num_columns} of {source.shape} are copied to {target.shape}")
        if num_rows and num_columns:
            element, runtime = source.itemsize, self._cuda.runtime
            pitch, to = source.shape[1] * element, device(target).address
            kind, stream = runtime.memcpyHostToDevice, self._stream.ptr
            runtime.memcpy2DAsync(to, pitch, source.ctypes.data, pitch, num_columns * element, num_rows, kind, stream)

    def download(self, source: Array, target: HostArray) -> None:
        self._copy(device(source).address, target.ctypes.data, source.nbytes, target.nbytes, "memcpyDeviceToHost")

    def _copy(self, source: int, target: int, num_bytes: int, target_bytes: int, kind: str) -> None:
        if num_bytes != target_bytes:
            raise LaunchError(f"{kind}: {num_bytes} bytes do not fill {target_bytes}")
        if num_bytes:
            runtime = self._cuda.runtime
            runtime.memcpyAsync(target, source, num_bytes, getattr(runtime, kind), self._stream.ptr)

    def synchronize(self) -> None:
        self._stream.synchronize()

    def mark(self) -> Callable[[], None]:
        event = self._cuda.Event(disable_timing=True)
        event.record(self._stream)
        return cast(Callable[[], None], event.synchronize)

    def memory_bytes(self) -> tuple[int, int]:
        free, total = self._cuda.runtime.memGetInfo()
        return int(free), int(total)

    # -- work

    def prepare(self, instances: Iterable[Instance]) -> None:
        for source, expressions in by_source(set(instances) - set(self._functions)).items():
            cubin = self._cubins.get(kernel_source(source), expressions, self.arch)
            module = self._cuda.Module()
            module.load(cubin.data)
            for expression in expressions:
                self._functions[Instance(source, expression)] = module.get_function(cubin.names[expression])

    def launch(self, call: KernelCall) -> None:
        function = self._functions[call.instance]
        if call.shared_bytes > max(DEFAULT_SHARED_BYTES, self._shared_bytes.get(call.instance, 0)):
            self._cuda.driver.funcSetAttribute(function.ptr, MAX_DYNAMIC_SHARED_SIZE_BYTES, call.shared_bytes)
            self._shared_bytes[call.instance] = call.shared_bytes
        args = tuple(kernel_argument(argument) for argument in call.args)
        function(call.grid, call.block, args, call.shared_bytes, self._stream)

    def choose_gemm(self, problem: Problem) -> Candidate:
        return self._choices.choose(problem, candidates(problem, self.arch, self._blas))

    def multiply(self, gemm: Gemm, algorithm: Algorithm) -> None:
        self._blas.multiply(gemm, algorithm, self._stream.ptr)

    def _launch_gemm(self, gemm: Gemm, candidate: Candidate) -> None:
        launch_gemm(self, self._blas, self._stream.ptr, gemm, candidate)

    def capture(self, run: Callable[[], None]) -> Replay:
        self._stream.begin_capture(STREAM_CAPTURE_MODE_GLOBAL)
        try:
            run()
        finally:
            graph = self._stream.end_capture()
        graph.upload(self._stream)
        return partial(replay, graph, self._stream, run)

    def close(self) -> None:
        self.synchronize()
        self._functions.clear()


def replay(graph: Any, stream: Any, recorded: Callable[[], None]) -> None:
    """Launch a graph. `recorded` holds every array that it points to."""
    graph.launch(stream)


def kernel_argument(argument: Any) -> Any:
    """A pointer as a number of 64 bits, a scalar as it is: both are passed by value, in exactly their sizes."""
    if argument is None:
        return NULL
    if isinstance(argument, DeviceArray):
        return np.uint64(argument.address)
    if isinstance(argument, np.generic):
        return argument
    raise LaunchError(f"a kernel's argument is {argument!r}, must be a device array, None or a NumPy scalar")


def device(array: Array) -> DeviceArray:
    assert isinstance(array, DeviceArray)
    return array


def as_text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def nearest_architecture(major: int, minor: int, name: str) -> str:
    """The newest architecture of ARCHITECTURES whose code this GPU runs: the same major number, at most its minor.

    Raises:
        ConfigError: there is none.
    """
    fitting = [arch for arch in ARCHITECTURES if same_major(arch, major) and minor_of(arch) <= minor]
    if not fitting:
        raise ConfigError(f"{name} has compute capability {major}.{minor}; supported: {', '.join(ARCHITECTURES)}")
    return max(fitting, key=minor_of)


def same_major(arch: str, major: int) -> bool:
    return int(arch.removeprefix("sm_")) // 10 == major


def minor_of(arch: str) -> int:
    return int(arch.removeprefix("sm_")) % 10
