"""The scheduler and the prefix cache: what is found, what is computed, who waits for whom. Exact blocks and chunks."""

from __future__ import annotations

from typing import Any

import pytest
from scheduling_steps import WORD, apply, chunks, make_scheduler, plan, step

from lean_engine.memory.prefix_cache import BlockKeys, ExtraKey
from lean_engine.scheduling.plan import ScheduledChunk
from lean_engine.scheduling.request import NEVER, Request, RequestStatus
from lean_engine.scheduling.scheduler import Scheduler
from lean_engine.scheduling.step import Limits, Step

SYSTEM = list(range(50, 62))  # 3 blocks of 4


def caching(num_usable: int = 100, **changes: Any) -> Scheduler:
    return make_scheduler(num_usable, **{"block_keys": BlockKeys(4)} | changes)


def add(scheduler: Scheduler, name: str, prompt: list[int], max_tokens: int = 8, **changes: Any) -> Request:
    request = Request(name, prompt, max_tokens=max_tokens, **changes)
    scheduler.add(request)
    return request


def run(scheduler: Scheduler) -> None:
    while scheduler.has_work():
        step(scheduler)


def test_prompt_of_full_blocks_sent_twice_computes_its_last_block_again() -> None:
    """One token would do, but blocks are whole: 8 tokens in blocks of 4 find 4; a turn later all 8 are found."""
    scheduler = caching()
    prompt = [1, 2, 3, 4, 5, 6, 7, 8]
    first = add(scheduler, "first", prompt, max_tokens=1)
    run(scheduler)
    second = add(scheduler, "second", prompt, max_tokens=1)
    assert step(scheduler) == [("second", 4, 4, True)]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 4)
    turn = add(scheduler, "turn", [*prompt, 9, 10, 11, 12], max_tokens=1)
    assert step(scheduler) == [("turn", 8, 4, True)]
    assert turn.num_cached_tokens == 8


def test_hit_shares_the_very_blocks_and_counts_them_once() -> None:
    scheduler = caching()
    a = add(scheduler, "a", [*SYSTEM, 1])
    step(scheduler)
    b = add(scheduler, "b", [*SYSTEM, 2])
    assert step(scheduler) == [("a", 13, 1, True), ("b", 12, 1, True)]
    assert a.block_table[:3] == b.block_table[:3]
    assert a.block_table[3] != b.block_table[3]
    assert scheduler.pool.num_held == 5
    stats = scheduler.step_stats()
    assert (stats.num_held_blocks, stats.num_unused_slots) == (5, 2 + 3), "14 of 16 slots, 13 of 16"
    assert (stats.num_query_tokens, stats.num_hit_tokens) == (26, 12)


def test_copies_of_a_block_sized_prompt_in_one_batch_and_across_batches_compute_a_token_each() -> None:
    scheduler = caching()
    for _ in range(2):
        for name in "abc":
            add(scheduler, name, [1, 2, 3, 4], max_tokens=2)
        assert step(scheduler) == [(name, 0, 4, True) for name in "abc"], "the only block is the one to compute"
        run(scheduler)


def test_generated_blocks_are_found_by_the_next_turn() -> None:
    scheduler = caching()
    first = add(scheduler, "first", [1, 2, 3], max_tokens=8)
    run(scheduler)
    history = first.token_ids  # 3 + 8 tokens; the last one was sampled, never computed
    add(scheduler, "second", [*history, 20, 21])
    assert step(scheduler) == [("second", 8, 5, True)]


def test_nothing_is_found_when_caching_is_off() -> None:
    scheduler = make_scheduler()
    for _ in range(2):
        request = add(scheduler, "a", [*SYSTEM, 1])
        assert step(scheduler) == [("a", 0, 13, True)]
        assert request.num_cached_tokens == 0
        run(scheduler)
    assert scheduler.step_stats().num_query_tokens == 0
    assert scheduler.pool.num_cached == 0


def test_salt_separates_and_opting_out_reads_nothing_but_publishes() -> None:
    scheduler = caching()
    salted = (ExtraKey("salt", "mine"),)
    add(scheduler, "plain", [*SYSTEM, 1])
    run(scheduler)
    add(scheduler, "salted", [*SYSTEM, 1], extra_keys=salted)
    assert step(scheduler) == [("salted", 0, 13, True)]
    add(scheduler, "salted again", [*SYSTEM, 1], extra_keys=salted)
    assert chunks(plan(scheduler))[-1] == ("salted again", 12, 1, True)
    scheduler = caching()
    queried = scheduler.stats.num_query_tokens
    add(scheduler, "out", [*SYSTEM, 1], reads_cache=False)
    run(scheduler)
    assert scheduler.stats.num_query_tokens == queried
    add(scheduler, "in", [*SYSTEM, 1])
    assert step(scheduler) == [("in", 12, 1, True)]


def test_prompt_whose_logits_are_wanted_reads_no_cache_before_it_has_them() -> None:
    scheduler = caching(max_num_logit_rows=8)
    add(scheduler, "a", [*SYSTEM, 1])
    run(scheduler)
    request = add(scheduler, "b", [*SYSTEM, 1], needs_prompt_logits=True)
    assert step(scheduler) == [("b", 0, 8, False)]
    assert request.num_cached_tokens == 0


def test_reset_forgets_everything_and_running_requests_publish_nothing_older() -> None:
    scheduler = caching()
    add(scheduler, "a", SYSTEM[:10], max_tokens=20)
    step(scheduler)
    scheduler.reset_prefix_cache()
    for _ in range(8):
        step(scheduler)
    assert scheduler.pool.match(block_keys_of(SYSTEM[:10])) == []
    assert not any(scheduler.pool.is_published(block) for block in range(1, 101))
    add(scheduler, "b", [*SYSTEM, 1])
    assert ("b", 0, 13, True) in step(scheduler)
    add(scheduler, "c", [*SYSTEM, 2])
    assert ("c", 12, 1, True) in step(scheduler)


def block_keys_of(tokens: list[int]) -> list[Any]:
    keys: list[Any] = []
    BlockKeys(4).extend(keys, tokens, len(tokens), ())
    return keys


# -- a cold prefix is computed once


def test_cold_prefix_of_requests_that_come_together_is_computed_once() -> None:
    scheduler = caching()
    for i in range(5):
        add(scheduler, f"r{i}", [*SYSTEM, i])
    assert step(scheduler) == [("r0", 0, 13, True)], "the others wait for its blocks"
    assert step(scheduler) == [("r0", 13, 1, True), *((f"r{i}", 12, 1, True) for i in range(1, 5))]
    assert scheduler.stats.num_prefill_tokens == 13 + 4


def test_long_cold_prefix_is_followed_chunk_by_chunk() -> None:
    """The second is admitted when the first goes another way, not before and not later."""
    scheduler = caching(max_num_batched_tokens=8, long_prefill_token_threshold=0)
    common = list(range(100, 120))
    add(scheduler, "a", [*common, *range(200, 212)])
    add(scheduler, "b", [*common, *range(300, 304)])
    taken = [step(scheduler) for _ in range(4)]
    assert taken[0] == [("a", 0, 8, False)]
    assert taken[1] == [("a", 8, 8, False)]
    assert taken[2] == [("a", 16, 8, False)], "block 4, of which b needs the tokens, is computed here"
    assert taken[3] == [("a", 24, 8, True)], "no token of the budget was left"
    assert step(scheduler) == [("a", 32, 1, True), ("b", 20, 4, True)]


def test_request_held_back_is_passed_only_by_those_computed_whole() -> None:
    scheduler = caching(max_num_batched_tokens=20)
    add(scheduler, "a", [*SYSTEM, 1], max_tokens=20)
    add(scheduler, "b", [*SYSTEM, 2])
    add(scheduler, "small", [7, 8, 9])
    add(scheduler, "big", list(range(200, 210)))
    assert step(scheduler) == [("a", 0, 13, True), ("small", 0, 3, True)]
    assert scheduler.num_waiting == 2
    assert step(scheduler) == [("a", 13, 1, True), ("small", 3, 1, True), ("b", 12, 1, True), ("big", 0, 10, True)]


def test_place_of_a_held_back_request_is_kept() -> None:
    """Of 2 places one is taken and the other is kept for b, so c does not take it."""
    scheduler = caching(max_num_seqs=2)
    add(scheduler, "a", [*SYSTEM, 1], max_tokens=20)
    add(scheduler, "b", [*SYSTEM, 2])
    add(scheduler, "c", [7, 8, 9])
    assert step(scheduler) == [("a", 0, 13, True)]
    assert step(scheduler) == [("a", 13, 1, True), ("b", 12, 1, True)]


def test_blocks_of_a_held_back_request_are_kept() -> None:
    """a takes 4 blocks and may grow by 1, b needs 2 beyond the 3 it shares, small 2: 9 blocks are enough for all."""
    for num_usable, first in ((9, ["a", "small"]), (8, ["a"])):
        scheduler = caching(num_usable)
        add(scheduler, "a", [*SYSTEM, 1], max_tokens=8)
        add(scheduler, "b", [*SYSTEM, 2], max_tokens=8)
        add(scheduler, "small", [7, 8, 9], max_tokens=8)
        assert [name for name, *_ in step(scheduler)] == first


def test_request_held_back_goes_on_when_its_prefix_is_there_whatever_lacks_blocks_behind_it() -> None:
    scheduler = caching(24, max_num_batched_tokens=300)
    add(scheduler, "leader", [*SYSTEM, 1], max_tokens=60)
    add(scheduler, "held", [*SYSTEM, 2], max_tokens=4)
    add(scheduler, "too big for now", list(range(100, 170)), max_tokens=4)
    assert step(scheduler) == [("leader", 0, 13, True)]
    assert step(scheduler) == [("leader", 13, 1, True), ("held", 12, 1, True)]


def test_nobody_waits_for_a_block_that_will_not_be_published() -> None:
    keys = block_keys_of(SYSTEM)
    request = Request("a", SYSTEM, max_tokens=1)
    request.block_keys = keys
    for publish_at, is_in_flight in ((4, True), (NEVER, False)):
        request.publish_at = publish_at
        making = Step(Limits(100, 100, NEVER, NEVER), num_running=0, short_tokens=0)
        making.take(ScheduledChunk(request, 2, 5, 0, False))
        assert [making.leader(key, 4) is request for key in keys] == [is_in_flight, is_in_flight, False]


def test_own_block_is_not_waited_for_by_one_who_reads_no_cache() -> None:
    scheduler = caching()
    add(scheduler, "a", [*SYSTEM, 1])
    add(scheduler, "b", [*SYSTEM, 1], reads_cache=False)
    assert step(scheduler) == [("a", 0, 13, True), ("b", 0, 13, True)]


# -- memory under pressure


def test_admission_counts_shared_blocks_as_there_already() -> None:
    """a holds 4 blocks; b lacks 1 of its own and 1 of growth for each: 8 blocks are enough for both, 7 are not."""
    for num_usable, num_running in ((8, 2), (5, 1)):
        scheduler = caching(num_usable)
        add(scheduler, "a", [*SYSTEM, 1], max_tokens=6)
        step(scheduler)
        add(scheduler, "b", [*SYSTEM, 2], max_tokens=6)
        step(scheduler)
        assert scheduler.num_running == num_running


def test_cached_blocks_make_room_and_the_oldest_go_first() -> None:
    scheduler = caching(8)
    add(scheduler, "old", list(range(100, 109)), max_tokens=1)
    run(scheduler)
    add(scheduler, "new", list(range(200, 209)), max_tokens=1)
    run(scheduler)
    assert scheduler.pool.num_cached == 4
    add(scheduler, "big", list(range(300, 325)), max_tokens=1)  # 7 blocks: 4 empty ones and 3 of the cached
    run(scheduler)
    assert scheduler.pool.num_evictions == 3
    assert len(scheduler.pool.match(block_keys_of(list(range(200, 208))))) == 1, "of new the first, not the last"
    assert scheduler.pool.match(block_keys_of(list(range(100, 108)))) == []


def test_preempted_request_finds_its_own_blocks_again() -> None:
    scheduler = caching(9)
    a = add(scheduler, "a", [1, 2, 3], max_tokens=25)
    b = add(scheduler, "b", [4, 5, 6], max_tokens=25)
    while b.status is not RequestStatus.PREEMPTED:
        step(scheduler)
    num_known = b.num_tokens
    while not a.is_finished:
        step(scheduler)
    planned = plan(scheduler)
    (chunk,) = planned.chunks
    assert chunk.request is b
    assert chunk.start > 0
    assert chunk.start + chunk.num_tokens == num_known
    kinds = (planned.num_prefill_tokens, planned.num_recompute_tokens, planned.num_decode_tokens)
    assert kinds == (0, num_known - 1 - chunk.start, 1), "the last token was sampled and never computed"
    apply(scheduler, planned)
    run(scheduler)
    assert b.token_ids[3:] == [WORD] * 25
    assert b.num_cached_tokens == 0, "a prefix hit is one at the first admission"


def test_request_that_would_lack_blocks_is_admitted_when_it_can_share_them() -> None:
    """b has no room beside a while a is cold, and some when a's prompt is there to be shared."""
    scheduler = caching(10, max_num_batched_tokens=16, long_prefill_token_threshold=0)
    add(scheduler, "a", list(range(100, 128)), max_tokens=4)
    add(scheduler, "b", [*range(100, 124), 9], max_tokens=4)
    assert step(scheduler) == [("a", 0, 16, False)]
    assert step(scheduler) == [("a", 16, 12, True)]
    assert step(scheduler) == [("a", 28, 1, True), ("b", 24, 1, True)]


@pytest.mark.parametrize("num_copies", [2, 9])
def test_keys_of_a_prompt_are_made_once(num_copies: int, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = BlockKeys(4)
    made: list[int] = []
    original = keys._append

    def append(into: list[Any], token_ids: list[int], extra_keys: Any) -> None:
        made.append(len(token_ids) // 4)
        original(into, token_ids, extra_keys)

    monkeypatch.setattr(keys, "_append", append)
    scheduler = caching(20, block_keys=keys, max_num_batched_tokens=6)
    for i in range(num_copies):
        add(scheduler, f"r{i}", SYSTEM, max_tokens=1)
    run(scheduler)
    assert made == [3] * num_copies
