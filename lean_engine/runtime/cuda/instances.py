"""The table of CUDA kernels: which instantiation a launch takes, its grid and block, its arguments.

One place for the launcher of the CUDA device, for the emulated one, and for what is listed and checked without a GPU.
Everything here follows from shapes, dtypes and scalars, so it is decided once, when a launch is captured, and a graph
for a padded number of tokens needs no other grid. Arguments follow the C++ parameters: outputs, inputs, scalars, sizes.
Arrays begin at 16-byte boundaries, as a device's allocate and the memory plan make them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from lean_engine.dtypes import DTYPES
from lean_engine.errors import LaunchError
from lean_engine.runtime.device import Array, LaunchArgs

REAL_DTYPES = ("float16", "bfloat16")  # element types of models
ARCHITECTURES = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")  # what is compiled and checked
ARCHITECTURES_WITHOUT_BFLOAT16 = ("sm_75",)

WARP = 32
PART_THREADS = 128  # of kernels that take rows in parts, as their __launch_bounds__ say
NORM_THREADS = 1024
NORM_ROWS_PER_BLOCK = 4  # where a row is one warp's
NORM_TIMES = {8: (1, 2), 1: (8,)}  # vector width → vectors that a thread may take
HEAD_LANES = {4: 64, 8: 128, 16: 256}  # threads that share a head → the largest head_dim they do, by vectors
MAX_HEAD_DIM = 256

TemplateArguments = tuple[int | str, ...]  # those behind the element type


@dataclass(frozen=True, slots=True, order=True)
class Instance:
    """One instantiation of a kernel template."""

    source: str  # file in cuda/
    expression: str  # "rms_norm<half, 8, 1>"


@dataclass(frozen=True, slots=True, eq=False)
class KernelCall:
    """One launch on a device."""

    instance: Instance
    grid: tuple[int, ...]
    block: tuple[int, ...]
    args: tuple[Any, ...]  # arrays, NumPy scalars of the parameters' types, None for a null pointer
    shared_bytes: int = 0  # dynamic shared memory


@dataclass(frozen=True, slots=True)
class Choice:
    """What an entry makes of a launch."""

    arguments: TemplateArguments
    grid: tuple[int, ...]
    block: tuple[int, ...]
    args: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    source: str
    arguments: tuple[TemplateArguments, ...]  # all that choose can give
    choose: Callable[[LaunchArgs], Choice]
    dtypes: tuple[str, ...] = REAL_DTYPES  # of the first output


def kernel_calls(launch: LaunchArgs) -> list[KernelCall]:
    """What a launch of the kernel table is on a CUDA device, to be run in order.

    Raises:
        LaunchError: no instantiation fits the shapes.
    """
    entry = ENTRIES[launch.kernel]
    choice = entry.choose(launch)
    name = expression(launch.kernel, launch.outputs[0].dtype.name, choice.arguments)
    return [KernelCall(Instance(entry.source, name), choice.grid, choice.block, choice.args)]


def instances(dtype: str) -> list[Instance]:
    """Every instantiation whose element type this is, sorted."""
    return sorted(
        Instance(entry.source, expression(kernel, dtype, arguments))
        for kernel, entry in ENTRIES.items()
        if dtype in entry.dtypes
        for arguments in entry.arguments
    )


def instances_for(arch: str) -> list[Instance]:
    """Every instantiation that an architecture can need, sorted."""
    missing = {"bfloat16"} if arch in ARCHITECTURES_WITHOUT_BFLOAT16 else set()
    return sorted(i for dtype in {*REAL_DTYPES, "float32"} - missing for i in instances(dtype))


def expression(kernel: str, dtype: str, arguments: TemplateArguments) -> str:
    return f"{kernel}<{', '.join([DTYPES[dtype].cuda, *map(str, arguments)])}>"


# ---- geometry


def vector_width(array: Array, *columns: int) -> int:
    """Elements that one access moves: 16 bytes of them if all these numbers of columns are multiples, else one."""
    width = 16 // array.dtype.itemsize
    return width if all(count % width == 0 for count in columns) else 1


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def row_parts(num_rows: int, num_threads: int) -> tuple[tuple[int, int], tuple[int]]:
    """Grid (rows, parts of a row) and block, for so many threads a row."""
    block = min(PART_THREADS, ceil_div(num_threads, WARP) * WARP)
    return (num_rows, ceil_div(num_threads, block)), (block,)


def offset_of(launch: LaunchArgs) -> np.float32:
    """What is added to a norm's weight."""
    return np.float32(1 if launch.scalars["unit_offset"] else 0)


def i32(*values: int) -> tuple[np.int32, ...]:
    return tuple(np.int32(value) for value in values)


# ---- gather.cu


def embedding(launch: LaunchArgs) -> Choice:
    ids, table = launch.inputs
    (out,) = launch.outputs
    num_rows, columns = table.shape
    width = vector_width(out, columns)
    args = (out, ids, table, launch.scalars["scale"], *i32(columns, num_rows))
    return Choice((width,), *row_parts(len(out), columns // width), args)


def gather_rows(launch: LaunchArgs) -> Choice:
    x, rows = launch.inputs
    (out,) = launch.outputs
    num_rows, columns = x.shape
    width = vector_width(out, columns)
    return Choice((width,), *row_parts(len(out), columns // width), (out, x, rows, *i32(columns, num_rows)))


def slice_columns(launch: LaunchArgs) -> Choice:
    (x,), (out,) = launch.inputs, launch.outputs
    start, columns = int(launch.scalars["start"]), out.shape[1]
    width = vector_width(out, start, columns, x.shape[1])
    return Choice((width,), *row_parts(len(out), columns // width), (out, x, *i32(start, x.shape[1], columns)))


# ---- norm.cu


def norm(launch: LaunchArgs) -> Choice:
    """rms_norm of rows or of their heads, and add_rms_norm."""
    columns = len(launch.inputs[-1])
    num_rows = launch.inputs[0].size // columns
    width = vector_width(launch.outputs[0], columns)
    num_vectors = columns // width
    times = next((n for n in NORM_TIMES[width] if num_vectors <= n * NORM_THREADS), None)
    if times is None:
        limit = width * NORM_TIMES[width][-1] * NORM_THREADS
        raise LaunchError(f"{launch.kernel}: rows of {columns} columns, at most {limit} can be normed on a CUDA device")
    threads = ceil_div(ceil_div(num_vectors, times), WARP) * WARP
    rows = NORM_ROWS_PER_BLOCK if threads == WARP else 1
    args = (*launch.outputs, *launch.inputs, launch.scalars["eps"], offset_of(launch), *i32(num_rows, columns))
    return Choice((width, times), (ceil_div(num_rows, rows),), (threads, rows), args)


NORM_ARGUMENTS = tuple((width, times) for width, choices in NORM_TIMES.items() for times in choices)


# ---- rope_cache.cu


def pair_width(array: Array, head_dim: int, rotary_dim: int) -> int:
    """vector_width for kernels that turn pairs of columns."""
    return vector_width(array, rotary_dim // 2, (head_dim - rotary_dim) // 2)


def rope(launch: LaunchArgs) -> Choice:
    x, positions, table = launch.inputs
    (out,) = launch.outputs
    head_dim, columns = int(launch.scalars["head_dim"]), x.shape[1]
    num_positions, rotary_dim = table.shape
    width = pair_width(out, head_dim, rotary_dim)
    args = (out, x, positions, table, *i32(columns, head_dim, rotary_dim, num_positions))
    return Choice((width,), *row_parts(len(out), columns // (2 * width)), args)


def write_kv(launch: LaunchArgs) -> Choice:
    k, v, slots, k_cache, v_cache = launch.inputs
    _num_blocks, num_heads, block_size, head_dim = k_cache.shape
    width = vector_width(k, head_dim)
    args = (k_cache, v_cache, k, v, slots, *i32(num_heads, head_dim, block_size))
    return Choice((width,), *row_parts(len(k), num_heads * head_dim // width), args)


def qk_norm_rope_write_kv(launch: LaunchArgs) -> Choice:
    qkv, positions, slots, table, k_cache, v_cache = launch.inputs[:6]
    norms = tuple(launch.inputs[6:]) or (None, None)
    q = launch.outputs[0]
    num_q, num_kv, head_dim = (int(launch.scalars[name]) for name in ("num_q_heads", "num_kv_heads", "head_dim"))
    if head_dim > MAX_HEAD_DIM:
        raise LaunchError(f"{launch.kernel}: head_dim is {head_dim}, on a CUDA device at most {MAX_HEAD_DIM}")
    num_positions, rotary_dim = table.shape
    width = pair_width(q, head_dim, rotary_dim)
    lanes = WARP if width == 1 else next(n for n, largest in HEAD_LANES.items() if head_dim <= largest)
    sizes = i32(num_q, num_kv, head_dim, rotary_dim, num_positions, k_cache.shape[2])
    args = (q, k_cache, v_cache, qkv, positions, slots, table, *norms)
    args += (launch.scalars["eps"], offset_of(launch), *sizes)
    return Choice((width, lanes), *row_parts(len(qkv), (num_q + 2 * num_kv) * lanes), args)


# ---- elementwise.cu


def act_and_mul(launch: LaunchArgs) -> Choice:
    (gate_up,), (out,) = launch.inputs, launch.outputs
    columns = out.shape[1]
    width = vector_width(out, columns)
    name = ACTIVATIONS[launch.scalars["activation"]]
    return Choice((width, name), *row_parts(len(out), columns // width), (out, gate_up, *i32(columns)))


def elementwise(launch: LaunchArgs) -> Choice:
    (out,) = launch.outputs
    blocks = ceil_div(out.size, vector_width(out) * PART_THREADS)
    args = (out, *launch.inputs, *launch.scalars.values(), np.int64(out.size))
    return Choice((), (blocks,), (PART_THREADS,), args)


ACTIVATIONS = {"silu": "Silu", "gelu_tanh": "GeluTanh"}  # scalar's value → functor in elementwise.cu
WIDTHS: tuple[TemplateArguments, ...] = ((8,), (1,))
ENTRIES = {
    "embedding": Entry("gather.cu", WIDTHS, embedding),
    "gather_rows": Entry("gather.cu", WIDTHS, gather_rows),
    "slice_columns": Entry("gather.cu", WIDTHS, slice_columns),
    "rms_norm": Entry("norm.cu", NORM_ARGUMENTS, norm),
    "add_rms_norm": Entry("norm.cu", NORM_ARGUMENTS, norm),
    "rope": Entry("rope_cache.cu", WIDTHS, rope),
    "write_kv": Entry("rope_cache.cu", WIDTHS, write_kv),
    "qk_norm_rope_write_kv": Entry(
        "rope_cache.cu", (*((8, lanes) for lanes in HEAD_LANES), (1, WARP)), qk_norm_rope_write_kv
    ),
    "act_and_mul": Entry(
        "elementwise.cu", tuple((w, name) for w in (8, 1) for name in ACTIVATIONS.values()), act_and_mul
    ),
    "silu": Entry("elementwise.cu", ((),), elementwise),
    "gelu_tanh": Entry("elementwise.cu", ((),), elementwise),
    "add": Entry("elementwise.cu", ((),), elementwise),
    "mul": Entry("elementwise.cu", ((),), elementwise),
    "softcap": Entry("elementwise.cu", ((),), elementwise, (*REAL_DTYPES, "float32")),  # logits are float32
}
