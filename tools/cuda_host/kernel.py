"""HostModule and HostKernel: what cupy.RawModule and its functions are on a GPU, on NumPy arrays.

A launch is refused where CUDA would refuse it, and where CUDA would not notice that an argument has the wrong type.
"""

from __future__ import annotations

import ctypes
import math
import re
import subprocess
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from cuda_host.build import MAX_SHARED_BYTES, kernel_library, runtime_library

MAX_THREADS = 1024
MAX_GRID = (2**31 - 1, 65_535, 65_535)
MAX_BLOCK = (1024, 1024, 64)
DEFAULT_SHARED_BYTES = 48 * 1024  # more must be asked for, as on a GPU
DTYPES = {  # C++ type → NumPy's name; arrays of other types are compared by size
    "float": "float32",
    "double": "float64",
    "half": "float16",
    "bfloat16": "bfloat16",
    "bool": "bool",
    "signed char": "int8",
    "unsigned char": "uint8",
    "short": "int16",
    "unsigned short": "uint16",
    "int": "int32",
    "unsigned int": "uint32",
    "long": "int64",
    "long long": "int64",
    "unsigned long": "uint64",
    "unsigned long long": "uint64",
}
MAX_PROFILE_ROWS = 4096
LAUNCH_BOUNDS = re.compile(r"__launch_bounds__\((\d+)(?:,\s*\d+)?\)\s*(\w+)\s*\(")
ACCESSES = ("global read", "global write", "shared read", "shared write")
LAUNCHING = threading.Lock()  # the runtime runs one launch at a time


class KernelError(RuntimeError):
    """A kernel or a launch broke a rule: a race, a deadlock, an access out of bounds, a geometry that CUDA refuses."""


@dataclass(frozen=True, slots=True)
class LineProfile:
    """How the accesses of one kind at one source line fit together. A request is one access by a warp.

    transactions: 32-byte sectors of global memory, or passes over the banks of shared memory; ideal: the fewest that
    could move as many bytes.
    """

    where: str
    access: str  # one of ACCESSES
    num_requests: int
    num_lanes: int
    num_bytes: int
    num_transactions: int
    num_ideal: int


@dataclass(frozen=True, slots=True)
class Parameter:
    is_pointer: bool
    num_bytes: int  # of the parameter, or of what it points to
    type: str


class Range(ctypes.Structure):
    _fields_ = (
        ("begin", ctypes.c_size_t),
        ("end", ctypes.c_size_t),
        ("element_bytes", ctypes.c_uint32),
        ("is_writable", ctypes.c_int32),
        ("argument", ctypes.c_int32),
    )


class Request(ctypes.Structure):
    _fields_ = (
        ("invoke", ctypes.c_void_p),
        ("args", ctypes.c_void_p),
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_size_t),
        ("dynamic", ctypes.c_void_p),
        ("dynamic_capacity", ctypes.c_size_t),
        ("ranges", ctypes.c_void_p),
        ("num_ranges", ctypes.c_int32),
        ("is_checked", ctypes.c_int32),
        ("is_profiled", ctypes.c_int32),
        ("preempt", ctypes.c_int32),
        ("order", ctypes.c_uint64),
    )


@cache
def load_runtime() -> ctypes.CDLL:
    runtime = ctypes.CDLL(str(runtime_library()), mode=ctypes.RTLD_GLOBAL)
    runtime.cuda_host_launch.restype = ctypes.c_char_p
    runtime.cuda_host_statistics.restype = ctypes.c_size_t
    return runtime


@dataclass(slots=True, eq=False)
class BoundLaunch:
    """A launch with its addresses; call it as often as needed."""

    kernel: HostKernel
    request: Request
    kept: list[Any]  # what the request's addresses point to

    def __call__(self, order: int = 0, preempt: int = 0) -> None:
        """See HostKernel.__call__."""
        self.request.order, self.request.preempt = order, preempt
        with LAUNCHING:
            self.kernel.run(self.request)


class HostModule:
    """The kernels of one source.

    Args:
        path: the .cu file. Headers it includes in quotes lie beside it.
        expressions: the kernels that will be asked for, as C++ names them: "rms_norm<half, 2>".
        options: further flags for g++, such as -DNAME=value.
        is_checked: check every access; about twice as slow. Without it a bad address ends the process.
        source: the text to compile instead of the file's.

    Raises:
        BuildError: g++ refused the source.
    """

    def __init__(
        self,
        path: str | Path,
        expressions: Sequence[str],
        *,
        options: Sequence[str] = (),
        is_checked: bool = False,
        source: str | None = None,
    ) -> None:
        self.path = Path(path).resolve()
        self.expressions = tuple(expressions)
        self.is_checked = is_checked
        text = self.path.read_text() if source is None else source
        self.launch_bounds = {name: int(threads) for threads, name in LAUNCH_BOUNDS.findall(text)}
        self.runtime = load_runtime()
        self.library_path = kernel_library(
            self.path.name, text, self.path.parent, self.expressions, options, is_checked
        )
        self.library = ctypes.CDLL(str(self.library_path))
        self.library.cuda_host_dynamic.restype = ctypes.c_void_p

    def get_function(self, expression: str) -> HostKernel:
        return HostKernel(self, expression, self.expressions.index(expression))

    def locate(self, text: str) -> str:
        """Replace @<offset> marks of a report by file:line, the innermost inlined call first."""

        def place(match: re.Match[str]) -> str:
            command = ["addr2line", "-i", "-e", str(self.library_path), match[1]]
            lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
            names = [Path(line.split(" (")[0]).name for line in lines]
            own = [name for name in names if Path(name).suffix.startswith(".cu")]
            return " < ".join(dict.fromkeys(own)) or "?"

        return re.sub(r"@([0-9a-f]+)(?::0)?", place, text)


class HostKernel:
    """One kernel of a module. Call it as a CuPy kernel: kernel(grid, block, args, shared_mem=…)."""

    def __init__(self, module: HostModule, name: str, index: int) -> None:
        self.module = module
        self.name = name
        self.max_dynamic_shared_size_bytes = DEFAULT_SHARED_BYTES
        self._invoke = ctypes.cast(getattr(module.library, f"cuda_host_invoke_{index}"), ctypes.c_void_p)
        signature = getattr(module.library, f"cuda_host_signature_{index}")
        signature.restype = ctypes.c_char_p
        self.parameters = tuple(parse_parameter(line) for line in signature().decode().splitlines())

    def __call__(
        self,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[Any],
        *,
        shared_mem: int = 0,
        order: int = 0,
        preempt: int = 0,
    ) -> None:
        """Launch and wait.

        Args:
            args: NumPy arrays for pointers (None = null), NumPy scalars of the exact type for values.
            shared_mem: bytes of dynamic shared memory.
            order: of threads and blocks: 0 ascending, 1 descending, otherwise the seed of a random one.
            preempt: of 256 checked accesses, how many let another thread run.

        Raises:
            TypeError: an argument does not fit the kernel's parameter.
            KernelError: a rule was broken; the message names it and the source line.
        """
        self.bind(grid, block, args, shared_mem=shared_mem)(order, preempt)

    def bind(
        self, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], *, shared_mem: int = 0
    ) -> BoundLaunch:
        """Check everything once, for launches over the same addresses."""
        return BoundLaunch(self, *self._request(grid, block, args, shared_mem))

    def profile(
        self, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], *, shared_mem: int = 0
    ) -> list[LineProfile]:
        """Launch a checked kernel and say how its accesses fit together, a row per source line and kind of access."""
        if not self.module.is_checked:
            raise ValueError("only a module built with is_checked=True can be profiled")
        request, _kept = self._request(grid, block, args, shared_mem)
        request.is_profiled = 1
        with LAUNCHING:
            self.run(request)
            return self._statistics()

    def run(self, request: Request) -> None:
        """What BoundLaunch calls, holding LAUNCHING."""
        library = self.module.library
        library.cuda_host_anchor()
        request.dynamic = library.cuda_host_dynamic()  # another address in every OS thread
        error = self.module.runtime.cuda_host_launch(ctypes.byref(request))
        if error:
            raise KernelError(f"{self.name}: {self.module.locate(error.decode())}")

    def _request(
        self, grid: Sequence[int], block: Sequence[int], args: Sequence[Any], shared_mem: int
    ) -> tuple[Request, list[Any]]:
        full_grid, full_block = ((*size, 1, 1)[:3] for size in (grid, block))
        self._check_geometry(full_grid, full_block, shared_mem)
        cells, ranges = self._pack(args)
        pointers = (ctypes.c_void_p * max(1, len(cells)))(*[ctypes.addressof(cell) for cell in cells])
        table = (Range * max(1, len(ranges)))(*[Range(*r) for r in ranges])
        request = Request(
            invoke=self._invoke,
            args=ctypes.addressof(pointers),
            grid=full_grid,
            block=full_block,
            shared_bytes=shared_mem,
            dynamic_capacity=MAX_SHARED_BYTES,
            ranges=ctypes.addressof(table),
            num_ranges=len(ranges),
            is_checked=self.module.is_checked,
        )
        return request, [cells, pointers, table, list(args)]

    def _check_geometry(self, grid: Sequence[int], block: Sequence[int], shared_mem: int) -> None:
        for name, size, limits in (("grid", grid, MAX_GRID), ("block", block, MAX_BLOCK)):
            if not all(1 <= n <= limit for n, limit in zip(size, limits, strict=True)):
                raise KernelError(f"{self.name}: {name} is {tuple(size)}, must be from 1 to {limits}")
        most = self.module.launch_bounds.get(self.name.partition("<")[0], MAX_THREADS)
        if math.prod(block) > most:
            raise KernelError(f"{self.name}: a block of {math.prod(block)} threads, at most {most} are possible")
        limit = min(self.max_dynamic_shared_size_bytes, MAX_SHARED_BYTES)
        if not 0 <= shared_mem <= limit:
            raise KernelError(
                f"{self.name}: {shared_mem} bytes of dynamic shared memory, at most {limit} were asked for "
                "with max_dynamic_shared_size_bytes"
            )

    def _pack(self, args: Sequence[Any]) -> tuple[list[Any], list[tuple[int, int, int, int, int]]]:
        """A ctypes cell per argument, and the address range of each array."""
        if len(args) != len(self.parameters):
            raise TypeError(f"{self.name} takes {len(self.parameters)} arguments, not {len(args)}")
        cells: list[Any] = []
        ranges = []
        for i, (value, parameter) in enumerate(zip(args, self.parameters, strict=True)):
            if problem := mismatch(value, parameter):
                raise TypeError(f"{self.name}, argument {i}: {problem}")
            if value is None:
                cells.append(ctypes.c_void_p(0))
            elif isinstance(value, np.ndarray):
                begin, end = np.lib.array_utils.byte_bounds(value)
                cells.append(ctypes.c_void_p(value.ctypes.data))
                ranges.append((begin, end, value.itemsize, int(value.flags.writeable), i))
            else:
                cells.append(ctypes.create_string_buffer(value.tobytes(), parameter.num_bytes))
        return cells, ranges

    def _statistics(self) -> list[LineProfile]:
        pcs, kinds = (ctypes.c_uint32 * MAX_PROFILE_ROWS)(), (ctypes.c_int32 * MAX_PROFILE_ROWS)()
        values = (ctypes.c_uint64 * (5 * MAX_PROFILE_ROWS))()
        runtime = self.module.runtime
        count = runtime.cuda_host_statistics(pcs, kinds, values, ctypes.c_size_t(MAX_PROFILE_ROWS))
        sums: dict[tuple[str, str], list[int]] = {}
        for i in range(count):
            key = (self.module.locate(f"@{pcs[i]:x}"), ACCESSES[kinds[i]])
            sums[key] = [a + b for a, b in zip(sums.get(key, [0] * 5), values[5 * i : 5 * i + 5], strict=True)]
        return [LineProfile(*key, *numbers) for key, numbers in sorted(sums.items())]


def parse_parameter(line: str) -> Parameter:
    is_pointer, num_bytes, type_name = line.split(" ", 2)
    return Parameter(is_pointer == "1", int(num_bytes), type_name)


def mismatch(value: Any, parameter: Parameter) -> str | None:
    """What is wrong with an argument, or None."""
    known = DTYPES.get(parameter.type)
    wanted = f"{parameter.type}{'*' if parameter.is_pointer else ''}"
    if parameter.is_pointer:
        if value is None:
            return None
        if not isinstance(value, np.ndarray):
            return f"the kernel wants {wanted}; pass a NumPy array, or None for a null pointer"
        fits = value.dtype.name == known if known else parameter.num_bytes in (1, value.itemsize)
        return None if fits else f"the kernel wants {wanted}, got an array of {value.dtype.name}"
    if not isinstance(value, np.generic):
        return f"the kernel wants {wanted}; pass a NumPy scalar, not {type(value).__name__}"
    fits = value.dtype.name == known if known else value.itemsize == parameter.num_bytes
    return None if fits else f"the kernel wants {wanted}, got {value.dtype.name}"
