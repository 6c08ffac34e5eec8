"""The scheduler, step by step: exact chunks, exact blocks, exact order. No model runs; tests say what was sampled.

Long because every rule has its own small case: chunks and budgets, rows of logits, admission, preemption, ends, aborts,
the integrity check, the request.
"""

from __future__ import annotations

from typing import Any

import pytest
from scheduling_steps import EOS, STOP, WORD, add, apply, chunks, make_request, make_scheduler, plan, step

from lean_engine.errors import ConfigError, RequestError
from lean_engine.memory.block_pool import IntegrityError
from lean_engine.scheduling.block_tables import BlockTables
from lean_engine.scheduling.plan import ScheduledChunk
from lean_engine.scheduling.request import Request, RequestStatus
from lean_engine.scheduling.scheduler import Scheduler

# -- chunks and budgets


def test_prompt_then_one_token_per_step() -> None:
    scheduler = make_scheduler()
    request = add(scheduler, "a", 6, max_tokens=3)
    assert request.status is RequestStatus.WAITING
    first = plan(scheduler)
    assert chunks(first) == [("a", 0, 6, True)]
    assert (first.num_tokens, first.num_logit_rows, first.preempted) == (6, 1, [])
    assert request.block_table == [1, 2]
    assert request.status is RequestStatus.RUNNING
    assert apply(scheduler, first) == [(request, [WORD])]
    assert step(scheduler) == [("a", 6, 1, True)]
    assert step(scheduler) == [("a", 7, 1, True)]
    assert request.output_token_ids == [WORD] * 3
    assert (request.finish_reason, request.stop_reason) == ("length", None)
    assert scheduler.plan() is None


def test_blocks_are_granted_only_for_the_tokens_of_the_step() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=6)
    request = add(scheduler, "a", 10)
    held = []
    for _ in range(6):
        plan_ = plan(scheduler)
        held.append(len(request.block_table))
        apply(scheduler, plan_)
    assert held == [2, 3, 3, 3, 4, 4], "after 6, 10, 11, 12, 13, 14 tokens"
    assert request.block_table == [1, 2, 3, 4]


def test_nothing_is_sampled_before_the_last_chunk() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    request = add(scheduler, "a", 30)
    for start in (0, 8, 16):
        planned = plan(scheduler)
        assert chunks(planned) == [("a", start, 8, False)]
        assert planned.num_logit_rows == 0
        assert apply(scheduler, planned) == []
        assert request.num_output_tokens == 0
    planned = plan(scheduler)
    assert chunks(planned) == [("a", 24, 6, True)]
    assert apply(scheduler, planned) == [(request, [WORD])]


def test_decodes_come_first_and_the_prefill_takes_what_is_left() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    add(scheduler, "a", 3)
    add(scheduler, "b", 4)
    assert step(scheduler) == [("a", 0, 3, True), ("b", 0, 4, True)]
    add(scheduler, "long", 20)
    assert step(scheduler) == [("a", 3, 1, True), ("b", 4, 1, True), ("long", 0, 6, False)]
    assert step(scheduler) == [("a", 4, 1, True), ("b", 5, 1, True), ("long", 6, 6, False)]


def test_long_prefill_leaves_a_token_for_each_decode_behind_it() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8, max_num_logit_rows=4)
    add(scheduler, "long", 30, needs_prompt_logits=True)
    assert step(scheduler) == [("long", 0, 4, False)], "4 rows of logits"
    add(scheduler, "a", 2)
    assert step(scheduler) == [("long", 4, 4, False), ("a", 0, 1, False)], "no row is left for a"
    assert step(scheduler) == [("long", 8, 3, False), ("a", 1, 1, True)]
    assert step(scheduler) == [("a", 2, 1, True), ("long", 11, 3, False)]


def test_request_with_several_tokens_to_catch_up_leaves_one_for_each_behind_it() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    for name in "abc":
        add(scheduler, name, 1)
    scheduler.apply(plan(scheduler), [[5, 6, 7], [5], [5]], 0.0)
    assert step(scheduler) == [("b", 1, 1, True), ("c", 1, 1, True), ("a", 1, 2, False)]


def test_several_prompts_share_a_step_and_the_last_is_cut() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=10)
    for name in "abc":
        add(scheduler, name, 4)
    assert step(scheduler) == [("a", 0, 4, True), ("b", 0, 4, True), ("c", 0, 2, False)]
    assert step(scheduler) == [("a", 4, 1, True), ("b", 4, 1, True), ("c", 2, 2, True)]


def test_no_more_than_max_num_seqs_run() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abc":
        add(scheduler, name, 4, max_tokens=2)
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 3)
    assert step(scheduler) == [("a", 0, 4, True), ("b", 0, 4, True)]
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)
    step(scheduler)
    assert step(scheduler) == [("c", 0, 4, True)]


def test_no_more_run_than_the_budgets_can_move_in_every_step() -> None:
    assert make_scheduler(max_num_seqs=9, max_num_batched_tokens=3).max_num_running == 3
    assert make_scheduler(max_num_seqs=9, max_num_logit_rows=2).max_num_running == 2
    scheduler = make_scheduler(max_num_batched_tokens=3)
    for name in "abcde":
        add(scheduler, name, 1)
    assert step(scheduler) == [("a", 0, 1, True), ("b", 0, 1, True), ("c", 0, 1, True)]


def test_without_chunked_prefill_a_prompt_is_scheduled_whole_or_not_at_all() -> None:
    scheduler = make_scheduler(max_model_len=10, max_num_batched_tokens=10, enable_chunked_prefill=False)
    add(scheduler, "a", 6)
    add(scheduler, "b", 5)
    add(scheduler, "c", 1)
    assert step(scheduler) == [("a", 0, 6, True)], "b does not fit, and c does not pass it"
    assert step(scheduler) == [("a", 6, 1, True), ("b", 0, 5, True), ("c", 0, 1, True)]


def test_without_chunked_prefill_the_budget_must_hold_a_whole_prompt() -> None:
    with pytest.raises(ConfigError, match=r"max_num_batched_tokens \(9\) must be at least max_model_len \(10\)"):
        make_scheduler(max_model_len=10, max_num_batched_tokens=9, enable_chunked_prefill=False)


@pytest.mark.parametrize(
    "name", ["block_size", "max_model_len", "max_num_seqs", "max_num_batched_tokens", "max_num_logit_rows"]
)
def test_limits_below_1_are_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is 0; it must be at least 1"):
        make_scheduler(**{name: 0})


# -- rows of logits


def test_prompt_logits_bound_the_chunk_by_rows() -> None:
    scheduler = make_scheduler(max_num_logit_rows=4)
    request = add(scheduler, "a", 10, needs_prompt_logits=True)
    rows = []
    for expected in ([("a", 0, 4, False)], [("a", 4, 4, False)], [("a", 8, 2, True)], [("a", 10, 1, True)]):
        planned = plan(scheduler)
        assert chunks(planned) == expected
        rows.append(planned.scheduled[0].num_logit_rows)
        assert planned.num_logit_rows == rows[-1]
        apply(scheduler, planned)
    assert rows == [4, 4, 2, 1], "the last prompt token's row is the one sampled from"
    assert request.num_prompt_logits == 10


def test_prompt_that_needs_no_logits_costs_one_row() -> None:
    scheduler = make_scheduler(max_num_logit_rows=2)
    add(scheduler, "a", 50)
    planned = plan(scheduler)
    assert (planned.num_tokens, planned.num_logit_rows) == (50, 1)


def test_prompt_stops_short_of_its_end_when_no_row_is_left() -> None:
    scheduler = make_scheduler(max_num_logit_rows=3)
    add(scheduler, "a", 3, needs_prompt_logits=True)
    add(scheduler, "b", 5)
    assert step(scheduler) == [("a", 0, 3, True), ("b", 0, 4, False)]
    assert step(scheduler) == [("a", 3, 1, True), ("b", 4, 1, True)]


def test_prompt_logits_are_not_delivered_again_after_preemption() -> None:
    scheduler = make_scheduler(num_usable=8, max_num_logit_rows=7)
    add(scheduler, "old", 4, max_tokens=12)
    young = add(scheduler, "young", 8, max_tokens=4, needs_prompt_logits=True)
    assert step(scheduler) == [("old", 0, 4, True), ("young", 0, 6, False)], "6 rows are left"
    scheduler._preempt(scheduler._running.pop())  # admission sees to it that no pool runs short here by itself
    scheduler.check()
    assert (young.num_computed_tokens, young.num_prompt_logits, young.num_preemptions) == (0, 6, 1)
    planned = plan(scheduler)
    assert chunks(planned) == [("old", 4, 1, True), ("young", 0, 8, True)]
    assert [c.num_logit_rows for c in planned.scheduled] == [1, 2], "only positions 6 and 7"


def test_whole_prompts_with_more_logits_than_rows_are_refused() -> None:
    scheduler = make_scheduler(max_num_logit_rows=5, enable_chunked_prefill=False)
    add(scheduler, "fits", 5, needs_prompt_logits=True)
    with pytest.raises(RequestError, match=r"all 6 prompt tokens .* there are 5;") as error:
        add(scheduler, "a", 6, needs_prompt_logits=True)
    assert error.value.param == "prompt_logprobs"


# -- admission


def test_empty_prompt_is_refused() -> None:
    scheduler = make_scheduler()
    with pytest.raises(RequestError, match="prompt is empty") as error:
        add(scheduler, "a", 0)
    assert (error.value.param, error.value.status) == ("prompt", 400)
    assert not scheduler.has_work()


def test_prompt_as_long_as_the_context_is_refused_with_both_numbers() -> None:
    scheduler = make_scheduler(max_model_len=128)
    add(scheduler, "fits", 127)
    with pytest.raises(RequestError, match="prompt has 128 tokens; with max_model_len=128 it can have at most 127"):
        add(scheduler, "a", 128)
    assert scheduler.num_waiting == 1


def test_prompt_larger_than_the_pool_is_refused_and_blocks_nothing() -> None:
    scheduler = make_scheduler(num_usable=8, max_model_len=128)  # 32 tokens
    with pytest.raises(RequestError, match=r"need 13 KV blocks; the pool has 8 \(32 tokens\)") as error:
        add(scheduler, "a", 40, max_tokens=10)
    assert (error.value.param, error.value.status) == ("prompt", 400)
    add(scheduler, "b", 4, max_tokens=10)
    assert step(scheduler) == [("b", 0, 4, True)]


def test_request_that_can_outgrow_the_pool_is_refused() -> None:
    scheduler = make_scheduler(num_usable=8, max_model_len=128)
    with pytest.raises(RequestError, match="prompt of 20 tokens and max_tokens=13 can grow to 33 tokens") as error:
        add(scheduler, "a", 20, max_tokens=13)
    assert error.value.param == "max_tokens"
    add(scheduler, "b", 20, max_tokens=12)
    while scheduler.has_work():
        step(scheduler)


def test_the_context_bounds_what_a_request_can_need() -> None:
    scheduler = make_scheduler(num_usable=8, max_model_len=32)
    request = add(scheduler, "a", 20, max_tokens=1000)
    while scheduler.has_work():
        step(scheduler)
    assert (request.num_tokens, request.finish_reason) == (32, "length")


def test_negative_max_tokens_is_refused() -> None:
    with pytest.raises(RequestError, match="max_tokens is -1") as error:
        add(make_scheduler(), "a", 4, max_tokens=-1)
    assert error.value.param == "max_tokens"


def test_id_in_use_is_refused_and_free_again_after_the_end() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 4)
    with pytest.raises(RequestError, match="'a' is already in use"):
        add(scheduler, "a", 4)
    scheduler.abort("a")
    add(scheduler, "a", 4)
    assert step(scheduler) == [("a", 0, 4, True)]


def test_admission_keeps_a_block_of_growth_for_each_running_request() -> None:
    scheduler = make_scheduler(num_usable=6)
    add(scheduler, "a", 4, max_tokens=16)
    add(scheduler, "b", 8, max_tokens=12)
    add(scheduler, "c", 4, max_tokens=16)
    # a holds 1 and may soon need 1; b takes 2 and may soon need 1; c would take the last, which a and b may need.
    assert step(scheduler) == [("a", 0, 4, True), ("b", 0, 8, True)]
    assert scheduler.pool.num_free == 3
    for _ in range(4):
        assert len(step(scheduler)) == 2
    scheduler.abort("b")
    assert step(scheduler) == [("a", 8, 1, True), ("c", 0, 4, True)]


def test_queue_that_awaits_blocks_costs_nothing_until_some_come_back(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = make_scheduler(num_usable=6)
    add(scheduler, "a", 4, max_tokens=8)
    add(scheduler, "b", 16, max_tokens=8)
    for _ in range(2):  # a's prompt, and a look at b after it
        step(scheduler)
    looked_at: list[str] = []

    def num_missing_soon(request: Request) -> int:
        looked_at.append(request.request_id)
        return BlockTables.num_missing_soon(scheduler.tables, request)

    monkeypatch.setattr(scheduler.tables, "num_missing_soon", num_missing_soon)
    for _ in range(6):
        step(scheduler)
        assert looked_at == []
    assert step(scheduler) == [("b", 0, 16, True)], "a has ended"


def test_reserve_is_not_kept_for_requests_that_cannot_grow() -> None:
    scheduler = make_scheduler(num_usable=3)
    add(scheduler, "a", 2, max_tokens=2)  # 1 block for ever
    add(scheduler, "b", 4, max_tokens=4)  # 2 blocks at most
    assert step(scheduler) == [("a", 0, 2, True), ("b", 0, 4, True)]


def test_a_prompt_that_is_being_computed_keeps_the_blocks_for_its_rest() -> None:
    scheduler = make_scheduler(num_usable=8, max_num_batched_tokens=8, max_num_logit_rows=4)
    add(scheduler, "long", 24, max_tokens=1, needs_prompt_logits=True)
    add(scheduler, "b", 4, max_tokens=8)
    assert step(scheduler) == [("long", 0, 4, False)], "6 blocks for the prompt, 1 to grow; b needs 1 and 1 to grow"
    scheduler = make_scheduler(num_usable=9, max_num_batched_tokens=8, max_num_logit_rows=4)
    add(scheduler, "long", 24, max_tokens=1, needs_prompt_logits=True)
    add(scheduler, "b", 4, max_tokens=8)
    assert step(scheduler) == [("long", 0, 4, False), ("b", 0, 3, False)]


def test_reserve_covers_all_steps_of_a_long_recomputation() -> None:
    """With blocks of 1 token, `a` grows by a block in each of the ten steps that `b` needs."""
    scheduler = make_scheduler(num_usable=30, block_size=1, max_num_batched_tokens=2)
    add(scheduler, "a", 1, max_tokens=29)
    while scheduler.pool.num_free > 15:
        step(scheduler)
    b = add(scheduler, "b", 10, max_tokens=10)
    while scheduler.has_work():
        step(scheduler)
    assert b.num_preemptions == 0


def test_first_in_the_queue_is_not_passed_by_smaller_ones() -> None:
    scheduler = make_scheduler(num_usable=6)
    add(scheduler, "a", 8, max_tokens=8)
    add(scheduler, "big", 16, max_tokens=4)
    add(scheduler, "small", 1, max_tokens=1)
    assert step(scheduler) == [("a", 0, 8, True)]
    scheduler.abort("big")
    assert step(scheduler) == [("a", 8, 1, True), ("small", 0, 1, True)], "once it leaves, the next is looked at"


@pytest.mark.parametrize("num_prompt", [1, 4, 15, 19])
def test_something_is_admitted_when_nothing_runs(num_prompt: int) -> None:
    scheduler = make_scheduler(num_usable=5, max_num_batched_tokens=2, max_num_logit_rows=1)
    add(scheduler, "a", num_prompt, max_tokens=20 - num_prompt, needs_prompt_logits=True)
    for _ in range(60):
        if not scheduler.has_work():
            break
        assert len(step(scheduler)) == 1
    assert not scheduler.has_work()


# -- preemption


def pressed() -> tuple[Scheduler, Request, Request]:
    """A pool of 4 blocks of 4; `old` (7 tokens, 2 blocks) and `young` (8 tokens, 2 blocks) run, all blocks are held."""
    scheduler = make_scheduler(num_usable=4)
    old = add(scheduler, "old", 2, max_tokens=14)
    young = add(scheduler, "young", 3, max_tokens=13)
    for _ in range(5):
        step(scheduler)
    assert (old.block_table, young.block_table) == ([1, 4], [2, 3])
    assert scheduler.pool.num_free == 0
    return scheduler, old, young


def test_request_that_finds_no_block_and_is_the_latest_is_preempted_itself() -> None:
    scheduler, old, young = pressed()
    step(scheduler)
    tokens = list(young.token_ids)
    planned = plan(scheduler)  # young has 9 tokens and needs a third block; old has 8 and needs none
    assert chunks(planned) == [("old", 7, 1, True)]
    assert planned.preempted == [young]
    assert (young.status, young.num_computed_tokens, young.num_preemptions) == (RequestStatus.PREEMPTED, 0, 1)
    assert young.token_ids == tokens, "its tokens so far are its prompt now"
    assert young.block_table == []
    assert list(scheduler.pool.free_block_ids()) == [2, 3]
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)
    assert old.status is RequestStatus.RUNNING


def test_the_latest_running_request_gives_its_blocks_to_an_older_one() -> None:
    scheduler = make_scheduler(num_usable=4)
    old = add(scheduler, "old", 3, max_tokens=13)
    young = add(scheduler, "young", 2, max_tokens=14)
    for _ in range(6):
        step(scheduler)
    assert (old.num_tokens, young.num_tokens) == (9, 8)
    planned = plan(scheduler)
    assert chunks(planned) == [("old", 8, 1, True)]
    assert planned.preempted == [young]
    assert old.block_table == [1, 3, 2]
    assert list(scheduler.pool.free_block_ids()) == [4]


def test_preempted_request_is_computed_again_like_a_prompt_and_goes_on() -> None:
    scheduler, _, young = pressed()
    step(scheduler)
    step(scheduler)  # preempts young with 9 tokens
    scheduler.abort("old")
    planned = scheduler.plan(now=50.0)
    assert planned is not None
    assert chunks(planned) == [("young", 0, 9, True)]
    assert planned.num_logit_rows == 1
    assert apply(scheduler, planned, 9) == [(young, [9])], "old tokens are not delivered again"
    assert young.output_token_ids == [WORD] * 6 + [9]
    assert young.first_scheduled_time == 1.0


def test_step_that_preempts_admits_nobody() -> None:
    scheduler, _, young = pressed()
    step(scheduler)
    add(scheduler, "tiny", 1, max_tokens=1)
    scheduler._num_blocks_to_admit = lambda *_: 0  # type: ignore[method-assign]  # not by grace of the reserve
    planned = plan(scheduler)
    assert planned.preempted == [young]
    assert chunks(planned) == [("old", 7, 1, True)], "two blocks are free, and yet neither young nor tiny gets one"


def test_preempted_requests_wait_before_new_ones_in_their_old_order() -> None:
    scheduler = make_scheduler(num_usable=7)
    for name in "abc":
        add(scheduler, name, 3, max_tokens=20)
    assert len(step(scheduler)) == 3
    add(scheduler, "d", 8, max_tokens=8)
    preempted: list[str] = []
    while scheduler.num_running > 1:
        planned = plan(scheduler)
        preempted += [request.request_id for request in planned.preempted]
        apply(scheduler, planned)
    assert preempted == ["c", "b"]
    assert [request.request_id for request in scheduler._waiting] == ["b", "c", "d"]


def test_several_are_preempted_for_one_large_chunk() -> None:
    """A chunk of an older request may need the blocks of more than one younger one."""
    scheduler = make_scheduler(num_usable=6, max_num_logit_rows=4)
    old = add(scheduler, "old", 20, max_tokens=4, needs_prompt_logits=True)
    step(scheduler)
    for name in ("b", "c"):  # admission would keep the blocks for old's prompt: put them in by hand
        request = add(scheduler, name, 8, max_tokens=4)
        scheduler._admit(request, [], ScheduledChunk(request, 0, 8, 1, True), 0.0)
    old.needs_prompt_logits = False
    planned = plan(scheduler)
    assert [request.request_id for request in planned.preempted] == ["c", "b"]
    assert chunks(planned) == [("old", 4, 16, True)]
    assert [request.request_id for request in scheduler._waiting] == ["b", "c"]


def test_over_committing_requests_each_get_every_token_once() -> None:
    """10 blocks of 16 and three requests that need 15 together; the sampled token is the position it stands at."""
    scheduler = make_scheduler(num_usable=10, block_size=16, max_model_len=160)
    requests = [add(scheduler, name, 20, max_tokens=60) for name in "abc"]
    delivered: dict[str, list[int]] = {name: [] for name in "abc"}
    num_tokens_at_preemption: dict[str, int] = {}
    while scheduler.has_work():
        planned = plan(scheduler)
        for request in planned.preempted:
            assert request.num_tokens > num_tokens_at_preemption.get(request.request_id, 0)
            num_tokens_at_preemption[request.request_id] = request.num_tokens
        updates = scheduler.apply(
            planned, [[c.request.num_tokens] if c.samples else [] for c in planned.scheduled], 0.0
        )
        for request, new_token_ids in updates:
            delivered[request.request_id] += new_token_ids
    assert num_tokens_at_preemption, "the pool was short"
    assert delivered == {name: list(range(20, 80)) for name in "abc"}
    assert all(request.finish_reason == "length" for request in requests)
    assert scheduler.pool.num_free == 10


# -- ends


def finished_by(
    tokens: list[int], num_prompt: int = 4, **changes: Any
) -> tuple[list[int], str | None, int | str | None]:
    """Give a fresh request these tokens in one step."""
    scheduler = make_scheduler(max_model_len=20)
    request = make_request("a", num_prompt, **{"max_tokens": 10} | changes)
    scheduler.add(request)
    updates = scheduler.apply(plan(scheduler), [tokens], now=5.0)
    scheduler.check()
    assert updates == [(request, request.output_token_ids)]
    assert request.is_finished == (request.finish_reason is not None) == (not scheduler.has_work())
    assert request.finished_time == (5.0 if request.is_finished else None)
    return request.output_token_ids, request.finish_reason, request.stop_reason


def test_eos_ends_without_a_stop_reason() -> None:
    assert finished_by([EOS], eos_token_ids=frozenset({EOS, 99})) == ([EOS], "stop", None)


def test_stop_token_ends_with_its_id() -> None:
    assert finished_by([STOP], stop_token_ids=frozenset({STOP, 99})) == ([STOP], "stop", STOP)


def test_token_that_is_both_counts_as_eos() -> None:
    both = frozenset({EOS})
    assert finished_by([EOS], eos_token_ids=both, stop_token_ids=both) == ([EOS], "stop", None)


def test_stop_goes_before_length() -> None:
    assert finished_by([STOP], max_tokens=1, stop_token_ids=frozenset({STOP})) == ([STOP], "stop", STOP)
    assert finished_by([WORD], max_tokens=1, stop_token_ids=frozenset({STOP})) == ([WORD], "length", None)


def test_no_eos_when_it_is_ignored() -> None:
    assert finished_by([EOS]) == ([EOS], None, None)


def test_neither_eos_nor_stop_tokens_end_before_min_tokens() -> None:
    ends = {"eos_token_ids": frozenset({EOS}), "stop_token_ids": frozenset({STOP})}
    assert finished_by([EOS, STOP, EOS], min_tokens=4, **ends) == ([EOS, STOP, EOS], None, None)
    assert finished_by([EOS, STOP, EOS], min_tokens=3, **ends) == ([EOS, STOP, EOS], "stop", None)
    assert finished_by([EOS, STOP, EOS], min_tokens=2, **ends) == ([EOS, STOP], "stop", STOP)


def test_length_ends_before_min_tokens_at_the_end_of_the_context() -> None:
    assert finished_by([WORD], num_prompt=19, min_tokens=5) == ([WORD], "length", None)


def test_tokens_after_the_end_are_dropped() -> None:
    stop = frozenset({STOP})
    assert finished_by([WORD, STOP, WORD, STOP], stop_token_ids=stop) == ([WORD, STOP], "stop", STOP)
    assert finished_by([WORD] * 5, max_tokens=3) == ([WORD] * 3, "length", None)
    assert finished_by([WORD] * 5, num_prompt=18) == ([WORD] * 2, "length", None)


def test_several_tokens_of_a_step_are_caught_up_with_in_the_next() -> None:
    scheduler = make_scheduler()
    request = add(scheduler, "a", 4)
    scheduler.apply(plan(scheduler), [[5, 6, 7]], 0.0)
    assert request.output_token_ids == [5, 6, 7]
    assert step(scheduler) == [("a", 4, 3, True)]


def test_max_tokens_0_computes_the_prompt_and_samples_nothing() -> None:
    scheduler = make_scheduler(max_num_logit_rows=4)
    request = add(scheduler, "a", 6, max_tokens=0, needs_prompt_logits=True)
    assert step(scheduler) == [("a", 0, 4, False)]
    planned = plan(scheduler)
    assert chunks(planned) == [("a", 4, 2, False)]
    assert planned.num_logit_rows == 2
    assert scheduler.apply(planned, [[]], 3.0) == [(request, [])]
    assert (request.finish_reason, request.output_token_ids, request.first_token_time) == ("length", [], None)
    assert scheduler.pool.num_free == scheduler.pool.num_usable


def test_blocks_of_ended_requests_are_free_at_once_and_head_first() -> None:
    scheduler = make_scheduler(num_usable=6)
    add(scheduler, "a", 5, max_tokens=1)
    add(scheduler, "b", 5, max_tokens=3)
    planned = plan(scheduler)
    assert list(scheduler.pool.free_block_ids()) == [5, 6]
    apply(scheduler, planned)
    assert list(scheduler.pool.free_block_ids()) == [1, 2, 5, 6]
    assert scheduler.num_running == 1


def test_engine_can_end_a_request_with_its_own_reason() -> None:
    scheduler = make_scheduler()
    request = add(scheduler, "a", 5)
    step(scheduler)
    assert scheduler.finish("a", "stop", "###", now=9.0)
    assert (request.finish_reason, request.stop_reason, request.finished_time) == ("stop", "###", 9.0)
    assert not scheduler.finish("a", "length")
    assert request.finish_reason == "stop"
    scheduler.check()


def test_times_are_stamped_once_and_survive_preemption() -> None:
    scheduler = make_scheduler()
    request = add(scheduler, "a", 5, max_tokens=2, arrival_time=10.0)
    assert (request.first_scheduled_time, request.first_token_time, request.finished_time) == (None, None, None)
    for now in (11.0, 13.0):
        planned = scheduler.plan(now)
        assert planned is not None
        scheduler.apply(planned, [[WORD]], now + 1)
    assert request.arrival_time == 10.0
    assert (request.first_scheduled_time, request.first_token_time, request.finished_time) == (11.0, 12.0, 14.0)


def test_results_that_do_not_match_the_plan_are_an_error() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8)
    add(scheduler, "a", 3)
    add(scheduler, "b", 9)
    planned = plan(scheduler)
    with pytest.raises(IntegrityError, match="2 requests were planned, results of 1 were given"):
        scheduler.apply(planned, [[WORD]], 0.0)
    with pytest.raises(IntegrityError, match=r"0 sampled tokens for Request\('a'.*samples=True"):
        scheduler.apply(planned, [[], []], 0.0)
    with pytest.raises(IntegrityError, match=r"1 sampled tokens for Request\('b'.*samples=False"):
        scheduler.apply(planned, [[WORD], [WORD]], 0.0)


# -- aborts


def test_abort_while_waiting() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    add(scheduler, "a", 4)
    waiting = add(scheduler, "b", 4)
    add(scheduler, "c", 4)
    step(scheduler)
    assert scheduler.abort("b", now=3.0)
    scheduler.check()
    assert (waiting.status, waiting.finish_reason, waiting.finished_time) == (RequestStatus.FINISHED, "abort", 3.0)
    assert scheduler.num_waiting == 1
    scheduler.abort("a")
    assert step(scheduler) == [("c", 0, 4, True)]


def test_abort_in_the_middle_of_a_prompt() -> None:
    scheduler = make_scheduler(num_usable=9, max_num_batched_tokens=8)
    add(scheduler, "a", 30, max_tokens=1)
    step(scheduler)
    assert scheduler.pool.num_held == 2
    assert scheduler.abort("a")
    assert list(scheduler.pool.free_block_ids()) == list(range(1, 10))
    assert scheduler.plan() is None


def test_abort_while_running() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 4)
    add(scheduler, "b", 4)
    step(scheduler)
    assert scheduler.abort("a")
    scheduler.check()
    assert step(scheduler) == [("b", 4, 1, True)]


def test_abort_while_preempted() -> None:
    scheduler, _, young = pressed()
    step(scheduler)
    step(scheduler)
    assert young.status is RequestStatus.PREEMPTED
    assert scheduler.abort("young")
    scheduler.check()
    assert (young.finish_reason, scheduler.num_waiting, scheduler.pool.num_held) == ("abort", 0, 2)


def test_abort_between_plan_and_apply_drops_the_step_s_tokens() -> None:
    scheduler = make_scheduler()
    a, b = add(scheduler, "a", 4), add(scheduler, "b", 4)
    planned = plan(scheduler)
    assert scheduler.abort("a")
    assert apply(scheduler, planned) == [(b, [WORD])]
    assert (a.output_token_ids, a.finish_reason, a.block_table) == ([], "abort", [])


def test_abort_after_the_end_twice_or_of_nothing_is_no_event() -> None:
    scheduler = make_scheduler()
    request = add(scheduler, "a", 4, max_tokens=1)
    step(scheduler)
    assert request.finish_reason == "length"
    assert not scheduler.abort("a")
    assert request.finish_reason == "length", "a normal end stays one"
    add(scheduler, "b", 4)
    assert scheduler.abort("b")
    assert not scheduler.abort("b")
    assert not scheduler.abort("never heard of")
    scheduler.check()


# -- the check itself


def test_check_sees_a_block_in_two_tables() -> None:
    scheduler = make_scheduler()
    a, b = add(scheduler, "a", 4), add(scheduler, "b", 4)
    step(scheduler)
    b.block_table = list(a.block_table)
    with pytest.raises(IntegrityError, match="block 1 is in 2 block tables and has 1 holders"):
        scheduler.check()


def test_check_sees_a_leaked_block() -> None:
    scheduler = make_scheduler()
    scheduler.pool.allocate(1)
    with pytest.raises(IntegrityError, match="block 1 is in 0 block tables and has 1 holders"):
        scheduler.check()


def test_check_sees_a_lost_request() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 4)
    scheduler._waiting.pop(scheduler._waiting.first())
    with pytest.raises(IntegrityError, match="0 requests run or wait, 1 are unfinished"):
        scheduler.check()
    with pytest.raises(IntegrityError, match="nothing can be admitted, but 1 wait"):
        scheduler.plan()


def test_check_sees_wrong_states_and_counters() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    running, waiting = add(scheduler, "a", 4), add(scheduler, "b", 4)
    step(scheduler)
    waiting.status = RequestStatus.RUNNING
    with pytest.raises(IntegrityError, match=r"among the waiting: Request\('b', running"):
        scheduler.check()
    waiting.status = RequestStatus.WAITING
    running.token_ids.append(9)
    running.num_computed_tokens = 5
    with pytest.raises(IntegrityError, match="computed tokens without blocks"):
        scheduler.check()
    running.num_computed_tokens = 6
    with pytest.raises(IntegrityError, match="nothing to compute"):
        scheduler.check()
    running.status = RequestStatus.PREEMPTED
    with pytest.raises(IntegrityError, match="among the running"):
        scheduler.check()


# -- the request


def test_request_shows_its_tokens_in_parts() -> None:
    request = make_request("a", 3)
    request.append([5, 6])
    assert request.token_ids == [10, 11, 12, 5, 6]
    assert (request.prompt_token_ids, request.output_token_ids) == ([10, 11, 12], [5, 6])
    assert (request.num_tokens, request.num_prompt_tokens, request.num_output_tokens) == (5, 3, 2)
    assert repr(request) == "Request('a', waiting, 0 of 5 tokens computed, 2 generated, 0 blocks)"


def test_request_keeps_its_own_copy_of_the_prompt() -> None:
    prompt = [1, 2, 3]
    request = Request("a", prompt, max_tokens=1)
    request.append([4])
    assert prompt == [1, 2, 3]
