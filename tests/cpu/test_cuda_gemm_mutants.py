"""Bugs planted in the gemm and MoE kernels: each must be caught, by the emulator or by a wrong result.

All are built before the first test, side by side.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import pytest
from cuda_gemm_running import ARCH, Bind, GemmRun
from cuda_gemm_running import Case as GemmCase
from cuda_kernel_running import assert_rounded, normal
from cuda_moe_running import Case as ExpertsCase
from cuda_moe_running import ExpertsRun, RouteRun

from lean_engine.errors import ConfigError
from lean_engine.ir import reference
from lean_engine.runtime.cuda.emulator import load_emulator
from lean_engine.runtime.cuda.gemm_kernels import FewRows, TensorCores, Way
from lean_engine.runtime.cuda.instances import KernelCall
from lean_engine.runtime.cuda.moe_kernels import moe_experts_calls, moe_route_call
from lean_engine.runtime.cuda.sources import cuda_source_directory, kernel_source

GEMMS: tuple[tuple[GemmCase, Way], ...] = (
    (GemmCase(3, 67, 1096), FewRows(4, 2, 8)),
    (GemmCase(5, 35, 584), TensorCores(32, 8)),  # the last stage lies where sums will
    (GemmCase(3, 37, 88, activation="silu", has_bias=True), FewRows(4, 1, 8)),
)
EXPERTS = (
    ExpertsCase(3, num_padded=1),
    ExpertsCase(30, num_experts=12, num_padded=7, hidden=200, intermediate=40, skew=1.0),
)
WRONG, RIGHT = "wrong result", "right result"
RACE = "race|cp.async|uninitialised"
BOUNDS = f"out of bounds|{WRONG}"

MUTANTS = {  # name → source, the text that stands there once, what replaces it, what must be reported
    "the last steps are left out": ("gemm.cuh", "at + (AHEAD - 1) * step < depth", "at + AHEAD * step < depth", WRONG),
    "sums of other lanes": ("gemm.cuh", "given, LANES / 2)", "given, LANES / 4)", WRONG),
    "weight rows behind the last are read": (
        "gemm.cuh",
        "min(first_column + o % COLUMNS, num_out - 1)",
        "first_column + o % COLUMNS",
        BOUNDS,
    ),
    "groups share their parts": ("gemm.cuh", "parts[first_warp + threadIdx", "parts[threadIdx", f"{RACE}|{WRONG}"),
    "parts read too early": ("gemm.cuh", "    __syncthreads();\n    auto joined", "    auto joined", RACE),
    "rows behind the last are written": ("gemm.cuh", "if (row >= num_rows) return;", "", "out of bounds"),
    "the partner has no bias": ("gemm.cuh", "partner += to_float(bias[num_out + column])", "(void)0", WRONG),
    "the depth's end is copied": ("gemm.cuh", "k < depth && column < num_out;", "column < num_out;", BOUNDS),
    "weight rows behind the last are copied": ("gemm.cuh", "k < depth && column < num_out;", "k < depth;", BOUNDS),
    "tokens behind the last are copied": ("gemm.cuh", "k < depth && row + first < num_rows;", "k < depth;", BOUNDS),
    "a wait for one copy too few": ("gemm.cuh", "cp_async_wait<STAGES - 2>();", "cp_async_wait<STAGES - 1>();", RACE),
    "no barrier after the wait": ("gemm.cuh", "__syncthreads();  // everyone's", "// everyone's", RACE),
    "sums over stages in use": (
        "gemm.cuh",
        "cp_async_wait<0>();\n        __syncthreads();",
        "cp_async_wait<0>();",
        RACE,
    ),
    "one share of the depth alone": ("gemm.cuh", "for (i32 g = 0; g < DEPTH_GROUPS; ++g)", "i32 g = 0;", WRONG),
    "minus zero is less than zero": ("moe.cu", "__float_as_uint(x + 0.0f)", "__float_as_uint(x)", WRONG),
    "the highest id of equals": ("moe.cu", "(0xffffffffu - u32(expert))", "u32(expert)", BOUNDS),
    "always rescaled": ("moe.cu", "(normalize ? chosen_total : total)", "chosen_total", WRONG),
    "padded rows are routed": ("moe.cu", "slots[row] == NO_SLOT", "slots[row] == -2", WRONG),
    "warps list over one another": (
        "moe.cu",
        "for (i32 w = 0; w < warp; ++w) rows",
        "if (0) for (i32 w = 0;;) rows",
        RACE,
    ),
    "tiles that are not full are nobody's": (
        "moe.cu",
        "tiles_before += (counts[e] + tile_rows - 1) / tile_rows",
        "tiles_before += counts[e] / tile_rows",
        f"{RACE}|{BOUNDS}",
    ),
    "tiles left over are not emptied": (
        "moe.cu",
        "is_last ? num_tiles - tiles_before : own_tiles",
        "own_tiles",
        BOUNDS,
    ),
    "counts are read while they are summed": ("moe.cu", "__syncthreads();  // before the next call", "// before", RACE),
    "a pair for its token": ("moe.cu", "pairs[r] / top_k : tile.first", "pairs[r] : tile.first", BOUNDS),
    "rows behind a tile's last are written": ("moe.cu", "if (r >= tile.num_rows) return;", "", f"{RACE}|{BOUNDS}"),
    "results of no expert are added": ("moe.cu", "if (ids[pair] < 0 || ids[pair] >= num_experts) continue;", "", WRONG),
    "no expert is counted": ("moe.cu", "if (id >= 0 && id < num_experts) atomic", "atomic", f"{RACE}|{BOUNDS}"),
}


def source_with(name: str, old: str = "", new: str = "", where: str = "") -> str:
    """A source with gemm.cuh written into it, and one text replaced in `where`."""
    texts = {part: kernel_source(name).text if part == name else kernel_source(name).headers[part]
             for part in (name, "gemm.cuh")}  # fmt: skip
    if where:
        texts[where] = texts[where].replace(old, new)
    return texts[name].replace('#include "gemm.cuh"', texts["gemm.cuh"].replace("#pragma once", ""))


@cache
def gemm_calls() -> list[KernelCall]:
    return [way.call(GemmRun(case).gemm) for case, way in GEMMS]


@cache
def moe_calls() -> list[KernelCall]:
    routes = [moe_route_call(run.launch, run.slots) for run in routings()]
    return routes + [call for case in EXPERTS for call in moe_experts_calls(ExpertsRun(case).launch, ARCH)]


@cache
def kernels(name: str) -> dict[str, Any]:
    """Expression → the kernel with a mutant's bug, of those that the mutant's source has in it."""
    where, old, new, _rule = MUTANTS[name]
    source, calls = ("moe.cu", moe_calls()) if where == "moe.cu" else ("skinny_gemm.cu", gemm_calls())
    expressions = sorted({call.instance.expression for call in calls})
    text = source_with(source, old, new, where)
    path = cuda_source_directory() / source
    module = load_emulator().HostModule(path, expressions, options=("-O0",), is_checked=True, source=text)
    return {expression: module.get_function(expression) for expression in expressions}


@cache
def build_side_by_side() -> None:
    try:
        load_emulator()
    except ConfigError as error:
        pytest.skip(str(error))
    moe_calls(), gemm_calls()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(kernels, MUTANTS))


def binder(name: str) -> Bind:
    def bind(call: KernelCall) -> Callable[..., None]:
        kernel = kernels(name)[call.instance.expression]
        kernel.max_dynamic_shared_size_bytes = max(call.shared_bytes, kernel.max_dynamic_shared_size_bytes)
        bound: Callable[..., None] = kernel.bind(call.grid, call.block, call.args, shared_mem=call.shared_bytes)
        return bound

    return bind


def routings() -> list[RouteRun]:
    logits = np.round(normal(6, 100))
    logits[0] = np.where(np.arange(100) % 2, 0.0, -0.0)
    slots = np.array([5, -1, 0, 1, -1, 2])
    return [RouteRun(logits, 8, False, "bfloat16"), RouteRun(logits, 8, True, "bfloat16", slots)]


def check_routing(run: RouteRun, bind: Bind) -> None:
    weights, ids = run.run(3, bind=bind)
    wanted_weights, wanted_ids = reference.moe_route(run.logits, ids.shape[1], bool(run.launch.scalars["normalize"]))
    if run.slots is not None:
        wanted_weights[run.slots < 0], wanted_ids[run.slots < 0] = 0, -1
    assert np.array_equal(ids, wanted_ids)
    assert_rounded(weights, wanted_weights)


def check_experts(case: ExpertsCase, bind: Bind) -> None:
    run = ExpertsRun(case)
    expected = run.expected()
    assert np.abs(run.run(3, bind=bind).astype(np.float64) - expected).max() <= 2**-7 * np.abs(expected).max()


def check_gemm(case: GemmCase, way: Way, bind: Bind) -> None:
    run = GemmRun(case)
    assert_rounded(run.run(way, 3, bind=bind), run.expected())


def checks(name: str, bind: Bind) -> Iterable[Callable[[], None]]:
    if MUTANTS[name][0] == "gemm.cuh":
        return [lambda case=case, way=way: check_gemm(case, way, bind) for case, way in GEMMS]  # type: ignore[misc]
    routes = [lambda run=run: check_routing(run, bind) for run in routings()]  # type: ignore[misc]
    return [*routes, *(lambda case=case: check_experts(case, bind) for case in EXPERTS)]  # type: ignore[misc]


def outcome(name: str) -> str:
    """What is reported by the first check that finds anything."""
    for check in checks(name, binder(name)):
        try:
            check()
        except AssertionError:
            return WRONG
        except load_emulator().KernelError as error:
            return str(error)
    return RIGHT


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name: str) -> None:
    where, old, _new, rule = MUTANTS[name]
    headers = kernel_source("moe.cu").headers
    assert (headers[where] if where in headers else kernel_source(where).text).count(old) == 1
    build_side_by_side()
    assert re.search(rule, outcome(name)), outcome(name)


def test_sources_as_they_are_pass_every_check(monkeypatch: pytest.MonkeyPatch) -> None:
    build_side_by_side()
    for where in ("gemm.cuh", "moe.cu"):
        monkeypatch.setitem(MUTANTS, f"none in {where}", (where, "", "", RIGHT))
        assert outcome(f"none in {where}") == RIGHT
