"""cpu/rows.c beyond what test_cpu_kernels asks of every CPU device: many tasks, threads, NaN, rows of any length."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_running import KernelRun
from meaning import assert_close
from native_running import compiled_devices, cpu_device
from numpy.typing import NDArray

from lean_engine.runtime.cpu.native.rows import TASK_ELEMENTS

Array = NDArray[Any]
Case = tuple[str, list[Array], dict[str, Any]]


device = compiled_devices()


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([*shape, seed]).standard_normal(shape)


def cases(rows: int, columns: int) -> list[Case]:
    x, y, weight = normal(rows, columns), normal(rows, columns, seed=1), normal(columns)
    chosen = np.random.default_rng(rows).integers(0, rows, 2 * rows + 1)
    norm = {"eps": 1e-6, "unit_offset": True}
    return [
        ("rms_norm", [x, weight], norm),
        ("add_rms_norm", [x, y, weight], norm),
        ("act_and_mul", [normal(rows, 2 * columns)], {"activation": "silu"}),
        ("act_and_mul", [normal(rows, 2 * columns)], {"activation": "gelu_tanh"}),
        ("silu", [x], {}),
        ("gelu_tanh", [x], {}),
        ("softcap", [x], {"cap": 30.0}),
        ("mul", [x, y], {}),
        ("add", [x, y], {}),
        ("gather_rows", [x, chosen], {}),
        ("slice_columns", [x], {"start": columns // 3, "stop": columns}),
    ]


def outputs(device: Any, case: Case) -> list[Array]:
    kind, inputs, attrs = case
    run = KernelRun(device, kind, inputs, attrs)
    run.replay()
    return run.outputs


@pytest.mark.parametrize("columns", [1, 5, 15, 16, 17, 31, 33, 48, 63, 64, 65, 130])
def test_rows_of_any_length(device: Any, columns: int) -> None:
    for kind, inputs, attrs in cases(3, columns):
        run = KernelRun(device, kind, inputs, attrs)
        expected = run.expected()
        run.replay()
        for found, wanted in zip(run.outputs, expected, strict=True):
            assert_close(found, wanted, 3e-6)


@pytest.mark.parametrize("shape", [(70, 1000), (2, 70_001), (40_000, 3)], ids=str)
def test_many_tasks_compute_what_few_do(shape: tuple[int, int]) -> None:
    """Bit for bit, for any number of threads."""
    assert shape[0] * shape[1] > 2 * TASK_ELEMENTS
    devices = [cpu_device("native", n) for n in (1, 2, 3)]
    for case in cases(*shape):
        first, *others = (outputs(device, case) for device in devices)
        for other in others:
            assert all(np.array_equal(a, b) for a, b in zip(first, other, strict=True)), case[0]
        kind, inputs, attrs = case
        for found, wanted in zip(first, KernelRun(devices[0], kind, inputs, attrs).expected(), strict=True):
            assert_close(found, wanted, 3e-6)
    for device in devices:
        device.close()


def test_a_row_with_nan_stays_visible_and_harms_no_other(device: Any) -> None:
    for kind, inputs, attrs in cases(5, 50):
        inputs[0][2, -1] = np.nan
        (found, *_) = outputs(device, (kind, inputs, attrs))
        bad = np.isnan(found).any(axis=1)
        if kind == "gather_rows":
            assert np.array_equal(bad, inputs[1] == 2)
        else:
            assert bad.tolist() == [False, False, True, False, False], kind


@pytest.mark.parametrize("kind", ["rms_norm", "add_rms_norm"])
def test_norm_of_values_whose_square_nearly_overflows(device: Any, kind: str) -> None:
    x = np.full((1, 40), 1e18)
    inputs = [x, np.ones(40)] if kind == "rms_norm" else [x, np.zeros((1, 40)), np.ones(40)]
    found = outputs(device, (kind, inputs, {"eps": 1e-6, "unit_offset": False}))[0]
    assert_close(found, np.ones((1, 40)), 1e-6)


def test_rows_out_of_range_are_taken_for_the_nearest(device: Any) -> None:
    x = normal(4, 6)
    (found,) = outputs(device, ("gather_rows", [x, np.array([-3, 0, 3, 9])], {}))
    assert np.array_equal(found, x[[0, 0, 3, 3]].astype(np.float32))


def test_extreme_gates_give_zero_or_the_other_half(device: Any) -> None:
    gate = np.array([[-1000.0, -200, -80, 0, 200, 1000]])
    gate_up = np.concatenate([gate, np.full((1, 6), 2.0)], axis=1)
    for activation in ("silu", "gelu_tanh"):
        (found,) = outputs(device, ("act_and_mul", [gate_up], {"activation": activation}))
        assert_close(found, np.array([[0, 0, 0, 0, 400, 2000]]), 1e-6)
