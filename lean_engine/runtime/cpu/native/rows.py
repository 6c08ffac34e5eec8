"""Kernels of cpu/rows.c, which treat each row or element by itself: norms, activations, sums and gathers."""

from __future__ import annotations

import ctypes

from lean_engine.runtime.cpu.native.launches import NativeKernel, NativeLaunch, Pointer, Scope, address
from lean_engine.runtime.device import LaunchArgs

TASK_ELEMENTS = 1 << 15  # of a task: some 10 µs of work; fewer are not worth waking a thread for
Int, Float = ctypes.c_int64, ctypes.c_float


class RmsNormArgs(ctypes.Structure):
    _fields_ = (
        *((name, Pointer) for name in ("x", "weight", "out")),
        *((name, Int) for name in ("rows", "columns", "rows_per_task")),
        *((name, Float) for name in ("eps", "offset")),
    )


class AddRmsNormArgs(ctypes.Structure):
    _fields_ = (
        *((name, Pointer) for name in ("x", "residual", "weight", "out", "sum")),
        *((name, Int) for name in ("rows", "columns", "rows_per_task")),
        *((name, Float) for name in ("eps", "offset")),
    )


class ActAndMulArgs(ctypes.Structure):
    _fields_ = (
        *((name, Pointer) for name in ("gate_up", "out")),
        *((name, Int) for name in ("rows", "columns", "rows_per_task")),
    )


class UnaryArgs(ctypes.Structure):
    _fields_ = (("x", Pointer), ("out", Pointer), ("count", Int), ("per_task", Int), ("cap", Float))


class BinaryArgs(ctypes.Structure):
    _fields_ = (("left", Pointer), ("right", Pointer), ("out", Pointer), ("count", Int), ("per_task", Int))


class GatherRowsArgs(ctypes.Structure):
    _fields_ = (
        *((name, Pointer) for name in ("x", "chosen", "out")),
        *((name, Int) for name in ("rows", "columns", "max_rows", "rows_per_task")),
    )


class SliceColumnsArgs(ctypes.Structure):
    _fields_ = (
        *((name, Pointer) for name in ("x", "out")),
        *((name, Int) for name in ("rows", "columns", "start", "width", "rows_per_task")),
    )


ARGUMENTS: tuple[type[ctypes.Structure], ...] = (
    *(RmsNormArgs, AddRmsNormArgs, ActAndMulArgs, UnaryArgs, BinaryArgs, GatherRowsArgs, SliceColumnsArgs),
)


def share(rows: int, columns: int) -> tuple[int, int]:
    """Rows per task, and tasks."""
    per_task = max(1, TASK_ELEMENTS // columns)
    return per_task, -(-rows // per_task)


def rms_norm(scope: Scope, args: LaunchArgs) -> list[NativeLaunch]:
    """A row is what one weight covers: a token, or one of its heads."""
    x, weight = args.inputs
    columns = len(weight)
    rows = x.size // columns
    per_task, count = share(rows, columns)
    eps, offset = args.scalars["eps"], float(args.scalars["unit_offset"])
    fields = RmsNormArgs(address(x), address(weight), address(args.outputs[0]), rows, columns, per_task, eps, offset)
    return [NativeLaunch("rms_norm", fields, count)]


def add_rms_norm(scope: Scope, args: LaunchArgs) -> list[NativeLaunch]:
    x, residual, weight = args.inputs
    out, total = args.outputs
    rows, columns = x.shape
    per_task, count = share(rows, columns)
    eps, offset = args.scalars["eps"], float(args.scalars["unit_offset"])
    fields = AddRmsNormArgs(*map(address, (x, residual, weight, out, total)), rows, columns, per_task, eps, offset)
    return [NativeLaunch("add_rms_norm", fields, count)]


def act_and_mul(scope: Scope, args: LaunchArgs) -> list[NativeLaunch]:
    (out,) = args.outputs
    rows, columns = out.shape
    per_task, count = share(rows, columns)
    fields = ActAndMulArgs(address(args.inputs[0]), address(out), rows, columns, per_task)
    return [NativeLaunch(f"{args.scalars['activation']}_and_mul", fields, count)]


def unary(scope: Scope, args: LaunchArgs) -> list[NativeLaunch]:
    (x,) = args.inputs
    cap = args.scalars.get("cap", 0)
    fields = UnaryArgs(address(x), address(args.outputs[0]), x.size, TASK_ELEMENTS, cap)
    return [NativeLaunch(args.kernel, fields, -(-x.size // TASK_ELEMENTS))]


def binary(scope: Scope, args: LaunchArgs) -> list[NativeLaunch]:
    left, right = args.inputs
    fields = BinaryArgs(address(left), address(right), address(args.outputs[0]), left.size, TASK_ELEMENTS)
    return [NativeLaunch(args.kernel, fields, -(-left.size // TASK_ELEMENTS))]


def gather_rows(scope: Scope, args: LaunchArgs) -> list[NativeLaunch]:
    x, chosen = args.inputs
    (out,) = args.outputs
    rows, columns = out.shape
    per_task, count = share(rows, columns)
    fields = GatherRowsArgs(address(x), address(chosen), address(out), rows, columns, len(x), per_task)
    return [NativeLaunch("gather_rows", fields, count)]


def slice_columns(scope: Scope, args: LaunchArgs) -> list[NativeLaunch]:
    (x,), (out,) = args.inputs, args.outputs
    rows, width = out.shape
    per_task, count = share(rows, width)
    fields = SliceColumnsArgs(address(x), address(out), rows, x.shape[1], int(args.scalars["start"]), width, per_task)
    return [NativeLaunch("slice_columns", fields, count)]


KERNELS = {
    "rms_norm": NativeKernel(rms_norm),
    "add_rms_norm": NativeKernel(add_rms_norm),
    "act_and_mul": NativeKernel(act_and_mul),
    "silu": NativeKernel(unary),
    "gelu_tanh": NativeKernel(unary),
    "softcap": NativeKernel(unary),
    "mul": NativeKernel(binary),
    "add": NativeKernel(binary),
    "gather_rows": NativeKernel(gather_rows),
    "slice_columns": NativeKernel(slice_columns),
}
