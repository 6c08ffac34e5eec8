"""Compiled paged_attention on AMX tiles in parts: as exact as multiply-adds, which requests of few rows take.

Among requests of many rows a row's bits depend on nothing but its own query, keys and values.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from kernel_running import KernelRun, check_one_capture
from meaning import assert_close
from native_running import compiled_devices, library_path, required_tiles
from numpy.typing import NDArray
from test_cpu_attention import Batch, Request
from test_native_attention import (
    CACHE_TYPES,
    EXACT,
    any_batches,
    distant_stretches,
    results_of_threads,
    run_batch,
    with_nan,
)

from lean_engine.runtime.cpu.native import attention
from lean_engine.runtime.cpu.native.launches import Precision, Scope
from lean_engine.runtime.cpu.native.library import Library

Array = NDArray[Any]
# Requests of few rows and of many, with contexts around the ends of stretches of 256 keys.
MIXED: list[Request] = [(300, 1), (0, 210), (255, 2), (500, 60), (190, 200), (511, 1)]
CHUNK: list[Request] = [(300, 1), (130, 460), (5, 1)]  # of several tiles, whatever their size

tiles = required_tiles()
device = compiled_devices(CACHE_TYPES, machines=("native",))
native = compiled_devices(machines=("native",))
exact = compiled_devices(machines=("native",), precision=EXACT)


def check(device: Any, batch: Batch) -> None:
    assert_close(*run_batch(device, batch.inputs(), batch.attrs), 5e-6)


@pytest.mark.parametrize(
    ("head_dim", "block_size"),
    [(8, 4), (10, 16), (64, 4), (64, 16), (64, 24), (64, 32), (80, 16), (96, 32), (128, 16), (160, 16), (256, 24)],
)
def test_head_dims_and_block_sizes(device: Any, head_dim: int, block_size: int) -> None:
    check(device, Batch(MIXED, num_kv_heads=1, head_dim=head_dim, block_size=block_size))


@pytest.mark.parametrize(("head_dim", "block_size", "window"), [(64, 16, None), (80, 32, 100), (256, 24, None)])
def test_chunks_of_several_tiles(device: Any, head_dim: int, block_size: int, window: int | None) -> None:
    check(device, Batch(CHUNK, num_kv_heads=1, head_dim=head_dim, block_size=block_size, window=window))


@pytest.mark.parametrize(("num_kv_heads", "group"), [(2, 1), (2, 3), (1, 8), (1, 71)])
def test_groups_of_query_heads(device: Any, num_kv_heads: int, group: int) -> None:
    check(device, Batch(MIXED, num_kv_heads=num_kv_heads, group=group))


@pytest.mark.parametrize(
    ("window", "softcap"), [(None, None), (None, 2.0), (1, None), (5, 2.0), (13, None), (256, None), (300, 3.0)]
)
@pytest.mark.parametrize("requests", [MIXED, CHUNK], ids=["mixed", "chunk"])
def test_windows_and_softcaps(device: Any, requests: list[Request], window: int | None, softcap: float | None) -> None:
    check(device, Batch(requests, num_kv_heads=1, window=window, softcap=softcap))


@pytest.mark.parametrize(("context", "window"), [(255, None), (512, 400), (3000, None), (3000, 400)])
def test_long_contexts(device: Any, context: int, window: int | None) -> None:
    check(device, Batch([(context, 65)], num_kv_heads=2, group=3, head_dim=64, block_size=16, window=window))


@pytest.mark.parametrize("head_dim", [64, 256])
def test_errors_are_those_of_multiply_adds(native: Any, exact: Any, head_dim: int) -> None:
    batch = Batch([(1500, 100)], num_kv_heads=2, group=3, head_dim=head_dim, block_size=16)
    errors = []
    for device in (native, exact):
        found, expected = run_batch(device, batch.inputs(), batch.attrs)
        errors.append(np.sqrt(np.mean((found - expected) ** 2)))
    assert errors[0] < 1.2 * errors[1]


def test_large_scores_do_not_overflow(device: Any) -> None:
    batch = Batch(MIXED)
    inputs = batch.inputs()
    inputs[0] *= 256
    found, expected = run_batch(device, inputs, batch.attrs)
    assert np.isfinite(found).all()
    assert_close(found, expected, 5e-4)


def test_stretches_may_be_far_apart(native: Any) -> None:
    """Whichever stretch has the larger maximum, the others neither overflow nor are lost."""
    batch = Batch([(900, 100), (300, 110), (700, 120)], num_kv_heads=1, block_size=16)
    for inputs in distant_stretches(batch.inputs):
        found, expected = run_batch(native, inputs, batch.attrs)
        assert np.isfinite(found).all()
        assert_close(found, expected, 5e-4)


def test_nan_in_a_query_a_key_or_a_value_stays_visible(native: Any) -> None:
    batch = Batch([(300, 100), (20, 100)], block_size=16)
    for which in range(3):
        inputs = with_nan(batch.inputs(), which, 7)
        found, _ = run_batch(native, inputs, batch.attrs)
        assert np.isnan(found[slice(7, 8) if which == 0 else slice(100)]).all()
        assert np.isfinite(found[100:]).all()


def test_the_largest_numbers_are_not_lost(native: Any) -> None:
    """Their rests do not overflow: a value beyond bfloat16's range comes out as it is."""
    batch = Batch([(0, 200)], num_kv_heads=1, group=1, window=1)
    inputs = batch.inputs()
    inputs[2][...] = np.float32(1 - 2.0**-20) * np.finfo(np.float32).max
    found, expected = run_batch(native, inputs, batch.attrs)
    assert np.allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("requests", [MIXED, CHUNK], ids=["mixed", "chunk"])
def test_bits_depend_on_nothing_but_the_row_and_its_kind(
    device: Any, requests: list[Request], window: int | None
) -> None:
    """A request alone, and the first and the last rows of a chunk as a chunk, give what they give in a batch."""
    batch = Batch(requests, num_kv_heads=1, group=3, head_dim=40, window=window)
    q, k_cache, v_cache, tables, starts, lengths = inputs = batch.inputs()
    whole, _ = run_batch(device, inputs, batch.attrs)
    least = attention.MAX_FMA_ROWS // 3 + 1
    for b, (_, new) in enumerate(requests):
        caches = [k_cache, v_cache, tables[b : b + 1]]
        for first, last in {(0, new)} | ({(0, least), (new - least, new)} if new > least else set()):
            rows = slice(starts[b] + first, starts[b] + last)
            length = lengths[b : b + 1] - (new - last)
            alone, _ = run_batch(device, [q[rows], *caches, np.array([0, last - first]), length], batch.attrs)
            assert np.array_equal(alone, whole[rows])


def test_requests_of_few_rows_take_multiply_adds(native: Any, exact: Any) -> None:
    batch = Batch(MIXED, num_kv_heads=2, group=3, head_dim=64, block_size=16)
    found, wanted = (run_batch(device, batch.inputs(), batch.attrs)[0] for device in (native, exact))
    starts = np.cumsum([0, *(new for _, new in MIXED)])
    for b, (_, new) in enumerate(MIXED):
        rows = slice(starts[b], starts[b + 1])
        assert np.array_equal(found[rows], wanted[rows]) == (3 * new <= attention.MAX_FMA_ROWS)


@pytest.mark.parametrize("requests", [[(0, 500), (700, 1)], [(2000, 70), (40, 1)], [(300, 80)] * 4], ids=str)
def test_bits_do_not_depend_on_threads(requests: list[Request]) -> None:
    """Nor therefore on how many rows a tile has, which does."""
    results = results_of_threads(Batch(requests, num_kv_heads=2, group=3, head_dim=64, block_size=16), 2)
    assert all(np.array_equal(results[0], other) for other in results[1:])


def test_padded_rows_give_zeros(device: Any) -> None:
    batch = Batch([(4, 160), (0, 0), (0, 3)])
    q, *caches, tables, starts, lengths = batch.inputs()
    inputs = [np.concatenate([q, np.full((3, q.shape[1]), np.nan)]), *caches, tables, starts, lengths]
    run = KernelRun(device, "paged_attention", inputs, batch.attrs)
    run.replay()
    assert np.isfinite(run.outputs[0]).all()
    assert not run.outputs[0][163:].any()


def test_one_capture_serves_other_lengths_and_tables(native: Any) -> None:
    """The same numbers of tokens, requests and blocks, everything else different."""
    first = Batch([(3, 1), (0, 100), (400, 120)], max_blocks=160)
    second = Batch([(1, 100), (12, 120), (530, 1)], max_blocks=160, seed=1)
    check_one_capture(native, "paged_attention", [first.inputs(), second.inputs()], first.attrs, 5e-6)


@pytest.mark.parametrize(
    ("precision", "has_tiles", "scale", "num_tokens", "kernel"),
    [
        (Precision(), True, 0.125, 65, "paged_attention_parts"),
        (Precision("int8"), True, 0.125, 65, "paged_attention_parts"),
        (Precision(), True, 0.125, 64, "paged_attention"),
        (Precision(), False, 0.125, 65, "paged_attention"),
        (Precision(), True, -0.125, 65, "paged_attention"),
        (EXACT, True, 0.125, 65, "paged_attention"),
        (Precision(products="bfloat16"), True, 0.125, 1, "paged_attention_bf16"),
    ],
)
def test_the_way_that_attention_takes(
    monkeypatch: pytest.MonkeyPatch, precision: Precision, has_tiles: bool, scale: float, num_tokens: int, kernel: str
) -> None:
    monkeypatch.setattr(attention, "has_tiles", lambda scope: has_tiles)
    scope = Scope(Library(library_path(), ()), 2, {}, precision)
    assert attention.Way.choose(scope, (num_tokens, 3, 3), 64, scale).kernel == kernel


@settings(max_examples=40, deadline=None)
@given(any_batches([0, 1, 2, 40, 70, 200, 450]))
def test_any_batch(native: Any, batch: Batch) -> None:
    check(native, batch)
