"""Workloads: seeded, of the shapes that their names promise, and traces made into them."""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from statistics import mean

import pytest

from lean_engine.bench.trace import TraceRequest
from lean_engine.bench.workloads import (
    MAX_TRACE_TOKENS,
    MIXES,
    NUM_COMMON_IDS,
    Source,
    Workload,
    make_workload,
    trace_workload,
)
from lean_engine.errors import ConfigError


def prompts(workload: Workload) -> list[list[int]]:
    """First turns."""
    return [list(turns[0].new_token_ids) for turns in workload.conversations]


def starts(workload: Workload, num_tokens: int) -> Counter[tuple[int, ...]]:
    return Counter(tuple(prompt[:num_tokens]) for prompt in prompts(workload))


def num_common(left: list[int], right: list[int]) -> int:
    return next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))


@pytest.mark.parametrize("name", MIXES)
def test_the_seed_decides_everything(name: str) -> None:
    workload = make_workload(name, 40, seed=3)
    assert workload == make_workload(name, 40, seed=3)
    assert workload.conversations != make_workload(name, 40, seed=4).conversations


@pytest.mark.parametrize("name", MIXES)
def test_a_workload_has_the_number_of_requests_asked_for(name: str) -> None:
    workload = make_workload(name, 57, seed=0)
    assert workload.num_requests == 57
    assert all(turn.new_token_ids and turn.output_token_ids for turns in workload.conversations for turn in turns)
    longest = max(workload.conversations, key=lambda c: sum(len(t.new_token_ids) + len(t.output_token_ids) for t in c))
    assert workload.max_num_tokens == sum(len(t.new_token_ids) + len(t.output_token_ids) for t in longest)


def test_chats_share_a_few_system_prompts_and_nothing_behind_them() -> None:
    workload = make_workload("chat", 300, seed=0)
    systems = starts(workload, 30)
    assert 4 <= len(systems) <= 8
    assert systems.most_common(1)[0][1] > 300 / 8  # the first is wanted more often than its fair share
    tails = [next(i for i in prompt if i >= NUM_COMMON_IDS) for prompt in prompts(workload)]
    assert len(set(tails)) == 300
    assert 250 < mean(len(p) for p in prompts(workload)) < 400  # about 150 + 161
    assert 280 < mean(len(turns[0].output_token_ids) for turns in workload.conversations) < 400


def test_shared_prefixes_are_long_and_tails_short() -> None:
    workload = make_workload("shared-prefix", 200, seed=0)
    groups = starts(workload, 512)
    assert len(groups) == 16
    first = next(iter(groups))
    members = [p for p in prompts(workload) if tuple(p[:512]) == first]
    common = num_common(members[0], members[1])
    assert 512 <= common <= 1536
    assert all(num_common(members[0], other) == common and len(other) - common <= 512 for other in members[1:])


def test_turns_of_a_chat_come_after_some_thought() -> None:
    workload = make_workload("multi-turn", 200, seed=0)
    assert all(2 <= len(turns) <= 10 for turns in workload.conversations[:-1])
    think_times = [turn.delay for turns in workload.conversations for turn in turns[1:]]
    assert 120 < mean(think_times) < 300  # 200 steps
    assert min(think_times) > 0


def test_documents_of_rag_are_popular_or_not_and_in_order() -> None:
    workload = make_workload("rag", 200, seed=0)
    (start,) = starts(workload, 200)  # one system prompt
    assert len(start) == 200
    firsts = Counter(tuple(prompt[200:210]) for prompt in prompts(workload))
    assert firsts.most_common(1)[0][1] > 200 / 5  # the most popular document, and it stands first whenever it is there


def test_an_agent_takes_many_turns_behind_a_long_prompt() -> None:
    workload = make_workload("agent", 200, seed=0)
    assert len(starts(workload, 1500)) <= 3
    assert all(6 <= len(turns) <= 20 for turns in workload.conversations[:-1])


def test_random_prompts_share_not_even_a_first_token() -> None:
    workload = make_workload("random", 200, seed=0)
    assert len(starts(workload, 1)) == 200


def test_conversations_begin_as_a_poisson_process() -> None:
    delays = [turns[0].delay for turns in make_workload("chat", 400, seed=0, rate=0.5).conversations]
    gaps = [b - a for a, b in pairwise(delays)]
    assert delays[0] == 0.0
    assert min(gaps) > 0
    assert 1.7 < mean(gaps) < 2.3
    assert 0.33 < sum(gap > 2 for gap in gaps) / len(gaps) < 0.41  # exp(-1)


def test_an_infinite_rate_begins_everything_at_once() -> None:
    workload = make_workload("chat", 20, seed=0, rate=math.inf)
    assert [turns[0].delay for turns in workload.conversations] == [0.0] * 20
    assert workload.origin["request_rate"] == "inf"


def test_the_rate_changes_no_token() -> None:
    slow, fast = (make_workload("agent", 40, seed=0, rate=rate) for rate in (0.01, 1.0))
    assert prompts(slow) == prompts(fast)


def test_lengths_have_their_mean_and_keep_their_bounds() -> None:
    source = Source("lengths")
    lengths = [source.length(200, 0.5, 50, 1000) for _ in range(4000)]
    assert 190 < mean(lengths) < 210
    cut = {source.length(200, 2.0, 150, 250) for _ in range(200)}
    assert (min(cut), max(cut)) == (150, 250)


def trace_request(arrival_time: float = 0.0, prompt_len: int = 8, **changes: object) -> TraceRequest:
    fields = {"prompt_token_ids": None, "prefix_id": None, "prefix_len": 0, "output_len": 2}
    return TraceRequest(arrival_time=arrival_time, prompt_len=prompt_len, **fields | changes)  # type: ignore[arg-type]


def test_a_trace_s_prefixes_are_shared_and_no_token_more() -> None:
    requests = [trace_request(prefix_id=name, prefix_len=5) for name in ("a", "a", "b")]
    first, second, other = prompts(trace_workload("t", requests, seed=0))
    assert num_common(first, second) == 5
    assert num_common(first, other) == 0


def test_a_prompt_that_is_all_prefix_has_no_tail() -> None:
    requests = [trace_request(prefix_id="a", prefix_len=8)] * 2
    first, second = prompts(trace_workload("t", requests, seed=0))
    assert first == second
    assert len(first) == 8


def test_a_trace_is_sorted_and_keeps_its_own_tokens() -> None:
    requests = [trace_request(6.0), trace_request(3.0, 2, prompt_token_ids=[7, 2**31 - 1])]
    workload = trace_workload("t", requests, seed=0, step_time=1.5)
    assert [turns[0].delay for turns in workload.conversations] == [2.0, 4.0]
    assert prompts(workload)[0] == [7, 2**31 - 1]
    assert workload.origin == {"workload": "t", "num_requests": 2, "seed": 0, "step_time": 1.5}


def test_what_is_out_of_range_is_named() -> None:
    with pytest.raises(ConfigError, match="workload is 'poems', must be one of: chat, shared-prefix, multi-turn"):
        make_workload("poems", 1, 0)
    with pytest.raises(ConfigError, match="num_requests is 0, must be at least 1"):
        make_workload("chat", 0, 0)
    for rate in (0.0, -1.0, math.nan):
        with pytest.raises(ConfigError, match=f"request_rate is {rate:g}, must be above 0"):
            make_workload("chat", 1, 0, rate)
    for step_time in (0.0, math.inf, math.nan):
        with pytest.raises(ConfigError, match=f"step_time is {step_time:g}, must be above 0"):
            trace_workload("t", [trace_request()], 0, step_time)
    with pytest.raises(ConfigError, match=f"t: a request has {MAX_TRACE_TOKENS + 1} tokens, must be at most"):
        trace_workload("t", [trace_request(prompt_len=MAX_TRACE_TOKENS - 1)], 0)
