"""rope_cache.cu in the emulator: every head_dim, partial rotation, block sizes, padded rows that write nowhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuda_kernel_running import Array, CudaRun, check, normal

from lean_engine.errors import LaunchError

DTYPES = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
ROWS = 6


def rope_inputs(rows: int, rotary_dim: int) -> tuple[Array, Array]:
    """Positions, with repetitions, and a table of 50 positions."""
    angles = np.arange(50)[:, None] * np.linspace(1, 0.01, rotary_dim // 2)
    positions = np.random.default_rng(rows).integers(0, 50, rows)
    return positions, np.concatenate([np.cos(angles), np.sin(angles)], axis=1)


def slots_and_caches(rows: int, num_kv_heads: int, block_size: int, head_dim: int) -> tuple[Array, Array]:
    """Distinct slots in random order, every fifth -1, and two caches of NaN [2, N, K, S, D]."""
    num_blocks = -(-rows // block_size) + 2
    slots = np.random.default_rng(rows).permutation(np.arange(block_size, num_blocks * block_size))[:rows]
    slots[::5] = -1
    return slots, np.full((2, num_blocks, num_kv_heads, block_size, head_dim), np.nan)


@DTYPES
@pytest.mark.parametrize(
    ("heads", "head_dim", "rotary_dim"),
    [(1, 2, 2), (3, 8, 8), (5, 24, 24), (2, 80, 32), (3, 64, 64), (9, 64, 62), (2, 128, 96)],
)
def test_rope_of_whole_and_part_heads(heads: int, head_dim: int, rotary_dim: int, dtype: str) -> None:
    check("rope", [normal(ROWS, heads * head_dim), *rope_inputs(ROWS, rotary_dim)], dtype, head_dim=head_dim)


@DTYPES
@pytest.mark.parametrize("block_size", [4, 16, 32])
@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(1, 10), (2, 80), (8, 128)])
def test_write_kv_touches_its_slots_only(num_kv_heads: int, head_dim: int, block_size: int, dtype: str) -> None:
    slots, caches = slots_and_caches(ROWS, num_kv_heads, block_size, head_dim)
    k, v = normal(2, ROWS, num_kv_heads * head_dim)
    outputs = check("write_kv", [k, v, slots, *caches], dtype)
    num_written = np.count_nonzero(slots >= 0)
    written = {np.count_nonzero(~np.isnan(cache.astype(np.float32))) for cache in outputs}
    assert written == {num_written * num_kv_heads * head_dim}


def fused_inputs(shape: tuple[int, int, int, int, int], has_norms: bool) -> tuple[list[Array], dict[str, Any]]:
    num_q, num_kv, head_dim, rotary_dim, block_size = shape
    slots, caches = slots_and_caches(ROWS, num_kv, block_size, head_dim)
    qkv = normal(ROWS, (num_q + 2 * num_kv) * head_dim)
    positions, table = rope_inputs(ROWS, rotary_dim)
    norms = [normal(head_dim, seed=1), normal(head_dim, seed=2)] if has_norms else []
    attrs = {"num_q_heads": num_q, "num_kv_heads": num_kv, "head_dim": head_dim, "eps": 1e-6}
    return [qkv, positions, slots, table, *caches, *norms], attrs


FUSED_SHAPES = [  # Q, K, D, E, S
    (1, 1, 8, 8, 4),
    (6, 2, 24, 24, 16),
    (8, 1, 64, 64, 32),
    (9, 3, 64, 32, 16),
    (5, 5, 80, 80, 16),
    (4, 2, 96, 72, 16),
    (7, 1, 128, 128, 16),
    (3, 1, 128, 96, 32),
    (4, 2, 256, 256, 16),
    (2, 1, 250, 250, 16),
]


@DTYPES
@pytest.mark.parametrize("norms", ["", "norms", "unit offset"])
@pytest.mark.parametrize("shape", FUSED_SHAPES, ids=str)
def test_qk_norm_rope_write_kv(shape: tuple[int, int, int, int, int], norms: str, dtype: str) -> None:
    inputs, attrs = fused_inputs(shape, bool(norms))
    outputs = check("qk_norm_rope_write_kv", inputs, dtype, **attrs, unit_offset=norms == "unit offset")
    assert np.isfinite(outputs[0].astype(np.float32)).all()  # rows without a slot too


def test_position_out_of_range_takes_the_nearest() -> None:
    inputs, attrs = fused_inputs((2, 1, 64, 64, 16), False)
    inputs[1] = np.array([-5, 0, 50, 49, 2**31 - 1, -(2**31)])
    run = CudaRun("qk_norm_rope_write_kv", inputs, "bfloat16", {**attrs, "unit_offset": False})
    q, _k, _v = run.run()
    inputs[1] = np.clip(inputs[1], 0, 49)
    wanted, _k, _v = CudaRun("qk_norm_rope_write_kv", inputs, "bfloat16", {**attrs, "unit_offset": False}).run()
    assert np.array_equal(q, wanted)


@pytest.mark.parametrize(
    ("head_dim", "rotary_dim", "arguments"),
    [(64, 64, "8, 4"), (80, 80, "8, 8"), (128, 96, "8, 8"), (256, 256, "8, 16"), (24, 24, "1, 32"), (96, 72, "1, 32")],
)
def test_instance_follows_head_dim_and_rotation(head_dim: int, rotary_dim: int, arguments: str) -> None:
    inputs, attrs = fused_inputs((2, 1, head_dim, rotary_dim, 16), False)
    (call,) = CudaRun("qk_norm_rope_write_kv", inputs, "float16", {**attrs, "unit_offset": False}).calls()
    assert call.instance.expression == f"qk_norm_rope_write_kv<half, {arguments}>"


def test_head_dim_beyond_the_largest_is_refused() -> None:
    inputs, attrs = fused_inputs((1, 1, 264, 264, 16), False)
    run = CudaRun("qk_norm_rope_write_kv", inputs, "float16", {**attrs, "unit_offset": False})
    with pytest.raises(LaunchError, match="head_dim is 264, on a CUDA device at most 256"):
        run.calls()
