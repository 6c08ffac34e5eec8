"""Prefix caching end to end on tiny models: the same answers with and without it, however the work is cut."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from conftest import LoadLLM
from test_engine import GREEDY, assert_idle, ids_of, logprobs_of

from lean_engine import LLM, RequestOutput, SamplingParams
from lean_engine.errors import ConfigError, OutOfMemory, RequestError
from lean_engine.runtime.cpu.host_memory import HostMemory


def turns_of(seed: int = 0) -> list[dict[str, Any]]:
    """Prompts that share beginnings of several lengths, some of them twice, one of whole blocks."""
    rng = random.Random(seed)
    system = [rng.randrange(5, 512) for _ in range(37)]
    document = system + [rng.randrange(5, 512) for _ in range(20)]
    tails = [[rng.randrange(5, 512) for _ in range(rng.randint(1, 12))] for _ in range(4)]
    prompts = [system + tails[0], system + tails[1], document + tails[2], document + tails[3], system[:32], system[:32]]
    return [{"prompt_token_ids": prompt} for prompt in [*prompts, document + tails[2], tails[0]]]


PARAMS = [
    GREEDY,
    SamplingParams(temperature=0.8, seed=3, max_tokens=12, logprobs=1, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=12, repetition_penalty=1.3, frequency_penalty=0.5, logprobs=1),
    SamplingParams(temperature=0, max_tokens=12, min_tokens=12, presence_penalty=1.0, logprobs=1),
    SamplingParams(temperature=1.0, seed=-7, top_k=20, top_p=0.9, min_p=0.01, max_tokens=9, n=3, logprobs=1),
    SamplingParams(temperature=0, max_tokens=6, prompt_logprobs=2, logprobs=1),
    SamplingParams(temperature=0, max_tokens=12, stop_token_ids=list(range(5, 40)), logprobs=1),
    GREEDY,
]


def assert_same(found: list[RequestOutput], wanted: list[RequestOutput]) -> None:
    assert ids_of(found) == ids_of(wanted)
    assert np.allclose(logprobs_of(found), logprobs_of(wanted), atol=1e-4)
    for one, other in zip(found, wanted, strict=True):
        assert [a.finish_reason for a in one.outputs] == [a.finish_reason for a in other.outputs]
        assert [a.stop_reason for a in one.outputs] == [a.stop_reason for a in other.outputs]
        for entry, expected in zip(one.prompt_logprobs or [], other.prompt_logprobs or [], strict=True):
            assert (entry is None) == (expected is None)
            if entry is not None and expected is not None:
                found_values = [entry[token].logprob for token in expected]
                assert np.allclose(found_values, [value.logprob for value in expected.values()], atol=1e-4)


@pytest.mark.parametrize("model", ["llama-gqa-untied", "gemma3", "qwen3-moe"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 8, "max_num_seqs": 8},
        {"max_num_batched_tokens": 64, "block_size": 4, "max_num_seqs": 12},
        {"block_size": 32, "max_num_seqs": 2},
        {"num_gpu_blocks_override": 23, "block_size": 4, "max_model_len": 90, "max_num_seqs": 8},
        {"prefix_caching_hash_algo": "builtin", "block_size": 4},
        {"block_size": 4, "long_prefill_token_threshold": 10},
    ],
    ids=["default", "budget 8", "blocks of 4", "two at a time", "tight pool", "builtin hash", "threshold"],
)
def test_answers_do_not_depend_on_caching(load_llm: LoadLLM, model: str, options: dict[str, Any]) -> None:
    prompts = turns_of()
    wanted = load_llm(model, enable_prefix_caching=False).generate(prompts, PARAMS)
    llm = load_llm(model, **options)
    assert_same(llm.generate(prompts, PARAMS), wanted)  # cold, together
    assert_idle(llm)
    assert_same(llm.generate(prompts, PARAMS), wanted)  # warm
    for prompt, params, one in zip(prompts, PARAMS, wanted, strict=True):  # warm, one by one
        assert_same(llm.generate([prompt], params), [one])
    assert llm.stats().num_hit_tokens > 0
    assert_idle(llm)


def test_aborts_in_between_change_nobodys_answer(load_llm: LoadLLM) -> None:
    prompts = [prompt["prompt_token_ids"] for prompt in turns_of(1)]
    wanted = load_llm(enable_prefix_caching=False).generate([{"prompt_token_ids": p} for p in prompts], GREEDY)
    llm = load_llm(
        block_size=4, num_gpu_blocks_override=40, max_model_len=100, max_num_batched_tokens=16, max_num_seqs=6
    )
    engine, rng = llm.engine, random.Random(2)
    groups = []
    for i, prompt in enumerate(prompts):
        groups.append(engine.add(f"kept{i}", prompt, GREEDY))
        engine.add(f"aborted{i}", prompt[: rng.randint(1, len(prompt))], GREEDY)
        engine.step()
        if rng.random() < 0.7:
            engine.abort(f"aborted{rng.randint(0, i)}")
    for i in range(len(prompts)):
        engine.abort(f"aborted{i}")
    while engine.has_work():
        engine.step()
        engine.scheduler.check()
    assert [group.answers[0].token_ids for group in groups] == ids_of(wanted)
    assert_idle(llm)


def test_prompt_of_whole_blocks_computes_at_least_a_token_and_the_next_turn_finds_all(load_llm: LoadLLM) -> None:
    llm = load_llm(block_size=4)
    prompt = {"prompt_token_ids": [9, 8, 7, 6, 5, 9, 8, 7]}
    one = SamplingParams(temperature=0, max_tokens=1)
    first, second = llm.generate([prompt], one)[0], llm.generate([prompt], one)[0]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 4)
    assert ids_of([first]) == ids_of([second])
    turn = llm.generate([{"prompt_token_ids": [9, 8, 7, 6, 5, 9, 8, 7, 20, 21, 22, 23]}], one)[0]
    assert turn.num_cached_tokens == 8


def test_chat_finds_its_own_history(load_llm: LoadLLM) -> None:
    llm = load_llm(block_size=4)
    history = list(range(100, 110))
    for turn in range(4):
        output = llm.generate([{"prompt_token_ids": history}], GREEDY)[0]
        computed_before = len(history) - 3 if turn else 0  # all but the new message, and the token sampled last
        assert output.num_cached_tokens == (computed_before - 1) // 4 * 4 if turn else output.num_cached_tokens == 0
        history = history + output.outputs[0].token_ids + [30 + turn, 31]


def test_prompt_logprobs_on_a_warm_prompt_are_all_there_and_the_cache_is_not_read(load_llm: LoadLLM) -> None:
    llm = load_llm(block_size=4)
    prompt = turns_of()[2]
    params = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=1, logprobs=1)
    cold, warm = llm.generate([prompt], params)[0], llm.generate([prompt], params)[0]
    assert warm.num_cached_tokens == 0
    assert warm.prompt_logprobs is not None
    assert cold.prompt_logprobs is not None
    assert len(warm.prompt_logprobs) == len(prompt["prompt_token_ids"])
    assert warm.prompt_logprobs[0] is None
    assert_same([warm], [cold])


def cached_tokens(llm: LLM, prompt: dict[str, Any], **changes: Any) -> int:
    params = SamplingParams(temperature=0, max_tokens=1, **changes)
    return llm.generate([prompt], params)[0].num_cached_tokens


def test_salt_opting_out_and_reset(load_llm: LoadLLM) -> None:
    llm = load_llm(block_size=4)
    prompt = {"prompt_token_ids": list(range(50, 63))}
    salted = prompt | {"cache_salt": "tenant 1"}
    assert [cached_tokens(llm, prompt), cached_tokens(llm, prompt)] == [0, 12]
    assert [cached_tokens(llm, salted), cached_tokens(llm, salted)] == [0, 12]
    assert cached_tokens(llm, prompt | {"cache_salt": "tenant 2"}) == 0
    assert cached_tokens(llm, prompt, skip_reading_prefix_cache=True) == 0
    llm.reset_prefix_cache()
    assert [cached_tokens(llm, prompt), cached_tokens(llm, prompt)] == [0, 12]


@pytest.mark.parametrize(
    ("salt", "message"),
    [
        ("", "cache_salt is 0 characters long, must be a string of 1 to 1024 characters"),
        ("x" * 1025, "cache_salt is 1025 characters long, must be a string of 1 to 1024 characters"),
        (7, "cache_salt is 7, must be a string of 1 to 1024 characters"),
    ],
)
def test_bad_salts_are_refused(load_llm: LoadLLM, salt: Any, message: str) -> None:
    llm = load_llm()
    with pytest.raises(RequestError, match=message):
        llm.generate([{"prompt_token_ids": [5, 6], "cache_salt": salt}], GREEDY)
    assert_idle(llm)


def test_misspelt_keys_of_a_prompt_are_refused(load_llm: LoadLLM) -> None:
    with pytest.raises(
        RequestError, match="a prompt has the key 'cache_sallt'; known: prompt, prompt_token_ids, cache"
    ):
        load_llm().generate([{"prompt_token_ids": [5, 6], "cache_sallt": "mine"}], GREEDY)


def test_cold_prefix_submitted_32_times_is_computed_once(load_llm: LoadLLM) -> None:
    llm = load_llm(max_model_len=128, max_num_batched_tokens=256)
    rng = random.Random(3)
    system = [rng.randrange(5, 512) for _ in range(48)]
    tails = [[rng.randrange(5, 512) for _ in range(rng.randint(1, 9))] for _ in range(32)]
    outputs = llm.generate([{"prompt_token_ids": system + tail} for tail in tails], GREEDY)
    assert llm.engine.scheduler.stats.num_prefill_tokens == 48 + sum(map(len, tails))
    assert sorted(output.num_cached_tokens for output in outputs) == [0] + [48] * 31


def test_answers_of_one_request_share_its_prompt(load_llm: LoadLLM) -> None:
    llm = load_llm(block_size=4)
    params = SamplingParams(temperature=1.0, seed=1, n=4, max_tokens=4)
    llm.generate([{"prompt_token_ids": list(range(50, 70))}], params)
    assert llm.engine.scheduler.stats.num_prefill_tokens == 20 + 3 * 4


# -- order and memory


def test_lower_priorities_are_answered_first(load_llm: LoadLLM) -> None:
    llm = load_llm(scheduling_policy="priority", max_num_seqs=1)
    prompts = [{"prompt_token_ids": [5 + i, 6]} for i in range(3)]
    outputs = llm.generate(prompts, GREEDY, priority=[1, 2, -3])
    ends = [output.metrics.finished_time for output in outputs]
    assert sorted(range(3), key=lambda i: ends[i] or 0.0) == [2, 0, 1]


@pytest.mark.parametrize(
    ("priority", "message"),
    [
        ([1, 2], r"2 priorities for 1 prompts"),
        ([1], r"priority is 1, but scheduling_policy is 'fcfs'; it must be 'priority'"),
        (["high"], r"priority is 'high', must be an integer"),
        (5, r"priority is 5, must be a list of integers, one per prompt"),
    ],
)
def test_bad_priorities_are_refused(load_llm: LoadLLM, priority: Any, message: str) -> None:
    llm = load_llm()
    with pytest.raises(RequestError, match=message):
        llm.generate([{"prompt_token_ids": [5, 6]}], GREEDY, priority=priority)
    assert_idle(llm)


def test_request_that_no_step_can_admit_fails_and_the_next_one_is_served(load_llm: LoadLLM) -> None:
    llm = load_llm(block_size=4, num_gpu_blocks_override=16, max_model_len=64, max_num_seqs=4)
    llm.engine.scheduler.pool.allocate(8)  # a leak
    big = {"prompt_token_ids": list(range(50, 90))}
    outputs = llm.generate([big, {"prompt_token_ids": [5, 6]}], SamplingParams(temperature=0, max_tokens=4))
    assert [output.outputs[0].finish_reason for output in outputs] == ["error", "length"]
    assert "8 of 16 are free though nothing runs" in (outputs[0].outputs[0].error or "")


def test_watchdog_counts_only_while_there_is_work(load_llm: LoadLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load_llm().engine
    now = [100.0]
    monkeypatch.setattr("lean_engine.engine.core.time.monotonic", lambda: now[0])
    assert engine.seconds_without_progress() == 0.0
    engine.add("a", [5, 6, 7], GREEDY)
    now[0] += 7
    assert engine.seconds_without_progress() == 7.0
    engine.step()
    assert engine.seconds_without_progress() == 0.0
    now[0] += 3
    engine.abort("a")
    assert engine.seconds_without_progress() == 0.0


def test_utilization_is_a_share_of_all_memory_with_weights_and_workspace_in_it(
    load_llm: LoadLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = 64 << 20
    monkeypatch.setattr(HostMemory, "total_memory_bytes", lambda self: total)
    small, large = (
        load_llm(gpu_memory_utilization=share, max_num_seqs=4096, max_num_batched_tokens=4096, max_model_len=64)
        for share in (0.5, 0.75)
    )
    difference = large._started.pool_size.kv_bytes - small._started.pool_size.kv_bytes
    assert abs(difference - total / 4) <= 2 * small._started.pool_size.block_bytes
    assert small._started.pool_size.kv_bytes < total / 2 - small.engine.runner.program.plan.arena_bytes
    with pytest.raises(OutOfMemory, match=r"gpu_memory_utilization 0\.001 allows 65\.54 KiB of 64\.00 MiB"):
        load_llm(gpu_memory_utilization=0.001)


@pytest.mark.parametrize("share", [0, -0.5, 1.01, "half", True])
def test_impossible_utilization_is_refused(share: Any) -> None:
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization is .*, must be above 0 and at most 1"):
        LLM("nowhere", gpu_memory_utilization=share)
