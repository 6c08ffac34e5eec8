"""skinny_gemm.cu in the emulator: every way for every number of rows, odd sizes, epilogues, float32 results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuda_gemm_running import ARCH, Case, GemmRun, check, checked_kernels
from cuda_kernel_running import ORDERS, Array

from lean_engine.dtypes import numpy_dtype
from lean_engine.errors import LaunchError
from lean_engine.runtime.cuda.gemm_kernels import (
    TENSOR_WEIGHTS,
    FewRows,
    Gemm,
    Problem,
    TensorCores,
    Way,
    gemm_instances,
    gemm_of,
    skinny_ways,
)
from lean_engine.runtime.cuda.instances import ARCHITECTURES
from lean_engine.runtime.device import LaunchArgs

ONE_ORDER = ((3, 0),)


def ways_of(case: Case, arch: str = ARCH) -> list[Way]:
    return skinny_ways(GemmRun(case).gemm.problem, arch)


# ---- every way


@pytest.mark.parametrize("num_rows", range(1, 9))
def test_every_way_for_up_to_eight_rows(num_rows: int) -> None:
    case = Case(num_rows, 67, 1096)
    ways = ways_of(case)
    assert {type(way) for way in ways} == {FewRows, TensorCores}
    assert {way.split for way in ways if isinstance(way, FewRows)} == {1, 2, 4}
    check(case, ways, ORDERS if num_rows in (1, 4, 8) else ONE_ORDER)


@pytest.mark.parametrize("num_rows", [9, 16, 17, 31, 32, 33, 63, 64])
def test_every_tile_for_more_rows(num_rows: int) -> None:
    case = Case(num_rows, 69, 264)
    ways = ways_of(case)
    assert {way.weights for way in ways if isinstance(way, TensorCores)} == set(
        TENSOR_WEIGHTS[next(n for n in TENSOR_WEIGHTS if num_rows <= n)]
    )
    check(case, ways, ORDERS if num_rows in (16, 33) else ONE_ORDER)


@pytest.mark.parametrize("depth", [8, 16, 24, 248, 256, 264, 1024, 1032])
def test_depths_that_fill_no_stage_or_just_fill_it(depth: int) -> None:
    for num_rows in (1, 3, 16):
        case = Case(num_rows, 35, depth)
        check(case, ways_of(case), ONE_ORDER)


@pytest.mark.parametrize("depth", [1, 7, 31, 129, 515])
@pytest.mark.parametrize("num_rows", [1, 5, 13])
def test_depths_that_are_no_multiple_of_eight(num_rows: int, depth: int) -> None:
    """16-byte accesses would not be aligned, so rows of any number are multiplied element by element."""
    case = Case(num_rows, 9, depth)
    ways = ways_of(case)
    assert all(isinstance(way, FewRows) and way.width == 1 for way in ways)
    check(case, ways, ORDERS if depth == 129 else ONE_ORDER)


@pytest.mark.parametrize("num_out", [1, 2, 15, 16, 17, 65, 128])
def test_numbers_of_columns(num_out: int) -> None:
    for num_rows in (1, 4, 8, 20):
        case = Case(num_rows, num_out, 72)
        check(case, ways_of(case), ONE_ORDER)


def test_more_rows_than_a_tile_has() -> None:
    case = Case(150, 40, 128)
    assert ways_of(case) == [TensorCores(64, 64), TensorCores(32, 64)]
    check(case, ways_of(case), ONE_ORDER)
    odd = Case(21, 5, 33)
    check(odd, ways_of(odd), ONE_ORDER)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 8, 16, 40])
def test_float16(num_rows: int) -> None:
    case = Case(num_rows, 33, 136, dtype="float16")
    check(case, ways_of(case), ONE_ORDER)


@pytest.mark.parametrize("num_rows", [1, 3, 8, 21])
def test_sm_75_multiplies_float16_without_tensor_cores(num_rows: int) -> None:
    case = Case(num_rows, 33, 136, dtype="float16")
    ways = ways_of(case, "sm_75")
    assert all(isinstance(way, FewRows) for way in ways)
    check(case, ways, ONE_ORDER)


# ---- epilogues


@pytest.mark.parametrize("num_rows", [1, 3, 8, 16, 32, 64])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_activation_over_merged_gate_and_up(activation: str, num_rows: int) -> None:
    case = Case(num_rows, 37, 88, activation=activation, has_bias=num_rows == 3)
    check(case, ways_of(case), ORDERS if num_rows in (3, 16) else ONE_ORDER)


@pytest.mark.parametrize("num_rows", [1, 6, 20, 64])
@pytest.mark.parametrize(("has_bias", "has_residual"), [(True, False), (False, True), (True, True)])
def test_bias_and_residual(has_bias: bool, has_residual: bool, num_rows: int) -> None:
    case = Case(num_rows, 35, 72, has_bias=has_bias, has_residual=has_residual)
    check(case, ways_of(case), ONE_ORDER)


@pytest.mark.parametrize("num_rows", [1, 2, 4, 8, 16, 32, 64])
def test_float32_results_are_not_rounded_to_the_inputs_type(num_rows: int) -> None:
    case = Case(num_rows, 51, 200, out_dtype="float32")
    assert GemmRun(case).gemm.out.dtype == np.float32
    check(case, ways_of(case), ONE_ORDER)


def test_activation_over_an_odd_depth() -> None:
    case = Case(3, 6, 45, activation="silu")
    check(case, ways_of(case), ONE_ORDER)


# ---- values


def test_sums_beyond_float16_become_infinite_and_sums_of_large_parts_do_not() -> None:
    """Products of 300 * 300 pass float16; in float32 they cancel."""
    run = GemmRun(Case(2, 16, 64, dtype="float16"))
    x, weight = (np.full(a.shape, 300, np.float16) for a in (run.gemm.x, run.gemm.weight))
    weight[:8, ::2] = -300
    for way in ways_of(Case(2, 16, 64, dtype="float16")):
        out = np.full((2, 16), np.nan, np.float16)
        checked_kernels().bind(way.call(Gemm(out, x, weight)))(0, 0)
        assert not out[:, :8].any()
        assert np.isinf(out[:, 8:]).all()


def test_a_row_with_nan_spoils_no_other_row() -> None:
    for case in (Case(3, 20, 64), Case(11, 20, 64)):
        run = GemmRun(case)
        run.gemm.x.flags.writeable = True
        clean = [run.run(way) for way in ways_of(case)]
        run.gemm.x[1] = np.nan
        for way, before in zip(ways_of(case), clean, strict=True):
            out = run.run(way)
            assert np.isnan(out[1].astype(np.float32)).all()
            assert np.array_equal(np.delete(out, 1, 0), np.delete(before, 1, 0))


def test_result_of_a_row_does_not_depend_on_the_other_rows() -> None:
    """Of one way: batch mates change nothing. (Ways differ from one another in the order of their sums.)"""
    run, alone = GemmRun(Case(8, 24, 520)), GemmRun(Case(8, 24, 520))
    alone.gemm.x.flags.writeable = True
    alone.gemm.x[1:] = 0
    for way in ways_of(Case(8, 24, 520)):
        assert np.array_equal(run.run(way)[0], alone.run(way)[0])


# ---- memory


def profile(case: Case, way: Way) -> tuple[GemmRun, list[Any]]:
    run = GemmRun(case)
    call = way.call(run.gemm)
    checked_kernels().bind(call)  # asks for its shared memory
    kernel = checked_kernels().kernel(call.instance)
    return run, kernel.profile(call.grid, call.block, call.args, shared_mem=call.shared_bytes)


@pytest.mark.parametrize("way", [FewRows(1, 2, 8), FewRows(8, 4, 8)], ids=lambda way: way.name)
def test_few_rows_reads_weights_once_in_whole_sectors(way: FewRows) -> None:
    run, rows = profile(Case(way.rows, 64, 2048), way)
    reads = [row for row in rows if row.access == "global read"]
    assert all(row.num_bytes == 16 * row.num_lanes and row.num_transactions == row.num_ideal for row in reads)
    assert run.gemm.weight.nbytes in [row.num_bytes for row in reads]


@pytest.mark.parametrize("weights", [16, 32])
def test_tiles_are_read_without_bank_conflicts(weights: int) -> None:
    for tokens in (8, 16, 32, 64):
        way = TensorCores(TENSOR_WEIGHTS[tokens][weights == 32], tokens)
        _run, rows = profile(Case(tokens, 64, 512), way)
        fragments = [row for row in rows if row.where.startswith("tensor_core.cuh")]
        assert len(fragments) == 2
        assert all(row.num_transactions == row.num_ideal for row in fragments), way.name


# ---- choices


def problem(num_rows: int, num_out: int = 64, depth: int = 4096, **options: Any) -> Problem:
    return Problem(num_rows, num_out, depth, **{"dtype": "bfloat16", "out_dtype": "bfloat16", **options})


def test_ways_are_the_likeliest_first() -> None:
    names = {n: [way.name for way in skinny_ways(problem(n), ARCH)] for n in (1, 3, 8, 16, 64, 512)}
    assert names == {
        1: ["few_rows 1 4 8", "few_rows 1 1 8", "few_rows 1 2 8", "skinny 32 8", "skinny 16 8"],
        3: ["few_rows 4 4 8", "few_rows 4 1 8", "few_rows 4 2 8", "skinny 32 8", "skinny 16 8"],
        8: ["skinny 32 8", "skinny 16 8", "few_rows 8 4 8", "few_rows 8 1 8", "few_rows 8 2 8"],
        16: ["skinny 64 16", "skinny 16 16"],
        64: ["skinny 64 64", "skinny 32 64"],
        512: ["skinny 64 64", "skinny 32 64"],
    }


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_problem_has_a_way(arch: str) -> None:
    known = set(gemm_instances(arch, ["float16"]))
    for num_rows in (1, 2, 7, 8, 9, 64, 65, 2048):
        for depth in (1, 8, 100, 4096):
            for options in ({}, {"activation": "silu"}, {"out_dtype": "float32"}):
                p = problem(num_rows, 3, depth, **{"dtype": "float16", "out_dtype": "float16", **options})
                ways = skinny_ways(p, arch)
                assert ways
                assert {way.instance(p) for way in ways} <= known


@pytest.mark.parametrize(
    ("options", "arch", "message"),
    [
        ({"dtype": "float32"}, "sm_90", "x is float32, which the kernels for sm_90 do not multiply"),
        ({}, "sm_75", "x is bfloat16, which the kernels for sm_75 do not multiply"),
        ({"activation": "relu"}, "sm_90", "no kernel has activation 'relu' and results in bfloat16"),
        ({"activation": "silu", "out_dtype": "float32"}, "sm_90", "activation 'silu' and results in float32"),
        ({"out_dtype": "float16"}, "sm_90", "no kernel has no activation and results in float16"),
    ],
)
def test_types_and_activations_that_no_kernel_has_are_refused(options: dict[str, Any], arch: str, message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        skinny_ways(problem(1, **options), arch)


def test_launch_of_the_kernel_table_becomes_a_gemm() -> None:
    def zeros(*shape: int) -> Array:
        return np.zeros(shape, numpy_dtype("bfloat16"))

    inputs = [zeros(3, 16), zeros(8, 16)]
    launch = LaunchArgs("gemm", inputs, [zeros(3, 8)], {}, np.zeros(0, np.uint8))
    assert gemm_of(launch).problem == problem(3, 8, 16)
    with_bias = LaunchArgs("gemm", [*inputs, zeros(8)], [zeros(3, 8)], {}, np.zeros(0, np.uint8))
    assert gemm_of(with_bias).problem == problem(3, 8, 16, has_bias=True)
