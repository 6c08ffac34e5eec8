"""Every kernel of the kernel table on the device against its meaning in float64, outputs poisoned and guarded.

A row per kernel: cases, how many were wrong and which, and the worst error as a share of what rounding allows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from gpu_check.arrays import FLOATS, Array, Guarded, fetch, overwrite, place
from gpu_check.context import CheckError, Context
from gpu_check.kernel_cases import AttentionCase, Case, attention_cases, gemm_cases, table_cases
from gpu_check.kernel_gemms import check_experts, check_gemm, check_route, expert_cases, route_cases
from gpu_check.kernel_sampler import check_sampler, sampler_cases
from gpu_check.wiring import open_driver
from lean_engine.ir import reference
from lean_engine.ir.graph import TensorType
from lean_engine.ir.ops import OPS, infer_types
from lean_engine.passes.lower import KERNELS as KERNEL_NAMES
from lean_engine.runtime.cuda import attention
from lean_engine.runtime.cuda.device import CudaDevice
from lean_engine.runtime.cuda.driver import Driver
from lean_engine.runtime.cuda.instances import kernel_calls
from lean_engine.runtime.device import LaunchArgs
from lean_engine.runtime.kernels import KERNELS

NOWHERE = 2**24  # a block id far beyond the cache
EMULATED_EVERY = 25  # of the cases, one in so many is run on the emulated device


Check = tuple[str, Callable[[], float]]  # a case as text, and what gives the share of the allowed error
Checks = dict[str, list[Check]]  # by kernel


def run_table(context: Context) -> None:
    run(context, table_checks)


def run_attention(context: Context) -> None:
    run(context, attention_checks)


def run_gemm(context: Context) -> None:
    run(context, gemm_checks)


def run_moe(context: Context) -> None:
    run(context, moe_checks)


def run_sampler(context: Context) -> None:
    run(context, sampler_checks)


def run(context: Context, checks_of: Callable[[Driver, str], Checks]) -> None:
    driver = open_driver(context)
    dtypes = ("bfloat16",) if context.is_emulated else ("bfloat16", "float16")
    failed = 0
    for dtype in dtypes:
        for name, checks in checks_of(driver, dtype).items():
            chosen = checks[::EMULATED_EVERY] if context.is_emulated else checks
            tally = count(chosen)
            failed += len(tally.wrong)
            context.row(
                f"{name} {dtype}", cases=len(chosen), wrong=len(tally.wrong), worst=tally.worst,
                first_wrong=tally.wrong[:3] or None, measured="worst error / allowed by rounding, against float64",
            )  # fmt: skip
    if failed:
        raise CheckError(f"{failed} cases are wrong")


@dataclass
class Tally:
    worst: float = 0.0
    wrong: list[str] = field(default_factory=list)


def count(checks: Iterable[Check]) -> Tally:
    tally = Tally()
    for title, check in checks:
        try:
            share = check()
        except Exception as error:
            tally.wrong.append(f"{title}: {type(error).__name__}: {str(error)[:300]}")
            continue
        tally.worst = max(tally.worst, share)
        if not share <= 1:
            tally.wrong.append(f"{title}: {share:.3g} times the error that is allowed")
    return tally


def table_checks(driver: Driver, dtype: str) -> Checks:
    checks: Checks = {}
    for case in table_cases():
        checks.setdefault(case.kind, []).append((str(case), partial(check_launch, driver, case, dtype)))
    return checks


def attention_checks(driver: Driver, dtype: str) -> Checks:
    device = CudaDevice(driver, dtype)
    return {"paged_attention": [(str(c), partial(check_attention, device, c)) for c in attention_cases()]}


def gemm_checks(driver: Driver, dtype: str) -> Checks:
    return {"gemm": [(str(c), partial(check_gemm, driver, c, dtype)) for c in gemm_cases()]}


def moe_checks(driver: Driver, dtype: str) -> Checks:
    return {
        "moe_route": [(str(c), partial(check_route, driver, c, dtype)) for c in route_cases()],
        "moe_experts": [(str(c), partial(check_experts, driver, c, dtype)) for c in expert_cases()],
    }


def sampler_checks(driver: Driver, dtype: str) -> Checks:
    if dtype != "bfloat16":  # logits are float32 whatever the model's type
        return {}
    return {"sampling": [(str(c), partial(check_sampler, driver, c)) for c in sampler_cases()]}


# ---- kernels of one launch


def check_launch(driver: Driver, case: Case, dtype: str) -> float:
    """The worst error of all outputs as a share of the allowed one."""
    name = KERNEL_NAMES.get(case.kind, case.kind)
    params = KERNELS[name].inputs[: len(case.inputs)]
    dtypes = [{"f32": "float32", "i32": "int32"}.get(p.dtype, dtype) for p in params]
    inputs = [place(driver, a, d) for a, d in zip(case.inputs, dtypes, strict=True)]
    before = [fetch(driver, array) for array in inputs]
    types = tuple(TensorType(tuple(a.shape), d) for a, d in zip(inputs, dtypes, strict=True))
    shared = {**OPS[case.kind].aliases, **case.in_place}
    own = {
        i: Guarded(driver, [int(n) for n in t.shape], t.dtype)
        for i, t in enumerate(infer_types(case.kind, types, case.attrs))
        if i not in shared
    }
    outputs = [own[i].array if i in own else inputs[shared[i]] for i in range(len(own) + len(shared))]
    scalars = KERNELS[name].check(inputs, outputs, case.attrs, dtype)
    calls = kernel_calls(LaunchArgs(name, inputs, outputs, scalars, driver.allocate((0,), "uint8")))
    driver.prepare(call.instance for call in calls)
    for call in calls:
        driver.launch(call)
    found = [own[i].content() if i in own else fetch(driver, array) for i, array in enumerate(outputs)]
    return max(error_share(f, w) for f, w in zip(found, meaning(case.kind, before, case.attrs), strict=True))


def meaning(kind: str, arrays: Iterable[Array], attrs: Any) -> list[Array]:
    exact = [a if a.dtype == np.int32 else a.astype(np.float64) for a in arrays]
    with np.errstate(over="ignore"):
        results = reference.OPS[kind](*exact, **attrs)
    return list(results) if isinstance(results, tuple) else [results]


def error_share(found: Array, wanted: Array) -> float:
    """The error as a share of rounding to the type and of float32's arithmetic; NaN must be where NaN is wanted."""
    exact = found.astype(np.float64)
    assert found.shape == wanted.shape
    assert np.array_equal(np.isnan(exact), np.isnan(wanted)), "NaN where none is wanted, or none where it is"
    if np.isnan(wanted).all():
        return 0.0
    eps, smallest = FLOATS[found.dtype.name]
    relative = 0.505 * eps if found.dtype.itemsize == 2 else 2e-6
    allowed = relative * np.abs(wanted) + 2e-6 * np.nanmax(np.abs(wanted)) + smallest
    return float(np.nanmax(np.abs(exact - wanted) / allowed))


# ---- attention


def check_attention(device: CudaDevice, case: AttentionCase) -> float:
    """Through the device's own launch code and a graph, run twice: the second must give the same bits."""
    driver, dtype = device.driver, device.compute_dtype
    arrays = attention_arrays(case)
    inputs = [place(driver, array, dtype if i < 3 else "int32") for i, array in enumerate(arrays)]
    out = Guarded(driver, arrays[0].shape, dtype)
    attrs = {"head_dim": case.head_dim, "scale": case.head_dim**-0.5, "window": case.window, "softcap": case.softcap}
    scalars = KERNELS["paged_attention"].check(inputs, [out.array], attrs, dtype)
    workspace = driver.allocate((attention.parts_bytes(driver.arch, case.head_dim, driver.num_sms),), "uint8")
    overwrite(driver, workspace, np.full(workspace.shape, 0xFF, np.uint8))
    replay = device.capture([LaunchArgs("paged_attention", inputs, [out.array], scalars, workspace)])
    results = []
    for _ in range(2):
        out.poison()
        replay()
        results.append(out.content())
    assert np.array_equal(results[0].view(np.uint16), results[1].view(np.uint16)), "two runs differ"
    return attention_share(results[0], [fetch(driver, array) for array in inputs], attrs)


def attention_arrays(case: AttentionCase) -> list[Array]:
    """q, caches, tables, starts, lengths; whatever no row may see is NaN or points nowhere."""
    size, lengths = case.block_size, [length for _, length in case.requests]
    starts = np.cumsum([0, *(count for count, _ in case.requests)])
    tables = np.full((len(lengths), max(1, *(-(-n // size) for n in lengths))), NOWHERE)
    num_blocks = sum(-(-n // size) for n in lengths) + 2
    ids = iter(np.random.default_rng(5).permutation(num_blocks - 1) + 1)
    k_cache, v_cache = np.full((2, num_blocks, case.num_kv_heads, size, case.head_dim), np.nan)
    rng = np.random.default_rng(lengths)
    for b, (num_queries, length) in enumerate(case.requests):
        first = 0 if case.window is None else max(0, length - num_queries - case.window + 1)
        for i in range(first // size, -(-length // size)):
            tables[b, i] = next(ids)
        keys = np.arange(first, length)
        for cache in (k_cache, v_cache):
            values = rng.standard_normal((len(keys), case.num_kv_heads, case.head_dim))
            cache[tables[b, keys // size], :, keys % size] = values
    q = rng.standard_normal((int(starts[-1]) + case.num_padded_rows, case.num_kv_heads * case.group * case.head_dim))
    q[starts[-1] :] = np.nan
    return [q, k_cache, v_cache, tables, starts, np.array(lengths)]


def attention_share(found: Array, arrays: list[Array], attrs: dict[str, Any]) -> float:
    """Allowed: the rounding of weights and result to the type, and float32's arithmetic."""
    exact = [a if a.dtype == np.int32 else a.astype(np.float64) for a in arrays]
    wanted = reference.OPS["paged_attention"](*exact, **attrs)
    exact[2] = np.abs(exact[2])
    size = reference.OPS["paged_attention"](*exact, **attrs)
    assert np.isfinite(found.astype(np.float64)).all(), "not finite"
    half_ulp = 0.505 * FLOATS[found.dtype.name][0]
    allowed = half_ulp * (size + np.abs(wanted)) + 2e-5 * size.max()
    return float((np.abs(found.astype(np.float64) - wanted) / allowed).max())
