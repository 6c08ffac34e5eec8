"""A cupy.cuda whose GPU is the host: memory is NumPy's, copies go by address, kernels run in tools/cuda_host.

It is strict where CuPy is not: an address outside every allocation, an argument of another size than the kernel's
parameter, or anything but a launch while a stream captures is an error.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lean_engine.dtypes import numpy_dtype
from lean_engine.runtime.cuda.cubin_cache import CubinCache
from lean_engine.runtime.cuda.cublaslt import WORKSPACE_BYTES, Algorithm
from lean_engine.runtime.cuda.emulated_driver import NUMPY, multiply
from lean_engine.runtime.cuda.emulator import EmulatedKernels
from lean_engine.runtime.cuda.gemm_kernels import Gemm, Problem
from lean_engine.runtime.cuda.instances import Instance, KernelCall
from lean_engine.runtime.cuda.nvrtc import Cubin, Resources
from lean_engine.runtime.cuda.sources import KernelSource

CUDA_TYPES = {
    "half": "float16",
    "bfloat16": "bfloat16",
    "float": "float32",
    "int": "int32",
    "unsigned int": "uint32",
    "unsigned short": "uint16",
    "unsigned long long": "uint64",
}
FREE_BYTES, TOTAL_BYTES = 3 << 30, 4 << 30


class CUDARuntimeError(RuntimeError):
    pass


class OutOfMemoryError(MemoryError):
    pass


class Memory:
    """An allocation; it begins at a multiple of 256 bytes and holds NaN until it is written."""

    def __init__(self, num_bytes: int) -> None:
        self.raw = np.full(num_bytes + 256, 0xFF, np.uint8)
        self.ptr = -(-self.raw.ctypes.data // 256) * 256
        self.num_bytes = num_bytes

    def __buffer__(self, flags: int) -> memoryview:  # pinned memory is read through the buffer protocol
        return memoryview(self.raw)


class Graph:
    def __init__(self, commands: list[Callable[[], None]]) -> None:
        self.commands = commands
        self.is_uploaded = False

    def upload(self, stream: Stream) -> None:
        self.is_uploaded = True

    def launch(self, stream: Stream) -> None:
        assert self.is_uploaded
        for command in self.commands:
            command()


class Stream:
    def __init__(self, non_blocking: bool) -> None:
        assert non_blocking, "the legacy stream cannot be captured"
        self.ptr = 7
        self.recorded: list[Callable[[], None]] | None = None

    def begin_capture(self, mode: int) -> None:
        assert mode == 0, "strict"
        self.recorded = []

    def end_capture(self) -> Graph:
        assert self.recorded is not None
        graph, self.recorded = Graph(self.recorded), None
        return graph

    def synchronize(self) -> None:
        assert self.recorded is None

    def run(self, command: Callable[[], None]) -> None:
        if self.recorded is None:
            command()
        else:
            self.recorded.append(command)


class Event:
    def __init__(self, disable_timing: bool) -> None:
        assert disable_timing, "events with times are slower"
        self.stream: Stream | None = None

    def record(self, stream: Stream) -> None:
        assert stream.recorded is None
        self.stream = stream

    def synchronize(self) -> None:
        assert self.stream is not None
        self.stream.synchronize()


class FakeCuda:
    """What CupyDriver takes for cupy.cuda."""

    def __init__(self, capability: tuple[int, int] = (9, 0), max_bytes: int = 1 << 30) -> None:
        self.max_bytes = max_bytes
        self.streams: list[Stream] = []
        self.kernels = EmulatedKernels()
        self.shared_bytes_asked: dict[str, int] = {}
        self._begins: list[int] = []
        self._allocations: list[Memory] = []
        major, minor = capability
        self.properties = {"name": b"Fake GPU", "major": major, "minor": minor, "multiProcessorCount": 2}
        self.memory = SimpleNamespace(OutOfMemoryError=OutOfMemoryError)
        self.driver = SimpleNamespace(funcSetAttribute=self._set_attribute)
        self.runtime = SimpleNamespace(
            CUDARuntimeError=CUDARuntimeError,
            getDeviceCount=lambda: 1,
            getDeviceProperties=lambda device: self.properties,
            memGetInfo=lambda: (FREE_BYTES, TOTAL_BYTES),
            memcpyAsync=self._copy,
            memcpy2DAsync=self._copy_rows,
            memcpyHostToDevice=1,
            memcpyDeviceToHost=2,
        )

    def Device(self) -> SimpleNamespace:  # noqa: N802 - CuPy's name
        return SimpleNamespace(id=0)

    def Stream(self, non_blocking: bool) -> Stream:  # noqa: N802
        self.streams.append(Stream(non_blocking))
        return self.streams[-1]

    def Event(self, disable_timing: bool) -> Event:  # noqa: N802
        return Event(disable_timing)

    def Module(self) -> Module:  # noqa: N802
        return Module(self)

    def alloc(self, num_bytes: int) -> Memory:
        assert not self.is_capturing
        if num_bytes > self.max_bytes:
            raise OutOfMemoryError
        memory = Memory(num_bytes)
        place = bisect_right(self._begins, memory.ptr)
        self._begins.insert(place, memory.ptr)
        self._allocations.insert(place, memory)
        return memory

    def alloc_pinned_memory(self, num_bytes: int) -> Any:
        assert not self.is_capturing
        return bytearray(num_bytes)

    @property
    def is_capturing(self) -> bool:
        return any(stream.recorded is not None for stream in self.streams)

    def view(self, address: int, dtype: str, num_bytes: int | None = None) -> NDArray[Any]:
        """The memory from an address to the end of its allocation, or so many bytes of it."""
        memory = self._allocations[bisect_right(self._begins, address) - 1]
        left = memory.ptr + memory.num_bytes - address
        assert 0 < (left if num_bytes is None else num_bytes) <= left, "an address outside every allocation"
        element = numpy_dtype(dtype) if dtype == "bfloat16" else np.dtype(dtype)
        num_elements = (left if num_bytes is None else num_bytes) // element.itemsize
        raw = (ctypes.c_uint8 * (num_elements * element.itemsize)).from_address(address)
        return np.frombuffer(raw, np.uint8).view(element)

    def _copy(self, target: int, source: int, num_bytes: int, kind: int, stream: int) -> None:
        assert not self.is_capturing
        assert stream == self.streams[-1].ptr
        if not all(type(value) is int for value in (target, source, stream)):
            raise TypeError("an integer is required")  # NumPy's are none to CuPy
        self.view(target if kind == 1 else source, "uint8", num_bytes)  # lies in an allocation
        ctypes.memmove(target, source, num_bytes)

    def _copy_rows(
        self, target: int, tpitch: int, source: int, spitch: int, width: int, height: int, kind: int, stream: int
    ) -> None:
        assert kind == 1
        assert 0 < width <= min(tpitch, spitch)
        for row in range(height):
            self._copy(target + row * tpitch, source + row * spitch, width, kind, stream)

    def _set_attribute(self, function: str, attribute: int, value: int) -> None:
        assert attribute == 8
        self.shared_bytes_asked[function] = value

    def make_blas(self, workspace: int) -> FakeBlas:
        assert workspace % 256 == 0
        self.view(workspace, "uint8", WORKSPACE_BYTES)  # lies in an allocation
        return FakeBlas(self)


class FakeBlas:
    """cuBLASLt by NumPy, over addresses."""

    version = 120900

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda

    def algorithms(self, problem: Problem) -> list[Algorithm]:
        return [NUMPY]

    def multiply(self, gemm: Gemm, algorithm: Algorithm, stream: int) -> None:
        assert algorithm == NUMPY
        assert stream == self.cuda.streams[-1].ptr
        arrays = [self._array(value) for value in (gemm.out, gemm.x, gemm.weight, gemm.bias, gemm.residual)]
        self.cuda.streams[-1].run(lambda: multiply(Gemm(*arrays)))

    def _array(self, value: Any) -> Any:
        if value is None:
            return None
        return self.cuda.view(value.address, value.dtype.name, value.nbytes).reshape(value.shape)


class Module:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.is_loaded = False

    def load(self, cubin: bytes) -> None:
        assert cubin == b"cubin"
        self.is_loaded = True

    def get_function(self, name: str) -> Function:
        assert self.is_loaded
        source, expression = name.split("|")
        return Function(self.cuda, Instance(source, expression))


class Function:
    """A kernel of the emulator behind CuPy's calling convention: pointers are numbers."""

    def __init__(self, cuda: FakeCuda, instance: Instance) -> None:
        self.cuda = cuda
        self.instance = instance
        self.ptr = instance.expression
        self.kernel = cuda.kernels.kernel(instance)

    def __call__(
        self, grid: tuple[int, ...], block: tuple[int, ...], args: Sequence[Any], shared_mem: int, stream: Stream
    ) -> None:
        assert type(grid) is type(block) is tuple, "CuPy takes no other sequences"
        limit = max(48 * 1024, self.cuda.shared_bytes_asked.get(self.ptr, 0))
        assert shared_mem <= limit, "more dynamic shared memory than was asked for"
        values = [self._value(v, p) for v, p in zip(args, self.kernel.parameters, strict=True)]
        call = KernelCall(self.instance, grid, block, tuple(values), shared_mem)
        stream.run(self.cuda.kernels.bind(call))

    def _value(self, value: Any, parameter: Any) -> Any:
        assert isinstance(value, np.generic), "CuPy passes anything else in a size of its own"
        if not parameter.is_pointer:
            return value
        assert value.dtype == np.uint64
        name = parameter.type.replace("const", "").strip()
        return None if value == 0 else self.cuda.view(int(value), CUDA_TYPES[name])


class FakeCubins(CubinCache):
    """Cubins that hold only names, which FakeCuda's modules understand."""

    def __init__(self) -> None:
        self.compiled: list[tuple[str, str]] = []

    def get(self, source: KernelSource, expressions: Sequence[str], arch: str, options: Sequence[str] = ()) -> Cubin:
        self.compiled += [(expression, arch) for expression in expressions]
        names = {expression: f"{source.name}|{expression}" for expression in expressions}
        return Cubin(b"cubin", names, dict.fromkeys(expressions, Resources(0, 0, 0, 0)))
