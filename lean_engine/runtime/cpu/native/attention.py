"""paged_attention by cpu/attention.c: a step's plan, once for all layers of a geometry, and their launches.

Where there are AMX tiles, another kernel takes its place (cpu/attention_tiles.c): if products are to be bfloat16's,
paged_attention_bf16, for all requests of a step alike; else paged_attention_parts, whose products are exact too, for
requests of many rows.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from lean_engine.errors import LaunchError
from lean_engine.runtime.cpu.native.launches import NativeKernel, NativeLaunch, Pointer, Scope, Shape, address
from lean_engine.runtime.cpu.native.rope_cache import cache_type
from lean_engine.runtime.device import Array, LaunchArgs

# As in cpu/attention.c.
STRETCH = 256  # keys
MIN_TILE = 24  # rows of a full tile at least
FEW_TILES = 32
FEW_ROWS = 192
MAX_HEAD_DIM = 256
MAX_LARGE_TILE = 384  # rows of a tile of AMX kernels
LARGE_TILE_ELEMENTS = 24576
UNIT = 32  # elements that head_dim is padded to there
MIN_LARGE_TILE = 96
MAX_FMA_ROWS = FEW_ROWS  # of a request and KV head: fewer are faster by multiply-adds than split
ALL_ROWS = 1 << 62
TILES_PER_THREAD = 4
ITEM_FIELDS = 8  # int32 each

LOG2_E = math.log2(math.e)
Int, Float = ctypes.c_int64, ctypes.c_float


class PlanAttentionArgs(ctypes.Structure):
    _fields_ = (
        *((name, Pointer) for name in ("cu_seqlens_q", "seq_lens", "counts", "items", "merges")),
        *((name, Int) for name in ("num_tokens", "num_requests", "num_kv_heads", "group", "head_dim", "window")),
        *((name, Int) for name in ("few_rows", "tile_rows")),
    )


class PagedAttentionArgs(ctypes.Structure):
    _fields_ = (
        *((name, Pointer) for name in ("q", "k_cache", "v_cache", "block_tables", "cu_seqlens_q", "seq_lens")),
        *((name, Pointer) for name in ("counts", "items", "merges", "partials", "out")),
        *((name, Int) for name in ("num_kv_heads", "group", "head_dim", "block_size", "max_blocks", "window")),
        *((name, Int) for name in ("cache_type", "few_rows")),
        *((name, Float) for name in ("scale", "cap")),
    )


ARGUMENTS: tuple[type[ctypes.Structure], ...] = (PlanAttentionArgs, PagedAttentionArgs)


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """What a step's attention is cut into: written by plan_attention, read by the launches of each layer."""

    counts: Array  # [2]: items, merges
    items: Array  # [max, ITEM_FIELDS]
    merges: Array  # [FEW_TILES, ITEM_FIELDS]
    addresses: tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Way:
    """Which kernel a step's attention takes, and how it cuts a request's rows into tiles."""

    kernel: str
    few_rows: int  # so many or fewer of a request and KV head are cut as paged_attention has them
    tile_rows: int  # of the others, at most

    @classmethod
    def choose(cls, scope: Scope, rows: tuple[int, int, int], head_dim: int, scale: float) -> Way:
        """rows: T, K, query heads per KV head."""
        num_tokens, num_kv_heads, group = rows
        if scale > 0 and has_tiles(scope):
            tile_rows = large_tile(num_tokens * num_kv_heads * group, head_dim, scope.num_threads)
            if scope.precision.products == "bfloat16":
                return cls("paged_attention_bf16", 0, tile_rows)
            if num_tokens * group > MAX_FMA_ROWS and not scope.precision.is_batch_invariant:
                return cls("paged_attention_parts", MAX_FMA_ROWS, tile_rows)
        return cls("paged_attention", ALL_ROWS, 1)


def plan(
    scope: Scope, cu_seqlens: Array, seq_lens: Array, sizes: tuple[int, int, int, int, int], way: Way, max_length: int
) -> Plan:
    """sizes: T, K, query heads per KV head, D, window (0 = all)."""

    def make() -> tuple[Plan, list[NativeLaunch]]:
        num_tokens, num_kv_heads, group, head_dim, window = sizes
        num_requests = len(seq_lens)
        whole = num_kv_heads * (num_tokens * group // MIN_TILE + num_requests)
        max_items = max(whole, FEW_TILES * num_stretches(max_length)) + num_requests + 1  # and those of padding
        counts = np.zeros(2, np.int64)
        items = np.zeros((max_items, ITEM_FIELDS), np.int32)
        merges = np.zeros((FEW_TILES, ITEM_FIELDS), np.int32)
        addresses = address(counts), address(items), address(merges)
        fields = PlanAttentionArgs(
            *(address(cu_seqlens), address(seq_lens), *addresses),
            *(num_tokens, num_requests, num_kv_heads, group, head_dim, window, way.few_rows, way.tile_rows),
        )
        made = Plan(counts, items, merges, addresses)
        return made, [NativeLaunch("plan_attention", fields, 1, keeps=(made,))]

    return scope.once_per_step(("plan_attention", address(seq_lens), len(seq_lens), sizes, way), make)


def num_stretches(max_length: int) -> int:
    """Stretches that a context of max_length keys spans at most."""
    return -(-max_length // STRETCH)


def partial_floats(head_dim: int, max_length: int) -> int:
    """Elements of the partial results of few rows, one per row and stretch: maximum, sum, weighted values."""
    return FEW_ROWS * num_stretches(max_length) * (head_dim + 2)


def paged_attention_workspace(shapes: Sequence[Shape], scalars: Mapping[str, Any], num_threads: int) -> int:
    _, _, block_size, head_dim = shapes[1]
    return 4 * partial_floats(head_dim, shapes[3][1] * block_size)


def paged_attention(scope: Scope, args: LaunchArgs) -> list[NativeLaunch]:
    """Two launches: the plan's items, and, where few rows have long contexts, the merge of their parts.

    Raises:
        LaunchError: heads are larger than the kernel's scratch.
    """
    q, k_cache, _, tables, cu_seqlens, seq_lens = args.inputs
    _, num_kv_heads, block_size, head_dim = k_cache.shape
    if head_dim > MAX_HEAD_DIM:
        raise LaunchError(f"paged_attention: head_dim is {head_dim}, must be at most {MAX_HEAD_DIM}")
    num_tokens, columns = q.shape
    max_blocks = tables.shape[1]
    group = columns // head_dim // num_kv_heads
    window = int(args.scalars["window"] or 0)
    sizes = num_tokens, num_kv_heads, group, head_dim, window
    scale = float(args.scalars["scale"])
    way = Way.choose(scope, (num_tokens, num_kv_heads, group), head_dim, scale)
    made = plan(scope, cu_seqlens, seq_lens, sizes, way, max_blocks * block_size)
    fields = PagedAttentionArgs(
        *map(address, args.inputs),
        *(*made.addresses, address(args.workspace), address(args.outputs[0])),
        *(num_kv_heads, group, head_dim, block_size, max_blocks, window, cache_type(k_cache), way.few_rows),
        *powers_of_two(scale, args.scalars["softcap"]),
    )
    return [
        NativeLaunch(way.kernel, fields, 0, "count_attention", (made,)),
        NativeLaunch("merge_attention", fields, 0, "count_attention_merges", (made,)),
    ]


def has_tiles(scope: Scope) -> bool:
    """Whether kernels on AMX tiles can run: the processor has them, and the system grants them."""
    return scope.constant("has_attention_tiles", lambda: bool(scope.library.function("has_attention_tiles", Int)()))


def large_tile(num_rows: int, head_dim: int, num_threads: int) -> int:
    """Rows of a tile of AMX kernels at most: many share the prepared keys, but all threads should have tiles.

    A row's result does not depend on it.
    """
    most = min(MAX_LARGE_TILE, LARGE_TILE_ELEMENTS // (-(-head_dim // UNIT) * UNIT))
    share = num_rows // (TILES_PER_THREAD * num_threads)
    return min(most, max(MIN_LARGE_TILE, share)) // UNIT * UNIT


def powers_of_two(scale: float, softcap: float | None) -> tuple[float, float]:
    """The kernel's scale and cap: it takes powers of 2 where softmax has powers of e, and divides by no cap."""
    return (scale * LOG2_E, 0.0) if softcap is None else (scale / float(softcap), float(softcap) * LOG2_E)


KERNELS = {"paged_attention": NativeKernel(paged_attention, paged_attention_workspace)}
