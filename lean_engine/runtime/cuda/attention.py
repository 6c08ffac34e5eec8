"""The launches of paged_attention.cu: tile shapes by architecture and head_dim, scratch, calls.

A step has one plan per sliding window (and one without), made by plan_call before the first layer that needs it; then
every layer is one call for narrow tiles and, where the step may have prompt chunks, one for wide ones. Grids depend on
the GPU alone, so a graph for a padded number of tokens serves every mix of requests.

A device allocates, once: a list per tile shape and window (plan_words), which lives as long as the graphs that hold its
address; the parts of units that are cut, shared by all layers (parts_bytes); the counters (num_counters), zeroed once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from lean_engine.dtypes import DTYPES
from lean_engine.errors import LaunchError
from lean_engine.runtime.cuda.instances import ARCHITECTURES_WITHOUT_BFLOAT16, REAL_DTYPES, Instance, KernelCall
from lean_engine.runtime.device import Array, LaunchArgs

SOURCE = "paged_attention.cu"
HEAD_DIMS = (64, 80, 96, 128, 256)
BLOCK_SIZES = (16, 32)
MAX_GROUP = 16  # query heads per KV head

NARROW_ROWS, WIDE_ROWS = 16, 64
WIDE_WARPS = 4
PLAN_THREADS = 256
PLAN_RECORD_WORDS = 8
MAX_PLAN_SHARED_BYTES = 48 * 1024  # what a launch may have without asking
ALL_ROWS = 2**31 - 1
NO_WINDOW = 2**30

# Shared memory of an SM in KiB, all of it and what one block may have. Others have at least SMALLEST_SHARED_KIB.
SMALLEST_SHARED_KIB = (100, 99)
SHARED_KIB = {
    "sm_75": (64, 64),
    "sm_80": (164, 163),
    "sm_86": (100, 99),
    "sm_89": (100, 99),
    "sm_90": (228, 227),
    "sm_100": (228, 227),
    "sm_120": (100, 99),
}
# Shared memory of an SM → head_dim → (keys of a tile, stages, blocks per SM). Rows are padded, so a stage is
# keys * 2 * (2 * head_dim + 16) bytes; more stages than the latency of memory needs are of no use.
NARROW = {
    228: {64: (64, 4, 2), 80: (64, 4, 2), 96: (64, 4, 2), 128: (64, 3, 2), 256: (64, 3, 1)},
    164: {64: (64, 4, 2), 80: (64, 3, 2), 96: (64, 3, 2), 128: (64, 2, 2), 256: (64, 2, 1)},
    100: {64: (64, 2, 2), 80: (64, 2, 2), 96: (64, 3, 1), 128: (64, 2, 1), 256: (32, 2, 1)},
    64: {64: (64, 2, 1), 80: (64, 2, 1), 96: (64, 2, 1), 128: (32, 2, 1), 256: (16, 2, 1)},
}
# At head_dim 256 a tile of 64 keys leaves too few registers.
WIDE = {
    228: {**NARROW[228], 256: (32, 3, 2)},
    164: {**NARROW[164], 256: (32, 2, 2)},
    100: {**NARROW[100], 256: (32, 2, 1)},
    64: {d: shape for d, shape in NARROW[64].items() if d < 256},  # 256 does not fit: all rows are narrow there
}


@dataclass(frozen=True, slots=True)
class TileShape:
    """One instantiation's tiles."""

    head_dim: int
    rows: int
    keys: int
    stages: int
    blocks_per_sm: int

    @property
    def num_threads(self) -> int:
        return 32 * (self.keys // 16 if self.rows == NARROW_ROWS else WIDE_WARPS)

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory: stages of keys and values, or float32 results of every warp's 16 rows."""
        padded = self.head_dim + 8
        return max(self.stages * 2 * self.keys * padded * 2, self.num_threads // 2 * padded * 4)

    def instance(self, dtype: str) -> Instance:
        sizes = f"{self.head_dim}, {self.rows}, {self.keys}, {self.stages}"
        return Instance(SOURCE, f"paged_attention<{DTYPES[dtype].cuda}, {sizes}>")


def tile_shape(arch: str, head_dim: int, rows: int) -> TileShape | None:
    """The shape of narrow or wide tiles (rows 16 or 64); None where wide ones do not fit.

    Raises:
        LaunchError: there is none for this head_dim.
    """
    if head_dim not in HEAD_DIMS:
        known = ", ".join(map(str, HEAD_DIMS))
        raise LaunchError(f"paged_attention: head_dim is {head_dim}, on a CUDA device it must be one of {known}")
    table = (NARROW if rows == NARROW_ROWS else WIDE)[SHARED_KIB.get(arch, SMALLEST_SHARED_KIB)[0]]
    return TileShape(head_dim, rows, *table[head_dim]) if head_dim in table else None


def tile_shapes(arch: str, head_dim: int) -> list[TileShape]:
    """All that a model can need: narrow, and wide where there is one."""
    shapes = (tile_shape(arch, head_dim, rows) for rows in (NARROW_ROWS, WIDE_ROWS))
    return [shape for shape in shapes if shape is not None]


PLAN = Instance("plan_attention.cu", "plan_attention")


def attention_instances(
    arch: str, dtypes: Iterable[str] = REAL_DTYPES, head_dims: Iterable[int] = HEAD_DIMS
) -> list[Instance]:
    """Every instantiation for these models on an architecture, sorted; by default all that are supported."""
    missing = ("bfloat16",) if arch in ARCHITECTURES_WITHOUT_BFLOAT16 else ()
    shapes = [shape for head_dim in head_dims for shape in tile_shapes(arch, head_dim)]
    return sorted([PLAN, *(shape.instance(dtype) for shape in shapes for dtype in dtypes if dtype not in missing)])


# ---- scratch


def num_counters(arch: str, head_dim: int, num_sms: int) -> int:
    """uint32 counters of a device, as many as the largest grid has blocks; zero before the first launch."""
    return max(num_sms * shape.blocks_per_sm for shape in tile_shapes(arch, head_dim))


def parts_bytes(arch: str, head_dim: int, num_sms: int) -> int:
    """float32 parts of the units that blocks share: two per block, each rows of values and their softmax."""
    return max(
        2 * num_sms * shape.blocks_per_sm * shape.rows * (head_dim + 2) * 4 for shape in tile_shapes(arch, head_dim)
    )


def plan_words(rows: int, num_tokens: int, num_requests: int, group: int) -> int:
    """int32 words of the list for tiles of so many rows, in a step of at most this size."""
    num_tiles = num_tokens * group // rows + min(num_tokens, num_requests + 1)
    return PLAN_RECORD_WORDS * (1 + num_tiles + 1)


# ---- calls


@dataclass(frozen=True, slots=True, eq=False)
class AttentionPlan:
    """The arrays of a step's lists for one window."""

    narrow: Array  # int32 [plan_words]
    wide: Array | None  # None: all rows are narrow, as is best for decodes and verify steps


@dataclass(frozen=True, slots=True, eq=False)
class AttentionScratch:
    parts: Array  # float32, parts_bytes
    counters: Array  # uint32 [num_counters]


@dataclass(frozen=True, slots=True)
class Geometry:
    num_kv_heads: int
    group: int
    head_dim: int
    block_size: int
    window: int


def geometry(launch: LaunchArgs) -> Geometry:
    """Sizes of a launch of paged_attention.

    Raises:
        LaunchError: the kernels have no such group or block size.
    """
    q, k_cache = launch.inputs[:2]
    _num_blocks, num_kv_heads, block_size, head_dim = k_cache.shape
    group, rest = divmod(q.shape[1], head_dim * num_kv_heads)
    if rest or not 1 <= group <= MAX_GROUP:
        heads = f"{q.shape[1] // head_dim} query heads and {num_kv_heads} KV heads"
        raise LaunchError(
            f"paged_attention: {heads}, on a CUDA device 1 to {MAX_GROUP} query heads may share a KV head"
        )
    if block_size not in BLOCK_SIZES:
        raise LaunchError(f"paged_attention: block_size is {block_size}, on a CUDA device it must be 16 or 32")
    window = launch.scalars["window"]
    return Geometry(num_kv_heads, group, head_dim, block_size, NO_WINDOW if window is None else min(window, NO_WINDOW))


def plan_call(launch: LaunchArgs, plan: AttentionPlan, arch: str) -> KernelCall:
    """Makes the plan that this launch, and every other of its window, reads in the same step.

    Raises:
        LaunchError: as geometry; more requests than the kernel holds; wide tiles where there are none.
    """
    g = geometry(launch)
    tables, cu_seqlens_q, seq_lens = launch.inputs[3:6]
    num_requests = len(tables)
    shared_bytes = 4 * (num_requests + 2)
    if shared_bytes > MAX_PLAN_SHARED_BYTES:
        limit = MAX_PLAN_SHARED_BYTES // 4 - 2
        raise LaunchError(f"paged_attention: {num_requests} requests in a step, on a CUDA device at most {limit}")
    narrow, wide = (tile_shape(arch, g.head_dim, rows) for rows in (NARROW_ROWS, WIDE_ROWS))
    assert narrow is not None
    if plan.wide is not None and wide is None:
        raise LaunchError(f"paged_attention: head_dim {g.head_dim} has no wide tiles on {arch}")
    most_narrow = ALL_ROWS if plan.wide is None else NARROW_ROWS
    wide_keys = narrow.keys if wide is None else wide.keys
    sizes = (g.window, most_narrow, narrow.keys, wide_keys, g.group, num_requests, len(launch.inputs[0]))
    args = (plan.narrow, plan.wide, cu_seqlens_q, seq_lens, *map(np.int32, sizes))
    return KernelCall(PLAN, (1 if plan.wide is None else 2,), (PLAN_THREADS,), args, shared_bytes)


def attention_calls(
    launch: LaunchArgs, plan: AttentionPlan, scratch: AttentionScratch, arch: str, num_sms: int
) -> list[KernelCall]:
    """One layer: a call per list of its plan, in this order, since they share the scratch.

    Raises:
        LaunchError: as plan_call.
    """
    g = geometry(launch)
    (out,) = launch.outputs
    q, k_cache, v_cache, tables = launch.inputs[:4]
    softcap = launch.scalars["softcap"]
    scalars = (launch.scalars["scale"], np.float32(0) if softcap is None else softcap, np.int32(g.window))
    sizes = [np.int32(n) for n in (g.num_kv_heads, g.group, g.block_size, tables.shape[1])]
    calls = []
    for rows, words in ((NARROW_ROWS, plan.narrow), (WIDE_ROWS, plan.wide)):
        shape = tile_shape(arch, g.head_dim, rows)
        if words is None or shape is None:
            continue
        args = (out, scratch.parts, scratch.counters, q, k_cache, v_cache, tables, words, *scalars, *sizes)
        grid = (num_sms * shape.blocks_per_sm,)
        calls.append(KernelCall(shape.instance(out.dtype.name), grid, (shape.num_threads,), args, shape.shared_bytes))
    return calls
