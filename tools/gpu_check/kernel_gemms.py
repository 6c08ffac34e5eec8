"""Matrix products, every way they can be computed, and experts, against float64."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from gpu_check.arrays import FLOATS, Array, Guarded, fetch, place
from gpu_check.kernel_cases import GemmCase, normal
from gpu_check.wiring import gemm_candidates
from lean_engine.ir import reference
from lean_engine.runtime.cuda.driver import Driver
from lean_engine.runtime.cuda.gemm_kernels import Gemm
from lean_engine.runtime.cuda.instances import KernelCall
from lean_engine.runtime.cuda.moe_kernels import moe_experts_calls, moe_route_call, moe_workspace_bytes, sizes_of
from lean_engine.runtime.device import LaunchArgs
from lean_engine.runtime.kernels import KERNELS

RouteCase = tuple[int, int, int, bool]  # T, E, A, normalize
ExpertCase = tuple[int, int, int, int, int, str]  # T, E, A, H, I, activation


def check_gemm(driver: Driver, case: GemmCase, dtype: str) -> float:
    """The worst share of the allowed error among all ways."""
    num_weights = case.num_out * (2 if case.activation else 1)
    out = Guarded(driver, (case.num_rows, case.num_out), case.out_dtype or dtype)
    gemm = Gemm(
        out.array,
        place(driver, normal(case.num_rows, case.depth), dtype),
        place(driver, normal(num_weights, case.depth) * case.depth**-0.5, dtype),
        place(driver, normal(num_weights), dtype) if case.has_bias else None,
        place(driver, normal(case.num_rows, case.num_out, seed=1), dtype) if case.has_residual else None,
        case.activation,
    )
    wanted, size = gemm_meaning(driver, gemm)
    worst = 0.0
    for name, make in gemm_candidates(driver, gemm.problem):
        out.poison()
        make(gemm)()
        driver.synchronize()
        share = product_share(out.content(), wanted, size)
        assert share <= 1, f"{name} is off by {share:.3g} times what is allowed"
        worst = max(worst, share)
    return worst


def gemm_meaning(driver: Driver, gemm: Gemm) -> tuple[Array, Array]:
    """The result in float64, and what errors are measured by: sums of absolute products."""

    def exact(array: Array) -> Array:
        return fetch(driver, array).astype(np.float64)

    x, weight = exact(gemm.x), exact(gemm.weight)
    y, size = x @ weight.T, np.abs(x) @ np.abs(weight).T
    if gemm.bias is not None:
        y = y + exact(gemm.bias)
    if gemm.activation:
        gate, partner = np.split(y, 2, axis=1)
        gate_size, partner_size = np.split(size, 2, axis=1)
        y = reference.ACTIVATIONS[gemm.activation](gate) * partner
        size = gate_size * np.abs(partner) + np.abs(gate) * partner_size
    return (y if gemm.residual is None else y + exact(gemm.residual)), size


def product_share(found: Array, wanted: Array, size: Array) -> float:
    """Allowed: rounding to the type, and float32 sums in any order."""
    exact = found.astype(np.float64)
    assert np.isfinite(exact).all(), "not finite"
    relative = 0.505 * FLOATS[found.dtype.name][0] if found.dtype.itemsize == 2 else 1e-6
    return float((np.abs(exact - wanted) / (relative * np.abs(wanted) + 2e-6 * size + 1e-7)).max())


# ---- experts


def route_cases() -> Iterator[RouteCase]:
    for num_experts, top_k in ((1, 1), (8, 2), (33, 32), (60, 4), (128, 8), (512, 10)):
        yield (7, num_experts, top_k, True)
        yield (7, num_experts, top_k, False)


def check_route(driver: Driver, case: RouteCase, dtype: str) -> float:
    num_rows, num_experts, top_k, normalize = case
    logits = place(driver, normal(num_rows, num_experts) * 2, dtype)
    weights, ids = (Guarded(driver, (num_rows, top_k), d) for d in ("float32", "int32"))
    scalars = {"top_k": top_k, "normalize": normalize}
    scalars = KERNELS["moe_route"].check([logits], [weights.array, ids.array], scalars, dtype)
    launch = LaunchArgs("moe_route", [logits], [weights.array, ids.array], scalars, driver.allocate((0,), "uint8"))
    run_calls(driver, [moe_route_call(launch)])
    wanted_weights, wanted_ids = reference.moe_route(fetch(driver, logits), top_k, normalize)
    assert np.array_equal(ids.content(), wanted_ids), "other experts"
    return float((np.abs(weights.content() - wanted_weights) / (4e-6 * np.abs(wanted_weights) + 1e-9)).max())


def expert_cases() -> Iterator[ExpertCase]:
    for num_rows in (1, 2, 7, 33, 130):
        yield (num_rows, 8, 2, 64, 96, "silu")
    yield (9, 60, 4, 128, 72, "gelu_tanh")
    yield (5, 4, 2, 37, 19, "silu")


def check_experts(driver: Driver, case: ExpertCase, dtype: str) -> float:
    num_rows, num_experts, top_k, hidden, intermediate, activation = case
    rng = np.random.default_rng(case[:5])
    ids = np.array([rng.permutation(num_experts)[:top_k] for _ in range(num_rows)])
    values = (
        (normal(num_rows, hidden), dtype),
        (rng.random((num_rows, top_k)), "float32"),
        (ids, "int32"),
        (normal(num_experts, 2 * intermediate, hidden) * hidden**-0.5, dtype),
        (normal(num_experts, hidden, intermediate) * intermediate**-0.5, dtype),
    )
    inputs = [place(driver, array, array_dtype) for array, array_dtype in values]
    out = Guarded(driver, (num_rows, hidden), dtype)
    scalars: dict[str, Any] = KERNELS["moe_experts"].check(inputs, [out.array], {"activation": activation}, dtype)
    sizes = sizes_of([array.shape for array in inputs])
    workspace = driver.allocate((moe_workspace_bytes(sizes, dtype, driver.arch),), "uint8")
    launch = LaunchArgs("moe_experts", inputs, [out.array], scalars, workspace)
    run_calls(driver, moe_experts_calls(launch, driver.arch))
    before = (fetch(driver, array) for array in inputs)
    exact: list[Array] = [a if a.dtype == np.int32 else a.astype(np.float64) for a in before]
    wanted = reference.OPS["moe_experts"](*exact, activation=activation)
    found, eps = out.content().astype(np.float64), FLOATS[dtype][0]
    assert np.isfinite(found).all(), "not finite"
    return float((np.abs(found - wanted) / (eps * np.abs(wanted) + eps * np.abs(wanted).max())).max())


def run_calls(driver: Driver, calls: list[KernelCall]) -> None:
    driver.prepare(call.instance for call in calls)
    for call in calls:
        driver.launch(call)
    driver.synchronize()
