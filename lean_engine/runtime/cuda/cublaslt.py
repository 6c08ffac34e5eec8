"""cuBLASLt by ctypes: gemm with an algorithm of one's choice, in a workspace of one's own.

CuPy binds only cuBLAS, and refuses it while a stream is being captured. Here a handle and a workspace are made once;
the heuristic is asked, and each chosen algorithm has run once, before anything is captured. A captured call then does
no more than launch.

cuBLAS knows column-major matrices. Read so, row-major x [T, C] is [C, T], weight [O, C] is [C, O] and out [T, O] is
[O, T]; so out = x · weightᵀ is computed as outᵀ = weight · xᵀ, the product of A = weight, transposed, and B = x.

Sums are in float32, and where the depth is split the parts are float32 in the workspace, added in a separate step:
algorithms that add up in the output's type, which may be 16 bits, are not asked for. Values of enums are those of
cublasLt.h and library_types.h, the same in CUDA 12 and 13.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import ExitStack
from ctypes import byref, c_char_p, c_float, c_int, c_int32, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from lean_engine.errors import ConfigError, LaunchError
from lean_engine.runtime.cuda.gemm_kernels import Gemm, Problem
from lean_engine.runtime.cuda.libraries import library_paths

PACKAGES = "nvidia-cublas-cu12 (or nvidia-cublas for CUDA 13)"
WORKSPACE_BYTES = 32 << 20  # what cuBLAS itself takes on Hopper
WORKSPACE_ALIGNMENT = 256
ARRAY_ALIGNMENT = 16  # bytes at which arrays begin at least
NUM_ALGORITHMS = 8

CUDA_TYPES = {"float32": 0, "float16": 2, "bfloat16": 14}  # cudaDataType
COMPUTE_FLOAT32 = 68
OP_T = 1
EPILOGUE_BIAS = 4
REDUCE_IN_COMPUTE_TYPE = 2  # cublasLtReductionScheme_t; none at all is always allowed
STATUS_NOT_SUPPORTED = 15
# cublasLtMatmulDescAttributes_t
DESC_TRANSA, DESC_EPILOGUE, DESC_BIAS_POINTER = 3, 7, 8
# cublasLtMatmulPreferenceAttributes_t
PREF_MAX_WORKSPACE_BYTES, PREF_REDUCTION_SCHEME_MASK = 1, 3
PREF_ALIGNMENTS = (5, 6, 7, 8)  # of A, B, C, D


class AlgorithmData(ctypes.Structure):
    """cublasLtMatmulAlgo_t: opaque, and may be kept on disk for the same version of the library."""

    _fields_ = (("data", c_uint64 * 8),)


class HeuristicResult(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", AlgorithmData),
        ("workspace_bytes", c_size_t),
        ("status", c_int32),
        ("num_waves", c_float),
        ("reserved", c_int * 4),
    )


POINTER = c_void_p
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "cublasLtCreate": (POINTER,),
    "cublasLtDestroy": (POINTER,),
    "cublasLtMatmulDescCreate": (POINTER, c_int, c_int),
    "cublasLtMatmulDescDestroy": (POINTER,),
    "cublasLtMatmulDescSetAttribute": (POINTER, c_int, POINTER, c_size_t),
    "cublasLtMatrixLayoutCreate": (POINTER, c_int, c_uint64, c_uint64, c_int64),
    "cublasLtMatrixLayoutDestroy": (POINTER,),
    "cublasLtMatmulPreferenceCreate": (POINTER,),
    "cublasLtMatmulPreferenceDestroy": (POINTER,),
    "cublasLtMatmulPreferenceSetAttribute": (POINTER, c_int, POINTER, c_size_t),
    "cublasLtMatmulAlgoGetHeuristic": (*[POINTER] * 7, c_int, POINTER, POINTER),
    "cublasLtMatmul": (*[POINTER] * 14, c_size_t, POINTER),
}


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A configured algorithm, valid for one problem and one version of the library."""

    data: bytes
    workspace_bytes: int

    @property
    def name(self) -> str:
        return f"cublaslt {self.data.hex()} {self.workspace_bytes}"


@dataclass(frozen=True, slots=True)
class Addresses:
    """Of a gemm's arrays on the device, see gemm_kernels.Gemm; each a multiple of ARRAY_ALIGNMENT."""

    out: int
    x: int
    weight: int
    bias: int | None = None
    residual: int | None = None


@dataclass(frozen=True, slots=True)
class Matrices:
    """The descriptors of a problem."""

    product: c_void_p
    weight: c_void_p
    x: c_void_p
    out: c_void_p


class CublasLt:
    """A handle.

    Args:
        workspace: address of device memory, which lives as long as the graphs that captured a call.
        workspace_bytes: its size.
        library: path of libcublasLt; by default the first that library_paths finds.

    Attributes:
        version: of the library, 120904 for 12.9.4.

    Raises:
        ConfigError: there is no library, or it cannot be loaded.
        LaunchError: it finds no device, or the workspace is not aligned.
    """

    def __init__(
        self, workspace: int, workspace_bytes: int = WORKSPACE_BYTES, library: str | Path | None = None
    ) -> None:
        if workspace % WORKSPACE_ALIGNMENT:
            raise LaunchError(f"cuBLASLt: the workspace is at {workspace:#x}, must be at a multiple of 256")
        self.workspace, self.workspace_bytes = workspace, workspace_bytes
        self._library = load(library)
        self.version = int(self._library.cublasLtGetVersion())
        self._handle = c_void_p()
        self._call("cublasLtCreate", byref(self._handle))

    def algorithms(self, problem: Problem, max_count: int = NUM_ALGORITHMS) -> list[Algorithm]:
        """The algorithms that the heuristic takes for the fastest, its favourite first; none where none fits.

        Raises:
            LaunchError: the library fails otherwise.
        """
        if not is_supported(problem):
            return []
        results, count = (HeuristicResult * max_count)(), c_int()
        with ExitStack() as stack:
            m = self._matrices(stack, problem, bias=ARRAY_ALIGNMENT)  # read for its alignment only
            arguments = (self._handle, m.product, m.weight, m.x, m.out, m.out, self._preference(stack))
            status = self._library.cublasLtMatmulAlgoGetHeuristic(*arguments, max_count, results, byref(count))
        if status == STATUS_NOT_SUPPORTED:
            return []
        self._check(status, f"cublasLtMatmulAlgoGetHeuristic for {problem}")
        return [Algorithm(bytes(r.algorithm), r.workspace_bytes) for r in results[: count.value] if r.status == 0]

    def bind(self, problem: Problem, algorithm: Algorithm, addresses: Addresses) -> BoundMatmul:
        """A gemm over fixed addresses, to be run any number of times.

        Raises:
            LaunchError: an address is missing or not aligned, or the library refuses the problem.
        """
        check_addresses(problem, addresses)
        if not is_supported(problem):
            raise LaunchError(f"cuBLASLt computes no {problem}")
        if algorithm.workspace_bytes > self.workspace_bytes:
            raise LaunchError(
                f"cuBLASLt: the algorithm needs a workspace of {algorithm.workspace_bytes} bytes, "
                f"this one has {self.workspace_bytes}"
            )
        with ExitStack() as stack:
            m = self._matrices(stack, problem, addresses.bias)
            alpha, beta = c_float(1), c_float(addresses.residual is not None)
            data = AlgorithmData.from_buffer_copy(algorithm.data)
            source = addresses.out if addresses.residual is None else addresses.residual
            matmul = partial(
                self._library.cublasLtMatmul, self._handle, m.product, byref(alpha), addresses.weight, m.weight,
                addresses.x, m.x, byref(beta), source, m.out, addresses.out, m.out, byref(data), self.workspace,
                self.workspace_bytes,
            )  # fmt: skip
            check = partial(self._check, call=f"cublasLtMatmul for {problem}")
            return BoundMatmul(matmul, check, stack.pop_all())

    def multiply(self, gemm: Gemm, algorithm: Algorithm, stream: int) -> None:
        """Launch one gemm. A capture keeps what it needs of it, but for the arrays.

        Raises:
            LaunchError: as bind, or the library refuses the launch.
        """
        with self.bind(gemm.problem, algorithm, addresses_of(gemm)) as run:
            run(stream)

    def close(self) -> None:
        """Give the handle back; what was bound must not run any more."""
        if self._handle:
            self._call("cublasLtDestroy", self._handle)
            self._handle = c_void_p()

    def _matrices(self, stack: ExitStack, problem: Problem, bias: int | None) -> Matrices:
        """Descriptors that live as long as the stack."""
        product = self._create(stack, "MatmulDesc", COMPUTE_FLOAT32, CUDA_TYPES["float32"])
        self._set(product, "MatmulDesc", DESC_TRANSA, c_int32(OP_T))
        if problem.has_bias:
            self._set(product, "MatmulDesc", DESC_EPILOGUE, c_uint32(EPILOGUE_BIAS))
            self._set(product, "MatmulDesc", DESC_BIAS_POINTER, c_void_p(bias))
        real, result = CUDA_TYPES[problem.dtype], CUDA_TYPES[problem.out_dtype]
        depth, num_out, num_rows = problem.depth, problem.num_out, problem.num_rows
        weight = self._create(stack, "MatrixLayout", real, depth, num_out, depth)
        x = self._create(stack, "MatrixLayout", real, depth, num_rows, depth)
        return Matrices(product, weight, x, self._create(stack, "MatrixLayout", result, num_out, num_rows, num_out))

    def _preference(self, stack: ExitStack) -> c_void_p:
        preference = self._create(stack, "MatmulPreference")
        self._set(preference, "MatmulPreference", PREF_MAX_WORKSPACE_BYTES, c_uint64(self.workspace_bytes))
        self._set(preference, "MatmulPreference", PREF_REDUCTION_SCHEME_MASK, c_uint32(REDUCE_IN_COMPUTE_TYPE))
        for attribute in PREF_ALIGNMENTS:
            self._set(preference, "MatmulPreference", attribute, c_uint32(ARRAY_ALIGNMENT))
        return preference

    def _create(self, stack: ExitStack, kind: str, *args: int) -> c_void_p:
        made = c_void_p()
        self._call(f"cublasLt{kind}Create", byref(made), *args)
        stack.callback(self._call, f"cublasLt{kind}Destroy", made)
        return made

    def _set(self, target: c_void_p, kind: str, attribute: int, value: Any) -> None:
        self._call(f"cublasLt{kind}SetAttribute", target, attribute, byref(value), ctypes.sizeof(value))

    def _call(self, name: str, *args: Any) -> None:
        self._check(getattr(self._library, name)(*args), name)

    def _check(self, status: int, call: str) -> None:
        if status:
            name = self._library.cublasLtGetStatusName(status)
            raise LaunchError(f"{call} failed: {name.decode() if name else 'unknown status'} ({status})")


class BoundMatmul:
    """A gemm over fixed addresses. It holds what its launches point to until it is closed."""

    def __init__(self, matmul: Callable[[c_void_p], int], check: Callable[[int], None], owned: ExitStack) -> None:
        self._matmul, self._check, self._owned = matmul, check, owned

    def __call__(self, stream: int) -> None:
        """Launch on a stream, by its cudaStream_t. LaunchError if the library refuses."""
        self._check(self._matmul(c_void_p(stream)))

    def close(self) -> None:
        self._owned.close()

    def __enter__(self) -> BoundMatmul:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def is_supported(problem: Problem) -> bool:
    """Whether cuBLASLt may have algorithms: none has a gated activation, or a bias of another type than the result."""
    return (
        problem.activation is None
        and not (problem.has_bias and problem.out_dtype != problem.dtype)
        and (not problem.has_residual or problem.out_dtype == problem.dtype)
    )


def check_addresses(problem: Problem, addresses: Addresses) -> None:
    if (addresses.bias is not None, addresses.residual is not None) != (problem.has_bias, problem.has_residual):
        raise LaunchError(f"cuBLASLt: bias and residual of {addresses} are not those of {problem}")
    for name in Addresses.__slots__:
        if (address := getattr(addresses, name)) is not None and address % ARRAY_ALIGNMENT:
            raise LaunchError(f"cuBLASLt: {name} is at {address:#x}, must be at a multiple of {ARRAY_ALIGNMENT}")


def addresses_of(gemm: Gemm) -> Addresses:
    """The addresses of a gemm over device arrays (device_array.py)."""
    arrays: dict[str, Any] = {name: getattr(gemm, name) for name in Addresses.__slots__}
    addresses: dict[str, Any] = {name: None if array is None else array.address for name, array in arrays.items()}
    return Addresses(**addresses)


def load(library: str | Path | None) -> ctypes.CDLL:
    path = next(library_paths("cublasLt"), None) if library is None else library
    if path is None:
        raise ConfigError(f"cuBLASLt, the library of matrix products, is not installed; pip install {PACKAGES}")
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise ConfigError(f"{path} cannot be loaded: {error}") from None
    for name, types in ARGUMENTS.items():
        getattr(loaded, name).argtypes = types
    loaded.cublasLtGetVersion.restype = c_size_t
    loaded.cublasLtGetStatusName.restype = c_char_p
    return loaded
