"""moe.cu in the emulator: routing with ties, grouping of every kind, experts with many rows, few and none."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from cuda_gemm_running import ARCH
from cuda_kernel_running import ORDERS, Array, GuardedMemory, assert_rounded, normal
from cuda_moe_running import Case, ExpertsRun, RouteRun, checked_kernels, placed

from lean_engine.dtypes import numpy_dtype
from lean_engine.errors import LaunchError
from lean_engine.ir import reference
from lean_engine.runtime.cuda.instances import ARCHITECTURES, Instance, KernelCall
from lean_engine.runtime.cuda.moe_kernels import (
    Sizes,
    expert_tiles,
    moe_experts_calls,
    moe_instances,
    moe_route_call,
    moe_workspace,
)
from lean_engine.runtime.device import LaunchArgs

DTYPES = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
ONE_ORDER = ((3, 0),)


# ---- routing


def check_route(logits: Array, top_k: int, normalize: bool = True, dtype: str = "bfloat16") -> None:
    run = RouteRun(logits, top_k, normalize, dtype)
    wanted_weights, wanted_ids = reference.moe_route(run.logits, top_k, normalize)
    for order, preempt in ORDERS:
        weights, ids = run.run(order, preempt)
        assert np.array_equal(ids, wanted_ids)
        assert_rounded(weights, wanted_weights)


@DTYPES
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (8, 2), (33, 33 - 1), (60, 4), (128, 8), (512, 10)])
def test_route(num_experts: int, top_k: int, normalize: bool, dtype: str) -> None:
    check_route(normal(7, num_experts) * 2, top_k, normalize, dtype)


def test_equal_logits_go_to_the_lowest_ids_first() -> None:
    logits = np.zeros((3, 40))
    logits[1, [35, 4, 17]] = 1
    logits[2, ::2] = -0.0
    run = RouteRun(logits, 5, False, "bfloat16")
    _weights, ids = run.run()
    assert ids.tolist() == [[0, 1, 2, 3, 4], [4, 17, 35, 0, 1], [0, 1, 2, 3, 4]]
    check_route(np.round(normal(9, 100)), 8)


def test_logits_of_every_size() -> None:
    logits = normal(4, 16) * np.array([[1e-3], [30], [150], [1]])
    logits[3, 3:] = -np.inf
    check_route(logits, 4, True)
    check_route(logits, 4, False)


def test_nan_gives_ids_in_range_and_spoils_its_row_alone() -> None:
    logits = normal(3, 64)
    logits[1, 5] = np.nan
    logits[2] = np.nan
    weights, ids = RouteRun(logits, 6, True, "bfloat16").run()
    assert ((ids >= 0) & (ids < 64)).all()
    assert all(len(set(row)) == 6 for row in ids.tolist())
    assert np.isfinite(weights[0]).all()
    assert np.isnan(weights[1:]).any(axis=1).all()


def test_padded_rows_get_no_expert() -> None:
    logits, slots = normal(6, 10), np.array([3, -1, 0, 9, -1, -1])
    logits[slots < 0] = np.nan
    weights, ids = RouteRun(logits, 3, True, "bfloat16", slots).run()
    assert (ids[slots < 0] == -1).all()
    assert not weights[slots < 0].any()
    real = RouteRun(logits[slots >= 0], 3, True, "bfloat16").run()
    assert np.array_equal(weights[slots >= 0], real[0])
    assert np.array_equal(ids[slots >= 0], real[1])


def test_routing_that_the_kernel_cannot_hold_is_refused() -> None:
    with pytest.raises(LaunchError, match="513 experts, on a CUDA device at most 512"):
        moe_route_call(RouteRun(np.zeros((1, 513)), 2, True, "bfloat16").launch)
    with pytest.raises(LaunchError, match="top_k is 33, on a CUDA device at most 32"):
        moe_route_call(RouteRun(np.zeros((1, 64)), 33, True, "bfloat16").launch)


# ---- grouping


def group(ids: Array, num_experts: int, tile_rows: int, order: int = 0, preempt: int = 0) -> tuple[Array, Array]:
    memory = GuardedMemory()
    placed_ids = placed(memory, ids, "int32")
    sizes = Sizes(ids.size, 1, num_experts, 8, 8)
    tiles, pairs = memory.allocate((sizes.max_tiles(tile_rows), 4), "int32"), memory.allocate((ids.size,), "int32")
    tiles[...] = pairs[...] = -987654321
    numbers = (np.int32(n) for n in (ids.size, num_experts, tile_rows, len(tiles)))
    call = KernelCall(
        Instance("moe.cu", "group_by_expert"),
        (num_experts,),
        (256,),
        (tiles, pairs, placed_ids, *numbers),
        4 * num_experts,
    )
    checked_kernels().bind(call)(order, preempt)
    memory.assert_guards_are_whole()
    return tiles, pairs


GROUPINGS = {
    "random": np.random.default_rng(1).integers(0, 12, 1000),
    "one expert": np.full(300, 5),
    "first and last": np.array([0, 11] * 40),
    "one pair": np.array([7]),
    "all once": np.arange(12)[::-1],
    "padded": np.where(np.arange(500) % 3 == 0, -1, np.random.default_rng(2).integers(0, 12, 500)),
    "all padded": np.full(40, -1),
    "wild": np.array([3, 12, 2**30, -7, 3, 0]),
}


@pytest.mark.parametrize("tile_rows", [1, 4, 64])
@pytest.mark.parametrize("name", GROUPINGS)
def test_pairs_are_grouped_in_their_order(name: str, tile_rows: int) -> None:
    ids, num_experts = GROUPINGS[name], 12
    chosen = [np.flatnonzero(ids == e) for e in range(num_experts)]
    wanted_pairs = np.concatenate(chosen)
    wanted_tiles, first = [], 0
    for expert, own in enumerate(chosen):
        for row in range(0, len(own), tile_rows):
            wanted_tiles.append([expert, first + row, min(tile_rows, len(own) - row)])
        first += len(own)
    for order in ORDERS if tile_rows == 4 else ONE_ORDER:
        tiles, pairs = group(ids, num_experts, tile_rows, *order)
        assert np.array_equal(pairs[: len(wanted_pairs)], wanted_pairs)
        assert (pairs[len(wanted_pairs) :] == -987654321).all()
        assert tiles[: len(wanted_tiles), :3].tolist() == wanted_tiles
        assert not tiles[len(wanted_tiles) :, 2].any()


def test_more_experts_than_a_block_has_threads() -> None:
    ids = np.random.default_rng(3).integers(0, 300, 700)
    tiles, pairs = group(ids, 300, 8)
    assert np.array_equal(pairs, np.argsort(ids, kind="stable"))
    assert tiles[:, 2].sum() == 700


def test_tiles_suffice_for_any_routing() -> None:
    for num_pairs, num_experts, rows in ((1, 8, 64), (100, 3, 7), (64, 64, 4), (7, 9, 1)):
        sizes = Sizes(num_pairs, 1, num_experts, 8, 8)
        worst = np.ones(min(num_pairs, num_experts), int)  # each has one row, and then whole tiles more
        for extra in range(num_pairs - len(worst)):
            worst[extra // rows % len(worst)] += 1
        assert (-(-worst // rows)).sum() == sizes.max_tiles(rows)


# ---- experts


def check_experts(case: Case, arch: str = ARCH, orders: Any = ONE_ORDER) -> Array:
    run = ExpertsRun(case, arch)
    expected = run.expected()
    results = [run.run(*order) for order in orders]
    # A hidden value at the middle between two numbers of the type may round to the other: one unit of one of them.
    unit = float(2.0 ** -(7 if case.dtype == "bfloat16" else 10))
    slack = unit * np.abs(expected).max() / 2
    error = np.abs(results[0].astype(np.float64) - expected)
    assert np.isfinite(error).all()
    assert error.max() <= slack + unit / 2 * np.abs(expected).max()
    assert (error > unit * np.abs(expected) * 0.51 + 1e-6 * np.abs(expected).max()).mean() < 0.05
    assert all(np.array_equal(results[0], other) for other in results[1:])
    return results[0]


@DTYPES
@pytest.mark.parametrize("num_rows", [1, 2, 3, 4, 5, 9, 17, 40])
def test_experts_for_every_number_of_rows(num_rows: int, dtype: str) -> None:
    check_experts(Case(num_rows, dtype=dtype), orders=ORDERS if num_rows in (1, 3, 17) else ONE_ORDER)


@pytest.mark.parametrize(("rows", "num_rows"), [(8, 20), (16, 30), (32, 60), (64, 100)])
def test_every_tile_of_rows(rows: int, num_rows: int) -> None:
    case = Case(num_rows, top_k=1, num_experts={8: 16, 16: 6, 32: 4, 64: 3}[rows], skew=1.0)
    assert expert_tiles(ExpertsRun(case).sizes, ARCH).rows == rows
    check_experts(case, orders=ORDERS[1:])


def test_all_rows_to_one_expert() -> None:
    check_experts(Case(50, top_k=1, num_experts=8, skew=1000))


@pytest.mark.parametrize("num_rows", [1, 3, 20])
@pytest.mark.parametrize(("hidden", "intermediate"), [(39, 24), (40, 13), (7, 5)])
def test_sizes_that_are_no_multiple_of_eight(hidden: int, intermediate: int, num_rows: int) -> None:
    check_experts(Case(num_rows, hidden=hidden, intermediate=intermediate))


@pytest.mark.parametrize("num_rows", [1, 3])
@pytest.mark.parametrize(("hidden", "intermediate", "splits"), [(2056, 8, {2, 1}), (8, 4104, {1, 4})])
def test_deep_experts_share_the_depth(hidden: int, intermediate: int, splits: set[int], num_rows: int) -> None:
    case = Case(num_rows, top_k=1, num_experts=2, hidden=hidden, intermediate=intermediate)
    products = moe_experts_calls(ExpertsRun(case).launch, ARCH)[1:3]
    assert {call.block[0] // 32 for call in products} == splits
    check_experts(case)


@pytest.mark.parametrize("num_rows", [1, 4, 12, 40])
def test_gelu(num_rows: int) -> None:
    check_experts(Case(num_rows, activation="gelu_tanh"))


@pytest.mark.parametrize("num_rows", [1, 2, 11])
def test_sm_75(num_rows: int) -> None:
    case = Case(num_rows, dtype="float16")
    assert expert_tiles(ExpertsRun(case).sizes, "sm_75").width == 8
    check_experts(case, "sm_75")


@pytest.mark.parametrize(("num_rows", "num_padded"), [(4, 2), (16, 7), (3, 3)])
def test_padded_rows_read_no_expert_and_become_zeros(num_rows: int, num_padded: int) -> None:
    out = check_experts(Case(num_rows, num_padded=num_padded))
    assert not out[num_rows - num_padded :].any()
    assert out[: num_rows - num_padded].any() or num_padded == num_rows


def test_row_does_not_depend_on_its_batch_mates() -> None:
    """Within one shape of tiles: the same 16 rows, then with other mates."""
    run = ExpertsRun(Case(16))
    first = run.run()
    x = run.inputs[0]
    x.flags.writeable = True
    x[1:] *= 2
    assert np.array_equal(run.run()[0], first[0])


def test_workspace_that_is_too_small_and_unknown_activation_are_refused() -> None:
    run = ExpertsRun(Case(3))
    small = LaunchArgs("moe_experts", run.inputs, [run.out], {"activation": "silu"}, run.workspace[:-1])
    with pytest.raises(LaunchError, match=r"the workspace has \d+ bytes, must have \d+"):
        moe_experts_calls(small, ARCH)
    relu = LaunchArgs("moe_experts", run.inputs, [run.out], {"activation": "relu"}, run.workspace)
    with pytest.raises(LaunchError, match="activation is 'relu', must be one of silu, gelu_tanh"):
        moe_experts_calls(relu, ARCH)


def test_parts_of_the_workspace_lie_side_by_side() -> None:
    parts = list(moe_workspace(Sizes(5, 2, 6, 40, 24), "bfloat16", ARCH).values())
    for (start, shape, dtype), (following, _shape, _dtype) in pairwise(parts):
        assert start + int(np.prod(shape)) * numpy_dtype(dtype).itemsize <= following
        assert following % 256 == 0


def test_every_choice_has_an_instance() -> None:
    for arch in ARCHITECTURES:
        known = set(moe_instances(arch, ["float16"]))
        for num_rows in (1, 2, 5, 64, 2048):
            for hidden, intermediate in ((2048, 768), (40, 13)):
                shape = expert_tiles(Sizes(num_rows, 8, 128, hidden, intermediate), arch)
                assert {shape.instance("float16", a) for a in ("Silu", "GeluTanh", "Plain")} <= known
