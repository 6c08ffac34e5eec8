"""Compiled paged_attention against the oracle: any geometry, cache type and processor; the same bits in any batch.

By multiply-adds alone: what kernels on AMX tiles do is tested in test_native_attention_parts and _bf16.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_running import KernelRun, check_one_capture
from meaning import assert_close
from native_running import compiled_devices, cpu_device
from numpy.typing import NDArray
from test_cpu_attention import DECODES, MIXED, Batch, Request

from lean_engine.errors import LaunchError
from lean_engine.runtime.cpu.native import attention
from lean_engine.runtime.cpu.native.launches import Precision

Array = NDArray[Any]
# Contexts around the ends of stretches of 256 keys, chunks of one tile and of several, all in one batch.
LONG: list[Request] = [(700, 1), (900, 3), (255, 1), (256, 1), (257, 2), (0, 80), (511, 30), (1023, 1)]
CACHE_TYPES = ("float32", "bfloat16", "float16")
EXACT = Precision(is_batch_invariant=True)

device = compiled_devices(CACHE_TYPES, precision=EXACT)
native = compiled_devices(machines=("native",), precision=EXACT)


def run_batch(device: Any, inputs: list[Array], attrs: dict[str, Any]) -> tuple[Array, Array]:
    """The kernel's result and the oracle's, of a second replay."""
    run = KernelRun(device, "paged_attention", inputs, attrs)
    run.replay()
    run.poison()
    (expected,) = run.expected()
    run.replay()
    return run.outputs[0].copy(), expected


def results_of_threads(batch: Batch, num_replays: int, **options: Any) -> list[Array]:
    """What replays give on one thread, and on three."""
    results = []
    for threads in (1, 3):
        device = cpu_device("native", threads, **options)
        run = KernelRun(device, "paged_attention", batch.inputs(), batch.attrs)
        for _ in range(num_replays):
            run.poison()
            run.replay()
            results.append(run.outputs[0].copy())
        device.close()
    return results


def any_batches(new_tokens: Sequence[int]) -> st.SearchStrategy[Batch]:
    """Up to six requests, each with one of `new_tokens`, in any geometry."""
    contexts = st.sampled_from([0, 1, 3, 17, 70, 250, 256, 600])
    return st.builds(
        lambda requests, heads, *others: dataclasses.replace(Batch(requests, *heads, 8, *others), max_blocks=1),
        st.lists(st.tuples(contexts, st.sampled_from(new_tokens)), min_size=1, max_size=6),
        st.sampled_from([(1, 1), (2, 3), (3, 1), (1, 8)]),
        st.sampled_from([4, 16, 32]),
        st.sampled_from([None, 1, 3, 40, 270]),
        st.sampled_from([None, 3.0]),
        st.integers(0, 1000),
    )


def distant_stretches(make_inputs: Callable[[], list[Array]]) -> Iterator[list[Array]]:
    """Inputs in blocks of 16 whose scores are far larger, or smaller, in one stretch than in the others."""
    for first, factor in ((0, 32.0), (256, 32.0), (512, -32.0)):
        inputs = make_inputs()
        inputs[0][...] = np.abs(inputs[0]) * factor
        for table in inputs[3]:
            blocks = table[first // 16 : first // 16 + 16]
            inputs[1][blocks] = np.abs(inputs[1][blocks])
        yield inputs


def with_nan(inputs: list[Array], which: int, query: int) -> list[Array]:
    """NaN in a query, or in a key or a value of the first request."""
    if which == 0:
        inputs[0][query] = np.nan
    else:
        inputs[which][inputs[3][0, 3], :, 2] = np.nan
    return inputs


def check(device: Any, batch: Batch) -> None:
    assert_close(*run_batch(device, batch.inputs(), batch.attrs), 5e-6)


@pytest.mark.parametrize(
    ("head_dim", "block_size"),
    [(8, 4), (10, 16), (24, 24), (64, 4), (64, 16), (64, 24), (80, 32), (96, 4), (128, 16), (256, 16), (256, 24)],
)
def test_head_dims_and_block_sizes(device: Any, head_dim: int, block_size: int) -> None:
    check(device, Batch(MIXED, head_dim=head_dim, block_size=block_size))


@pytest.mark.parametrize(("num_kv_heads", "group"), [(4, 1), (2, 3), (1, 8), (1, 71)])
def test_groups_of_query_heads(device: Any, num_kv_heads: int, group: int) -> None:
    check(device, Batch(MIXED, num_kv_heads=num_kv_heads, group=group))


@pytest.mark.parametrize(
    ("window", "softcap"), [(None, None), (None, 2.0), (1, None), (5, 2.0), (13, None), (256, None), (300, 3.0)]
)
@pytest.mark.parametrize("requests", [DECODES, MIXED, LONG], ids=["decodes", "mixed", "long"])
def test_windows_and_softcaps(device: Any, requests: list[Request], window: int | None, softcap: float | None) -> None:
    check(device, Batch(requests, window=window, softcap=softcap))


@pytest.mark.parametrize(
    ("context", "window"), [(0, None), (255, None), (256, None), (512, 400), (3000, None), (3000, 400)]
)
def test_one_decode_is_split_by_stretches(device: Any, context: int, window: int | None) -> None:
    check(device, Batch([(context, 1)], num_kv_heads=3, group=3, head_dim=64, block_size=16, window=window))


def test_few_rows_become_a_task_per_stretch_and_many_do_not(native: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    plans: list[attention.Plan] = []
    make = attention.plan
    monkeypatch.setattr(attention, "plan", lambda *args: plans.append(make(*args)) or plans[-1])
    for num_requests, num_items, num_merges in ((2, 2 * 2 * 4, 2 * 2), (60, 60 * 2, 0)):
        batch = Batch([(1000, 1)] * num_requests, head_dim=16, block_size=16)
        KernelRun(native, "paged_attention", batch.inputs(), batch.attrs).replay()
        assert plans[-1].counts.tolist() == [num_items, num_merges]


@pytest.mark.parametrize("requests", [[(0, 0), (6, 1), (0, 0)], [(0, 0), (0, 0)], [(0, 3), (0, 0), (300, 2)]], ids=str)
def test_requests_of_no_tokens(device: Any, requests: list[Request]) -> None:
    check(device, Batch(requests))


def test_padded_rows_give_zeros(device: Any) -> None:
    """Rows behind the last request, and the row of a request of length 0."""
    batch = Batch([(4, 1), (0, 3)])
    q, *caches, tables, starts, lengths = batch.inputs()
    padded = np.concatenate([q, np.full((3, q.shape[1]), np.nan)])
    tables = np.concatenate([tables, np.zeros_like(tables[:1])])
    inputs = [padded, *caches, tables, np.append(starts, starts[-1] + 1), np.append(lengths, 0)]
    found, expected = run_batch(device, inputs, batch.attrs)
    assert_close(found, expected, 5e-6)
    assert not found[4:].any()


def test_large_scores_do_not_overflow(device: Any) -> None:
    batch = Batch(MIXED)
    inputs = batch.inputs()
    inputs[0] *= 200
    found, expected = run_batch(device, inputs, batch.attrs)
    assert np.isfinite(found).all()
    assert_close(found, expected, 2e-3)  # scores near 1,000: float32 leaves 1e-4 of each


def test_stretches_may_be_far_apart(native: Any) -> None:
    """Whichever stretch has the larger maximum, the others neither overflow nor are lost."""
    batch = Batch([(900, 1), (300, 40), (700, 2)], block_size=16)
    for first, factor in ((0, 40.0), (256, 40.0), (512, -40.0)):
        inputs = batch.inputs()
        inputs[0][...] = np.abs(inputs[0]) * factor
        for table in inputs[3]:
            blocks = table[first // 16 : first // 16 + 16]
            inputs[1][blocks] = np.abs(inputs[1][blocks])
        found, expected = run_batch(native, inputs, batch.attrs)
        assert np.isfinite(found).all()
        assert_close(found, expected, 5e-4)


def test_nan_in_a_query_a_key_or_a_value_stays_visible(native: Any) -> None:
    batch = Batch([(300, 1), (20, 1)], block_size=16)
    for which in range(3):
        found, _ = run_batch(native, with_nan(batch.inputs(), which, 0), batch.attrs)
        assert np.isnan(found[0]).all()
        assert np.isfinite(found[1]).all()


@pytest.mark.parametrize("window", [None, 300])
def test_bits_depend_on_nothing_but_the_row(device: Any, window: int | None) -> None:
    """A request alone, and a row as a decode of its own, give what they give in a batch of decodes and long chunks."""
    batch = Batch(LONG, num_kv_heads=1, group=3, head_dim=24, window=window)
    inputs = batch.inputs()
    whole, _ = run_batch(device, inputs, batch.attrs)
    q, k_cache, v_cache, tables, starts, lengths = inputs
    for b, (_, new) in enumerate(LONG):
        rows = slice(starts[b], starts[b + 1])
        caches = [k_cache, v_cache, tables[b : b + 1]]
        alone, _ = run_batch(device, [q[rows], *caches, np.array([0, new]), lengths[b : b + 1]], batch.attrs)
        assert np.array_equal(alone, whole[rows])
        for row in {0, new // 2, new - 1}:
            length = lengths[b : b + 1] - (new - 1 - row)
            query = q[starts[b] + row : starts[b] + row + 1]
            single, _ = run_batch(device, [query, *caches, np.array([0, 1]), length], batch.attrs)
            assert np.array_equal(single[0], whole[starts[b] + row])


@pytest.mark.parametrize("requests", [LONG, [(2000, 1), (40, 1)], [(300, 1)] * 70], ids=["long", "split", "decodes"])
def test_bits_do_not_depend_on_threads(requests: list[Request]) -> None:
    batch = Batch(requests, num_kv_heads=3, group=3, head_dim=64, block_size=16)
    results = results_of_threads(batch, 3, precision=EXACT)
    assert all(np.array_equal(results[0], other) for other in results[1:])


def test_one_capture_serves_other_lengths_and_tables(native: Any) -> None:
    """The same numbers of tokens, requests and blocks, everything else different."""
    first = Batch([(3, 1), (0, 5), (600, 2)], max_blocks=160)
    second = Batch([(1, 5), (12, 2), (530, 1)], max_blocks=160, seed=1)
    check_one_capture(native, "paged_attention", [first.inputs(), second.inputs()], first.attrs, 5e-6)


def test_heads_too_large_are_refused(native: Any) -> None:
    batch = Batch([(0, 1)], head_dim=264)
    with pytest.raises(LaunchError, match="head_dim is 264, must be at most 256"):
        KernelRun(native, "paged_attention", batch.inputs(), batch.attrs)


@settings(max_examples=40, deadline=None)
@given(any_batches([0, 1, 1, 1, 2, 5, 19, 40]))
def test_any_batch(native: Any, batch: Batch) -> None:
    check(native, batch)
