"""Compiled rope, write_kv and qk_norm_rope_write_kv against the oracle, over caches of every type."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_running import KernelRun
from meaning import assert_close
from native_running import compiled_devices
from numpy.typing import NDArray

from lean_engine.dtypes import numpy_dtype

Array = NDArray[Any]
CACHE_TYPES = ("float32", "bfloat16", "float16")
# Of a cache's element: half a unit in the last place, relative.
ROUNDING = {"float32": 1e-6, "bfloat16": 2.0**-8 + 1e-6, "float16": 2.0**-11 + 1e-6}


device = compiled_devices(CACHE_TYPES)


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([*shape, seed]).standard_normal(shape)


def rope_inputs(rows: int, rotary_dim: int) -> tuple[Array, Array]:
    angles = np.arange(50)[:, None] * 0.7 ** np.arange(rotary_dim // 2)
    return np.random.default_rng(rows).integers(0, 50, rows), np.hstack([np.cos(angles), np.sin(angles)])


def cache_inputs(rows: int, num_heads: int, block_size: int, head_dim: int) -> tuple[Array, Array, Array]:
    """Slots in random order, the second of them -1; two caches of NaN."""
    num_blocks = -(-rows // block_size) + 2
    slots = np.random.default_rng(rows).permutation(num_blocks * block_size)[:rows]
    slots[1:2] = -1
    caches = np.full((2, num_blocks, num_heads, block_size, head_dim), np.nan)
    return slots, caches[0], caches[1]


def assert_rounded(found: Array, wanted: Array) -> None:
    """Each element of a cache is the wanted one rounded; NaN where nothing was written."""
    tolerance = ROUNDING[found.dtype.name]
    as_float = found.astype(np.float64)
    assert np.array_equal(np.isnan(as_float), np.isnan(wanted))
    difference = np.nan_to_num(np.abs(as_float - wanted))
    assert (difference <= tolerance * np.nan_to_num(np.abs(wanted)) + 1e-6).all()


def wanted_caches(run: KernelRun, oracle: Any) -> list[Array]:
    """What the oracle leaves in caches of float64."""
    inputs = [a.astype(np.float64) if a.dtype != np.int32 else a for a in run.inputs]
    return list(oracle(*inputs, **run.attrs))


@pytest.mark.parametrize(
    ("rows", "num_heads", "block_size", "head_dim"), [(1, 1, 4, 8), (3, 2, 16, 10), (33, 3, 16, 64), (300, 5, 8, 24)]
)
def test_write_kv_rounds_to_its_slots_and_touches_no_other(
    device: Any, rows: int, num_heads: int, block_size: int, head_dim: int
) -> None:
    from lean_engine.ir.reference import write_kv

    k, v = normal(rows, num_heads * head_dim), normal(rows, num_heads * head_dim, seed=1)
    run = KernelRun(device, "write_kv", [k, v, *cache_inputs(rows, num_heads, block_size, head_dim)])
    wanted = wanted_caches(run, write_kv)
    run.replay()
    for found, expected in zip(run.outputs, wanted, strict=True):
        assert found.dtype.name == device.kv_cache_dtype
        assert_rounded(found, expected)


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(
    ("rows", "num_q", "num_kv", "head_dim", "rotary_dim"),
    [(1, 3, 3, 8, 8), (2, 4, 1, 10, 4), (5, 9, 3, 64, 64), (70, 8, 2, 96, 24)],
)
def test_qk_norm_rope_write_kv(
    device: Any, rows: int, num_q: int, num_kv: int, head_dim: int, rotary_dim: int, norms: bool
) -> None:
    from lean_engine.ir.reference import qk_norm_rope_write_kv

    qkv = normal(rows, (num_q + 2 * num_kv) * head_dim)
    positions, table = rope_inputs(rows, rotary_dim)
    slots, *caches = cache_inputs(rows, num_kv, 16, head_dim)
    weights = [normal(head_dim, seed=2), normal(head_dim, seed=3)] if norms else []
    attrs = {"num_q_heads": num_q, "num_kv_heads": num_kv, "head_dim": head_dim, "eps": 1e-6, "unit_offset": rows == 5}
    run = KernelRun(device, "qk_norm_rope_write_kv", [qkv, positions, slots, table, *caches, *weights], attrs)
    q, *wanted = wanted_caches(run, qk_norm_rope_write_kv)
    run.replay()
    assert_close(run.outputs[0], q, 3e-6)
    for found, expected in zip(run.outputs[1:], wanted, strict=True):
        assert_rounded(found, expected)


@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(2, 2), (64, 64), (96, 24)])
def test_rope(device: Any, head_dim: int, rotary_dim: int) -> None:
    run = KernelRun(device, "rope", [normal(70, 5 * head_dim), *rope_inputs(70, rotary_dim)], {"head_dim": head_dim})
    run.replay()
    assert_close(run.outputs[0], run.expected()[0], 3e-6)


def test_values_of_sixteen_bits_are_those_of_numpy(device: Any) -> None:
    """Ties to even, subnormal, largest, overflowing, infinite and NaN values, to the last bit."""
    if device.kv_cache_dtype == "float32":
        pytest.skip("nothing is rounded")
    bits = np.arange(0x10000, dtype=np.uint16)
    with np.errstate(invalid="ignore"):  # widening a signalling NaN is worth a warning on ARM
        exact = bits.view(numpy_dtype(device.kv_cache_dtype)).astype(np.float32)
    bits = exact[np.isfinite(exact)].view(np.uint32)
    half = 1 << (15 if device.kv_cache_dtype == "bfloat16" else 12)  # half a unit in the last place of normal numbers
    near = np.concatenate([bits + np.uint32(d) for d in (0, 1, half - 1, half, half + 1)]).view(np.float32)
    special = [65504, 65519.996, 65520, 1e6, 3.4e38, 2.0**-24, 2.0**-25, 2.0**-25 * 1.001, 3 * 2.0**-25, np.inf, np.nan]
    values = np.concatenate([near, np.array([*special, *(-x for x in special)], np.float32)])
    values = np.resize(values, (-(-len(values) // 64), 64))
    slots = np.arange(len(values))
    caches = np.zeros((2, -(-len(values) // 16), 1, 16, 64))
    run = KernelRun(device, "write_kv", [values, values, slots, *caches])
    run.replay()
    found = run.outputs[0].reshape(-1, 64)[: len(values)]
    with np.errstate(over="ignore", invalid="ignore"):
        wanted = values.astype(found.dtype)
    is_nan = np.isnan(values)
    assert np.array_equal(np.isnan(found.astype(np.float32)), is_nan)
    assert np.array_equal(found.view(np.uint16)[~is_nan], wanted.view(np.uint16)[~is_nan])
