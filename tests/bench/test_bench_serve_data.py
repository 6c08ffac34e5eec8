"""What is asked and when: prompts of exact lengths, files, mixes and traces; arrivals from a seed."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tiny import directory

from lean_engine.bench.serving.arrivals import Ramp, arrival_times
from lean_engine.bench.serving.benchmark import LoadOptions, make_schedule
from lean_engine.bench.serving.datasets import DatasetOptions, ServeTurn, history_of, make_conversations
from lean_engine.bench.serving.prompts import PromptSource
from lean_engine.bench.serving.target import make_target
from lean_engine.errors import ConfigError
from lean_engine.text.tokenizer import Tokenizer

SMALL = DatasetOptions(num_prompts=6, random_input_len=20, random_output_len=8)


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(directory("qwen3"))


def turns_of(options: DatasetOptions) -> list[ServeTurn]:
    return [conversation.turns[0] for conversation in make_conversations(options, tokenizer)]


def no_tokenizer() -> Tokenizer:
    raise AssertionError("no tokenizer is needed")


# -- prompts


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "phi3", "llama3-rope"])
def test_a_text_has_the_wanted_number_of_tokens(name: str) -> None:
    source = PromptSource(Tokenizer.from_directory(directory(name)), 0)
    for wanted in (2, 3, 17, 300):
        text, count = source.text(wanted)
        assert len(source.tokenizer.encode(text, add_special_tokens=False)) == count == wanted


def test_token_ids_are_never_special() -> None:
    ids = PromptSource(tokenizer(), 0).token_ids(5000)
    assert not tokenizer().special_ids.intersection(ids)
    assert all(tokenizer().token_bytes(i) for i in ids)


def test_the_same_seed_asks_the_same_and_another_does_not() -> None:
    assert turns_of(SMALL) == turns_of(SMALL)
    assert turns_of(SMALL) != turns_of(replace(SMALL, seed=1))


# -- data sets


@pytest.mark.parametrize("is_chat", [False, True])
def test_random_prompts_have_their_lengths(is_chat: bool) -> None:
    turns = turns_of(replace(SMALL, is_chat=is_chat))
    assert [(t.prompt_len, t.output_len) for t in turns] == [(20, 8)] * 6
    assert all(isinstance(t.prompt, str) == is_chat for t in turns)
    varied = turns_of(replace(SMALL, is_chat=is_chat, num_prompts=200, random_range_ratio=0.5))
    assert {t.output_len for t in varied} == set(range(4, 13))
    assert {t.prompt_len for t in varied} == set(range(10, 31))


@pytest.mark.parametrize("is_chat", [False, True])
def test_a_prefix_is_shared_by_all_or_by_groups(is_chat: bool) -> None:
    turns = turns_of(replace(SMALL, is_chat=is_chat, random_prefix_len=5))
    assert len({str(t.prompt[:5]) for t in turns}) == 1
    repeated = replace(SMALL, name="prefix_repetition", is_chat=is_chat, num_prompts=12)
    turns = turns_of(replace(repeated, prefix_repetition_num_prefixes=3, prefix_repetition_prefix_len=40))
    groups = {str(t.prompt[:40]) for t in turns}
    assert len(groups) == 3
    assert len({str(t.prompt) for t in turns}) == 12


def test_a_mix_becomes_chats_or_token_ids_that_go_on() -> None:
    options = DatasetOptions(name="multi-turn", num_prompts=12, turn_delay=0.5, is_chat=True)
    chats = make_conversations(options, tokenizer)
    assert sum(len(c.turns) for c in chats) == 12
    later = [turn for c in chats for turn in c.turns[1:]]
    assert 0 < statistics.fmean(turn.delay for turn in later) < 2
    go_on = history_of(True, no_tokenizer)
    assert go_on([{"role": "user", "content": "a"}], "b", [{"role": "user", "content": "c"}]) == [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    assert history_of(False, tokenizer)([1, 2], "a", [3]) == [1, 2, *tokenizer().encode("a"), 3]
    for one, other in zip(chats, make_conversations(replace(options, is_chat=False), tokenizer), strict=True):
        assert [t.output_len for t in one.turns] == [t.output_len for t in other.turns]


def write(path: Path, content: Any, is_lines: bool = True) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in content) if is_lines else json.dumps(content))
    return str(path)


def test_a_trace_comes_at_its_own_times(tmp_path: Path) -> None:
    lines = [
        {"arrival_time": 2.5, "prompt_token_ids": [5, 6, 7], "output_len": 3, "priority": -1},
        {"arrival_time": 1.5, "prompt_len": 30, "output_len": 4, "prefix_id": "a", "prefix_len": 20},
        {"prompt_len": 25, "output_len": 5, "prefix_id": "a", "prefix_len": 20},
    ]
    options = DatasetOptions(name="trace", path=write(tmp_path / "t.jsonl", lines))
    conversations = make_conversations(options, tokenizer)
    assert [c.arrival for c in conversations] == [0.0, 1.5, 2.5]
    turns = [c.turns[0] for c in conversations]
    assert [(t.prompt_len, t.output_len) for t in turns] == [(25, 5), (30, 4), (3, 3)]
    assert turns[0].prompt[:20] == turns[1].prompt[:20]
    assert (turns[2].prompt, turns[2].fields) == ([5, 6, 7], {"priority": -1})
    assert [s.time for s in make_schedule(conversations, LoadOptions())] == [0.0, 1.5, 2.5]
    with pytest.raises(ConfigError, match="has arrival times of its own"):
        make_schedule(conversations, LoadOptions(request_rate=3))


def test_custom_lines_are_prompts_ids_or_messages(tmp_path: Path) -> None:
    lines = [{"prompt": "one", "note": 1}, {"prompt": [4, 5], "output_tokens": 9}, {"prompt": "three"}]
    path = write(tmp_path / "c.jsonl", lines)
    options = DatasetOptions(name="custom", path=path, num_prompts=4, custom_output_len=7, shuffles=False)
    turns = [c.turns[0] for c in make_conversations(options, no_tokenizer)]
    assert [(t.prompt, t.prompt_len, t.output_len) for t in turns] == [
        ("one", None, 7),
        ([4, 5], 2, 9),
        ("three", None, 7),
        ("one", None, 7),
    ]
    assert len(make_conversations(replace(options, oversamples=False), no_tokenizer)) == 3
    messages = [{"role": "user", "content": "hi"}]
    chat = DatasetOptions(name="custom", path=write(tmp_path / "m.jsonl", [{"messages": messages}]), is_chat=True)
    assert make_conversations(replace(chat, num_prompts=1), no_tokenizer)[0].turns[0].prompt == messages
    with pytest.raises(ConfigError, match=r"m.jsonl:1: has messages, which need --backend openai-chat"):
        make_conversations(replace(chat, is_chat=False), no_tokenizer)


def test_sharegpt_gives_questions_with_the_lengths_of_their_answers(tmp_path: Path) -> None:
    def chat(*texts: str) -> dict[str, Any]:
        return {"conversations": [{"from": "human", "value": text} for text in texts]}

    long, short = "the quick brown fox jumps over it", "x"
    entries = [chat(long, long * 2), chat(short, long), chat(long, short), chat(long), chat("w " * 3000, long)]
    options = DatasetOptions(name="sharegpt", path=write(tmp_path / "s.json", entries, False), num_prompts=2)
    turns = turns_of(options)
    expected = (long, len(tokenizer().encode(long)), len(tokenizer().encode(long * 2)))
    assert [(t.prompt, t.prompt_len, t.output_len) for t in turns] == [expected] * 2
    assert {t.output_len for t in turns_of(replace(options, sharegpt_output_len=5, num_prompts=3))} == {5}


@pytest.mark.parametrize(
    ("changes", "content", "expected"),
    [
        ({"name": "poems"}, None, "data set is 'poems', must be one of: random"),
        ({"name": "custom"}, None, "the data set 'custom' needs --dataset-path"),
        ({"path": "x"}, None, "--dataset-path does not go with the data set 'random'"),
        ({"random_range_ratio": 1.0}, None, "random_range_ratio is 1, must be at least 0 and below 1"),
        ({"random_input_len": 0}, None, "random_input_len is 0, must be at least 1"),
        ({"turn_delay": math.inf}, None, "turn_delay is inf"),
        ({"name": "custom", "path": "/nowhere"}, None, "/nowhere: cannot be read: No such file"),
        ({"name": "custom"}, "{}", "f:1: found neither prompt nor messages"),
        ({"name": "custom"}, '{"prompt": ""}', 'f:1: found ""; must have a prompt'),
        ({"name": "custom"}, '{"prompt": [1, "a"]}', "f:1: found"),
        ({"name": "custom"}, '{"prompt": "a", "output_tokens": 0}', "f:1: output_tokens is 0"),
        ({"name": "custom"}, "\n\n", "holds no usable prompt"),
        ({"name": "custom"}, "[]", "f:1: is not a JSON object but list"),
        ({"name": "sharegpt"}, "{", "f: is not valid JSON"),
        ({"name": "sharegpt"}, "{}", "f: is not a JSON list but dict"),
        ({"name": "sharegpt"}, '[{"conversations": [{}, {}]}]', "conversations must be lists of"),
        ({"name": "trace"}, '{"prompt_len": 0}', "f:1: prompt_len is 0"),
    ],
)
def test_what_is_wrong_with_a_data_set_is_one_line(
    changes: dict[str, Any], content: str | None, expected: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "f").write_text(content)
        changes = changes | {"path": str(tmp_path / "f")}
    with pytest.raises(ConfigError, match=expected) as caught:
        make_conversations(replace(SMALL, **changes), tokenizer)
    assert "\n" not in str(caught.value)


# -- arrivals


def gaps(times: list[float]) -> list[float]:
    return [b - a for a, b in zip([0.0, *times], times, strict=False)]


@pytest.mark.parametrize(("burstiness", "variation"), [(1.0, 1.0), (0.25, 2.0), (4.0, 0.5)])
def test_gaps_have_the_rate_and_the_spread_that_were_asked_for(burstiness: float, variation: float) -> None:
    times = arrival_times(20_000, 50.0, seed=1, burstiness=burstiness)
    assert times == sorted(times)
    assert times[-1] == pytest.approx(20_000 / 50)
    found = gaps(times)
    assert statistics.pstdev(found) / statistics.fmean(found) == pytest.approx(variation, rel=0.1)


def test_arrivals_depend_on_the_seed_alone() -> None:
    assert arrival_times(50, 5.0, 1) == arrival_times(50, 5.0, 1) != arrival_times(50, 5.0, 2)
    assert arrival_times(3, math.inf, 0) == [0.0] * 3


@pytest.mark.parametrize(("strategy", "middle"), [("linear", (10 + 1000) / 2), ("exponential", math.sqrt(10 * 1000))])
def test_a_rate_ramps_up(strategy: str, middle: float) -> None:
    ramp = Ramp(strategy, 10.0, 1000.0)
    assert (ramp.rate(0), ramp.rate(0.5), ramp.rate(1)) == pytest.approx((10, middle, 1000))
    found = gaps(arrival_times(10_000, math.inf, 0, ramp=ramp))
    assert 1 / statistics.fmean(found[4900:5100]) == pytest.approx(middle, rel=0.2)


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: arrival_times(1, 0.0, 0), "request rate is 0, must be above 0"),
        (lambda: arrival_times(1, math.nan, 0), "request rate is nan"),
        (lambda: arrival_times(1, 1.0, 0, burstiness=0), "burstiness is 0, must be above 0"),
        (lambda: Ramp("steep", 1, 2), "ramp-up strategy is 'steep', must be one of: linear, exponential"),
        (lambda: Ramp("linear", 0, 2), "ramp-up start is 0 requests/s"),
        (lambda: LoadOptions(ramp=Ramp("linear", 1, 2), request_rate=3), "leave --request-rate out"),
        (lambda: LoadOptions(max_concurrency=0), "max concurrency is 0"),
        (lambda: LoadOptions(percents=(101,)), "a percentile is 101"),
        (lambda: LoadOptions(timeout=0), "timeout is 0 s"),
    ],
)
def test_impossible_loads_are_refused(make: Callable[[], object], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        make()


# -- the target


def test_bodies_are_those_of_the_api() -> None:
    target = make_target("vllm", "http://h:1/", None, "m", ignore_eos=True, extra_body={"top_k": 1, "stream": True})
    head, body = target.request([1, 2], 5, priority=3).split(b"\r\n\r\n")
    assert head.startswith(b"POST /v1/completions HTTP/1.1\r\nHost: h:1\r\n")
    assert json.loads(body) == {
        "model": "m",
        "prompt": [1, 2],
        "max_tokens": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
        "priority": 3,
        "top_k": 1,
    }
    assert f"Content-Length: {len(body)}".encode() in head
    chat = make_target("openai-chat", "https://h/base", None, "m", headers={"X-A": "b"})
    head, body = chat.request("hi", 5).split(b"\r\n\r\n")
    assert head.startswith(b"POST /base/v1/chat/completions HTTP/1.1\r\nHost: h\r\n")
    assert b"\r\nX-A: b" in head
    assert json.loads(body)["messages"] == [{"role": "user", "content": "hi"}]
    assert (chat.address.port, chat.address.tls is not None) == (443, True)


@pytest.mark.parametrize(
    ("backend", "url", "endpoint", "expected"),
    [
        ("openai", "localhost:8000", None, "base URL is 'localhost:8000', must be like http://127.0.0.1:8000"),
        ("openai", "http://h:99999", None, "base URL is"),
        ("openai", "ftp://h", None, "base URL is"),
        ("openai", "http://h", "/v1/chat/completions", "of the backend openai it must end in /v1/completions"),
        ("openai-chat", "http://h", "/v1/completions", "it must end in /v1/chat/completions"),
        ("openai", "http://h", "v1/completions", "endpoint is 'v1/completions'"),
    ],
)
def test_an_impossible_target_is_refused(backend: str, url: str, endpoint: str | None, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        make_target(backend, url, endpoint, "m")
