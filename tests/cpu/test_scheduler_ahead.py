"""A step planned before the one in flight is applied: what it holds, what it waits for, and how it is taken back."""

from __future__ import annotations

import pytest
from scheduling_steps import WORD, add, apply, chunks, make_scheduler, plan, step

from lean_engine.memory.block_pool import IntegrityError
from lean_engine.memory.prefix_cache import BlockKeys
from lean_engine.scheduling.request import RequestStatus


def test_a_token_that_is_being_sampled_counts_as_the_next_one() -> None:
    scheduler = make_scheduler()
    request = add(scheduler, "a", 3)
    first = plan(scheduler)
    ahead = plan(scheduler)
    assert chunks(first) == [("a", 0, 3, True)]
    assert chunks(ahead) == [("a", 3, 1, True)]
    assert (request.num_tokens, request.num_computed_tokens, len(request.block_table)) == (3, 4, 1)
    apply(scheduler, first)
    beyond = plan(scheduler)
    assert (chunks(beyond), len(request.block_table)) == ([("a", 4, 1, True)], 2)
    apply(scheduler, ahead)
    apply(scheduler, beyond)
    assert request.output_token_ids == [WORD] * 3


def test_results_come_in_the_order_of_the_plans() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 3)
    plan(scheduler)
    ahead = plan(scheduler)
    with pytest.raises(IntegrityError, match="not the oldest in flight"):
        scheduler.apply(ahead, [[WORD]], 0.0)


def test_what_ends_with_the_step_in_flight_is_not_planned_again() -> None:
    scheduler = make_scheduler()
    add(scheduler, "short", 3, max_tokens=1)
    add(scheduler, "long", 3)
    first, ahead = plan(scheduler), plan(scheduler)
    assert chunks(ahead) == [("long", 3, 1, True)]
    apply(scheduler, first)
    assert scheduler.num_running == 1


def test_alone_it_leaves_nothing_to_plan_ahead() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 3, max_tokens=1)
    add(scheduler, "only a prompt", 5, max_tokens=0)
    first = plan(scheduler)
    assert scheduler.plan() is None
    assert [request.request_id for request, _ in apply(scheduler, first)] == ["a", "only a prompt"]
    assert not scheduler.has_work()


def test_without_blocks_there_is_no_step_ahead_and_nobody_is_preempted_before_results_are_known() -> None:
    scheduler = make_scheduler(4)
    add(scheduler, "a", 3, max_tokens=13)
    second = add(scheduler, "b", 3, max_tokens=13)
    for _ in range(5):
        step(scheduler)
    last = plan(scheduler)  # fills two blocks of each
    assert scheduler.plan() is None
    assert second.status is RequestStatus.RUNNING
    apply(scheduler, last)
    assert [request.request_id for request in plan(scheduler).preempted] == ["b"]


def test_a_block_that_a_finishing_request_frees_saves_another_from_preemption() -> None:
    scheduler = make_scheduler(4)
    add(scheduler, "a", 3, max_tokens=13)
    add(scheduler, "b", 3, max_tokens=6)
    for _ in range(5):
        step(scheduler)
    last = plan(scheduler)
    assert scheduler.plan() is None, "a lacks a block, which b, who ends now, will free"
    apply(scheduler, last)
    assert chunks(plan(scheduler)) == [("a", 8, 1, True)]
    assert scheduler.stats.num_preemptions == 0


def test_prompt_blocks_of_the_step_in_flight_are_found_and_generated_ones_when_they_are_known() -> None:
    scheduler = make_scheduler(block_keys=BlockKeys(4), max_num_batched_tokens=8)
    first = add(scheduler, "a", 13)
    in_flight = plan(scheduler)
    second = add(scheduler, "b", 13)
    ahead = plan(scheduler)
    assert chunks(ahead) == [("a", 8, 5, True)], "b waits for the block that a computes in this step"
    assert first.publish_at == 12
    apply(scheduler, in_flight)
    apply(scheduler, ahead)
    decode, waits = plan(scheduler), plan(scheduler)
    assert chunks(decode)[1:] == [("b", 12, 1, True)]
    assert second.num_cached_tokens == 12
    del waits


def test_a_plan_that_is_taken_back_leaves_its_requests_where_they_stood() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=8, max_num_logit_rows=4)
    request = add(scheduler, "a", 11, needs_prompt_logits=True)
    other = add(scheduler, "b", 2)
    for _ in range(6):
        before = (request.num_computed_tokens, request.num_prompt_logits, request.is_caught_up, other.is_caught_up)
        scheduler.withdraw(plan(scheduler))
        scheduler.check()
        after = (request.num_computed_tokens, request.num_prompt_logits, request.is_caught_up, other.is_caught_up)
        assert after == before
        step(scheduler)
    assert request.num_output_tokens > 0


def test_only_the_latest_plan_can_be_taken_back() -> None:
    scheduler = make_scheduler()
    add(scheduler, "a", 3)
    first = plan(scheduler)
    plan(scheduler)
    with pytest.raises(IntegrityError, match="not the latest in flight"):
        scheduler.withdraw(first)


def test_the_reserve_for_growth_reckons_with_the_token_that_is_being_sampled() -> None:
    for is_ahead in (False, True):
        scheduler = make_scheduler(4)
        add(scheduler, "a", 3, max_tokens=10)
        step(scheduler)
        in_flight = plan(scheduler)
        if not is_ahead:
            apply(scheduler, in_flight)
        add(scheduler, "b", 3, max_tokens=10)
        assert chunks(plan(scheduler)) == [("a", 4, 1, True)], "a may soon need a third block, b two, and two are free"
