"""The table of instances: complete, in step with the kernel table, and reached by launches of every kind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tiny
from numpy.typing import NDArray

from lean_engine import models, passes
from lean_engine.dtypes import numpy_dtype
from lean_engine.ir.graph import Value
from lean_engine.passes import lower
from lean_engine.runtime.cuda.instances import ENTRIES, REAL_DTYPES, Instance, instances, instances_for, kernel_calls
from lean_engine.runtime.cuda.sources import kernel_source
from lean_engine.runtime.device import LaunchArgs
from lean_engine.runtime.kernels import KERNELS

Array = NDArray[Any]
MISSING = {"gemm", "paged_attention", "moe_route", "moe_experts"}  # CUDA kernels to come


def zeros(*shape: int, dtype: str = "bfloat16") -> Array:
    return np.zeros(shape, numpy_dtype(dtype))


def launch(kernel: str, inputs: list[Array], outputs: list[Array], **scalars: Any) -> LaunchArgs:
    return LaunchArgs(kernel, inputs, outputs, scalars, zeros(0, dtype="uint8"))


def act_and_mul(tokens: int, columns: int) -> LaunchArgs:
    return launch("act_and_mul", [zeros(tokens, 2 * columns)], [zeros(tokens, columns)], activation="silu")


def rms_norm(tokens: int, columns: int, width: int) -> LaunchArgs:
    x = zeros(tokens, columns)
    return launch("rms_norm", [x, zeros(width)], [x], eps=np.float32(0), unit_offset=False)


def test_entries_are_kernels_of_the_kernel_table() -> None:
    assert set(ENTRIES) == set(KERNELS) - MISSING


@pytest.mark.parametrize("dtype", [*REAL_DTYPES, "float32"])
def test_every_instance_names_a_kernel_of_its_source(dtype: str) -> None:
    for instance in instances(dtype):
        name = instance.expression.split("<")[0]
        assert f" {name}(" in kernel_source(instance.source).text or f"\n{name}(" in kernel_source(instance.source).text


def test_sm_75_has_no_bfloat16() -> None:
    assert not [i for i in instances_for("sm_75") if "bfloat16" in i.expression]
    assert set(instances_for("sm_80")) - set(instances_for("sm_75")) == set(instances("bfloat16"))
    assert Instance("elementwise.cu", "softcap<float>") in instances_for("sm_75")


@pytest.mark.parametrize(
    ("tokens", "columns", "grid", "block"),
    [(1, 8192, (1, 8), (128,)), (512, 8192, (512, 8), (128,)), (3, 1536, (3, 2), (128,)), (1, 100, (1, 1), (128,))],
)
def test_rows_are_cut_into_parts_of_128_threads(
    tokens: int, columns: int, grid: tuple[int, int], block: tuple[int]
) -> None:
    (call,) = kernel_calls(act_and_mul(tokens, columns))
    assert (call.grid, call.block) == (grid, block)


def test_short_rows_take_no_more_warps_than_they_need() -> None:
    (call,) = kernel_calls(act_and_mul(7, 320))
    assert (call.grid, call.block) == ((7, 1), (64,))


@pytest.mark.parametrize(
    ("tokens", "columns", "width", "arguments", "grid", "block"),
    [
        (1, 4096, 4096, "8, 1", (1,), (512, 1)),
        (300, 576, 576, "8, 1", (300,), (96, 1)),
        (2, 16384, 16384, "8, 2", (2,), (1024, 1)),
        (3, 16 * 128, 128, "8, 1", (12,), (32, 4)),
        (5, 64, 64, "8, 1", (2,), (32, 4)),
        (2, 8191, 8191, "1, 8", (2,), (1024, 1)),
    ],
)
def test_norm_spreads_a_row_over_a_block_or_a_warp(
    tokens: int, columns: int, width: int, arguments: str, grid: tuple[int], block: tuple[int, int]
) -> None:
    (call,) = kernel_calls(rms_norm(tokens, columns, width))
    assert call.instance == Instance("norm.cu", f"rms_norm<bfloat16, {arguments}>")
    assert (call.grid, call.block) == (grid, block)


def test_arguments_have_the_exact_types_of_the_parameters() -> None:
    (call,) = kernel_calls(rms_norm(2, 64, 64))
    assert [type(a) for a in call.args] == [np.ndarray] * 3 + [np.float32] * 2 + [np.int32] * 2
    logits = zeros(3, 50, dtype="float32")
    (call,) = kernel_calls(launch("softcap", [logits], [logits], cap=np.float32(30)))
    assert call.instance.expression == "softcap<float>"
    assert [type(a) for a in call.args] == [np.ndarray] * 2 + [np.float32, np.int64]


# ---- whole models


DIMS = {"T": 6, "B": 3, "R": 2, "M": 4, "N": 9, "S": 16}


def abstract(value: Value) -> Array:
    return zeros(*value.type.concrete_shape(DIMS), dtype=value.type.dtype)


@pytest.mark.parametrize("optimize", [False, True], ids=["plain", "optimized"])
@pytest.mark.parametrize("dtype", REAL_DTYPES)
@pytest.mark.parametrize("name", [*tiny.NAMES, *tiny.EXTRA_NAMES])
def test_every_launch_of_every_family_has_an_instance(name: str, dtype: str, optimize: bool) -> None:
    graph = models.build(models.configure(tiny.raw_config(name)), dtype, tiny.MAX_POSITIONS)
    known = {*instances(dtype), *instances("float32")}
    for step in lower(passes.optimize(graph) if optimize else graph).launches:
        has_logits = step.outputs[0].type.dtype == "float32"
        if step.kernel in MISSING or (step.kernel == "gather_rows" and has_logits):  # which hoist_gather never leaves
            continue
        inputs, outputs = ([abstract(v) for v in values] for values in (step.inputs, step.outputs))
        real = "float32" if has_logits else dtype
        scalars = KERNELS[step.kernel].check(inputs, outputs, step.scalars, real)
        (call,) = kernel_calls(launch(step.kernel, inputs, outputs, **scalars))
        assert call.instance in known
