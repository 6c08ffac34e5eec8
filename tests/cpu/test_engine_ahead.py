"""The engine one step ahead of its results gives every answer that it gives step by step. No model runs."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import pytest
from fake_runner import DAMAGED, FakeRunner, fake_engine
from tiny import directory, raw_config

from lean_engine import EngineConfig, SamplingParams, models
from lean_engine.engine.core import Engine
from lean_engine.engine.outputs import Group
from lean_engine.text.tokenizer import Tokenizer

NAME = "llama-gqa-tied"
EOS = frozenset({1, 2})
PREFIX = [(7 * i) % 500 + 5 for i in range(40)]
Outcome = tuple[list[int], str, str | None, int | str | None, str | None, list[Any]]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_directory(directory(NAME))


def make_engine(
    tokenizer: Tokenizer | None, runs_ahead: bool, options: dict[str, Any] | None = None, **more: Any
) -> tuple[Engine, FakeRunner]:
    config = EngineConfig(
        **{
            "num_gpu_blocks_override": 24,
            "block_size": 4,
            "max_model_len": 80,
            "max_num_seqs": 6,
            "max_num_batched_tokens": 24,
            **(options or {}),
        }
    )
    return fake_engine(models.configure(raw_config(NAME)), tokenizer, config, runs_ahead, EOS, **more)


@dataclass
class Asked:
    """A request of a workload."""

    request_id: str
    prompt: list[int]
    params: SamplingParams
    step: int  # at which it comes
    priority: int
    aborted_after: int | None  # tokens


@dataclass
class Workload:
    requests: list[Asked]
    options: dict[str, Any]
    resets: frozenset[int]  # steps before which the prefix cache is forgotten
    damaged_at: dict[str, int] = field(default_factory=dict)
    host_ids: frozenset[str] = frozenset()
    late_ids: frozenset[str] = frozenset()


def random_workload(seed: int) -> Workload:
    rng = random.Random(seed)
    requests = []
    for i in range(rng.randint(1, 14)):
        prompt = PREFIX[: rng.choice([0, 0, 9, 20, 40])] + [rng.randrange(3, 512) for _ in range(rng.randint(1, 20))]
        max_tokens = rng.choice([0, 1, 2, 7, 20, None, None])
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min(rng.choice([0, 0, 0, 3]), 20 if max_tokens is None else max_tokens),
            stop=rng.choice([None, None, None, "e", ["th", "q"]]),
            stop_token_ids=rng.choice([None, None, list(range(20, 40))]),
            ignore_eos=rng.random() < 0.7,
            prompt_logprobs=rng.choice([None, None, None, 0]),
            temperature=1.0,
            n=rng.choice([1, 1, 1, 2]),
        )
        aborted_after = rng.choice([None, None, 1, 3]) if params.n == 1 else None  # others depend on each other's pace
        requests.append(Asked(f"r{i}", prompt, params, rng.randint(0, 12), rng.randint(0, 2), aborted_after))
    options = {
        "enable_prefix_caching": rng.random() < 0.7,
        "num_gpu_blocks_override": rng.choice([20, 24, 60]),
        "max_num_batched_tokens": rng.choice([6, 24, 100]),
        "scheduling_policy": rng.choice(["fcfs", "priority"]),
    }
    ids = [asked.request_id for asked in requests]
    damaged = {request_id: rng.randint(0, 4) for request_id in ids if rng.random() < 0.1}
    hosts = frozenset(request_id for request_id in ids if rng.random() < 0.1)
    late = frozenset(request_id for request_id in ids if rng.random() < 0.2)
    return Workload(requests, options, frozenset({rng.randint(0, 20)}), damaged, hosts, late)


def run(workload: Workload, tokenizer: Tokenizer, runs_ahead: bool) -> tuple[dict[str, Outcome], Engine, FakeRunner]:
    """Outcomes by answer; the engine is idle afterwards and nothing is held."""
    engine, runner = make_engine(
        tokenizer, runs_ahead, workload.options, damaged_at=workload.damaged_at, host_ids=workload.host_ids,
        late_ids=workload.late_ids,
    )  # fmt: skip
    is_by_priority = engine.scheduler.policy == "priority"
    groups: dict[str, Group] = {}
    waiting = sorted(workload.requests, key=lambda asked: asked.step)
    step = 0
    while waiting or engine.has_work():
        while waiting and waiting[0].step <= step:
            asked = waiting.pop(0)
            priority = asked.priority if is_by_priority else 0
            groups[asked.request_id] = engine.add(asked.request_id, asked.prompt, asked.params, priority=priority)
        if step in workload.resets:
            engine.reset_prefix_cache()
        changed = engine.step()
        assert len({group.request_id for group in changed}) == len(changed)
        engine.scheduler.check()
        for asked in workload.requests:
            group = groups.get(asked.request_id)
            limit = asked.aborted_after
            if group is not None and limit is not None and any(len(a.token_ids) >= limit for a in group.answers):
                engine.abort(asked.request_id)
        step += 1
        assert step < 3000
    while engine._in_flight:  # an abort may have left a step that nobody waits for
        engine.step()
    assert engine.scheduler.pool.num_held == 0
    assert not engine.scheduler.has_work()
    assert not runner._known
    return {key: outcome for group in groups.values() for key, outcome in outcomes(group)}, engine, runner


def outcomes(group: Group) -> list[tuple[str, Outcome]]:
    return [
        (
            f"{group.request_id}#{a.index}",
            (a.token_ids, a.text, a.finish_reason, a.stop_reason, a.error, group.prompt_logprobs),
        )
        for a in group.answers
    ]


@pytest.mark.parametrize("first", range(0, 400, 40))
def test_outcomes_of_random_workloads_are_those_of_step_by_step(tokenizer: Tokenizer, first: int) -> None:
    num_ahead = num_preempted = num_idle_rows = num_late = 0
    reasons: set[str | None] = set()
    for seed in range(first, first + 40):
        workload = random_workload(seed)
        wanted, plain, _ = run(workload, tokenizer, runs_ahead=False)
        found, ahead, runner = run(workload, tokenizer, runs_ahead=True)
        assert found == wanted, seed
        num_ahead += ahead.num_steps
        num_preempted += min(plain.scheduler.stats.num_preemptions, ahead.scheduler.stats.num_preemptions)
        num_idle_rows += runner.num_idle_rows
        num_late += runner.num_late
        reasons |= {outcome[2] for outcome in found.values()}
    assert num_ahead > 500
    assert num_preempted > 0
    assert num_idle_rows > 0, "an answer that ends is in one step too many"
    assert num_late > 0
    assert reasons >= {"stop", "length", "abort", "error"}


def run_to_end(engine: Engine) -> None:
    while engine.has_work():
        engine.step()


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, **options)


def test_a_step_is_launched_before_the_results_of_the_one_before_are_taken() -> None:
    engine, runner = make_engine(None, runs_ahead=True)
    group = engine.add("a", [5, 6, 7], greedy(5, detokenize=False))
    for num_tokens in range(1, 5):
        engine.step()
        assert len(group.answers[0].token_ids) == num_tokens
        assert runner.num_launched == min(num_tokens + 1, 5), "none for what ends with the step in flight"
    engine.step()
    assert (group.is_finished, engine.has_work(), len(engine._in_flight)) == (True, False, 0)
    assert (runner.num_launched, runner.num_idle_rows, engine.num_steps) == (5, 0, 5)


def test_an_answer_that_ends_by_a_token_costs_one_row_and_shows_nothing_of_it() -> None:
    plain, _ = make_engine(None, runs_ahead=False)
    tokens = plain.add("a", [5, 6, 7], greedy(8, detokenize=False))
    while plain.has_work():
        plain.step()
    engine, runner = make_engine(None, runs_ahead=True)
    stop = tokens.answers[0].token_ids[3]
    group = engine.add("a", [5, 6, 7], greedy(8, detokenize=False, stop_token_ids=[stop]))
    while engine.has_work():
        engine.step()
    assert group.answers[0].token_ids == tokens.answers[0].token_ids[:4]
    assert (runner.num_idle_rows, runner.num_launched) == (1, 5)
    assert not engine._in_flight


def test_a_stop_string_is_found_a_step_late_and_its_extra_token_is_never_shown(tokenizer: Tokenizer) -> None:
    plain, _ = make_engine(tokenizer, runs_ahead=False)
    whole = plain.add("a", [5, 6, 7], greedy(30))
    while plain.has_work():
        plain.step()
    text = whole.answers[0].text
    stop = text[len(text) // 2 : len(text) // 2 + 2]
    engine, runner = make_engine(tokenizer, runs_ahead=True)
    group = engine.add("a", [5, 6, 7], greedy(30, stop=[stop]))
    while engine.has_work():
        engine.step()
    answer = group.answers[0]
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
    assert answer.text == text[: text.index(stop)]
    assert runner.num_launched == engine.num_steps
    assert engine.scheduler.pool.num_held == 0


def test_requests_that_the_host_samples_are_not_planned_ahead() -> None:
    engine, runner = make_engine(None, runs_ahead=True, host_ids=frozenset({"h"}))
    engine.add("h", [5, 6, 7], greedy(4, detokenize=False))
    for num_launched in range(1, 5):
        engine.step()
        assert (runner.num_launched, len(engine._in_flight)) == (num_launched, 0)


def test_a_choice_that_waits_for_the_tokens_before_keeps_no_step_from_being_launched_ahead() -> None:
    engine, runner = make_engine(None, runs_ahead=True, late_ids=frozenset({"f"}))
    engine.add("f", [5, 6, 7], greedy(5, detokenize=False))
    engine.add("a", [8, 9], greedy(5, detokenize=False))
    for num_launched in range(2, 6):
        engine.step()
        assert (runner.num_launched, runner.num_late, len(engine._in_flight)) == (num_launched, num_launched - 1, 1)
    engine.step()
    assert not engine.has_work()


@pytest.mark.parametrize("error", [RuntimeError("no memory for a graph"), KeyboardInterrupt()])
def test_a_late_choice_that_fails_or_is_interrupted_loses_nothing(error: BaseException) -> None:
    wanted: list[list[int]] = []
    for step in (None, *range(5)):
        engine, runner = make_engine(None, runs_ahead=True, late_ids=frozenset("0"))
        runner.fails_late = True
        prompts = [PREFIX[:11], PREFIX[5:30], [9]]
        groups = [engine.add(str(i), prompt, greedy(8, detokenize=False)) for i, prompt in enumerate(prompts)]
        number = 0
        while engine.has_work():
            if number == step:
                runner.fails_next = error
                with pytest.raises(type(error)):
                    run_to_end(engine)
                engine.scheduler.check()
                assert runner.num_settled == 1
            engine.step()
            number += 1
        found = [group.answers[0].token_ids for group in groups]
        wanted = wanted or found
        assert found == wanted
        assert engine.scheduler.pool.num_held == 0


def test_an_id_can_be_used_again_with_the_aborted_request_s_step_in_flight() -> None:
    engine, _ = make_engine(None, runs_ahead=True, damaged_at={"a": 1})
    engine.add("a", [5, 6, 7], greedy(8, detokenize=False))
    engine.step()  # the step in flight will find the logits damaged
    engine.abort("a")
    again = engine.add("a", [8, 9], greedy(1, detokenize=False))
    while engine.has_work():
        engine.step()
    assert again.answers[0].finish_reason == "length"


def test_a_damaged_row_ends_its_request_alone() -> None:
    engine, _ = make_engine(None, runs_ahead=True, damaged_at={"a": 2})
    bad, good = (engine.add(name, [5, 6, ord(name)], greedy(6, detokenize=False)) for name in "ab")
    while engine.has_work():
        engine.step()
    assert (bad.answers[0].finish_reason, bad.answers[0].error, len(bad.answers[0].token_ids)) == ("error", DAMAGED, 2)
    assert (good.answers[0].finish_reason, len(good.answers[0].token_ids)) == ("length", 6)


def test_a_cold_prefix_that_requests_share_is_computed_once() -> None:
    prompts = [[*PREFIX, 100 + i] for i in range(5)]
    computed = []
    for runs_ahead in (False, True):
        engine, _ = make_engine(None, runs_ahead, {"num_gpu_blocks_override": 100})
        for i, prompt in enumerate(prompts):
            engine.add(f"r{i}", prompt, greedy(3, detokenize=False))
        while engine.has_work():
            engine.step()
        computed.append(engine.scheduler.stats.num_prefill_tokens)
    assert computed == [len(PREFIX) + len(prompts)] * 2


@pytest.mark.parametrize("error", [RuntimeError("no memory for a graph"), KeyboardInterrupt()])
@pytest.mark.parametrize("step", range(6))
@pytest.mark.parametrize("runs_ahead", [False, True])
def test_a_launch_that_fails_or_is_interrupted_loses_nothing(runs_ahead: bool, step: int, error: BaseException) -> None:
    wanted: list[list[int]] = []
    for fails in (False, True):
        engine, runner = make_engine(None, runs_ahead, {"max_num_batched_tokens": 8})
        prompts = [PREFIX[:11], PREFIX[5:30], [9]]
        params = greedy(6, detokenize=False, prompt_logprobs=0)
        groups = [engine.add(str(i), prompt, params) for i, prompt in enumerate(prompts)]
        number = 0
        while engine.has_work():
            if fails and number == step:
                runner.fails_next = error
                with pytest.raises(type(error)):
                    engine.step()
                engine.scheduler.check()
                assert runner.num_settled == 1
            engine.step()
            number += 1
        found = [[*group.answers[0].token_ids, *group.prompt_logprobs] for group in groups]
        wanted = wanted or found  # type: ignore[assignment]
        assert found == wanted
        assert engine.scheduler.pool.num_held == 0
