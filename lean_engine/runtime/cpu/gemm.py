"""gemm: x·Wᵀ + bias over weights as checkpoints have them, [out, in] row by row.

Three ways, by the number of rows:
- one row: a matrix-vector product, W streamed once;
- few rows: for a product of few rows OpenBLAS packs all of W, which costs more than the product itself, except for
  products of up to about 10⁶ multiply-adds, for which it has kernels that do not pack. So W is cut into panels of rows
  small enough for those, and the panels are shared out over the threads;
- many rows: one product over the BLAS's own threads.
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
    rows, depth = x.shape
    if rows == 1:
        return partial(np.matmul, weight, x[0], out=out[0])
    panel = panel_rows(rows, depth, len(weight))
    if panel:
        return panel_product(scope, x, weight, out, panel)
    return partial(np.matmul, x, weight.T, out=out)


def panel_rows(rows: int, depth: int, num_out: int) -> int:
    """Weight rows per panel; 0 where panels do not pay."""
    panel = min(MAX_PANEL_WORK // (rows * depth), MAX_PANEL, num_out) // 16 * 16
    return panel if panel >= MIN_PANEL else 0


def panel_product(scope: Scope, x: Array, weight: Array, out: Array, panel: int) -> Call:
    num_panels, rest = divmod(len(weight), panel)
    whole = num_panels * panel
    depth = x.shape[1]
    panels = weight[:whole].reshape(num_panels, panel, depth).transpose(0, 2, 1)  # [panels, C, panel]
    results = out[:, :whole].reshape(len(x), num_panels, panel).transpose(1, 0, 2)  # [panels, T, panel]
    tasks: list[Call] = [
        partial(np.matmul, x, panels[part], out=results[part]) for part in split(num_panels, scope.team.num_threads)
    ]
    if rest:
        tasks[-1] = in_turn(tasks[-1], partial(np.matmul, x, weight[whole:].T, out=out[:, whole:]))
    return tasks[0] if len(tasks) == 1 else partial(scope.team.run, tasks)
