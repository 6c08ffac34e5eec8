"""`lean-engine bench memory`: the simulation, the optimum that judges it, the steady state, and the command.

One file: the command's options are those of the simulation, and both are checked on the same small runs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from lean_engine.bench import plots
from lean_engine.bench.grid import config_at, parse_sweeps
from lean_engine.bench.memory import MemoryReport, Simulation, percentile, simulate
from lean_engine.bench.null_engine import NullEngine, StepRecord, complete
from lean_engine.bench.optimum import PrefixOptimum
from lean_engine.bench.steady import SteadyState, steady_state
from lean_engine.bench.trace import TraceRequest, read_trace
from lean_engine.bench.workloads import make_workload, trace_workload
from lean_engine.cli import run
from lean_engine.config import EngineConfig
from lean_engine.errors import ConfigError
from lean_engine.memory.block_pool import IntegrityError
from lean_engine.scheduling.plan import StepPlan

REQUIRED = {
    "waste_ratio",
    "prefix_hit_ratio",
    "optimal_prefix_hit_ratio",
    "prefix_hit_tokens",
    "num_preemptions",
    "num_evictions",
    "running_mean",
    "step_us_p50",
    "step_us_p99",
    "add_us_p50",
}
SMALL = ["--num-requests", "20", "--num-blocks", "1024"]
Capture = pytest.CaptureFixture[str]


def engine_config(num_blocks: int = 4096, **changes: Any) -> EngineConfig:
    return EngineConfig(num_gpu_blocks_override=num_blocks, **changes)


def run_mix(name: str, num_requests: int, config: EngineConfig | None = None, **changes: Any) -> MemoryReport:
    return simulate(make_workload(name, num_requests, seed=0, **changes), config or engine_config())


def request(prompt_len: int, output_len: int, arrival_time: float = 0.0, ids: list[int] | None = None) -> TraceRequest:
    return TraceRequest(arrival_time, prompt_len, output_len, ids, None, 0)


def without_times(report: MemoryReport) -> dict[str, Any]:
    return {name: value for name, value in report.figures().items() if "us_" not in name}


# -- the optimum


def test_the_optimum_by_hand() -> None:
    optimum = PrefixOptimum(block_size=2)
    optimum.admit([1, 2, 3, 4, 5])  # nothing before it
    optimum.admit([1, 2, 3, 4, 9, 9])  # two blocks of the first
    optimum.admit([1, 2, 3, 9])  # one: [3, 9] is not [3, 4]
    optimum.admit([3, 4, 9])  # none: [3, 4] is no beginning
    assert (optimum.num_query_tokens, optimum.num_hit_tokens) == (18, 6)
    assert optimum.hit_ratio == 6 / 18


def test_the_optimum_leaves_a_token_to_compute() -> None:
    optimum = PrefixOptimum(block_size=2)
    optimum.admit([1, 2, 3, 4])
    optimum.admit([1, 2, 3, 4])
    assert optimum.num_hit_tokens == 2


def test_the_optimum_finds_what_an_ended_request_has_generated_but_not_its_last_token() -> None:
    optimum = PrefixOptimum(block_size=2)
    optimum.admit([1, 2, 3])
    optimum.admit([1, 2, 3, 4, 5, 6, 7])  # [3, 4] is not there before its request has ended
    assert optimum.num_hit_tokens == 2
    other = PrefixOptimum(block_size=2)
    other.admit([1, 2, 3])
    other.finish([1, 2, 3, 4, 5, 6])  # 6 was sampled and never computed
    other.admit([1, 2, 3, 4, 5, 6, 7])
    assert other.num_hit_tokens == 4


def test_an_empty_optimum_is_zero() -> None:
    assert PrefixOptimum(16).hit_ratio == 0.0


# -- the simulation


def test_a_run_is_reproducible_up_to_its_times() -> None:
    first, second = (run_mix("multi-turn", 30) for _ in range(2))
    assert without_times(first) == without_times(second)
    other = simulate(make_workload("multi-turn", 30, seed=1), engine_config())
    assert other.prefix_query_tokens != first.prefix_query_tokens


@pytest.mark.parametrize("name", ["chat", "shared-prefix", "multi-turn", "rag", "agent", "random"])
def test_every_mix_runs_to_its_end_and_leaves_nothing_behind(name: str) -> None:
    simulation = Simulation(make_workload(name, 80, seed=0), engine_config())
    report = simulation.run()
    pool = simulation.engine.scheduler.pool
    assert (report.num_finished, report.num_refused, report.num_stalled) == (80, 0, 0)
    assert (pool.num_held, pool.num_free) == (0, 4096)
    assert report.prefix_hit_ratio <= report.optimal_prefix_hit_ratio


def test_a_chat_wastes_less_than_four_percent_of_its_blocks() -> None:
    report = run_mix("chat", 150)
    assert 0.005 < report.waste_ratio < 0.04


def test_hits_on_shared_prefixes_are_the_optimum() -> None:
    report = run_mix("shared-prefix", 150)
    assert report.optimal_prefix_hit_ratio > 0.7
    assert report.prefix_hit_ratio > 0.99 * report.optimal_prefix_hit_ratio


def test_random_prompts_hit_nothing() -> None:
    report = run_mix("random", 60, engine_config(block_size=2, num_blocks=16384))
    assert report.prefix_query_tokens > 0
    assert (report.prefix_hit_tokens, report.optimal_prefix_hit_tokens) == (0, 0)


def test_a_chat_of_many_turns_hits_on_what_it_has_generated() -> None:
    workload = make_workload("multi-turn", 2, seed=0)
    ((first, second),) = workload.conversations
    report = simulate(workload, engine_config())
    num_computed = len(first.new_token_ids) + len(first.output_token_ids) - 1
    assert report.prefix_hit_tokens == num_computed // 16 * 16
    assert report.prefix_query_tokens == 2 * len(first.new_token_ids) + len(first.output_token_ids) + len(
        second.new_token_ids
    )


def test_a_turn_comes_when_the_one_before_has_ended_and_its_delay_has_passed() -> None:
    workload = make_workload("agent", 4, seed=0)
    (turns,) = workload.conversations
    assert len(turns) == 4
    records: list[StepRecord] = []
    simulate(workload, engine_config(), records.append)
    ended = [r.finished_time for record in records for r in record.finished]
    begun = [r.first_scheduled_time for record in records for r in record.admitted]
    for turn, end, begin in zip(turns[1:], ended, begun[1:], strict=False):
        assert end + turn.delay <= begin < end + turn.delay + 1  # type: ignore[operator]


def test_time_without_work_is_skipped() -> None:
    workload = trace_workload("t", [request(8, 2), request(8, 2, arrival_time=1e12)], seed=0)
    report = simulate(workload, engine_config())
    assert report.steps == 4
    assert report.queue_steps_p99 == 0


def test_queue_time_counts_steps_until_the_first_admission() -> None:
    workload = trace_workload("t", [request(8, 5), request(8, 5), request(8, 1)], seed=0)
    report = simulate(workload, engine_config(max_num_seqs=1))
    assert (report.queue_steps_p50, report.queue_steps_p99) == (5, 10)
    assert report.running_mean == 1
    assert report.waiting_mean == (5 * 2 + 5 * 1) / 11


def test_what_the_pool_cannot_hold_is_refused_and_its_next_turns_are_never_sent() -> None:
    workload = make_workload("agent", 6, seed=0)
    (turns,) = workload.conversations
    num_first = len(turns[0].new_token_ids) + len(turns[0].output_token_ids)
    report = simulate(workload, engine_config(num_first // 16 + 1))
    assert (report.num_finished, report.num_refused, report.num_unsent) == (1, 1, 4)
    assert f"the pool has {num_first // 16 + 1}" in (report.first_refusal or "")


def test_a_pool_too_small_for_anything_runs_no_step() -> None:
    report = run_mix("random", 5, engine_config(1))
    assert (report.num_refused, report.steps, report.waste_ratio, report.step_us_p50) == (5, 0, 0.0, 0.0)


def test_outputs_that_the_context_cuts_short_are_counted() -> None:
    workload = trace_workload("t", [request(8, 20), request(8, 2)], seed=0)
    report = simulate(workload, engine_config(max_model_len=16))
    assert (report.num_finished, report.num_truncated, report.num_decode_tokens) == (2, 1, 7 + 1)


def test_a_small_pool_preempts_and_evicts() -> None:
    workload = make_workload("chat", 60, seed=0, rate=10.0)
    tight, ample = simulate(workload, engine_config(300)), simulate(workload, engine_config(20000))
    assert tight.num_preemptions > 0
    assert tight.num_recomputed_tokens > 0
    assert tight.num_evictions > 0
    assert (ample.num_preemptions, ample.num_recomputed_tokens, ample.num_evictions) == (0, 0, 0)
    assert tight.kv_usage_max > 0.95
    assert tight.num_finished == ample.num_finished == 60


def test_the_report_agrees_with_what_scheduler_and_pool_have_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    simulation = Simulation(make_workload("chat", 60, seed=0, rate=10.0), engine_config(300))
    scheduler, pool = simulation.engine.scheduler, simulation.engine.scheduler.pool
    num_granted = 0
    allocate = pool.allocate

    def counting(num_blocks: int) -> list[int]:
        nonlocal num_granted
        num_granted += num_blocks
        return allocate(num_blocks)

    monkeypatch.setattr(pool, "allocate", counting)
    report, stats = simulation.run(), scheduler.stats
    assert simulation.tally.total["granted"] == num_granted
    assert (report.prefix_hit_tokens, report.prefix_query_tokens) == (stats.num_hit_tokens, stats.num_query_tokens)
    assert (report.num_preemptions, report.num_evictions) == (stats.num_preemptions, pool.num_evictions)
    assert (report.num_decode_tokens, report.num_prefill_tokens, report.num_recomputed_tokens) == (
        stats.num_decode_tokens,
        stats.num_prefill_tokens,
        stats.num_recompute_tokens,
    )
    assert report.us_per_block * num_granted == pytest.approx(report.step_us_mean * report.steps)


def test_without_the_cache_nothing_is_found_and_all_is_computed() -> None:
    workload = make_workload("shared-prefix", 60, seed=0)
    cached, plain = (simulate(workload, engine_config(enable_prefix_caching=on)) for on in (True, False))
    assert plain.prefix_hit_tokens == 0
    assert plain.num_prefill_tokens == cached.num_prefill_tokens + cached.prefix_hit_tokens
    assert plain.optimal_prefix_hit_ratio == cached.optimal_prefix_hit_ratio > 0


def test_a_long_prompt_in_chunks_delays_no_decode_by_more_than_a_step_s_budget() -> None:
    decoding = [request(100, 600) for _ in range(32)]
    workload = trace_workload("t", [*decoding, request(32768, 8, arrival_time=50.0)], seed=0)
    config = engine_config(16384, max_num_batched_tokens=2080, long_prefill_token_threshold=2048)
    records: list[StepRecord] = []
    report = simulate(workload, config, records.append)
    chunked = [r for r in records if r.max_chunk_tokens == 2048]
    assert len(chunked) == 32768 // 2048
    assert all(r.num_decoding == len(r.plan.decodes) == 32 for r in chunked)
    assert all(r.stats.num_tokens <= r.budget == 2080 for r in records)
    assert all(r.num_stalled == 0 for r in records)
    assert report.num_finished == 33


def test_a_decode_that_does_not_move_is_noticed() -> None:
    engine = NullEngine(complete(engine_config(64), 32))
    engine.add(range(8), range(8))
    engine.add(range(20, 28), range(8))
    engine.step()
    plan = engine.scheduler.plan

    def forgetful(now: float = 0.0) -> StepPlan | None:
        found = plan(now)
        assert found is not None
        found.decodes.pop()
        return found

    engine.scheduler.plan = forgetful  # type: ignore[method-assign]
    for _ in range(2):
        record = engine.step()
        assert (record.num_decoding, record.num_stalled) == (2, 1)


def test_an_engine_that_is_not_idle_is_noticed() -> None:
    engine = NullEngine(complete(engine_config(64), 32))
    engine.check_idle()
    engine.add(range(8), range(8))
    engine.step()
    with pytest.raises(IntegrityError, match="1 requests run, 0 wait and 1 blocks are held"):
        engine.check_idle()


@pytest.mark.parametrize(
    ("changes", "budget", "rows"),
    [({}, 512, 128), ({"enable_chunked_prefill": False}, 900, 128), ({"max_num_seqs": 700}, 700, 700)],
)
def test_limits_left_open_are_the_engine_s(changes: dict[str, Any], budget: int, rows: int) -> None:
    config = complete(engine_config(100, **changes), 900)
    assert (config.max_model_len, config.max_num_batched_tokens) == (900, budget)
    assert NullEngine(config).scheduler.max_num_logit_rows == rows


def test_priorities_of_a_trace_count_under_their_policy(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [{"prompt_len": 8, "output_len": 4, "priority": -number} for number in range(4)]
    path.write_text("\n".join(map(json.dumps, lines)))
    requests = read_trace(path)
    assert [request.priority for request in requests] == [0, -1, -2, -3]
    for policy, order in (("fcfs", [0, 1, 2, 3]), ("priority", [3, 2, 1, 0])):
        config = engine_config(64, max_num_seqs=1, scheduling_policy=policy)
        admitted: list[int] = []
        workload = trace_workload("t", requests, 0)
        simulate(workload, config, lambda record, into=admitted: into.extend(-r.priority for r in record.admitted))
        assert admitted == order


def test_percentiles_are_values_that_occur() -> None:
    values = [5.0, 1.0, 4.0, 2.0, 3.0]
    assert [percentile(values, share) for share in (0.0, 0.2, 0.21, 0.5, 0.99, 1.0)] == [1.0, 1.0, 2.0, 3.0, 5.0, 5.0]
    assert percentile([], 0.5) == 0.0


def test_progress_ends_with_all_requests() -> None:
    seen: list[tuple[int, int]] = []
    simulate(make_workload("chat", 20, seed=0), engine_config(), on_progress=lambda *done: seen.append(done))
    assert seen == sorted(seen)
    assert seen[-1] == (20, 20)


# -- the steady state


@pytest.mark.parametrize("num_blocks", [48, 200, 3000])
def test_in_a_steady_state_all_decode_and_nothing_else_happens(num_blocks: int) -> None:
    records: list[StepRecord] = []
    report = steady_state(engine_config(num_blocks), running=16, waiting=20, steps=60, seed=0, on_step=records.append)
    assert report.steps == len(records) == 60
    assert all(len(r.plan.decodes) == r.plan.num_requests == r.stats.num_running == 16 for r in records)
    assert all(r.stats.num_waiting == 20 for r in records)
    assert (report.num_preemptions, report.num_finished, report.num_stalled) == (0, 0, 0)
    assert report.add_us_p50 > 0


def test_in_a_steady_state_blocks_fill_up_in_different_steps_and_each_evicts_another() -> None:
    records: list[StepRecord] = []
    report = steady_state(engine_config(3000), running=64, waiting=0, steps=64, seed=0, on_step=records.append)
    granted = [r.num_granted_blocks for r in records]
    assert max(granted) < 16
    assert sum(granted) == 64 * 64 // 16
    assert report.num_evictions == sum(granted)


def test_a_steady_state_without_the_cache_fills_no_pool() -> None:
    state = SteadyState(engine_config(3000, enable_prefix_caching=False), 16, 0, 10, 0)
    assert state.run().num_evictions == 0
    assert state.engine.scheduler.pool.num_cached == 0


def test_a_steady_state_says_what_is_out_of_range() -> None:
    for numbers, expected in (
        ((0, 0, 1), "running is 0, must be at least 1"),
        ((1, -1, 1), "waiting is -1, must be at least 0"),
        ((1, 0, 0), "steps is 0, must be at least 1"),
        ((40, 0, 1), "a pool of 100 blocks is too small for 40 running requests, which need 120"),
    ):
        with pytest.raises(ConfigError, match=expected):
            SteadyState(engine_config(100), *numbers, seed=0)


# -- sweeps


def test_sweeps_are_combined() -> None:
    points = parse_sweeps(["block-size=8,16", "prefix-caching=on,off"])
    assert points == [
        {"block-size": 8, "prefix-caching": True},
        {"block-size": 8, "prefix-caching": False},
        {"block-size": 16, "prefix-caching": True},
        {"block-size": 16, "prefix-caching": False},
    ]
    assert parse_sweeps([]) == [{}]


def test_a_pool_keeps_its_tokens_when_its_blocks_change_size() -> None:
    config = config_at(engine_config(100), {"block-size": 32})
    assert (config.block_size, config.num_gpu_blocks_override) == (32, 50)
    config = config_at(engine_config(100), {"block-size": 32, "num-blocks": 70})
    assert (config.block_size, config.num_gpu_blocks_override) == (32, 70)


@pytest.mark.parametrize(
    ("sweep", "expected"),
    [
        ("colour=1", "'colour' cannot be swept; write NAME=V1,V2,... with one of: block-size, num-blocks"),
        ("block-size", "sweep block-size: '' is not an integer of at least 1"),
        ("block-size=8,", "sweep block-size: '' is not an integer of at least 1"),
        ("num-blocks=0", "sweep num-blocks: '0' is not an integer of at least 1"),
        ("num-blocks=1.5", "sweep num-blocks: '1.5' is not an integer"),
        ("prefix-caching=yes", "sweep prefix-caching: 'yes' is neither on nor off"),
        ("running=1", "'running' cannot be swept"),
    ],
)
def test_a_bad_sweep_is_named(sweep: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        parse_sweeps([sweep])


def test_a_sweep_is_given_once() -> None:
    with pytest.raises(ConfigError, match="sweep block-size is given twice"):
        parse_sweeps(["block-size=8", "block-size=16"])


# -- the command


def succeed(capsys: Capture, *args: str) -> str:
    code = run(["bench", "memory", *args])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    return out


def fail(capsys: Capture, *args: str) -> str:
    assert run(["bench", "memory", *args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("Error: ")
    assert err.count("\n") == 1
    return err


def write_trace(path: Path, requests: Sequence[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(fields) + "\n" for fields in requests))
    return str(path)


def test_json_is_one_object_with_figures_and_configuration(capsys: Capture) -> None:
    figures = json.loads(succeed(capsys, *SMALL, "--json", "--block-size", "8", "--seed", "5"))
    assert all(isinstance(figures[name], int | float) for name in REQUIRED)
    configuration = figures["configuration"]
    assert configuration["workload"] == "chat"
    assert (configuration["num_blocks"], configuration["block_size"], configuration["seed"]) == (1024, 8, 5)
    assert configuration["max_num_batched_tokens"] == 512


def test_a_steady_state_has_the_same_keys(capsys: Capture) -> None:
    steady = ["--running", "8", "--num-blocks", "100", "--waiting", "5", "--steps", "20", "--json"]
    figures = json.loads(succeed(capsys, *steady))
    assert figures.keys() == json.loads(succeed(capsys, *SMALL, "--json")).keys()
    assert (figures["steps"], figures["running_mean"], figures["waiting_mean"]) == (20, 8, 5)


def test_the_table_shows_figures_with_units(capsys: Capture) -> None:
    table = succeed(capsys, *SMALL)
    assert "workload  chat: 20 requests; 0.33 conversations per step; seed 0" in table
    assert "pool      1,024 blocks of 16 tokens, 16,384 tokens; prefix cache by sha256" in table
    for group in ("requests", "KV memory", "prefix cache", "steps", "Python"):
        assert f"\n\n{group}\n" in table
    rows = [line for line in table.splitlines() if line.startswith("  ")]
    assert {len(line[:39].rstrip()) for line in rows} == {39}  # figures end in one column


def test_a_sweep_is_one_table_or_a_list(capsys: Capture) -> None:
    sweep = ["--sweep", "block-size=8,16", "--sweep", "chunked-prefill=on,off"]
    lines = succeed(capsys, *SMALL, *sweep).splitlines()
    assert len(lines) == 2 + 1 + 4
    assert len({len(line) for line in lines[2:]}) == 1
    assert lines[2].split()[:3] == ["block-size", "chunked-prefill", "waste"]
    assert [line.split()[:2] for line in lines[3:]] == [["8", "on"], ["8", "off"], ["16", "on"], ["16", "off"]]
    found = json.loads(succeed(capsys, *SMALL, *sweep, "--json"))
    assert [f["sweep"]["block-size"] for f in found] == [8, 8, 16, 16]
    assert [f["configuration"]["num_blocks"] for f in found] == [2048, 2048, 1024, 1024]
    assert found[0]["waste_ratio"] < found[2]["waste_ratio"]


def test_a_steady_state_is_swept_over_running_and_waiting(capsys: Capture) -> None:
    steady = ["--running", "1", "--num-blocks", "100", "--steps", "5", "--json"]
    found = json.loads(succeed(capsys, *steady, "--sweep", "running=2,4", "--sweep", "waiting=0,3"))
    assert [(f["running_mean"], f["waiting_mean"]) for f in found] == [(2, 0), (2, 3), (4, 0), (4, 3)]


def test_a_trace_is_run(capsys: Capture, tmp_path: Path) -> None:
    shared = {"prompt_len": 64, "output_len": 4, "prefix_id": "a", "prefix_len": 48}
    path = write_trace(tmp_path / "t.jsonl", [shared | {"arrival_time": i * 20} for i in range(3)])
    figures = json.loads(succeed(capsys, "--trace", path, "--step-time", "20", "--json"))
    assert (figures["num_finished"], figures["prefix_hit_tokens"]) == (3, 96)
    assert figures["configuration"]["workload"] == path
    assert figures["configuration"]["step_time"] == 20


def test_the_step_log_shows_that_every_decode_moved(capsys: Capture, tmp_path: Path) -> None:
    log = tmp_path / "steps.jsonl"
    lines = [{"prompt_len": 20, "output_len": 200}] * 8 + [{"prompt_len": 4000, "output_len": 2, "arrival_time": 20}]
    trace = write_trace(tmp_path / "t.jsonl", lines)
    figures = json.loads(succeed(capsys, "--trace", trace, "--step-log", str(log), "--json"))
    steps = [json.loads(line) for line in log.read_text().splitlines()]
    assert len(steps) == figures["steps"]
    assert [s["step"] for s in steps] == list(range(1, len(steps) + 1))
    assert all(s["num_decodes"] == s["num_decoding"] and s["num_stalled"] == 0 for s in steps)
    assert all(s["num_tokens"] <= s["budget"] for s in steps)
    assert sum(s["max_chunk_tokens"] > 20 * 8 for s in steps) == 8  # 4000 tokens beside 8 decodes
    assert all(s["step_us"] > 0 for s in steps)


def test_refused_requests_are_reported_and_no_failure(capsys: Capture) -> None:
    table = succeed(capsys, "--num-requests", "10", "--workload", "agent", "--num-blocks", "20")
    assert "refused                             1  the first because a prompt of" in table
    assert "never sent                          9  turns after a refused one" in table


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--workload", "poems"], "'poems' is not one of 'chat', 'shared-prefix'"),
        (["--sweep", "colour=1"], "'colour' cannot be swept"),
        (["--trace", "/nowhere.jsonl"], "/nowhere.jsonl: cannot be read: No such file"),
        (["--request-rate", "0"], "request_rate is 0, must be above 0"),
        (["--num-blocks", "0"], "Invalid value for '--num-blocks': 0"),
        (["--running", "8", "--num-blocks", "23"], "a pool of 23 blocks is too small for 8 running requests"),
        (["--running", "8", "--max-num-seqs", "8"], "--max-num-seqs does not go with --running"),
        (["--running", "8", "--workload", "chat"], "--workload does not go with --running"),
        (["--trace", "t", "--num-requests", "8"], "--num-requests does not go with --trace"),
        (["--waiting", "8"], "--waiting needs --running"),
        (["--step-time", "8"], "--step-time needs --trace"),
        (["--sweep", "block-size=8", "--plot", "a.png"], "--plot does not go with --sweep"),
        (["--sweep", "block-size=8", "--step-log", "a"], "--step-log does not go with --sweep"),
        (["--plot", "a.pdf"], "plot file is 'a.pdf', must end in .png or .svg"),
        (["--plot", "/nowhere/a.png"], "there is no directory '/nowhere'"),
        (["--step-log", "/nowhere/a"], "/nowhere/a: cannot be written: No such file"),
        (["--max-num-batched-tokens", "8"], "max_num_batched_tokens 8 is below max_num_seqs 128"),
        (["--no-enable-chunked-prefill", "--max-num-batched-tokens", "200"], "without chunked prefill"),
    ],
)
def test_what_is_wrong_is_one_line(capsys: Capture, args: list[str], expected: str) -> None:
    assert expected in fail(capsys, *args)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no device that is always full")
def test_a_step_log_on_a_full_disk_is_named(capsys: Capture) -> None:
    assert "/dev/full: cannot be written: No space left" in fail(capsys, "--step-log", "/dev/full")


def test_a_bad_line_of_a_trace_is_named(capsys: Capture, tmp_path: Path) -> None:
    path = write_trace(tmp_path / "t.jsonl", [{"prompt_len": 4, "output_len": 4}, {"prompt_len": 0, "output_len": 4}])
    assert f"{path}:2: prompt_len is 0" in fail(capsys, "--trace", path)


def test_an_unknown_benchmark_is_named(capsys: Capture) -> None:
    assert run(["bench", "colours"]) == 2
    assert "unknown benchmark 'colours'; there are: serve, latency, " in capsys.readouterr().err


def test_help_names_every_workload(capsys: Capture) -> None:
    assert run(["bench"]) == 0
    assert "memory" in capsys.readouterr().out
    out = succeed(capsys, "--help")
    assert "multi-turn     chats of 2 to 10 turns" in out
    assert "MODEL" not in out


def test_the_command_starts_without_heavy_packages() -> None:
    code = "import sys, lean_engine.cli.bench_memory; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"numpy", "matplotlib", "tokenizers"} & set(loaded)


# -- plots


def test_a_plot_without_matplotlib_says_what_to_install(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install 'lean-engine[plot]'" in fail(capsys, *SMALL, "--plot", "a.png")


@pytest.mark.parametrize("name", ["memory.png", "memory.svg"])
def test_a_plot_is_drawn(name: str, capsys: Capture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(plots, "BLOCK_SIZES", (8, 16))
    monkeypatch.setattr(plots, "POOL_SHARES", (0.001, 0.5, 1))
    path = tmp_path / name
    succeed(capsys, *SMALL, "--plot", str(path))
    content = path.read_bytes()
    assert len(content) > 10_000
    if name.endswith(".png"):
        assert content.startswith(b"\x89PNG")
    else:
        assert content.rstrip().endswith(b"</svg>")


def test_plots_leave_out_pools_that_would_refuse_a_request() -> None:
    workload = make_workload("random", 3, seed=0)
    num_needed = -(-workload.max_num_tokens // 16)
    by_block_size, by_num_blocks = plots.sweep_for_plot(workload, engine_config(2 * num_needed))
    assert [r.configuration["block_size"] for r in by_block_size] == list(plots.BLOCK_SIZES)
    assert [r.configuration["num_blocks"] for r in by_num_blocks] == [num_needed * n for n in (1, 2, 4, 8)]
    assert all(r.num_refused == 0 for r in by_num_blocks)


@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_steady_state_is_reached_or_refused_in_however_small_a_pool(block_size: int) -> None:
    num_reached = 0
    for num_blocks in (*range(4, 24), 40, 80, 160, 320):
        config = engine_config(num_blocks, block_size=block_size)
        with suppress(ConfigError):
            report = steady_state(config, running=4, waiting=2, steps=10, seed=0)
            assert (report.figures()["steps"], report.figures()["running_mean"]) == (10, 4.0)
            num_reached += 1
    assert 3 < num_reached < 24
    with pytest.raises(ConfigError, match="a pool of 4 blocks is too small for 4 running requests"):
        steady_state(engine_config(4, block_size=block_size), running=4, waiting=2, steps=10, seed=0)


def test_times_beyond_all_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match="request_rate is 1e-308, at which the last request would come after step"):
        make_workload("chat", 30, 0, 1e-308)
    late = TraceRequest(1e30, 4, 4, None, None, 0)
    with pytest.raises(ConfigError, match=r"t: arrival_time 1e\+30 at step_time 1e-300 is after step 9,007"):
        trace_workload("t", [late], 0, 1e-300)
