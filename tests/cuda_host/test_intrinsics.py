"""The device language in the emulator: conversions bit by bit, collectives, atomics, barriers, matrices."""

from __future__ import annotations

from collections.abc import Callable

import ml_dtypes
import numpy as np
import pytest
from cuda_host import HostKernel
from host_running import kernel

Get = Callable[[str], HostKernel]


@pytest.fixture(scope="module", params=[False, True], ids=["unchecked", "checked"])
def get(request: pytest.FixtureRequest) -> Get:
    return lambda name: kernel("intrinsics.cu", name, request.param)


def float_patterns() -> np.ndarray:
    """Floats of every exponent: random bits, and all whose upper 16 bits are theirs, exact or half way."""
    upper = np.arange(2**16, dtype=np.uint32) << 16
    random = np.random.default_rng(0).integers(0, 2**32, 60_000, dtype=np.uint32)
    return np.concatenate([random, upper, upper | 0x8000, upper | 0x8001]).view(np.float32)


def test_narrowing_is_bit_exact(get: Get) -> None:
    x = float_patterns()
    b, h = np.zeros(x.shape, ml_dtypes.bfloat16), np.zeros(x.shape, np.float16)
    b2, h2 = np.zeros(x.shape, np.uint32), np.zeros(x.shape, np.uint32)
    get("narrow")((-(-len(x) // 256),), (256,), (b, h, b2, h2, x, np.int32(len(x))))
    is_number = ~np.isnan(x)
    with np.errstate(over="ignore", invalid="ignore"):
        for found, pairs in ((b, b2), (h, h2)):
            bits, wanted = found.view(np.uint16), x.astype(found.dtype).view(np.uint16)
            assert np.array_equal(bits[is_number], wanted[is_number])
            assert (bits[~is_number] == 0x7FFF).all()
            assert np.array_equal(pairs, bits | bits[::-1].astype(np.uint32) << 16)


def test_widening_is_bit_exact(get: Get) -> None:
    every = np.arange(2**16, dtype=np.uint16)
    b, h = every.view(ml_dtypes.bfloat16), every.view(np.float16)
    from_b, from_h = np.zeros(2**16, np.float32), np.zeros(2**16, np.float32)
    get("widen")((256,), (256,), (from_b, from_h, b, h))
    assert np.array_equal(from_b, b.astype(np.float32), equal_nan=True)
    assert np.array_equal(from_h, h.astype(np.float32), equal_nan=True)


@pytest.mark.parametrize("order", [0, 1, 2, 3])
def test_warp_collectives(get: Get, order: int) -> None:
    out = np.zeros((8, 32), np.int32)
    get("lanes")((1,), (32,), (out,), order=order)
    lane = np.arange(32)
    v = lane * lane
    thirds = np.array(sum(1 << i for i in range(0, 32, 3)), np.uint32).astype(np.int32)
    wanted = [
        np.full(32, 25),
        v[lane // 8 * 8 + (lane + 1) % 8],
        v[np.where(lane >= 3, lane - 3, lane)],
        v[np.where(lane % 16 < 13, lane + 3, lane)],
        v[lane ^ 9],
        np.full(32, thirds),
        np.full(32, 3),
        np.where(lane < 16, 225, 961),
    ]
    assert np.array_equal(out, wanted)


def test_threads_that_have_returned_are_not_waited_for(get: Get) -> None:
    out = np.zeros(65, np.int32)
    get("early_exit")((1,), (64,), (out, np.int32(40)), order=4)
    assert out.tolist() == [32] * 32 + [8] * 8 + [0] * 24 + [40]


def test_every_thread_of_a_grid_runs_once(get: Get) -> None:
    total, odd, any_all = (np.zeros(1, np.int32) for _ in range(3))
    half_sum = np.zeros(1, np.float32)
    get("count_threads")((3, 2, 2), (16, 8, 8), (total, half_sum, odd, any_all), order=5)
    assert (total[0], half_sum[0], odd[0], any_all[0]) == (12 * 1024, 6 * 1024, 512, 2)


def test_dynamic_shared_memory(get: Get) -> None:
    out = np.zeros((2, 2, 64), np.float32)
    get("reversed_in_shared")((2, 2), (64,), (out,), shared_mem=256)
    assert np.array_equal(out, np.broadcast_to(np.arange(63, -1, -1), out.shape))


def test_ldmatrix_gives_rows_or_columns(get: Get) -> None:
    x = np.random.default_rng(1).integers(0, 2**16, (4, 8, 8)).astype(np.uint16)
    out, out_trans = np.zeros((32, 4), np.uint32), np.zeros((32, 4), np.uint32)
    get("matrices")((1,), (32,), (out, out_trans, x.reshape(32, 8)))
    for found, matrices in ((out, x), (out_trans, x.transpose(0, 2, 1))):
        pairs = np.ascontiguousarray(matrices).view(np.uint32).reshape(4, 32)  # lane i: row i / 4, pair i % 4
        assert np.array_equal(found, pairs.T)


def test_integers(get: Get) -> None:
    out = np.zeros(7, np.uint32)
    out[6] = 7
    get("integers")((1,), (1,), (out, np.uint32(0x00F0_0010), np.uint32(7)))
    assert out.tolist() == [0, 5, 8, 5, 0x0800_0F00, 7, 0x00F0_0010]
    get("integers")((1,), (1,), (out, np.uint32(0xFFFF_FFFF), np.uint32(0xFFFF_FFFF)))
    assert out.tolist() == [0xFFFF_FFFE, 32, 0, 1, 0xFFFF_FFFF, 0x00F0_0010, 0x00F0_0010]
