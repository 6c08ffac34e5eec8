"""What the page is told of the engine: exact counts, cells, runs and holders, and no word of anybody's prompt."""

from __future__ import annotations

import time
from collections import Counter
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scheduling_steps import add, make_scheduler, step

from lean_engine.errors import RequestError
from lean_engine.memory.prefix_cache import BlockKeys
from lean_engine.scheduling.scheduler import Scheduler
from lean_engine.server.dashboard import (
    MAX_HOLDERS,
    MAX_WAITING,
    BlockCounts,
    Holdings,
    State,
    block_map,
    count_blocks,
    count_cells,
    describe_range,
    describe_request,
    power_of_two,
    state,
    take_holdings,
    take_snapshot,
)


def engine_of(scheduler: Scheduler) -> Any:
    return SimpleNamespace(scheduler=scheduler, stats=scheduler.step_stats)


def look(scheduler: Scheduler, **changes: Any) -> State:
    asked = {"num_generated_tokens": 0, "has_chat_template": True, "num_cells": 4096, "min_mapped": 0}
    return state(take_snapshot(engine_of(scheduler)), **asked | {"known_version": None} | changes)


def arrays(ref_counts: list[int], published: list[int]) -> tuple[Any, Any]:
    return np.array(ref_counts, np.int32), np.array(published, np.uint8)


def cells_of(found: Any) -> list[tuple[int, ...]]:
    """The runs of a map, cell by cell."""
    return [tuple(cell) for length, *cell in found.runs for _ in range(length)]


@pytest.fixture
def sharing() -> Scheduler:
    """Requests with a common prefix that run, one that has ended and left its blocks cached, one that waits."""
    scheduler = make_scheduler(40, max_num_seqs=3, block_keys=BlockKeys(4))
    add(scheduler, "ended", 13, max_tokens=1)
    step(scheduler)
    add(scheduler, "first", 9, max_tokens=20)
    add(scheduler, "second", 10, max_tokens=30)
    add(scheduler, "third", 5, max_tokens=30)
    add(scheduler, "fourth", 7, max_tokens=9)
    step(scheduler)
    return scheduler


def test_snapshot_names_every_request_with_its_progress_and_no_token(sharing: Scheduler) -> None:
    rows = {row.id: row for row in look(sharing).requests}
    assert list(rows) == ["first", "second", "third", "fourth"]
    second = rows["second"]
    assert (second.status, second.num_prompt_tokens, second.num_cached_tokens) == ("running", 10, 8)
    assert (second.num_computed_tokens, second.num_output_tokens, second.max_total_tokens) == (10, 1, 40)
    assert (second.num_blocks, second.num_preemptions, second.priority) == (3, 0, 0)
    assert (rows["fourth"].status, rows["fourth"].num_blocks) == ("waiting", 0)
    assert not {"token_ids", "text", "prompt"} & set(rows["first"].__struct_fields__)


def test_state_counts_each_block_once(sharing: Scheduler) -> None:
    found = look(sharing, num_generated_tokens=5)
    pool = sharing.pool
    kinds = Counter(
        "shared"
        if pool.ref_count(b) > 1
        else "held"
        if pool.ref_count(b)
        else "cached"
        if pool.is_published(b)
        else "empty"
        for b in range(1, pool.num_blocks)
    )
    assert kinds["shared"] >= 2
    assert kinds["cached"] >= 1
    assert msgspec.structs.asdict(found.blocks) == {k: kinds[k] for k in ("empty", "cached", "held", "shared")}
    assert found.totals.num_generated_tokens == 5
    assert (found.num_running, found.num_waiting, found.totals.num_finished) == (3, 1, 1)
    assert found.totals.num_hit_tokens == sharing.stats.num_hit_tokens > 0


def test_state_is_small_json_with_rows_as_arrays(sharing: Scheduler) -> None:
    decoded = msgspec.json.decode(msgspec.json.encode(look(sharing)))
    assert decoded["requests"][0][:3] == ["first", "running", 9]
    assert decoded["map"]["runs"][-1][1:] == [0, 0, 0]


def test_waiting_requests_are_listed_up_to_a_bound_and_all_counted() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    for number in range(MAX_WAITING + 50):
        add(scheduler, str(number), 5)
    step(scheduler)
    found = look(scheduler)
    assert [row.id for row in found.requests] == [str(number) for number in range(MAX_WAITING + 1)]
    assert found.num_waiting == MAX_WAITING + 49


def test_a_preempted_request_says_so_and_holds_nothing() -> None:
    scheduler = make_scheduler(8, max_model_len=32)
    add(scheduler, "kept", 9, max_tokens=19)
    add(scheduler, "victim", 8, max_tokens=19)
    while not scheduler.stats.num_preemptions:
        step(scheduler)
    found = look(scheduler)
    victim = found.requests[-1]
    assert (victim.id, victim.status, victim.num_blocks, victim.num_computed_tokens) == ("victim", "preempted", 0, 0)
    assert (victim.num_cached_tokens, victim.num_preemptions, found.totals.num_preemptions) == (0, 1, 1)


def test_a_step_planned_ahead_counts_no_token_that_nobody_knows() -> None:
    scheduler = make_scheduler()
    request = add(scheduler, "a", 5)
    step(scheduler)
    request.num_computed_tokens += 2
    assert look(scheduler).requests[0].num_computed_tokens == 6 == request.num_tokens


# -- the map


def test_map_covers_a_power_of_two_of_blocks_from_the_first_to_the_last_in_use() -> None:
    ref_counts, published = arrays([0] * 5000, [0] * 5000)
    assert block_map(ref_counts, published, 4096, 0, None).num_blocks == 256
    published[700] = 1
    assert block_map(ref_counts, published, 4096, 0, None).num_blocks == 1024
    ref_counts[4500] = 1
    assert block_map(ref_counts, published, 8192, 0, None).num_blocks == 5000


def test_map_covers_as_many_blocks_as_asked_and_no_more_than_there_are() -> None:
    ref_counts, published = arrays([0] * 5000, [0] * 5000)
    assert block_map(ref_counts, published, 4096, 2048, None).num_blocks == 2048
    assert block_map(ref_counts, published, 8192, 2**31, None).num_blocks == 5000


def test_a_cell_stands_for_more_blocks_where_there_are_more_than_cells() -> None:
    ref_counts, published = arrays([0, 1, 2, 0, 0, 5] + [0] * 594, [0, 0, 1, 1, 0, 1] + [0] * 593 + [1])
    found = block_map(ref_counts, published, 200, 600, None)
    assert (found.num_blocks, found.blocks_per_cell) == (600, 4)
    assert cells_of(found) == [(1, 1, 1), (0, 0, 1)] + [(0, 0, 0)] * 147 + [(1, 0, 0)]


def test_an_idle_pool_of_a_million_blocks_is_one_run() -> None:
    found = block_map(*arrays([0] * 1_000_000, [0] * 1_000_000), 3000, 2**31, None)
    assert found.runs == [[1954, 0, 0, 0]]
    assert found.blocks_per_cell == 512


@given(
    st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=2, max_size=300),
    st.integers(1, 64),
    st.integers(0, 400),
)
@settings(max_examples=60, deadline=None)
def test_map_has_no_more_cells_than_asked_and_accounts_for_every_block(
    blocks: list[tuple[int, bool]], num_cells: int, min_mapped: int
) -> None:
    blocks[0] = (0, False)
    ref_counts, published = arrays([count for count, _ in blocks], [int(flag) for _, flag in blocks])
    found = block_map(ref_counts, published, num_cells, min_mapped, None)
    cells = cells_of(found)
    assert len(cells) <= num_cells
    assert len(cells) == -(-found.num_blocks // found.blocks_per_cell)
    whole = count_blocks(ref_counts, published)
    assert [sum(cell[kind] for cell in cells) for kind in range(3)] == [whole.cached, whole.held, whole.shared]
    assert whole.empty + whole.cached + whole.held + whole.shared == len(blocks) - 1
    assert found.runs is not None
    assert all(before[1:] != after[1:] for before, after in zip(found.runs, found.runs[1:], strict=False))


def test_a_map_that_the_asker_has_is_not_sent_again() -> None:
    ref_counts, published = arrays([0, 1] + [0] * 300, [0] * 302)
    first = block_map(ref_counts, published, 100, 0, None)
    again = block_map(ref_counts, published, 100, 0, first.version)
    assert (again.runs, again.version) == (None, first.version)
    ref_counts[200] = 2
    changed = block_map(ref_counts, published, 100, 0, first.version)
    assert changed.runs is not None
    assert changed.version != first.version


def test_another_scale_of_an_empty_map_is_another_version() -> None:
    ref_counts, published = arrays([0] * 1024, [0] * 1024)
    versions = {block_map(ref_counts, published, cells, mapped, None).version
                for cells, mapped in ((256, 512), (512, 1024), (256, 1024))}  # fmt: skip
    assert len(versions) == 3


def test_count_cells_of_a_last_cell_that_is_not_full() -> None:
    counts = count_cells(*arrays([0, 1, 0, 0, 3], [0, 0, 1, 0, 0]), 2)
    assert counts.tolist() == [[0, 1, 0], [1, 0, 0], [0, 0, 1]]


@pytest.mark.parametrize(("count", "expected"), [(0, 1), (1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (1025, 2048)])
def test_power_of_two(count: int, expected: int) -> None:
    assert power_of_two(count) == expected


# -- who holds what


def test_a_block_names_its_holders(sharing: Scheduler) -> None:
    holdings = take_holdings(engine_of(sharing))
    tables = {request.request_id: request.block_table for request in sharing.unfinished(0)[0]}
    shared = tables["first"][0]
    found = describe_range(holdings, shared, shared)
    assert {(holder.request_id, holder.num_blocks) for holder in found.holders} == {
        ("first", 1),
        ("second", 1),
        ("third", 1),
    }
    assert (found.ref_count, found.num_holders, found.num_published, found.blocks) == (3, 3, 1, BlockCounts(0, 0, 0, 1))
    last = tables["second"][-1]
    assert [holder.request_id for holder in describe_range(holdings, last, last).holders] == ["second"]


def test_the_null_block_is_of_no_kind(sharing: Scheduler) -> None:
    assert describe_range(take_holdings(engine_of(sharing)), 0, 0).blocks == BlockCounts(0, 0, 0, 0)


def test_a_range_adds_up_its_holders_the_largest_first() -> None:
    tables = [(str(number), list(range(1, 2 + number % 25))) for number in range(MAX_HOLDERS + 10)]
    ref_counts, published = arrays([0] + [9] * 30, [0] * 31)
    holdings = Holdings(31, ref_counts.tobytes(), published.tobytes(), tables)
    found = describe_range(holdings, 1, 30)
    assert (found.num_holders, len(found.holders), found.ref_count) == (30, MAX_HOLDERS, 270)
    assert [(holder.request_id, holder.num_blocks) for holder in found.holders[:2]] == [("24", 25), ("23", 24)]


@pytest.mark.parametrize(("first", "last"), [(5, 4), (0, 41), (41, 41)])
def test_a_range_outside_the_pool_is_refused(sharing: Scheduler, first: int, last: int) -> None:
    with pytest.raises(RequestError, match=f"blocks {first} to {last} are not among the pool's, 0 to 40"):
        describe_range(take_holdings(engine_of(sharing)), first, last)


def test_a_request_names_its_blocks_as_ranges() -> None:
    holdings = Holdings(20, b"", b"", [("a", [7, 3, 4, 5, 12]), ("b", [1])])
    assert describe_request(holdings, "a").ranges == [(3, 5), (7, 7), (12, 12)]
    assert describe_request(holdings, "b").ranges == [(1, 1)]
    assert describe_request(holdings, "gone").ranges == []


def test_a_look_at_a_hundred_thousand_blocks_takes_the_engine_a_millisecond_at_most() -> None:
    scheduler = make_scheduler(
        100_000, max_num_seqs=128, max_num_batched_tokens=100_000, max_num_logit_rows=128, max_model_len=800
    )
    for number in range(400):
        add(scheduler, str(number), 700)
    scheduler.plan()
    assert (scheduler.num_running, scheduler.num_waiting) == (128, 272)
    engine = engine_of(scheduler)
    assert min(seconds(take_snapshot, engine) for _ in range(20)) < 0.001
    assert min(seconds(take_holdings, engine) for _ in range(20)) < 0.001


def seconds(function: Any, *args: Any) -> float:
    began = time.perf_counter()
    function(*args)
    return time.perf_counter() - began
