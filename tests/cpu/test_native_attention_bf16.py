"""Compiled paged_attention with bfloat16 products, on AMX tiles: errors of rounding alone, the same bits in any batch.

Inputs are numbers that bfloat16 has, so that only the weights' rounding is left to differ from the oracle.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from kernel_running import KernelRun
from native_running import compiled_devices, cpu_device, required_tiles
from numpy.typing import NDArray
from test_cpu_attention import DECODES, MIXED, Batch, Request
from test_native_attention import CACHE_TYPES, LONG, any_batches, distant_stretches, results_of_threads, with_nan

from lean_engine.dtypes import numpy_dtype
from lean_engine.runtime.cpu.native import attention
from lean_engine.runtime.cpu.native.launches import Precision

Array = NDArray[Any]
BF16 = Precision(products="bfloat16")
CHUNK: list[Request] = [(300, 1), (130, 260), (5, 1)]  # of several tiles, whatever their size

tiles = required_tiles()
device = compiled_devices(CACHE_TYPES, machines=("native",), precision=BF16)
native = compiled_devices(machines=("native",), precision=BF16)


def rounded_inputs(batch: Batch) -> list[Array]:
    inputs = batch.inputs()
    for i in range(3):
        inputs[i] = inputs[i].astype(numpy_dtype("bfloat16")).astype(np.float64)
    return inputs


def run_batch(device: Any, inputs: list[Array], attrs: dict[str, Any]) -> Array:
    """The kernel's result of a second replay."""
    run = KernelRun(device, "paged_attention", inputs, attrs)
    run.replay()
    run.poison()
    run.replay()
    return run.outputs[0].copy()


def assert_within_rounding(found: Array, device: Any, inputs: list[Array], attrs: dict[str, Any]) -> None:
    """Weights and their sum are each off by 2^-9 + 2^-13 of themselves at most, times what they weigh."""
    (expected,) = KernelRun(device, "paged_attention", inputs, attrs).expected()
    sizes = [*inputs[:2], np.abs(inputs[2]), *inputs[3:]]
    (size,) = KernelRun(device, "paged_attention", sizes, attrs).expected()
    error = np.abs(found - expected)
    assert np.all(error <= 2 * (2**-9 + 2**-13) * size + 1e-5), (error / size).max()


def check(device: Any, batch: Batch) -> None:
    inputs = rounded_inputs(batch)
    assert_within_rounding(run_batch(device, inputs, batch.attrs), device, inputs, batch.attrs)


@pytest.mark.parametrize(
    ("head_dim", "block_size"),
    [(8, 4), (10, 16), (64, 4), (64, 16), (64, 24), (64, 32), (80, 16), (96, 32), (128, 16), (160, 16), (256, 24)],
)
def test_head_dims_and_block_sizes(device: Any, head_dim: int, block_size: int) -> None:
    check(device, Batch(MIXED, head_dim=head_dim, block_size=block_size))


@pytest.mark.parametrize(("head_dim", "block_size", "window"), [(64, 16, None), (80, 32, 100), (256, 24, None)])
def test_chunks_of_several_tiles(native: Any, head_dim: int, block_size: int, window: int | None) -> None:
    check(native, Batch(CHUNK, num_kv_heads=1, head_dim=head_dim, block_size=block_size, window=window))


@pytest.mark.parametrize(("num_kv_heads", "group"), [(4, 1), (2, 3), (1, 8), (1, 16), (1, 71)])
def test_groups_of_query_heads(device: Any, num_kv_heads: int, group: int) -> None:
    check(device, Batch(MIXED, num_kv_heads=num_kv_heads, group=group))


@pytest.mark.parametrize(
    ("window", "softcap"), [(None, None), (None, 2.0), (1, None), (5, 2.0), (13, None), (256, None), (300, 3.0)]
)
@pytest.mark.parametrize("requests", [DECODES, MIXED, LONG], ids=["decodes", "mixed", "long"])
def test_windows_and_softcaps(device: Any, requests: list[Request], window: int | None, softcap: float | None) -> None:
    check(device, Batch(requests, window=window, softcap=softcap))


@pytest.mark.parametrize(("context", "window"), [(255, None), (256, None), (512, 400), (3000, None), (3000, 400)])
def test_one_decode_is_split_by_stretches(device: Any, context: int, window: int | None) -> None:
    check(device, Batch([(context, 1)], num_kv_heads=3, group=3, head_dim=64, block_size=16, window=window))


def test_operands_are_rounded_to_bfloat16(device: Any) -> None:
    """Rounding what the caches and queries hold beforehand changes nothing: a cache of bfloat16 gives the same bits."""
    batch = Batch(LONG, head_dim=64, block_size=16)
    rounded, exact = (run_batch(device, make(batch), batch.attrs) for make in (rounded_inputs, Batch.inputs))
    if device.kv_cache_dtype == "float16":
        assert np.abs(rounded - exact).max() < 0.05  # rounded twice
    else:
        assert np.array_equal(rounded, exact)


def test_padded_rows_and_requests_of_no_tokens_give_zeros(device: Any) -> None:
    batch = Batch([(4, 1), (0, 0), (0, 3)])
    q, *caches, tables, starts, lengths = rounded_inputs(batch)
    padded = np.concatenate([q, np.full((3, q.shape[1]), np.nan)])
    tables = np.concatenate([tables, np.zeros_like(tables[:1])])
    inputs = [padded, *caches, tables, np.append(starts, starts[-1] + 1), np.append(lengths, 0)]
    found = run_batch(device, inputs, batch.attrs)
    assert_within_rounding(found[:4], device, [q, *caches, tables[:3], starts, lengths], batch.attrs)
    assert not found[4:].any()


def test_large_scores_do_not_overflow(device: Any) -> None:
    batch = Batch(MIXED)
    inputs = rounded_inputs(batch)
    inputs[0] *= 256
    found = run_batch(device, inputs, batch.attrs)
    assert np.isfinite(found).all()
    assert_within_rounding(found, device, inputs, batch.attrs)


def test_stretches_may_be_far_apart(native: Any) -> None:
    """Whichever stretch has the larger maximum, the others neither overflow nor are lost."""
    batch = Batch([(900, 1), (300, 40), (700, 2)], block_size=16)
    for inputs in distant_stretches(lambda: rounded_inputs(batch)):
        found = run_batch(native, inputs, batch.attrs)
        assert_within_rounding(found, native, inputs, batch.attrs)


def test_nan_in_a_query_a_key_or_a_value_stays_visible(native: Any) -> None:
    batch = Batch([(300, 1), (20, 1)], block_size=16)
    for which in range(3):
        inputs = with_nan(rounded_inputs(batch), which, 0)
        found = run_batch(native, inputs, batch.attrs)
        assert np.isnan(found[0]).all()
        assert np.isfinite(found[1]).all()


@pytest.mark.parametrize("window", [None, 300])
@pytest.mark.parametrize("requests", [LONG, CHUNK], ids=["long", "chunk"])
def test_bits_depend_on_nothing_but_the_row(device: Any, requests: list[Request], window: int | None) -> None:
    """A request alone, and a row as a decode of its own, give what they give in a batch of decodes and long chunks."""
    batch = Batch(requests, num_kv_heads=1, group=3, head_dim=40, window=window)
    q, k_cache, v_cache, tables, starts, lengths = inputs = batch.inputs()
    whole = run_batch(device, inputs, batch.attrs)
    for b, (_, new) in enumerate(requests):
        rows = slice(starts[b], starts[b + 1])
        caches = [k_cache, v_cache, tables[b : b + 1]]
        alone = run_batch(device, [q[rows], *caches, np.array([0, new]), lengths[b : b + 1]], batch.attrs)
        assert np.array_equal(alone, whole[rows])
        for row in {0, new // 2, new - 1}:
            length = lengths[b : b + 1] - (new - 1 - row)
            query = q[starts[b] + row : starts[b] + row + 1]
            single = run_batch(device, [query, *caches, np.array([0, 1]), length], batch.attrs)
            assert np.array_equal(single[0], whole[starts[b] + row])


@pytest.mark.parametrize("requests", [[(0, 500), (700, 1)], [(2000, 1), (40, 1)], [(300, 1)] * 70], ids=str)
def test_bits_do_not_depend_on_threads(requests: list[Request]) -> None:
    """Nor therefore on how many rows a tile has, which does."""
    batch = Batch(requests, num_kv_heads=2, group=3, head_dim=64, block_size=16)
    results = results_of_threads(batch, 2, precision=BF16)
    assert all(np.array_equal(results[0], other) for other in results[1:])


def test_tiles_are_large_where_all_threads_have_some() -> None:
    assert attention.large_tile(512 * 9, 64, 1) == 384
    assert attention.large_tile(512 * 9, 128, 1) == 192
    assert attention.large_tile(512 * 9, 64, 8) == 128
    assert attention.large_tile(9, 256, 64) == 96


def test_one_capture_serves_other_lengths_and_tables(native: Any) -> None:
    """The same numbers of tokens, requests and blocks, everything else different."""
    first = Batch([(3, 1), (0, 5), (600, 2)], max_blocks=160)
    second = Batch([(1, 5), (12, 2), (530, 1)], max_blocks=160, seed=1)
    run = KernelRun(native, "paged_attention", first.inputs(), first.attrs)
    for batch in (first, second, first):
        inputs = rounded_inputs(batch)
        for held, array in zip(run.inputs, inputs, strict=True):
            held[...] = array
        run.replay()
        assert_within_rounding(run.outputs[0], native, inputs, batch.attrs)


def exact_and_found(
    monkeypatch: pytest.MonkeyPatch, precision: Precision, has_tiles: bool, scale: float
) -> list[Array]:
    monkeypatch.setattr(attention, "has_tiles", lambda scope: has_tiles)
    results = []
    for chosen in (Precision(), precision):
        device = cpu_device("native", 2, precision=chosen)
        batch = Batch(LONG, head_dim=64, block_size=16)
        results.append(run_batch(device, batch.inputs(), {**batch.attrs, "scale": scale}))
        device.close()
    return results


@pytest.mark.parametrize(
    ("precision", "has_tiles", "scale"),
    [
        (Precision("bfloat16"), True, 0.125),
        (Precision("int8"), True, 0.125),
        (BF16, False, 0.125),
        (BF16, True, -0.125),
    ],
    ids=["bfloat16 weights alone", "int8", "no tiles", "negative scale"],
)
def test_all_else_is_exact(
    monkeypatch: pytest.MonkeyPatch, precision: Precision, has_tiles: bool, scale: float
) -> None:
    exact, found = exact_and_found(monkeypatch, precision, has_tiles, scale)
    assert np.array_equal(exact, found)


def test_bfloat16_products_are_not_the_exact_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    exact, found = exact_and_found(monkeypatch, BF16, True, 0.125)
    assert not np.array_equal(exact, found)


@settings(max_examples=30, deadline=None)
@given(any_batches([0, 1, 1, 1, 2, 5, 19, 40, 130]))
def test_any_batch(native: Any, batch: Batch) -> None:
    check(native, batch)
