"""Kernels of cpu/rope_cache.c: head norms, RoPE, and K and V into their cache slots."""

from __future__ import annotations

import ctypes

from lean_engine.errors import LaunchError
from lean_engine.runtime.cpu.native.launches import NativeKernel, NativeLaunch, Pointer, Scope, address
from lean_engine.runtime.device import Array, LaunchArgs

TASK_ELEMENTS = 1 << 14  # of a task: some 10 µs of work
MAX_HEAD_DIM = 1024
CACHE_TYPES = {"float32": 0, "bfloat16": 1, "float16": 2}  # as in cpu/kv_types.h
Int, Float = ctypes.c_int64, ctypes.c_float


class RopeArgs(ctypes.Structure):
    _fields_ = (
        *((name, Pointer) for name in ("x", "positions", "table", "out")),
        *((name, Int) for name in ("num_tokens", "num_heads", "head_dim", "table_width", "max_positions")),
        ("tokens_per_task", Int),
    )


class WriteKvArgs(ctypes.Structure):
    _fields_ = (
        *((name, Pointer) for name in ("k", "v", "slots", "k_cache", "v_cache")),
        *((name, Int) for name in ("num_tokens", "num_kv_heads", "block_size", "head_dim", "cache_type")),
        ("tokens_per_task", Int),
    )


class QkNormRopeWriteKvArgs(ctypes.Structure):
    _fields_ = (
        *((name, Pointer) for name in ("qkv", "positions", "slots", "table", "q_norm", "k_norm")),
        *((name, Pointer) for name in ("q", "k_cache", "v_cache")),
        *((name, Int) for name in ("num_tokens", "num_q_heads", "num_kv_heads", "head_dim", "block_size")),
        *((name, Int) for name in ("cache_type", "table_width", "max_positions", "tokens_per_task")),
        *((name, Float) for name in ("eps", "offset")),
    )


ARGUMENTS: tuple[type[ctypes.Structure], ...] = (RopeArgs, WriteKvArgs, QkNormRopeWriteKvArgs)


def cache_type(cache: Array) -> int:
    return CACHE_TYPES[cache.dtype.name]


def share(num_tokens: int, columns: int) -> tuple[int, int]:
    """Tokens per task, and tasks."""
    per_task = max(1, TASK_ELEMENTS // columns)
    return per_task, -(-num_tokens // per_task)


def rope(scope: Scope, args: LaunchArgs) -> list[NativeLaunch]:
    x, positions, table = args.inputs
    num_tokens, columns = x.shape
    head_dim = int(args.scalars["head_dim"])
    max_positions, width = table.shape
    per_task, count = share(num_tokens, columns)
    fields = RopeArgs(
        *(address(x), address(positions), address(table), address(args.outputs[0])),
        *(num_tokens, columns // head_dim, head_dim, width, max_positions, per_task),
    )
    return [NativeLaunch("rope", fields, count)]


def write_kv(scope: Scope, args: LaunchArgs) -> list[NativeLaunch]:
    k, _, _, k_cache, _ = args.inputs
    num_tokens, columns = k.shape
    _, num_heads, block_size, head_dim = k_cache.shape
    per_task, count = share(num_tokens, 2 * columns)
    fields = WriteKvArgs(
        *map(address, args.inputs), num_tokens, num_heads, block_size, head_dim, cache_type(k_cache), per_task
    )
    return [NativeLaunch("write_kv", fields, count)]


def qk_norm_rope_write_kv(scope: Scope, args: LaunchArgs) -> list[NativeLaunch]:
    """q, k and v of each token: q and k normed where there are weights, and turned; k and v to their slots.

    Raises:
        LaunchError: heads are larger than the kernel's scratch.
    """
    qkv, positions, slots, table, k_cache, v_cache, *norms = args.inputs
    num_tokens, columns = qkv.shape
    _, num_kv_heads, block_size, head_dim = k_cache.shape
    if head_dim > MAX_HEAD_DIM:
        raise LaunchError(f"{args.kernel}: head_dim is {head_dim}, must be at most {MAX_HEAD_DIM}")
    max_positions, width = table.shape
    per_task, count = share(num_tokens, columns)
    scalars = args.scalars
    fields = QkNormRopeWriteKvArgs(
        *(address(qkv), address(positions), address(slots), address(table), *map(address, norms or (None, None))),
        *(address(args.outputs[0]), address(k_cache), address(v_cache)),
        *(num_tokens, int(scalars["num_q_heads"]), num_kv_heads, head_dim, block_size, cache_type(k_cache)),
        *(width, max_positions, per_task, scalars["eps"], float(scalars["unit_offset"])),
    )
    return [NativeLaunch("qk_norm_rope_write_kv", fields, count)]


KERNELS = {
    "rope": NativeKernel(rope),
    "write_kv": NativeKernel(write_kv),
    "qk_norm_rope_write_kv": NativeKernel(qk_norm_rope_write_kv),
}
