"""Who goes first: priorities, short prompts behind long ones, and what is done when nobody can go. Exact chunks."""

from __future__ import annotations

import random
from typing import Any

import pytest
from scheduling_steps import WORD, add, apply, chunks, make_request, make_scheduler, plan, step

from lean_engine.errors import ConfigError
from lean_engine.memory.prefix_cache import BlockKeys
from lean_engine.scheduling.plan import ScheduledChunk
from lean_engine.scheduling.queue import WaitingQueue
from lean_engine.scheduling.request import Request, RequestStatus
from lean_engine.scheduling.scheduler import Scheduler
from lean_engine.scheduling.step import Step

# -- the queue


def queued(queue: WaitingQueue, name: str, num_tokens: int, priority: int, number: int) -> Request:
    request = make_request(name, num_tokens)
    request.order = (priority, number)
    queue.push(request, num_tokens)
    return request


def test_queue_gives_priority_then_arrival_and_can_pass_over_long_ones() -> None:
    queue = WaitingQueue(long_threshold=5)
    late, long, early = queued(queue, "late", 2, 0, 3), queued(queue, "long", 6, 0, 1), queued(queue, "early", 5, 0, 2)
    urgent = queued(queue, "urgent", 1, -1, 4)
    assert list(queue) == [urgent, long, early, late]
    assert (len(queue), queue.num_short_tokens) == (4, 8)
    taken = []
    for with_long in (True, False, True, True):
        request = queue.first(with_long)
        assert request is not None
        queue.pop(request)
        taken.append(request)
    assert taken == [urgent, early, long, late]
    assert (len(queue), queue.num_short_tokens, queue.first()) == (0, 0, None)


def test_queue_forgets_requests_that_end_in_it() -> None:
    queue = WaitingQueue(long_threshold=5)
    requests = [queued(queue, f"r{i}", 1 + i % 8, 0, i) for i in range(1000)]
    rng = random.Random(0)
    for request in rng.sample(requests, 990):
        request.status = RequestStatus.FINISHED
        queue.discard(request)
    alive = [request for request in requests if not request.is_finished]
    assert list(queue) == alive
    assert queue.num_short_tokens == sum(r.num_tokens for r in alive if r.num_tokens <= 5)
    assert len(queue._short) + len(queue._long) < 250, "those that ended are let go of"


# -- priorities


def test_lower_priority_value_goes_first_whenever_it_came() -> None:
    scheduler = make_scheduler(max_num_seqs=1, policy="priority")
    for name, priority in (("a", 1), ("b", 0), ("c", -1), ("d", 0)):
        add(scheduler, name, 4, max_tokens=1, priority=priority)
    order = [step(scheduler)[0][0] for _ in range(4)]
    assert order == ["c", "b", "d", "a"]


def test_priority_does_not_count_under_fcfs() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    for name, priority in (("a", 1), ("b", 0)):
        add(scheduler, name, 4, max_tokens=1, priority=priority)
    assert [step(scheduler)[0][0] for _ in range(2)] == ["a", "b"]


def test_least_urgent_is_preempted_though_it_came_first() -> None:
    scheduler = make_scheduler(num_usable=6, policy="priority")
    low = add(scheduler, "low", 3, max_tokens=20, priority=5)
    step(scheduler)
    high = add(scheduler, "high", 3, max_tokens=20)
    while not low.num_preemptions:
        step(scheduler)
    assert (low.status, high.status) == (RequestStatus.PREEMPTED, RequestStatus.RUNNING)
    while scheduler.has_work():
        step(scheduler)
    assert high.num_preemptions == 0
    assert low.output_token_ids == [WORD] * 20


def test_unknown_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="scheduling_policy is 'lifo', must be one of: fcfs, priority"):
        make_scheduler(policy="lifo")


def test_urgent_request_does_not_wait_for_one_that_lacks_blocks() -> None:
    scheduler = make_scheduler(num_usable=20, policy="priority")
    add(scheduler, "running", 20, max_tokens=30, priority=1)
    step(scheduler)
    add(scheduler, "big", 60, priority=1, max_tokens=8)
    step(scheduler)
    step(scheduler)
    add(scheduler, "urgent", 3, max_tokens=4)
    assert ("urgent", 0, 3, True) in step(scheduler)


# -- long and short prompts


def steps_until_running(scheduler: Scheduler, request: Request, limit: int = 100) -> int:
    for num_steps in range(1, limit):
        step(scheduler)
        if request.num_output_tokens:
            return num_steps
    raise AssertionError(f"{request!r} got no token in {limit} steps")


def test_short_prompt_behind_a_long_one_gets_half_of_the_step() -> None:
    scheduler = make_scheduler(num_usable=1000, max_model_len=4000, max_num_batched_tokens=64)
    add(scheduler, "long", 1000)
    assert step(scheduler) == [("long", 0, 64, False)], "nobody else is there"
    add(scheduler, "short", 20)
    assert step(scheduler) == [("long", 64, 44, False), ("short", 0, 20, True)], "as much as it needs, up to half"
    for i in range(4):
        add(scheduler, f"more{i}", 20)
    assert step(scheduler) == [
        ("short", 20, 1, True),
        ("long", 108, 32, False),
        ("more0", 0, 20, True),
        ("more1", 0, 11, False),
    ]
    assert step(scheduler)[:2] == [("short", 21, 1, True), ("more0", 20, 1, True)]


@pytest.mark.parametrize("num_long", [1, 3, 10])
def test_wait_of_short_prompts_is_bounded_however_long_those_before_them_are(num_long: int) -> None:
    waits = []
    for length in (500, 3000):
        scheduler = make_scheduler(num_usable=20000, max_model_len=4000, max_num_batched_tokens=64)
        for i in range(num_long):
            add(scheduler, f"long{i}", length)
        shorts = [add(scheduler, f"short{i}", 16) for i in range(4)]
        waits.append(steps_until_running(scheduler, shorts[-1]))
    assert waits[0] == waits[1] <= 4, waits


def test_chat_whose_history_is_cached_counts_as_short() -> None:
    scheduler = make_scheduler(num_usable=1000, max_model_len=4000, max_num_batched_tokens=64, block_keys=BlockKeys(4))
    add(scheduler, "first turn", 200, max_tokens=1)
    while scheduler.has_work():
        step(scheduler)
    scheduler.add(Request("long", range(1000, 2000), max_tokens=4))
    step(scheduler)
    add(scheduler, "second turn", 210)
    assert step(scheduler) == [("long", 64, 54, False), ("second turn", 200, 10, True)]


def test_request_that_was_long_until_its_prefix_was_cached_is_short_from_then_on() -> None:
    scheduler = make_scheduler(
        num_usable=1000, max_model_len=4000, max_num_batched_tokens=64, block_keys=BlockKeys(4), max_num_seqs=8
    )
    scheduler.add(Request("long", range(1000, 3000), max_tokens=4))
    add(scheduler, "leader", 80, max_tokens=50)
    follower = add(scheduler, "follower", 84)
    steps = 0
    while follower.first_scheduled_time is None:
        step(scheduler)
        steps += 1
    assert follower.num_cached_tokens == 80
    assert steps < 2000 / 64 + 6, "the leader needs the long one's end, the follower one or two steps more"


def test_long_prompt_keeps_half_of_the_step_whatever_comes_behind_it() -> None:
    scheduler = make_scheduler(num_usable=2000, max_model_len=4000, max_num_batched_tokens=64, max_num_seqs=8)
    long = add(scheduler, "long", 1000, max_tokens=1)
    num_steps = 0
    while not long.is_finished:
        add(scheduler, f"short{num_steps}", 30, max_tokens=1)
        step(scheduler)
        num_steps += 1
    assert 1000 / 64 < num_steps <= 1000 / 24


def test_tokens_kept_for_short_prompts_that_cannot_come_are_used() -> None:
    """The short one lacks blocks: the long one gets the whole step."""
    scheduler = make_scheduler(num_usable=30, max_num_batched_tokens=64)
    add(scheduler, "long", 110, max_tokens=4)
    add(scheduler, "short", 16)
    assert step(scheduler) == [("long", 0, 64, False)]
    assert step(scheduler) == [("long", 64, 46, True)]


def test_what_a_short_prompt_has_taken_is_not_kept_for_it_a_second_time() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=64)
    add(scheduler, "short", 32)
    add(scheduler, "long", 100)
    assert step(scheduler) == [("short", 0, 32, True), ("long", 0, 32, False)]


def test_threshold_caps_the_chunks_of_longer_prompts_alone() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=64, long_prefill_token_threshold=10)
    add(scheduler, "a", 25)
    add(scheduler, "b", 10)
    add(scheduler, "c", 11)
    assert step(scheduler) == [("a", 0, 10, False), ("b", 0, 10, True), ("c", 0, 10, False)]
    assert step(scheduler) == [("b", 10, 1, True), ("a", 10, 10, False), ("c", 10, 1, True)]


def test_threshold_0_lets_long_prompts_take_all() -> None:
    scheduler = make_scheduler(num_usable=1000, max_num_batched_tokens=64, long_prefill_token_threshold=0)
    add(scheduler, "long", 150)
    add(scheduler, "short", 4)
    assert step(scheduler) == [("long", 0, 64, False)]
    assert step(scheduler) == [("long", 64, 64, False)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"long_prefill_token_threshold": -1}, "long_prefill_token_threshold is -1; it must be at least 0"),
        (
            {"long_prefill_token_threshold": 5, "enable_chunked_prefill": False},
            "long_prefill_token_threshold is 5, but chunked prefill is off",
        ),
    ],
)
def test_impossible_thresholds_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_scheduler(**changes)


def test_every_decode_moves_in_every_step_beside_a_prompt_of_32k_tokens() -> None:
    scheduler = make_scheduler(
        num_usable=3000,
        block_size=16,
        max_model_len=40_000,
        max_num_seqs=8,
        max_num_batched_tokens=2048,
    )
    decodes = [add(scheduler, f"d{i}", 10, max_tokens=100) for i in range(4)]
    step(scheduler)
    long = add(scheduler, "long", 32_768)
    num_steps = 0
    while not long.num_output_tokens:
        planned = plan(scheduler)
        assert planned.num_tokens <= 2048
        assert planned.decodes == decodes
        apply(scheduler, planned)
        num_steps += 1
    assert num_steps == 17  # 32,768 / 2,044


# -- nobody can go


def test_request_that_cannot_be_admitted_though_nothing_runs_fails_with_the_numbers() -> None:
    """Blocks that somebody outside holds: a bug, which must not hang those that wait."""
    scheduler = make_scheduler(num_usable=10)
    scheduler.pool.allocate(6)
    big, small = add(scheduler, "big", 20, max_tokens=4), add(scheduler, "small", 4, max_tokens=1)
    planned = scheduler.plan(now=1.0)
    assert planned is not None
    assert chunks(planned) == [("small", 0, 4, True)]
    (failed,) = planned.failed
    assert failed[0] is big
    assert failed[1] == (
        "no step can admit this request: it needs 6 KV blocks to go on, 4 of 10 are free though nothing runs"
    )
    assert (big.finish_reason, big.status) == ("error", RequestStatus.FINISHED)
    scheduler.apply(planned, [[WORD]], 2.0)
    assert small.is_finished
    assert not scheduler.has_work()
    assert scheduler.stats.num_failed == 1


def test_step_statistics_add_up() -> None:
    scheduler = make_scheduler(num_usable=8)
    a = add(scheduler, "a", 6, max_tokens=20)
    add(scheduler, "b", 5, max_tokens=20)
    preempted = 0
    for number in range(1, 30):
        planned = scheduler.plan(now=float(number))
        assert planned is not None
        preempted += len(planned.preempted)
        scheduler.apply(planned, [[WORD] if c.samples else [] for c in planned.scheduled], float(number))
        stats = scheduler.step_stats()
        assert stats.step == number
        assert stats.num_tokens == planned.num_tokens
        assert stats.num_held_blocks + stats.num_cached_blocks + stats.num_empty_blocks == 8
        running = [r for r in scheduler._running if not r.is_finished]
        assert stats.num_unused_slots == sum(4 * len(r.block_table) - r.num_computed_tokens for r in running)
        assert 0.0 <= stats.waste_ratio < 1.0
        assert stats.usage == stats.num_held_blocks / 8
        if not scheduler.has_work():
            break
    totals = scheduler.stats
    assert a.is_finished
    assert preempted == totals.num_preemptions > 0
    assert (totals.num_admitted, totals.num_finished, totals.num_prefill_tokens) == (2, 2, 11)
    assert totals.num_decode_tokens == 2 * 19, "the last token of each is never computed"
    assert totals.num_recompute_tokens > 0


def test_admission_reckons_with_the_growth_of_the_running_while_a_long_prompt_catches_up() -> None:
    """10 decodes leave 10 tokens a step, of which a long prompt is sure of 5; blocks hold 4."""
    scheduler = make_scheduler(max_num_batched_tokens=20)
    for i in range(10):
        add(scheduler, f"d{i}", 1)
    step(scheduler)
    long = add(scheduler, "long", 41)
    ahead = make_request("ahead", 20)
    making = Step(scheduler._limits, num_running=10, short_tokens=0)
    own = 12  # for 41 tokens and a block of growth
    assert scheduler._num_blocks_to_admit(long, [], making) == own + 10 * 2, "8 more steps, 2 blocks for each decode"
    making.take(ScheduledChunk(ahead, 0, 4, 0, False))
    assert scheduler._num_blocks_to_admit(long, [], making) == own + 10 * 3, "12 more steps, since 20 tokens go before"
