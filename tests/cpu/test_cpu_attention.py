"""paged_attention of the CPU device against the oracle: prompts, chunks and decodes mixed, over poisoned caches."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_running import KernelRun, check_one_capture
from meaning import assert_close
from numpy.typing import NDArray

from lean_engine.runtime.cpu import attention
from lean_engine.runtime.cpu.device import CpuDevice

Array = NDArray[Any]
Request = tuple[int, int]  # tokens in the cache before this step, tokens of this step

DECODES = [(0, 1), (7, 1), (8, 1), (9, 1), (8, 1), (63, 1), (1, 1), (62, 1), (30, 1)]
MIXED = [(0, 5), (9, 1), (3, 4), (0, 1), (17, 1), (12, 2), (40, 1), (0, 17), (33, 1), (21, 33)]


@pytest.fixture(scope="module")
def device() -> Iterator[CpuDevice]:
    device = CpuDevice(2)
    yield device
    device.close()


@pytest.fixture(scope="module", params=[1, 2, 3], ids=lambda n: f"{n} threads")
def any_device(request: pytest.FixtureRequest) -> Iterator[CpuDevice]:
    device = CpuDevice(request.param)
    yield device
    device.close()


@dataclass
class Batch:
    """A step's attention. Caches hold NaN and infinity wherever no query of the step may look."""

    requests: list[Request]
    num_kv_heads: int = 2
    group: int = 2
    head_dim: int = 8
    block_size: int = 4
    window: int | None = None
    softcap: float | None = None
    seed: int = 0
    max_blocks: int = 1  # columns of the block tables at least
    num_shared: int = 0  # blocks with which the table of every request begins whose context has them

    def inputs(self) -> list[Array]:
        """q, k_cache, v_cache, block_tables, cu_seqlens_q, seq_lens."""
        random = np.random.default_rng(self.seed)
        lengths = [context + new for context, new in self.requests]
        max_blocks = max(self.max_blocks, *(-(-length // self.block_size) + 1 for length in lengths), 2)
        tables = 1 + random.permutation(len(lengths) * max_blocks).reshape(len(lengths), max_blocks)
        sharing = [b for b, (context, _) in enumerate(self.requests) if context >= self.num_shared * self.block_size]
        tables[sharing, : self.num_shared] = tables[sharing[:1], : self.num_shared]
        shape = (1 + tables.size, self.num_kv_heads, self.block_size, self.head_dim)
        caches = random.choice([np.nan, np.inf, -np.inf], (2, *shape))
        for table, (context, new) in zip(tables, self.requests, strict=True):
            first = 0 if self.window is None else max(0, context - self.window + 1)
            for position in range(first, context + new):
                place = (slice(None), table[position // self.block_size], slice(None), position % self.block_size)
                caches[place] = random.standard_normal(caches[place].shape)
        starts = np.cumsum([0, *(new for _, new in self.requests)])
        q = random.standard_normal((starts[-1], self.num_kv_heads * self.group * self.head_dim))
        return [2 * q, *caches, tables, starts, np.array(lengths)]

    @property
    def attrs(self) -> dict[str, Any]:
        scale = self.head_dim**-0.5
        return {"head_dim": self.head_dim, "scale": scale, "window": self.window, "softcap": self.softcap}


def check(device: CpuDevice, batch: Batch) -> None:
    run = KernelRun(device, "paged_attention", batch.inputs(), batch.attrs)
    (expected,) = run.expected()
    run.replay()
    assert_close(run.outputs[0], expected, 5e-6)


@pytest.mark.parametrize("block_size", [4, 16, 32])
@pytest.mark.parametrize("head_dim", [8, 24, 64, 80])
def test_head_dims_and_block_sizes(device: CpuDevice, head_dim: int, block_size: int) -> None:
    check(device, Batch(MIXED, head_dim=head_dim, block_size=block_size))


@pytest.mark.parametrize(("num_kv_heads", "group"), [(1, 1), (4, 1), (2, 3), (3, 2), (1, 5), (1, 8), (2, 4), (5, 7)])
def test_groups_of_query_heads(device: CpuDevice, num_kv_heads: int, group: int) -> None:
    check(device, Batch(MIXED, num_kv_heads=num_kv_heads, group=group))


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 2, 4, 5, 8, 13, 1000])
@pytest.mark.parametrize("requests", [DECODES, MIXED], ids=["decodes", "mixed"])
def test_windows_and_softcaps(
    device: CpuDevice, requests: list[Request], window: int | None, softcap: float | None
) -> None:
    check(device, Batch(requests, window=window, softcap=softcap))


@pytest.mark.parametrize(
    "requests",
    [
        [(0, 1)],
        [(5, 1)],
        [(0, 2)],
        [(0, 64), (0, 65)],
        [(3, 150)],
        [(100, 1)] * 7,
        [(n, 1) for n in range(40)],
        [(n, 1) for n in range(160, 0, -13)],
        [(4, 1), (0, 3), (5, 1), (6, 1)],
        [(15, 1), (16, 1), (17, 1)],
        [(0, 0), (6, 1), (0, 0)],
        [(0, 0), (0, 0)],
    ],
    ids=str,
)
def test_shapes_of_a_batch(any_device: CpuDevice, requests: list[Request]) -> None:
    check(any_device, Batch(requests))


def test_contexts_and_chunks_too_large_for_one_piece_of_scratch(device: CpuDevice) -> None:
    requests = [(2500, 1), (2400, 1), (10, 1), (2300, 58), (2499, 1)]
    for batch in (requests, [(2500 + i, 1) for i in range(9)]):
        check(device, Batch(batch, num_kv_heads=2, group=4, head_dim=64, block_size=16))


def test_padded_rows_give_zeros(device: CpuDevice) -> None:
    """Rows behind the last request, and the row of a request of length 0."""
    batch = Batch([(4, 1), (0, 3)])
    q, *rest = batch.inputs()
    padded = np.concatenate([q, np.full((2, q.shape[1]), np.nan)])
    run = KernelRun(device, "paged_attention", [padded, *rest], batch.attrs)
    (expected,) = run.expected()
    run.replay()
    assert_close(run.outputs[0], expected, 5e-6)
    assert not run.outputs[0][4:].any()
    tables, cu_seqlens, seq_lens = rest[2:]
    tables = np.concatenate([tables, np.zeros_like(tables[:1])])
    padding = [np.append(cu_seqlens, cu_seqlens[-1] + 1), np.append(seq_lens, 0)]
    run = KernelRun(device, "paged_attention", [padded[:5], *rest[:2], tables, *padding], batch.attrs)
    (expected,) = run.expected()
    run.replay()
    assert_close(run.outputs[0], expected, 5e-6)
    assert not run.outputs[0][4].any()


def test_blocks_shared_by_requests(device: CpuDevice) -> None:
    batch = Batch([(16, 1), (16, 3), (16, 1)])
    inputs = batch.inputs()
    inputs[3][1:, :4] = inputs[3][0, :4]  # one prefix of four blocks
    run = KernelRun(device, "paged_attention", inputs, batch.attrs)
    (expected,) = run.expected()
    run.replay()
    assert_close(run.outputs[0], expected, 5e-6)


@pytest.fixture
def _any_sharing_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a prefix of one block that two decodes share worth reading once."""
    monkeypatch.setattr(attention, "MIN_SHARED_TOKENS", 1)


SHARING = [(16, 1), (40, 1), (3, 1), (17, 1), (100, 1), (16, 3), (19, 1), (16, 1), (0, 20), (37, 1), (16, 1)]


@pytest.mark.usefixtures("_any_sharing_counts")
@pytest.mark.parametrize("num_shared", [1, 3, 4])
@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize(("num_kv_heads", "group", "head_dim"), [(2, 2, 8), (1, 1, 24), (3, 3, 64), (1, 8, 10)])
def test_prefix_that_decodes_share_is_read_once(
    any_device: CpuDevice, num_shared: int, softcap: float | None, num_kv_heads: int, group: int, head_dim: int
) -> None:
    batch = Batch(SHARING, num_kv_heads, group, head_dim, softcap=softcap, num_shared=num_shared)
    _, _, _, tables, starts, lengths = batch.inputs()
    geometry = attention.Geometry(num_kv_heads, group, head_dim, 4, None)
    items = attention.make_items(geometry, tables, starts, lengths, 2)
    assert sum(item.num_requests for item in items if item.shared_length == 4 * num_shared) == 8
    check(any_device, batch)


@pytest.mark.usefixtures("_any_sharing_counts")
def test_long_shared_prefix_is_cut_to_the_scratch(device: CpuDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "TILE_ELEMENTS", 4 * 200 * 2)  # scores of 2 requests, 4 heads, 200 keys
    batch = Batch([(200 + i, 1) for i in range(7)], num_shared=50)
    _, _, _, tables, starts, lengths = batch.inputs()
    items = attention.make_items(attention.Geometry(2, 2, 8, 4, None), tables, starts, lengths, 2)
    assert max(item.num_requests * item.shared_length * 4 for item in items) <= attention.TILE_ELEMENTS
    check(device, batch)


@pytest.mark.usefixtures("_any_sharing_counts")
def test_requests_of_one_table_keep_a_block_each(device: CpuDevice) -> None:
    batch = Batch([(15, 1), (15, 1)])
    inputs = batch.inputs()
    inputs[3][1] = inputs[3][0]
    items = attention.make_items(attention.Geometry(2, 2, 8, 4, None), inputs[3], inputs[4], inputs[5], 2)
    assert {(item.shared_length, item.length) for item in items} == {(12, 4)}
    run = KernelRun(device, "paged_attention", inputs, batch.attrs)
    (expected,) = run.expected()
    run.replay()
    assert_close(run.outputs[0], expected, 5e-6)


def test_scores_of_shared_and_own_parts_may_be_far_apart(device: CpuDevice) -> None:
    """Whichever part has the larger maximum, the other neither overflows nor is lost."""
    batch = Batch([(64, 1), (66, 1), (70, 1), (64, 1)], num_shared=16)
    for factor in (40.0, -40.0):
        inputs = batch.inputs()
        shared = inputs[3][0, :16]
        inputs[1][shared] = np.abs(inputs[1][shared])
        inputs[0][...] = np.abs(inputs[0]) * factor
        run = KernelRun(device, "paged_attention", inputs, batch.attrs)
        (expected,) = run.expected()
        run.replay()
        assert np.isfinite(run.outputs[0]).all()
        assert_close(run.outputs[0], expected, 5e-4)


def test_large_scores_do_not_overflow(device: CpuDevice) -> None:
    batch = Batch(MIXED)
    inputs = batch.inputs()
    inputs[0] *= 200
    run = KernelRun(device, "paged_attention", inputs, batch.attrs)
    (expected,) = run.expected()
    run.replay()
    assert np.isfinite(run.outputs[0]).all()
    assert_close(run.outputs[0], expected, 2e-3)  # scores near 1,000: float32 leaves 1e-4 of each


def test_each_request_gets_the_same_whatever_shares_its_batch(any_device: CpuDevice) -> None:
    batch = Batch(MIXED, head_dim=24)
    inputs = batch.inputs()
    whole = KernelRun(any_device, "paged_attention", inputs, batch.attrs)
    whole.replay()
    q, k_cache, v_cache, tables, starts, lengths = inputs
    for b in range(len(MIXED)):
        rows = slice(starts[b], starts[b + 1])
        alone = [q[rows], k_cache, v_cache, tables[b : b + 1], np.array([0, MIXED[b][1]]), lengths[b : b + 1]]
        run = KernelRun(any_device, "paged_attention", alone, batch.attrs)
        run.replay()
        assert_close(run.outputs[0], whole.outputs[0][rows].astype(np.float64), 2e-6)


def test_one_capture_serves_other_lengths_and_tables(any_device: CpuDevice) -> None:
    """The same numbers of tokens, requests and blocks, everything else different."""
    first = Batch([(3, 1), (0, 5), (9, 2)], max_blocks=6)
    second = Batch([(1, 5), (12, 2), (2, 1)], max_blocks=6, seed=1)
    check_one_capture(any_device, "paged_attention", [first.inputs(), second.inputs()], first.attrs, 5e-6)


requests_strategy = st.lists(
    st.tuples(st.integers(0, 70), st.sampled_from([0, 1, 1, 1, 2, 5, 19])), min_size=1, max_size=8
)


@settings(max_examples=60, deadline=None)
@given(
    requests_strategy,
    st.sampled_from([(1, 1), (2, 3), (3, 1), (1, 8)]),
    st.sampled_from([4, 16, 32]),
    st.sampled_from([None, 1, 3, 16, 40]),
    st.sampled_from([None, 3.0]),
    st.integers(1, 3),
    st.integers(0, 1000),
    st.sampled_from([0, 0, 1, 2, 4]),
)
def test_any_batch(
    requests: list[Request],
    heads: tuple[int, int],
    block_size: int,
    window: int | None,
    softcap: float | None,
    num_threads: int,
    seed: int,
    num_shared: int,
) -> None:
    device = CpuDevice(num_threads)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "MIN_SHARED_TOKENS", 1)
        check(device, Batch(requests, *heads, 8, block_size, window, softcap, seed, num_shared=num_shared))
    device.close()
