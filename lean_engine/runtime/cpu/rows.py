"""Kernels that treat each row or element by itself: embedding, norms, activations, sums and gathers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from lean_engine.runtime.cpu.scope import Call, Scope
from lean_engine.runtime.device import Array, LaunchArgs

Scratch = Sequence[Array]


def embedding(scope: Scope, args: LaunchArgs, scratch: Scratch) -> list[Call]:
    ids, table = args.inputs
    (out,) = args.outputs
    calls: list[Call] = [partial(np.take, table, ids, axis=0, out=out, mode="clip")]
    if args.scalars["scale"] != 1.0:
        calls.append(partial(np.multiply, out, args.scalars["scale"], out=out))
    return calls


def norm_calls(scope: Scope, x: Array, weight: Array, out: Array, squares: Array, args: LaunchArgs) -> list[Call]:
    """out = x / sqrt(mean(x²) + eps) · weight over the last axis. x, out [..., C], squares [...]."""
    if args.scalars["unit_offset"]:
        weight = scope.constant(("unit_offset", id(weight)), lambda: (weight + np.float32(1), weight))[0]
    rms = squares[..., None]
    return [
        partial(np.vecdot, x, x, out=squares),
        partial(np.multiply, squares, np.float32(1 / x.shape[-1]), out=squares),
        partial(np.add, squares, args.scalars["eps"], out=squares),
        partial(np.sqrt, squares, out=squares),
        partial(np.divide, x, rms, out=out),
        partial(np.multiply, out, weight, out=out),
    ]


def rms_norm_scratch(shapes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    (rows, columns), (width,) = shapes
    return [(rows, columns // width)]


def rms_norm(scope: Scope, args: LaunchArgs, scratch: Scratch) -> list[Call]:
    x, weight = args.inputs
    heads = (len(x), -1, len(weight))
    return norm_calls(scope, x.reshape(heads), weight, args.outputs[0].reshape(heads), scratch[0], args)


def add_rms_norm_scratch(shapes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    return [shapes[0][:1]]


def add_rms_norm(scope: Scope, args: LaunchArgs, scratch: Scratch) -> list[Call]:
    x, residual, weight = args.inputs
    out, total = args.outputs
    # out may lie over x and total over residual: both inputs are read before either output is written.
    return [partial(np.add, x, residual, out=total), *norm_calls(scope, total, weight, out, scratch[0], args)]


def slice_columns(scope: Scope, args: LaunchArgs, scratch: Scratch) -> list[Call]:
    (x,) = args.inputs
    return [partial(np.copyto, args.outputs[0], x[:, args.scalars["start"] : args.scalars["stop"]])]


def silu_calls(x: Array, out: Array) -> list[Call]:
    """out = x / (1 + exp(-x)); out is another array than x. exp overflows to inf where the result is 0."""
    return [
        partial(np.negative, x, out=out),
        partial(np.exp, out, out=out),
        partial(np.add, out, np.float32(1), out=out),
        partial(np.divide, x, out, out=out),
    ]


def gelu_tanh_calls(x: Array, out: Array) -> list[Call]:
    """out = x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³))); out is another array than x."""
    return [
        partial(np.multiply, x, x, out=out),
        partial(np.multiply, out, np.float32(0.044715), out=out),
        partial(np.add, out, np.float32(1), out=out),
        partial(np.multiply, out, x, out=out),
        partial(np.multiply, out, np.float32(math.sqrt(2 / math.pi)), out=out),
        partial(np.tanh, out, out=out),
        partial(np.add, out, np.float32(1), out=out),
        partial(np.multiply, out, np.float32(0.5), out=out),
        partial(np.multiply, out, x, out=out),
    ]


ACTIVATIONS = {"silu": silu_calls, "gelu_tanh": gelu_tanh_calls}


def activation_scratch(shapes: Sequence[tuple[int, ...]]) -> list[tuple[int, ...]]:
    return [shapes[0]]


def silu(scope: Scope, args: LaunchArgs, scratch: Scratch) -> list[Call]:
    return [*silu_calls(args.inputs[0], scratch[0]), partial(np.copyto, args.outputs[0], scratch[0])]


def gelu_tanh(scope: Scope, args: LaunchArgs, scratch: Scratch) -> list[Call]:
    return [*gelu_tanh_calls(args.inputs[0], scratch[0]), partial(np.copyto, args.outputs[0], scratch[0])]


def gated_calls(gate_up: Array, out: Array, activation: str) -> list[Call]:
    """out = activation(gate) · up, gate_up [T, 2·I] with gate at the left."""
    half = gate_up.shape[1] // 2
    calls = ACTIVATIONS[activation](gate_up[:, :half], out)
    return [*calls, partial(np.multiply, out, gate_up[:, half:], out=out)]


def act_and_mul(scope: Scope, args: LaunchArgs, scratch: Scratch) -> list[Call]:
    return gated_calls(args.inputs[0], args.outputs[0], args.scalars["activation"])


def mul(scope: Scope, args: LaunchArgs, scratch: Scratch) -> list[Call]:
    return [partial(np.multiply, *args.inputs, out=args.outputs[0])]


def add(scope: Scope, args: LaunchArgs, scratch: Scratch) -> list[Call]:
    return [partial(np.add, *args.inputs, out=args.outputs[0])]


def softcap(scope: Scope, args: LaunchArgs, scratch: Scratch) -> list[Call]:
    return softcap_calls(args.inputs[0], args.outputs[0], args.scalars["cap"])


def softcap_calls(x: Array, out: Array, cap: np.float32) -> list[Call]:
    """out = cap · tanh(x / cap)"""
    return [
        partial(np.divide, x, cap, out=out),
        partial(np.tanh, out, out=out),
        partial(np.multiply, out, cap, out=out),
    ]


def gather_rows(scope: Scope, args: LaunchArgs, scratch: Scratch) -> list[Call]:
    x, rows = args.inputs
    return [partial(np.take, x, rows, axis=0, out=args.outputs[0], mode="clip")]
