"""gemm and embedding over packed matrices: how a product is cut into tasks (cpu/gemm.c)."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lean_engine.runtime.cpu.native.launches import NativeKernel, NativeLaunch, Pointer, Scope, Shape, address
from lean_engine.runtime.cpu.native.library import Library
from lean_engine.runtime.cpu.native.matrices import EmbeddingArgs, GemmPart, Matrix, PackArgs
from lean_engine.runtime.device import LaunchArgs

Int = ctypes.c_int64

EXACT, BF16, DIGITS, PARTS = range(4)  # of cpu/gemm.h
UNIT = 32  # elements of a row that are rounded or scaled together
BLOCK = 16  # rows of a tile
DIGITS_GROUP = 256  # elements of a row under one scale, in mode DIGITS
MAX_EXACT_ROWS = 4  # fewer of quantised weights are faster exactly than with weights rounded
MAX_FMA_ROWS = 40  # fewer of float32 weights are faster by multiply-adds than split
BLOCK_ROWS = (64, 256, 256, 256)  # rows at most that share expanded weights, by mode
MAX_SHORT_BYTES = 5 << 18  # of a task's x in bfloat16 or its parts: it stays in the second-level cache
MAX_KEPT_BYTES = 3 << 19  # of all x: beyond, its blocks of rows take turns in that cache
GROUP = 4  # panels that are multiplied together
TASKS_PER_THREAD = 8  # where a task is then worth
MIN_TASK_US, MAX_TASK_US = 8.0, 100.0
BYTES_PER_US = 20e3  # what one core reads
FLOPS_PER_US = (1e5, 8e5, 3e5, 3e5)  # and computes, by mode
EMBEDDING_ELEMENTS = 1 << 14  # of a task
SHORT_ELEMENTS = 1 << 14


class GemmArgs(ctypes.Structure):
    _fields_ = (
        *((name, Pointer) for name in ("parts", "x", "short_x", "bias", "out")),
        *((name, Int) for name in ("num_parts", "num_rows", "x_stride", "short_stride", "out_stride", "mode")),
        *((name, Int) for name in ("rows_per_task", "panels_per_task", "is_by_rows")),
    )


class RoundRowsArgs(ctypes.Structure):
    _fields_ = (("x", Pointer), ("out", Pointer), *((name, Int) for name in ("num_rows", "depth", "stride")))


class RowsArgs(ctypes.Structure):
    """Of split_rows and digit_rows."""

    _fields_ = (
        *((name, Pointer) for name in ("x", "index", "out")),
        *((name, Int) for name in ("num_rows", "depth", "stride", "rows_per_task")),
    )


class SplitRowsArgs(RowsArgs):
    pass


class DigitRowsArgs(RowsArgs):
    pass


ARGUMENTS: tuple[type[ctypes.Structure], ...] = (
    *(GemmPart, PackArgs, EmbeddingArgs, GemmArgs, RoundRowsArgs, DigitRowsArgs, SplitRowsArgs),
)


@dataclass(frozen=True, slots=True)
class Modes:
    """What the processor has instructions for besides exact products."""

    has_bf16: bool
    has_tiles: bool  # AMX
    has_digits: bool
    is_batch_invariant: bool = False  # see Precision

    @classmethod
    def of(cls, library: Library, is_batch_invariant: bool = False) -> Modes:
        has_mode = library.function("has_mode", Int, Int)
        return cls(has_mode(BF16) > 0, has_mode(BF16) > 1, has_mode(DIGITS) > 0, is_batch_invariant)

    @classmethod
    def of_scope(cls, scope: Scope) -> Modes:
        return scope.constant("gemm modes", lambda: cls.of(scope.library, scope.precision.is_batch_invariant))

    def choose(self, weight: Matrix, rows: int) -> int:
        """The mode of a product.

        Few rows of quantised weights are faster exactly than with weights rounded to bfloat16.
        """
        if weight.products == "bfloat16" and self.has_bf16:
            rounds_weights = rows > MAX_EXACT_ROWS and not self.is_batch_invariant
            if weight.format == "bfloat16" or rounds_weights:
                return BF16
        return self.exact(weight, rows)

    def exact(self, weight: Matrix, rows: int = 1) -> int:
        """The mode of exact products: one for all numbers of rows, so that a row's bits do not depend on it.

        But many rows of float32 weights are faster with both split, and their last bits others.
        """
        if self.has_digits and weight.is_quantised:
            return DIGITS
        splits_float32 = rows > MAX_FMA_ROWS and not self.is_batch_invariant
        return PARTS if self.has_tiles and (weight.has_short_floats or splits_float32) else EXACT


def gemm(scope: Scope, args: LaunchArgs) -> list[NativeLaunch]:
    """out = x·weightᵀ (+ bias): x [T, C], weight a matrix [O, C], bias [O], out [T, O], all float32."""
    x, weight, *bias = args.inputs
    (out,) = args.outputs
    modes = Modes.of_scope(scope)
    place = address(bias[0]) if bias else 0
    return launches(modes, scope.num_threads, weight, address(x), x.shape, place, address(out), address(args.workspace))


def launches(
    modes: Modes, num_threads: int, weight: Matrix, x: int, shape: tuple[int, int], bias: int, out: int, workspace: int
) -> list[NativeLaunch]:
    """The product of x, with rows of shape[1], and a matrix, by addresses; out's rows are weight.shape[0].

    Args:
        workspace: of workspace_bytes(…), aligned to a cache line.
    """
    rows, depth = shape
    mode = modes.choose(weight, rows)
    row_block, panels = cut(mode, rows, depth, weight.num_panels, weight.nbytes, num_threads)
    tasks = -(-rows // row_block) * sum(-(-part.panels.shape[1] // panels) for part in weight.parts)
    row_bytes = short_row_bytes(mode, depth)
    fields = GemmArgs(
        *(
            weight.c_address,
            x,
            workspace,
            bias,
            out,
            len(weight.parts),
            rows,
            depth,
            BLOCK * row_bytes,
            weight.shape[0],
            mode,
        ),
        *(row_block, panels, rows * row_bytes > MAX_KEPT_BYTES),
    )
    product = NativeLaunch("gemm", fields, tasks, keeps=(weight,))
    if mode == BF16:
        return [NativeLaunch("round_rows", RoundRowsArgs(x, workspace, rows, depth, depth), -(-rows // BLOCK)), product]
    if mode in (PARTS, DIGITS):
        return [cut_rows(mode, x, 0, workspace, rows, depth), product]
    return [product]


def cut_rows(mode: int, x: int, index: int, out: int, rows: int, depth: int) -> NativeLaunch:
    """Rows of x in parts or digits, by addresses; index int32 [rows] says which, 0 = all in order."""
    per_task = max(1, SHORT_ELEMENTS // depth)
    name, fields = ("split_rows", SplitRowsArgs) if mode == PARTS else ("digit_rows", DigitRowsArgs)
    return NativeLaunch(name, fields(x, index, out, rows, depth, depth, per_task), -(-rows // per_task))


def short_row_bytes(mode: int, depth: int) -> int:
    """Of a row of x as a mode reads it (cpu/gemm.h); in parts or digits an odd number of cache lines."""
    units = -(-depth // UNIT)
    if mode == DIGITS:
        return (16 * -(-depth // DIGITS_GROUP) | 1) * 64
    return {BF16: units * 64, PARTS: (3 * units | 1) * 64}.get(mode, 0)


def short_bytes(rows: int, depth: int) -> int:
    """Of `rows` rows as any mode reads them, and of what is read behind them."""
    return -(-rows // BLOCK) * BLOCK * max(short_row_bytes(mode, depth) for mode in (BF16, DIGITS, PARTS))


def cut(mode: int, rows: int, depth: int, num_panels: int, num_bytes: int, num_threads: int) -> tuple[int, int]:
    """Rows and panels of a task: rows in equal blocks, panels so that all threads have some tasks, but no tiny ones."""
    max_rows = BLOCK_ROWS[mode]
    if mode == BF16:
        max_rows = min(max_rows, max(4 * BLOCK, MAX_SHORT_BYTES // (2 * depth) // BLOCK * BLOCK))
    if mode in (PARTS, DIGITS):
        fitting = MAX_SHORT_BYTES // short_row_bytes(mode, depth) // (2 * BLOCK) * 2 * BLOCK
        max_rows = min(max_rows, max(4 * BLOCK, fitting))
    num_blocks = -(-rows // max_rows)
    row_block = -(-rows // num_blocks)
    if mode != EXACT and num_blocks > 1:
        row_block = -(-row_block // BLOCK) * BLOCK
    panel_us = max(num_bytes / num_panels / BYTES_PER_US, 2.0 * 16 * row_block * depth / FLOPS_PER_US[mode])
    share_us = num_blocks * num_panels * panel_us / (TASKS_PER_THREAD * num_threads)
    wanted = min(MAX_TASK_US, max(MIN_TASK_US, share_us))
    panels = max(1, round(wanted / panel_us / GROUP)) * GROUP
    return row_block, panels


def embedding(scope: Scope, args: LaunchArgs) -> list[NativeLaunch]:
    """out[t] = scale · table[ids[t]]: ids int32 [T], table a matrix [V, H], out [T, H]."""
    ids, table = args.inputs
    (out,) = args.outputs
    rows, width = out.shape
    per_task = max(1, EMBEDDING_ELEMENTS // width)
    scale = args.scalars["scale"]
    fields = EmbeddingArgs(table.c_address, address(ids), address(out), len(table.parts), rows, per_task, scale)
    return [NativeLaunch("embedding", fields, -(-rows // per_task), keeps=(table,))]


def workspace_bytes(shapes: Sequence[Shape], scalars: Mapping[str, Any], num_threads: int) -> int:
    """x as a product's mode reads it, in whole blocks and units."""
    (rows, depth), *_ = shapes
    return short_bytes(rows, depth)


KERNELS = {"gemm": NativeKernel(gemm, workspace_bytes), "embedding": NativeKernel(embedding)}
