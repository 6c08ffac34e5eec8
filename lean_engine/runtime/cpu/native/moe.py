"""Mixture of experts by cpu/moe.c: routing, and the experts' products over packed matrices (cpu/gemm.h)."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lean_engine.passes.plan_memory import align
from lean_engine.runtime.cpu.native.gemm import BF16, BLOCK, DIGITS, PARTS, Modes, cut, cut_rows, short_bytes
from lean_engine.runtime.cpu.native.launches import NativeKernel, NativeLaunch, Pointer, Scope, Shape, address
from lean_engine.runtime.cpu.native.matrices import Matrix
from lean_engine.runtime.cpu.native.rows import ActAndMulArgs, share
from lean_engine.runtime.device import LaunchArgs

Int = ctypes.c_int64


class MoeRouteArgs(ctypes.Structure):
    _fields_ = (
        *((name, Pointer) for name in ("logits", "weights", "ids")),
        *((name, Int) for name in ("num_rows", "num_experts", "top_k", "normalize", "rows_per_task")),
    )


class MoeGroupArgs(ctypes.Structure):
    _fields_ = (
        *((name, Pointer) for name in ("ids", "experts", "starts", "rows", "places", "num_active")),
        *((name, Int) for name in ("num_choices", "num_experts", "top_k")),
    )


class MoeProductArgs(ctypes.Structure):
    _fields_ = (
        *((name, Pointer) for name in ("parts", "x", "short_x", "out", "experts", "starts", "rows", "num_active")),
        *((name, Int) for name in ("num_parts", "x_stride", "out_stride", "mode", "panels_per_task")),
        ("tasks_per_expert", Int),
    )


class MoeGatherArgs(ctypes.Structure):
    _fields_ = (
        *((name, Pointer) for name in ("results", "weights", "places", "out")),
        *((name, Int) for name in ("num_rows", "columns", "top_k", "rows_per_task")),
    )


ARGUMENTS: tuple[type[ctypes.Structure], ...] = (MoeRouteArgs, MoeGroupArgs, MoeProductArgs, MoeGatherArgs)


def moe_route(scope: Scope, args: LaunchArgs) -> list[NativeLaunch]:
    (logits,) = args.inputs
    weights, ids = args.outputs
    num_rows, num_experts = logits.shape
    per_task, count = share(num_rows, 4 * num_experts)  # an exponential and a comparison are some sums' work
    top_k, normalize = int(args.scalars["top_k"]), int(args.scalars["normalize"])
    fields = MoeRouteArgs(
        address(logits), address(weights), address(ids), num_rows, num_experts, top_k, normalize, per_task
    )
    return [NativeLaunch("moe_route", fields, count)]


class Areas:
    """Where the parts of moe_experts's workspace begin, in bytes; C = T · A choices."""

    def __init__(self, shapes: Sequence[Shape]) -> None:
        (num_rows, hidden), (_, top_k), _, (num_experts, merged, _), _ = shapes
        choices = num_rows * top_k
        self.size = 0
        self.num_active = self._take(2)  # int64
        self.experts = self._take(num_experts)
        self.starts = self._take(num_experts + 1)
        self.rows = self._take(choices)
        self.places = self._take(choices)
        self.merged = self._take(choices * max(merged, hidden))  # gate and up, and later the results of down
        self.gated = self._take(choices * (merged // 2))
        # An expert's last rows are read as a whole block.
        self.short_x = self._take(short_bytes(choices + BLOCK - 1, max(hidden, merged // 2)) // 4)

    def _take(self, count: int) -> int:
        start = self.size
        self.size = align(start + 4 * count)
        return start


def moe_experts_workspace(shapes: Sequence[Shape], scalars: Mapping[str, Any], num_threads: int) -> int:
    return Areas(shapes).size


def moe_experts(scope: Scope, args: LaunchArgs) -> list[NativeLaunch]:
    """out[t] = Σ over the experts e of row t: weight · down_e(act(gate_e·x_t) · (up_e·x_t))."""
    x, weights, ids, gate_up, down = args.inputs
    (out,) = args.outputs
    areas, base = Areas([a.shape for a in args.inputs]), address(args.workspace)
    num_rows, hidden = x.shape
    top_k, merged = ids.shape[1], gate_up.shape[1]
    num_active, experts, starts, rows, places = (
        base + area for area in (areas.num_active, areas.experts, areas.starts, areas.rows, areas.places)
    )
    choices = num_rows * top_k
    group = MoeGroupArgs(address(ids), experts, starts, rows, places, num_active, choices, gate_up.shape[0], top_k)
    per_task, num_tasks = share(choices, merged // 2)
    gated = ActAndMulArgs(base + areas.merged, base + areas.gated, choices, merged // 2, per_task)
    rows_per_task, num_sums = share(num_rows, hidden * top_k)
    gather = MoeGatherArgs(
        base + areas.merged, address(weights), places, address(out), num_rows, hidden, top_k, rows_per_task
    )
    choice = Choices(choices, experts, starts, num_active, base + areas.short_x)
    return [
        NativeLaunch("moe_group", group, 1),
        *products(scope, gate_up, address(x), rows, base + areas.merged, choice),
        NativeLaunch(f"{args.scalars['activation']}_and_mul", gated, num_tasks),
        *products(scope, down, base + areas.gated, 0, base + areas.merged, choice),
        NativeLaunch("moe_gather", gather, num_sums),
    ]


@dataclass(frozen=True, slots=True)
class Choices:
    """How many, and addresses: what moe_group writes, and room for x in parts or digits."""

    count: int
    experts: int
    starts: int
    num_active: int
    short_x: int


def products(scope: Scope, stack: Matrix, x: int, rows: int, out: int, choices: Choices) -> list[NativeLaunch]:
    """Each active expert's rows of x times its matrix of a stack [E, O, C]; out [choices, O] by place.

    Args:
        rows: address of the row of x for each place; 0 = x is by place.
    """
    num_experts, outputs, depth = stack.shape
    active = min(num_experts, choices.count)
    modes = Modes.of_scope(scope)
    rounds = stack.products == "bfloat16" and not modes.is_batch_invariant
    mode = BF16 if rounds else modes.exact(stack)
    expert_bytes = stack.nbytes // num_experts
    rows_each = -(-choices.count // active)
    _, panels = cut(mode, rows_each, depth, stack.num_panels, expert_bytes, scope.num_threads * active)
    fields = MoeProductArgs(
        *(stack.c_address, x, choices.short_x, out, choices.experts, choices.starts, rows, choices.num_active),
        *(len(stack.parts), depth, outputs, mode, panels, -(-stack.num_panels // panels)),
    )
    product = NativeLaunch("moe_product", fields, 0, "count_moe_product", (stack,))
    if mode in (PARTS, DIGITS):
        return [cut_rows(mode, x, rows, choices.short_x, choices.count, depth), product]
    return [product]


KERNELS = {
    "moe_route": NativeKernel(moe_route),
    "moe_experts": NativeKernel(moe_experts, moe_experts_workspace),
}
