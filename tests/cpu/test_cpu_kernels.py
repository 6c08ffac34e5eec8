"""Every kernel of the CPU devices against the oracle: odd sizes, poisoned outputs and workspace, storage taken over.

NumPy's kernels and the compiled ones, for every kind of processor that they can be built for and run on here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from kernel_running import KernelRun, run_kernel
from meaning import assert_close
from native_running import MACHINES, cpu_device
from numpy.typing import NDArray

from lean_engine.errors import OutOfMemory
from lean_engine.runtime.cpu.device import CpuDevice

Array = NDArray[Any]
AnyDevice = Any  # CpuDevice or NativeCpuDevice
ROWS = (1, 2, 3, 7, 17, 33, 65)
TOLERANCE = 3e-6  # of the largest element


@pytest.fixture(scope="module", params=["numpy", *MACHINES])
def device(request: pytest.FixtureRequest) -> Iterator[AnyDevice]:
    device = cpu_device(request.param)
    yield device
    device.close()


@pytest.fixture(
    scope="module",
    params=[(name, n) for name in ("numpy", "native") for n in (1, 2, 3)],
    ids=lambda p: f"{p[0]}-{p[1]}",
)
def any_device(request: pytest.FixtureRequest) -> Iterator[AnyDevice]:
    """Any number of threads."""
    device = cpu_device(*request.param)
    yield device
    device.close()


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([*shape, seed]).standard_normal(shape)


def check(
    device: AnyDevice, kind: str, inputs: list[Array], in_place: dict[int, int] | None = None, **attrs: Any
) -> list[Array]:
    """Compare all outputs with the oracle's and return them, those of a second replay behind the first's."""
    pairs = run_kernel(device, kind, inputs, attrs, in_place)
    for found, wanted in pairs:
        if found.dtype == np.int32:
            assert np.array_equal(found, wanted)
        else:
            assert_close(found, wanted, TOLERANCE)
    return [found for found, _ in pairs]


# ---- rows


@pytest.mark.parametrize("scale", [1.0, 8.0])
@pytest.mark.parametrize("rows", ROWS)
def test_embedding(device: AnyDevice, rows: int, scale: float) -> None:
    ids = np.random.default_rng(rows).integers(0, 11, rows)
    check(device, "embedding", [ids, normal(11, 13)], scale=scale)


@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize(("columns", "width"), [(1, 1), (7, 7), (577, 577), (24, 8), (39, 13), (960, 80)])
@pytest.mark.parametrize("rows", [1, 3, 33])
def test_rms_norm_over_rows_and_heads(
    device: AnyDevice, rows: int, columns: int, width: int, unit_offset: bool
) -> None:
    x = normal(rows, columns) * np.exp(normal(rows, 1) * 4)  # rows of very different size
    check(device, "rms_norm", [x, 1 + normal(width)], eps=1e-5, unit_offset=unit_offset)


def test_rms_norm_of_large_small_and_zero_rows(device: AnyDevice) -> None:
    x = np.stack([normal(64) * 25_000, normal(64) * 1e-9, np.zeros(64)])
    out, _again = check(device, "rms_norm", [x, np.ones(64)], eps=1e-5, unit_offset=False)
    assert np.isfinite(out).all()
    assert not out[2].any()


@pytest.mark.parametrize("in_place", [{}, {0: 0}, {1: 1}, {0: 0, 1: 1}], ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_add_rms_norm(device: AnyDevice, rows: int, in_place: dict[int, int]) -> None:
    inputs = [normal(rows, 37), normal(rows, 37, seed=1), normal(37)]
    check(device, "add_rms_norm", inputs, in_place, eps=1e-6, unit_offset=True)


@pytest.mark.parametrize("rows", ROWS)
def test_slice_columns(device: AnyDevice, rows: int) -> None:
    for start, stop in ((0, 5), (5, 19), (18, 19), (0, 19)):
        check(device, "slice_columns", [normal(rows, 19)], start=start, stop=stop)


@pytest.mark.parametrize("in_place", [{}, {0: 0}], ids=str)
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("rows", ROWS)
def test_activations(device: AnyDevice, rows: int, kind: str, in_place: dict[int, int]) -> None:
    check(device, kind, [normal(rows, 19) * 3], in_place)


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_activations_far_from_zero(device: AnyDevice, kind: str) -> None:
    x = np.array([[-1e4, -200.0, -90.0, -0.0, 90.0, 200.0, 1e4]])
    out, _again = check(device, kind, [x])
    assert np.isfinite(out).all()


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("rows", ROWS)
def test_act_and_mul(device: AnyDevice, rows: int, activation: str) -> None:
    check(device, "act_and_mul", [normal(rows, 38) * 2], activation=activation)
    check(device, "act_and_mul", [normal(rows, 2)], activation=activation)


@pytest.mark.parametrize("in_place", [{}, {0: 0}], ids=str)
@pytest.mark.parametrize("kind", ["add", "mul"])
@pytest.mark.parametrize("rows", ROWS)
def test_sums_and_products(device: AnyDevice, rows: int, kind: str, in_place: dict[int, int]) -> None:
    check(device, kind, [normal(rows, 19), normal(rows, 19, seed=1)], in_place)


@pytest.mark.parametrize("in_place", [{}, {0: 0}], ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_softcap(device: AnyDevice, rows: int, in_place: dict[int, int]) -> None:
    check(device, "softcap", [normal(rows, 19) * 40], in_place, cap=30.0)


@pytest.mark.parametrize("num_rows", [1, 2, 9])
@pytest.mark.parametrize("rows", ROWS)
def test_gather_rows(device: AnyDevice, rows: int, num_rows: int) -> None:
    check(device, "gather_rows", [normal(rows, 19), np.random.default_rng(rows).integers(0, rows, num_rows)])


# ---- gemm


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize(("depth", "num_out"), [(96, 200), (31, 5), (64, 16), (7, 33), (128, 131), (1, 1)])
def test_gemm_at_every_number_of_rows(any_device: AnyDevice, depth: int, num_out: int, bias: bool) -> None:
    weight = normal(num_out, depth)
    for rows in (*range(1, 13), 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 69, 70):
        inputs = [normal(rows, depth), weight, *([normal(num_out, seed=1)] if bias else [])]
        check(any_device, "linear", inputs)


@pytest.mark.parametrize(("depth", "num_out"), [(2048, 150), (4099, 70), (576, 577), (700, 16), (999, 15)])
def test_gemm_where_panels_begin_and_end(any_device: AnyDevice, depth: int, num_out: int) -> None:
    weight, x = normal(num_out, depth), normal(96, depth)
    for rows in (1, 2, 3, 5, 8, 10, 11, 15, 20, 21, 22, 40, 44, 60, 61, 64, 75, 76, 77, 96):
        check(any_device, "linear", [x[:rows], weight, normal(num_out)])


# ---- rope and caches


def rope_inputs(rows: int, rotary_dim: int, seed: int = 0) -> tuple[Array, Array]:
    """Positions, with repetitions, and a table of 50 positions."""
    angles = np.arange(50)[:, None] * np.linspace(1, 0.01, rotary_dim // 2)
    positions = np.random.default_rng([rows, seed]).integers(0, 50, rows)
    return positions, np.concatenate([np.cos(angles), np.sin(angles)], axis=1)


@pytest.mark.parametrize(
    ("heads", "head_dim", "rotary_dim"), [(1, 2, 2), (3, 8, 8), (5, 24, 24), (2, 80, 32), (9, 64, 62)]
)
@pytest.mark.parametrize("rows", ROWS)
def test_rope_of_whole_and_part_heads(device: AnyDevice, rows: int, heads: int, head_dim: int, rotary_dim: int) -> None:
    check(device, "rope", [normal(rows, heads * head_dim), *rope_inputs(rows, rotary_dim)], head_dim=head_dim)


def slots_and_caches(rows: int, num_kv_heads: int, block_size: int, head_dim: int) -> tuple[Array, Array]:
    """Distinct slots in random order, every fifth -1, and two caches of NaN [2, N, K, S, D]."""
    num_blocks = -(-rows // block_size) + 2
    slots = np.random.default_rng(rows).permutation(np.arange(block_size, num_blocks * block_size))[:rows]
    slots[::5] = -1
    return slots, np.full((2, num_blocks, num_kv_heads, block_size, head_dim), np.nan)


@pytest.mark.parametrize("block_size", [4, 16, 32])
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(1, 8), (3, 24), (2, 80)])
@pytest.mark.parametrize("rows", ROWS)
def test_write_kv_touches_its_slots_only(
    device: AnyDevice, rows: int, num_kv_heads: int, head_dim: int, block_size: int
) -> None:
    slots, caches = slots_and_caches(rows, num_kv_heads, block_size, head_dim)
    k, v = normal(2, rows, num_kv_heads * head_dim)
    outputs = check(device, "write_kv", [k, v, slots, *caches])
    num_written = np.count_nonzero(slots >= 0)
    assert {np.count_nonzero(~np.isnan(cache)) for cache in outputs} == {num_written * num_kv_heads * head_dim}


def test_write_kv_with_no_slot_at_all_writes_nothing(device: AnyDevice) -> None:
    outputs = check(device, "write_kv", [normal(3, 8), normal(3, 8), np.full(3, -1), *np.full((2, 4, 1, 4, 8), np.nan)])
    assert all(np.isnan(cache).all() for cache in outputs)


@pytest.mark.parametrize("norms", [False, True], ids=["", "norms"])
@pytest.mark.parametrize(
    ("num_q", "num_kv", "head_dim", "rotary_dim", "block_size"),
    [(1, 1, 8, 8, 4), (6, 2, 24, 24, 16), (8, 1, 64, 32, 32), (5, 5, 80, 78, 16), (9, 3, 64, 64, 4)],
)
@pytest.mark.parametrize("rows", ROWS)
def test_qk_norm_rope_write_kv(
    device: AnyDevice, rows: int, num_q: int, num_kv: int, head_dim: int, rotary_dim: int, block_size: int, norms: bool
) -> None:
    slots, caches = slots_and_caches(rows, num_kv, block_size, head_dim)
    positions, table = rope_inputs(rows, rotary_dim)
    qkv = normal(rows, (num_q + 2 * num_kv) * head_dim)
    weights = [normal(head_dim, seed=1), normal(head_dim, seed=2)] if norms else []
    attrs: dict[str, Any] = {"num_q_heads": num_q, "num_kv_heads": num_kv, "head_dim": head_dim}
    inputs = [qkv, positions, slots, table, *caches, *weights]
    outputs = check(device, "qk_norm_rope_write_kv", inputs, **attrs, eps=1e-6, unit_offset=norms and rows % 2 == 1)
    assert np.isfinite(outputs[0]).all()  # rows without a slot too


# ---- mixture of experts


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize(("num_experts", "top_k"), [(1, 1), (4, 2), (7, 7), (128, 8)])
@pytest.mark.parametrize("rows", ROWS)
def test_moe_route(device: AnyDevice, rows: int, num_experts: int, top_k: int, normalize: bool) -> None:
    check(device, "moe_route", [normal(rows, num_experts) * 3], top_k=top_k, normalize=normalize)


def test_moe_route_of_equal_and_of_extreme_logits(device: AnyDevice) -> None:
    logits = np.array([[0.0, 0, 0, 0], [1e4, 0, -1e4, 1e4], [-200, -300, -100, -400]])
    _weights, ids, *_again = check(device, "moe_route", [logits], top_k=3, normalize=True)
    assert ids.tolist() == [[0, 1, 2], [0, 3, 1], [2, 0, 1]]
    _weights, ids, *_again = check(device, "moe_route", [np.arange(128.0)[None] % 2], top_k=4, normalize=False)
    assert ids.tolist() == [[1, 3, 5, 7]]


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("hidden", "size"), [(13, 7), (32, 48)])
@pytest.mark.parametrize("rows", ROWS)
def test_moe_experts_with_some_that_nobody_chose(
    device: AnyDevice, rows: int, hidden: int, size: int, activation: str
) -> None:
    random = np.random.default_rng(rows)
    ids = np.stack([random.permutation([0, 2, 3, 6])[:3] for _ in range(rows)])  # of 8 experts: 1, 4, 5, 7 idle
    gate_up, down = normal(8, 2 * size, hidden), normal(8, hidden, size)
    gate_up[[1, 4, 5, 7]] = np.nan
    inputs = [normal(rows, hidden), random.random((rows, 3)), ids, gate_up, down]
    check(device, "moe_experts", inputs, activation=activation)


def test_moe_experts_all_choosing_one(any_device: AnyDevice) -> None:
    inputs = [normal(65, 40), np.ones((65, 1)), np.full((65, 1), 2), normal(4, 34, 40), normal(4, 40, 17)]
    check(any_device, "moe_experts", inputs, activation="silu")


# ---- one capture, many replays


def test_replay_reads_what_the_inputs_hold_then(device: AnyDevice) -> None:
    slots, caches = slots_and_caches(3, 2, 4, 8)
    positions, table = rope_inputs(3, 8)
    attrs = {"num_q_heads": 2, "num_kv_heads": 2, "head_dim": 8, "eps": 0.0, "unit_offset": False}
    run = KernelRun(device, "qk_norm_rope_write_kv", [normal(3, 48), positions, slots, table, *caches], attrs)
    for step in range(3):
        run.inputs[0][...] = normal(3, 48, seed=step)
        run.inputs[1][...] = rope_inputs(3, 8, seed=step)[0]
        run.inputs[2][...] = np.roll(slots, step)
        expected = run.expected()
        run.replay()
        for found, wanted in zip(run.outputs, expected, strict=True):
            assert_close(found, wanted, TOLERANCE)


# ---- the device itself


def test_memory_is_zeroed_and_of_the_asked_type(device: AnyDevice) -> None:
    for dtype in ("float32", "int32", "uint8"):
        array = device.allocate((3, 5), dtype)
        assert (array.shape, array.dtype.name, array.flags.c_contiguous) == ((3, 5), dtype, True)
        assert not array.any()


def test_memory_that_cannot_be_had_is_an_error_with_the_numbers(device: AnyDevice) -> None:
    with pytest.raises(
        OutOfMemory, match=r"cannot allocate 4,503,599,627,370,496 bytes; [\d,]+ bytes of memory are free"
    ):
        device.allocate((1 << 50,), "float32")


def test_free_memory_is_a_number_of_bytes(device: AnyDevice) -> None:
    assert device.memory_bytes() > 1 << 20


def test_device_limits_the_blas_and_gives_it_back() -> None:
    from threadpoolctl import threadpool_info

    def blas_threads() -> list[int]:
        return [int(pool["num_threads"]) for pool in threadpool_info() if pool["user_api"] == "blas"]

    before = blas_threads()
    device = CpuDevice(1)
    assert device.num_threads == 1
    assert set(blas_threads()) == {1}
    device.close()
    assert blas_threads() == before
