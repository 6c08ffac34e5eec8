"""Compiled moe_route and moe_experts: ties, NaN, skewed choices, stored types of experts, and the number of threads."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_running import KernelRun
from meaning import assert_close
from native_running import compiled_devices, cpu_device
from numpy.typing import NDArray

from lean_engine.ir import reference
from lean_engine.runtime.cpu.native.launches import Precision

Array = NDArray[Any]


device = compiled_devices()


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([*shape, seed]).standard_normal(shape)


def route(device: Any, logits: Array, top_k: int, normalize: bool) -> tuple[Array, Array]:
    run = KernelRun(device, "moe_route", [logits], {"top_k": top_k, "normalize": normalize})
    run.replay()
    return run.outputs[0].copy(), run.outputs[1].copy()


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (8, 2), (17, 17), (60, 4), (128, 8), (512, 10)])
def test_route(device: Any, num_experts: int, top_k: int, normalize: bool) -> None:
    logits = (normal(70, num_experts) * 3).astype(np.float32)
    weights, ids = route(device, logits, top_k, normalize)
    wanted_weights, wanted_ids = reference.moe_route(logits, top_k, normalize)
    assert np.array_equal(ids, wanted_ids)
    assert_close(weights, wanted_weights, 2e-6)


def test_equal_logits_go_to_the_lowest_ids_first(device: Any) -> None:
    logits = np.zeros((3, 40))
    logits[1, [35, 4, 17]] = 1
    logits[2, ::2] = -0.0
    assert route(device, logits, 5, False)[1].tolist() == [[0, 1, 2, 3, 4], [4, 17, 35, 0, 1], [0, 1, 2, 3, 4]]
    rounded = np.round(normal(50, 100) * 2)
    assert np.array_equal(route(device, rounded, 8, True)[1], reference.moe_route(rounded, 8, True)[1])


def test_extreme_logits(device: Any) -> None:
    logits = np.array([[1e30, -1e30, 3.0, -np.inf], [-200.0, -np.inf, -100.0, -np.inf], [88.0, 0.0, 87.0, 89.0]])
    weights, ids = route(device, logits, 3, True)
    assert ids[:, :2].tolist() == [[0, 2], [2, 0], [3, 0]]
    assert_close(weights, reference.moe_route(logits, 3, True)[0], 2e-6)


@pytest.mark.parametrize("normalize", [False, True])
def test_nan_among_the_logits_stays_visible_and_ids_stay_valid(device: Any, normalize: bool) -> None:
    logits = normal(3, 20)
    logits[0, 7] = np.nan
    logits[1] = np.nan
    weights, ids = route(device, logits, 4, normalize)
    assert np.isnan(weights[:2]).all()
    assert np.isfinite(weights[2]).all()
    assert all(len({*row}) == 4 and 0 <= min(row) <= max(row) < 20 for row in ids.tolist())


def experts_run(device: Any, rows: int, ids: Array, hidden: int, size: int, num_experts: int) -> KernelRun:
    gate_up = normal(num_experts, 2 * size, hidden) / hidden**0.5
    down = normal(num_experts, hidden, size, seed=1) / size**0.5
    idle = np.setdiff1d(np.arange(num_experts), ids)
    gate_up[idle], down[idle] = np.nan, np.nan
    weights = np.random.default_rng(rows).random(ids.shape)
    return KernelRun(device, "moe_experts", [normal(rows, hidden), weights, ids, gate_up, down], {"activation": "silu"})


def choices(rows: int, num_experts: int, top_k: int, seed: int = 0) -> Array:
    random = np.random.default_rng(seed)
    return np.stack([random.permutation(num_experts)[:top_k] for _ in range(rows)])


@pytest.mark.parametrize(
    ("rows", "num_experts", "top_k", "hidden", "size"),
    [(1, 4, 2, 16, 8), (1, 60, 8, 33, 24), (5, 8, 3, 40, 17), (90, 8, 2, 64, 48), (200, 3, 1, 24, 40)],
)
def test_experts(device: Any, rows: int, num_experts: int, top_k: int, hidden: int, size: int) -> None:
    """Experts that nobody chose hold NaN."""
    run = experts_run(device, rows, choices(rows, num_experts, top_k), hidden, size, num_experts)
    for _ in range(2):
        run.poison()
        run.replay()
        assert_close(run.outputs[0], run.expected()[0], 5e-6)


def test_one_capture_serves_other_choices(device: Any) -> None:
    run = experts_run(device, 70, choices(70, 9, 2), 40, 24, 9)
    skewed = np.tile([8, 0], (70, 1))
    for ids in (choices(70, 9, 2, seed=1), skewed, choices(70, 9, 2, seed=2)):
        run.inputs[2][...] = ids
        run.replay()
        assert_close(run.outputs[0], run.expected()[0], 5e-6)


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "int8"])
def test_a_row_gets_the_same_bits_whatever_its_batch_and_the_threads(weights: str) -> None:
    results = []
    for threads in (1, 3):
        device = cpu_device("native", threads, precision=Precision(weights))
        ids = choices(70, 6, 2)
        run = experts_run(device, 70, ids, 64, 48, 6)
        run.replay()
        results.append(run.outputs[0].copy())
        alone = experts_run(device, 70, ids, 64, 48, 6)
        alone.inputs[2][1:] = ids[0]  # other rows choose other experts
        alone.replay()
        assert np.array_equal(alone.outputs[0][0], results[-1][0])
        device.close()
    assert np.array_equal(results[0], results[1])


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "int8"])
def test_an_expert_computes_what_a_dense_layer_does(weights: str) -> None:
    device = cpu_device("native", 2, precision=Precision(weights))
    for rows in (1, 5, 40):
        run = experts_run(device, rows, np.zeros((rows, 1), np.int64), 64, 48, 1)
        run.inputs[1][...] = 1
        run.replay()
        x, _, _, gate_up, down = run.inputs
        out = x
        act = {"activation": "silu"}
        for kind, more, attrs in (("linear", [gate_up[0]], {}), ("act_and_mul", [], act), ("linear", [down[0]], {})):
            layer = KernelRun(device, kind, [out, *more], attrs)
            layer.replay()
            out = layer.outputs[0]
        assert np.array_equal(run.outputs[0], out)
    device.close()
