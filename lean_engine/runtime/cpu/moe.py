"""Mixture of experts: routing, and each expert's gated MLP over the rows that chose it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lean_engine.runtime.cpu.gemm import product
from lean_engine.runtime.cpu.rope_cache import carve
from lean_engine.runtime.cpu.rows import gated_calls
from lean_engine.runtime.cpu.scope import Call, Scope
from lean_engine.runtime.device import Array, LaunchArgs

Shapes = Sequence[tuple[int, ...]]
Scratch = Sequence[Array]


def moe_route_scratch(shapes: Shapes) -> list[tuple[int, ...]]:
    return [shapes[0]]


def moe_route(scope: Scope, args: LaunchArgs, scratch: Scratch) -> list[Call]:
    """Softmax over the experts, the top_k largest in falling order, rescaled to sum 1 where asked."""
    (logits,) = args.inputs
    weights, ids = args.outputs
    p = scratch[0]
    top_k = int(args.scalars["top_k"])

    def route() -> None:
        np.subtract(logits, logits.max(axis=-1, keepdims=True), out=p)
        np.exp(p, out=p)
        np.divide(p, p.sum(axis=-1, keepdims=True), out=p)
        ids[...] = np.argsort(-p, axis=-1, kind="stable")[:, :top_k]
        weights[...] = np.take_along_axis(p, ids, axis=-1)
        if args.scalars["normalize"]:
            np.divide(weights, weights.sum(axis=-1, keepdims=True), out=weights)

    return [route]


def moe_experts_scratch(shapes: Shapes) -> list[tuple[int, ...]]:
    (rows, hidden), _weights, _ids, (_experts, merged, _hidden), _down = shapes
    return [(rows, hidden), (rows, merged), (rows, merged // 2), (rows, hidden)]


def moe_experts(scope: Scope, args: LaunchArgs, scratch: Scratch) -> list[Call]:
    """out[t] = Σ over the experts e of row t: weight · down_e(act(gate_e·x_t) · (up_e·x_t))."""
    x, weights, ids, gate_up, down = args.inputs
    (out,) = args.outputs

    def run_expert(expert: int, rows: Array, shares: Array) -> None:
        count = len(rows)
        chosen = carve(scratch[0], count, x.shape[1])
        merged = carve(scratch[1], count, gate_up.shape[1])
        hidden = carve(scratch[2], count, down.shape[2])
        result = carve(scratch[3], count, x.shape[1])
        np.take(x, rows, axis=0, out=chosen, mode="clip")
        product(scope, chosen, gate_up[expert], merged)()
        for call in gated_calls(merged, hidden, args.scalars["activation"]):
            call()
        product(scope, hidden, down[expert], result)()
        np.multiply(result, shares[:, None], out=result)
        out[rows] += result  # a row chooses an expert at most once, so rows are distinct

    def run() -> None:
        out[...] = 0
        for expert in np.unique(ids).tolist():
            rows, places = np.nonzero(ids == expert)
            run_expert(expert, rows, weights[rows, places])

    return [run]
