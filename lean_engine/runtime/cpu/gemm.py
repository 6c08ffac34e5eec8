"""gemm: x·Wᵀ + bias over weights as checkpoints have them, [out, in] row by row.

W's rows are shared out over the Team; within a thread:
- one row of x: a matrix-vector product, W streamed once;
- few rows: OpenBLAS would pack all of W, which costs more than the product itself, except for products of up to about
  10⁶ multiply-adds, for which it has kernels that do not pack. So W is cut into panels small enough for those;
- some more rows: the product the other way round, W·xᵀ, for which it packs only xᵀ, and whose result is turned while
  it is in the cache;
- many rows: one product.

The BLAS itself runs one thread, but for steps of one row that go by its own threads (see faster.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from lean_engine.runtime.cpu.scope import Call, Scope, in_turn
from lean_engine.runtime.cpu.team import split
from lean_engine.runtime.device import Array, LaunchArgs

MAX_PANEL_WORK = 700_000  # multiply-adds of one panel's product: safely inside the kernels that do not pack
MIN_PANEL, MAX_PANEL = 16, 128  # weight rows of a panel, a multiple of 16
TURNED_ROWS = range(22, 97)  # rows of x for which W·xᵀ is faster than panels and than one product
TURNED_WEIGHTS = 512  # weight rows whose result is turned at once: at most 192 KiB


def gemm(scope: Scope, args: LaunchArgs, _scratch: Sequence[Array]) -> list[Call]:
    """out = x·weightᵀ (+ bias): x [T, C], weight [O, C], bias [O], out [T, O], all float32."""
    x, weight = args.inputs[:2]
    (out,) = args.outputs
    calls = [product(scope, x, weight, out)]
    if len(args.inputs) == 3:
        calls.append(partial(np.add, out, args.inputs[2], out=out))
    return calls


def product(scope: Scope, x: Array, weight: Array, out: Array) -> Call:
    """The call that computes out = x·weightᵀ; out's rows may be strided."""
    parts = split(len(weight), 1 if scope.uses_blas_threads else scope.team.num_threads)
    tasks = [part_product(scope, i, x, weight[part], out[:, part]) for i, part in enumerate(parts)]
    return tasks[0] if len(tasks) == 1 else partial(scope.team.run, tasks)


def part_product(scope: Scope, thread: int, x: Array, weight: Array, out: Array) -> Call:
    """One thread's share: out [T, O] is a part of the columns."""
    rows, depth = x.shape
    if rows in TURNED_ROWS:
        return partial(turned_product, turned_parts(scope, thread, x, weight, out), x.T)
    if rows == 1:
        return partial(np.matmul, weight, x[0], out=out[0])
    panel = panel_rows(rows, depth, len(weight))
    if panel:
        return panel_product(x, weight, out, panel)
    return partial(np.matmul, x, weight.T, out=out)


def panel_rows(rows: int, depth: int, num_out: int) -> int:
    """Weight rows per panel; 0 where panels do not pay."""
    panel = min(MAX_PANEL_WORK // (rows * depth), MAX_PANEL, num_out) // 16 * 16
    return panel if panel >= MIN_PANEL else 0


def panel_product(x: Array, weight: Array, out: Array, panel: int) -> Call:
    num_panels, rest = divmod(len(weight), panel)
    whole = num_panels * panel
    panels = weight[:whole].reshape(num_panels, panel, -1).transpose(0, 2, 1)  # [panels, C, panel]
    row, column = out.strides
    results = np.lib.stride_tricks.as_strided(out, (num_panels, len(x), panel), (panel * column, row, column))
    product_of_panels = partial(np.matmul, x, panels, out=results)
    if not rest:
        return product_of_panels
    return in_turn(product_of_panels, partial(np.matmul, x, weight[whole:].T, out=out[:, whole:]))


def turned_parts(scope: Scope, thread: int, x: Array, weight: Array, out: Array) -> list[tuple[Array, Array, Array]]:
    """Weight rows, scratch for their result [rows of weight, T], and where it belongs; a thread's share in pieces."""
    scratch = scope.constant(
        ("turned product", thread), lambda: np.empty(TURNED_WEIGHTS * TURNED_ROWS.stop, np.float32)
    )
    parts = []
    for start in range(0, len(weight), TURNED_WEIGHTS):
        piece = slice(start, min(start + TURNED_WEIGHTS, len(weight)))
        rows = piece.stop - start
        parts.append((weight[piece], scratch[: rows * len(x)].reshape(rows, len(x)), out[:, piece].T))
    return parts


def turned_product(parts: list[tuple[Array, Array, Array]], x_turned: Array) -> None:
    for weight, scratch, out in parts:
        np.matmul(weight, x_turned, out=scratch)
        out[...] = scratch
