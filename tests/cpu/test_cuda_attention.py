"""paged_attention.cu in the emulator: decodes, verify steps, chunks and their mixtures, on grids of every size."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cuda_attention_running import AttentionRun, Case, check, checked_kernels, read_plan, variant
from cuda_kernel_running import ORDERS

from lean_engine.errors import LaunchError
from lean_engine.runtime.cuda.attention import (
    HEAD_DIMS,
    AttentionPlan,
    attention_instances,
    plan_call,
    tile_shapes,
)
from lean_engine.runtime.device import LaunchArgs

GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
BLOCK_SIZES = pytest.mark.parametrize("block_size", [16, 32])
EVERY_HEAD_DIM = pytest.mark.parametrize("head_dim", HEAD_DIMS)
MIXED = Case(((1, 77), (1, 16), (40, 140), (19, 19)), num_kv_heads=2, group=3, has_wide=True)
LONG = Case(((1, 1500), (3, 800)), num_kv_heads=2, group=2)  # 24 and 13 key tiles per KV head


# ---- what a step is made of


@pytest.mark.parametrize(("head_dim", "group"), list(zip(HEAD_DIMS * 2, GROUPS, strict=True)))
def test_decodes_of_every_group_and_head_dim(head_dim: int, group: int) -> None:
    check(Case(((1, 1), (1, 63), (1, 65), (1, 210)), num_kv_heads=2, group=group, head_dim=head_dim), num_sms=3)


@pytest.mark.parametrize("num_queries", range(2, 9))
def test_verify_steps(num_queries: int) -> None:
    """Packed rows that do not fill their tiles, and that end in the middle of a token."""
    lengths = (num_queries, 64 + num_queries // 2, 131)
    check(Case(tuple((num_queries, n) for n in lengths), num_kv_heads=2, group=3), num_sms=2)


@EVERY_HEAD_DIM
@BLOCK_SIZES
def test_mixed_step_of_decodes_and_chunks(head_dim: int, block_size: int) -> None:
    check(replace(MIXED, head_dim=head_dim, block_size=block_size))


@pytest.mark.parametrize("head_dim", [64, 80, 256])
@pytest.mark.parametrize("has_wide", [False, True])
def test_float16(head_dim: int, has_wide: bool) -> None:
    check(replace(MIXED, head_dim=head_dim, dtype="float16", has_wide=has_wide))


@pytest.mark.parametrize("group", GROUPS)
def test_chunk_of_every_group(group: int) -> None:
    check(Case(((23, 90), (5, 5)), group=group, has_wide=True))


def test_chunk_by_chunk_is_the_whole_prompt() -> None:
    whole = AttentionRun(Case(((96, 96),), group=2, has_wide=True)).run(1)
    first = AttentionRun(Case(((64, 64),), group=2, has_wide=True)).run(1)
    assert np.array_equal(whole[:64], first)


@pytest.mark.parametrize("seed", range(12))
def test_random_steps(seed: int) -> None:
    random = np.random.default_rng(seed)
    counts = random.choice([0, 1, 1, 1, 2, 5, 20, 50], random.integers(1, 7)).tolist()
    case = Case(
        tuple((n, int(random.choice([n + random.integers(0, 300), n, 0], p=[0.8, 0.1, 0.1]))) for n in counts),
        num_kv_heads=int(random.integers(1, 4)),
        group=int(random.choice(GROUPS)),
        head_dim=int(random.choice([64, 64, 128])),
        block_size=int(random.choice([16, 32])),
        window=None if random.random() < 0.5 else int(random.integers(1, 200)),
        softcap=None if random.random() < 0.7 else 25.0,
        num_padded_rows=max(int(random.integers(-5, 10)), int(not any(counts))),
        has_wide=bool(random.random() < 0.6),
    )
    check(case, num_sms=int(random.integers(1, 12)), order=seed)


# ---- window, cap, scale


@BLOCK_SIZES
@pytest.mark.parametrize("window", [1, 16, 33, 100])
def test_window(window: int, block_size: int) -> None:
    """Blocks that lie before the window of all rows are not even in the table."""
    requests = ((1, 300), (4, 170), (30, 101), (1, 20))
    check(Case(requests, num_kv_heads=2, group=3, window=window, block_size=block_size, has_wide=True), num_sms=3)


@pytest.mark.parametrize("has_wide", [False, True])
def test_window_longer_than_everything_is_none(has_wide: bool) -> None:
    case = replace(MIXED, has_wide=has_wide)
    assert np.array_equal(AttentionRun(replace(case, window=4096)).run(), AttentionRun(case).run())


@pytest.mark.parametrize("softcap", [2.0, 50.0])
def test_softcap(softcap: float) -> None:
    check(replace(MIXED, softcap=softcap, scale=0.5, window=50))


def test_logits_of_every_size() -> None:
    """Softmax of a single key in effect, in parts whose greatest logits differ by more than float32's range of 2^x."""
    for scale in (1e-4, 40.0):
        check(replace(LONG, scale=scale), num_sms=4)


# ---- padding


@pytest.mark.parametrize("has_wide", [False, True])
def test_rows_of_padded_requests_and_behind_the_last_are_zero(has_wide: bool) -> None:
    case = Case(((1, 0), (1, 40), (20, 0), (0, 0), (2, 5), (0, 0)), 2, 4, has_wide=has_wide, num_padded_rows=21)
    out = check(case)
    assert not out[[0, *range(2, 22), *range(24, 45)]].any()
    assert out[[1, 22, 23]].any()


def test_step_without_requests_is_zero() -> None:
    out = check(Case(((0, 0), (0, 0)), num_kv_heads=2, num_padded_rows=8, has_wide=True))
    assert out.shape[0] == 8
    assert not out.any()


# ---- grids


@pytest.mark.parametrize("num_sms", [1, 3, 8, 37, 132])
def test_long_contexts_are_cut_between_blocks(num_sms: int) -> None:
    check(LONG, num_sms)
    check(replace(MIXED, requests=((1, 700), (70, 300))), num_sms)


def test_grids_agree_within_rounding() -> None:
    run = AttentionRun(LONG)
    results = [run.run(num_sms).astype(np.float64) for num_sms in (1, 5, 23)]
    assert not np.array_equal(results[0], results[2]), "other cuts, other roundings: or were there no cuts?"
    assert np.abs(results - results[0]).max() < 0.02


def test_grids_that_cut_alike_agree_bit_by_bit() -> None:
    run = AttentionRun(replace(LONG, requests=((1, 500),)))  # 16 key tiles, at least two a share
    results = [run.run(num_sms) for num_sms in (4, 5, 132)]
    assert np.array_equal(results[0], results[1])
    assert np.array_equal(results[0], results[2])


@pytest.mark.parametrize("case", [LONG, replace(MIXED, softcap=30.0, window=70)], ids=["long", "mixed"])
def test_order_of_threads_and_blocks_changes_nothing(case: Case) -> None:
    run = AttentionRun(case)
    results = [run.run(5, order, preempt) for order, preempt in (*ORDERS, (11, 0), (12, 60))]
    run.assert_right(results[0])
    for other in results[1:]:
        assert np.array_equal(results[0], other)


def test_launches_repeat_over_the_same_scratch() -> None:
    run = AttentionRun(replace(MIXED, requests=((1, 600), (50, 200), (1, 33))))
    once = run.run(6)
    assert np.array_equal(once, run.run(6, times=3))


# ---- architectures


@pytest.mark.parametrize(("arch", "head_dim"), [("sm_80", 128), ("sm_86", 64), ("sm_89", 96), ("sm_120", 256)])
def test_shapes_of_other_architectures(arch: str, head_dim: int) -> None:
    check(replace(MIXED, head_dim=head_dim, window=90), arch=arch, num_sms=3)


@pytest.mark.parametrize(("head_dim", "has_wide"), [(64, True), (96, True), (128, True), (256, False)])
def test_sm_75(head_dim: int, has_wide: bool) -> None:
    """The same sources, with copies and products as that architecture has them."""
    case = replace(MIXED, head_dim=head_dim, dtype="float16", has_wide=has_wide, window=90)
    run = AttentionRun(case, "sm_75")
    run.assert_right(run.run(3, order=4, bind=variant("-DEMULATE_SM_75")))


# ---- plans


def plan_of(case: Case) -> list[tuple[int, list[dict[str, Any]]]]:
    run = AttentionRun(case)
    checked_kernels().bind(run.calls(1)[0])(order=2)
    run.memory.assert_guards_are_whole()
    return [read_plan(words) for words in (run.plan.narrow, run.plan.wide) if words is not None]


def test_plan_lists_row_tiles_with_the_keys_they_see() -> None:
    case = Case(((1, 130), (30, 100)), group=3, window=64, has_wide=True, num_padded_rows=2)
    (num_narrow, narrow), (num_wide, wide) = plan_of(case)
    decode = {"start": 0, "request": 0, "row": 0, "num_rows": 3, "token": 0, "position": 129}
    padding = {"start": 2, "request": 2, "row": 0, "num_rows": 6, "token": 31, "position": -2}
    assert narrow == [decode | {"key_begin": 66, "key_end": 130}, padding | {"key_begin": 0, "key_end": 0}]
    chunk = {"request": 1, "token": 1, "position": 70}
    first = {"start": 0, "row": 0, "num_rows": 64, "key_begin": 7, "key_end": 92}
    second = {"start": 2, "row": 64, "num_rows": 26, "key_begin": 28, "key_end": 100}
    assert wide == [chunk | first, chunk | second]
    assert (num_narrow, num_wide) == (3, 4)


def test_plan_has_every_packed_row_once() -> None:
    """More requests, and more row tiles, than the kernel has threads; the lists' arrays are as full as they can be."""
    counts = np.random.default_rng(1).integers(0, 5, 300)
    counts[[7, 120]] = 200, 90
    requests = tuple((int(n), int(n) + 3 * i % 50) for i, n in enumerate(counts))
    for has_wide in (False, True):
        case = Case(requests, group=12, head_dim=64, has_wide=has_wide, num_padded_rows=30)
        rows: list[tuple[int, int]] = []
        for num_key_tiles, tiles in plan_of(case):
            starts = [tile["start"] for tile in tiles] + [num_key_tiles]
            needed = [max(1, -(-t["key_end"] // 64) - t["key_begin"] // 64) for t in tiles]
            assert np.diff(starts).tolist() == needed
            rows += [(t["token"], t["row"] + i) for t in tiles for i in range(t["num_rows"])]
        tokens = np.cumsum([0, *counts]).tolist()
        wanted = [(token, r) for token, n in zip(tokens, [*counts, 30], strict=True) for r in range(12 * n)]
        assert sorted(rows) == sorted(wanted)


@pytest.mark.parametrize("num_queries", [1, 2])
def test_lists_hold_the_worst_case(num_queries: int) -> None:
    """One row more than a tile holds, per request."""
    plan_of(Case(((num_queries, 9),) * 70, group=9, num_padded_rows=1))
    plan_of(Case(((num_queries * 33, 99),) * 9, group=2, num_padded_rows=33, has_wide=True))


# ---- refusals


def launch(columns: int = 128, block_size: int = 16, head_dim: int = 64, num_requests: int = 1) -> LaunchArgs:
    """One KV head."""
    q, cache = np.zeros((2, columns), np.float16), np.zeros((2, 1, block_size, head_dim), np.float16)
    table, starts, lengths = (np.zeros(n, np.int32) for n in ((num_requests, 4), num_requests + 1, num_requests))
    scalars = {"head_dim": head_dim, "scale": np.float32(1), "window": None, "softcap": None}
    return LaunchArgs("paged_attention", [q, cache, cache, table, starts, lengths], [q], scalars, q)


@pytest.mark.parametrize(
    ("args", "arch", "message"),
    [
        (launch(columns=17 * 64), "sm_90", "17 query heads and 1 KV heads, on a CUDA device 1 to 16"),
        (launch(block_size=64), "sm_90", "block_size is 64, on a CUDA device it must be 16 or 32"),
        (launch(head_dim=72, columns=72), "sm_90", "head_dim is 72, .* one of 64, 80, 96, 128, 256"),
        (launch(num_requests=12287), "sm_90", "12287 requests in a step, on a CUDA device at most 12286"),
        (launch(head_dim=256, columns=256), "sm_75", "head_dim 256 has no wide tiles on sm_75"),
    ],
    ids=["group", "block_size", "head_dim", "requests", "wide"],
)
def test_what_no_kernel_does_is_refused(args: LaunchArgs, arch: str, message: str) -> None:
    words = np.zeros(8, np.int32)
    with pytest.raises(LaunchError, match=f"^paged_attention: {message}"):
        plan_call(args, AttentionPlan(words, words), arch)


def test_unknown_architecture_takes_shapes_that_fit_every_one() -> None:
    assert tile_shapes("sm_87", 128) == tile_shapes("sm_86", 128)
    assert attention_instances("sm_75", head_dims=[64]) == attention_instances("sm_75", ["float16"], [64])
