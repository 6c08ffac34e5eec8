"""Metric names, types, labels and buckets are frozen; the numbers are those of the requests."""

import re
from collections.abc import Callable
from typing import Any

import pytest
from live_server import Live

Start = Callable[..., Live]
LABELS = {"engine", "model_name"}
EXPECTED = {  # name → type and labels; `process_` metrics of prometheus-client apart
    "lean_engine:num_requests_running": ("gauge", LABELS),
    "lean_engine:num_requests_waiting": ("gauge", LABELS),
    "lean_engine:kv_cache_usage_perc": ("gauge", LABELS),
    "lean_engine:prompt_tokens_total": ("counter", LABELS),
    "lean_engine:prompt_tokens_cached_total": ("counter", LABELS),
    "lean_engine:generation_tokens_total": ("counter", LABELS),
    "lean_engine:num_preemptions_total": ("counter", LABELS),
    "lean_engine:prefix_cache_queries_total": ("counter", LABELS),
    "lean_engine:prefix_cache_hits_total": ("counter", LABELS),
    "lean_engine:admission_rejections_total": ("counter", LABELS),
    "lean_engine:request_success_total": ("counter", {*LABELS, "finished_reason"}),
    "lean_engine:prompt_tokens_by_source_total": ("counter", {*LABELS, "source"}),
    "lean_engine:time_to_first_token_seconds": ("histogram", LABELS),
    "lean_engine:inter_token_latency_seconds": ("histogram", LABELS),
    "lean_engine:request_time_per_output_token_seconds": ("histogram", LABELS),
    "lean_engine:e2e_request_latency_seconds": ("histogram", LABELS),
    "lean_engine:request_queue_time_seconds": ("histogram", LABELS),
    "lean_engine:request_prefill_time_seconds": ("histogram", LABELS),
    "lean_engine:request_decode_time_seconds": ("histogram", LABELS),
    "lean_engine:request_inference_time_seconds": ("histogram", LABELS),
    "lean_engine:iteration_tokens_total": ("histogram", LABELS),
    "lean_engine:request_prompt_tokens": ("histogram", LABELS),
    "lean_engine:request_generation_tokens": ("histogram", LABELS),
    "lean_engine:request_prefill_kv_computed_tokens": ("histogram", LABELS),
    "lean_engine:request_max_num_generation_tokens": ("histogram", LABELS),
    "lean_engine:request_params_max_tokens": ("histogram", LABELS),
    "lean_engine:request_params_n": ("histogram", LABELS),
    "lean_engine:request_num_preemptions": ("histogram", LABELS),
    "lean_engine:kv_block_lifetime_seconds": ("histogram", LABELS),
    "lean_engine:kv_block_idle_before_evict_seconds": ("histogram", LABELS),
    "lean_engine:cache_config_info": (
        "gauge",
        {
            "engine",
            "block_size",
            "num_gpu_blocks",
            "enable_prefix_caching",
            "prefix_caching_hash_algo",
            "kv_cache_memory_bytes",
        },
    ),
}
BUCKETS = {
    "time_to_first_token_seconds": (
        "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0 160.0 640.0 2560.0"
    ),
    "inter_token_latency_seconds": (
        "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1.0 2.5 5.0 7.5 10.0 20.0 40.0 80.0"
    ),
    "e2e_request_latency_seconds": (
        "0.3 0.5 0.8 1.0 1.5 2.0 2.5 5.0 10.0 15.0 20.0 30.0 40.0 50.0 60.0 120.0 240.0 480.0 960.0 1920.0 7680.0"
    ),
    "request_prompt_tokens": "1.0 2.0 5.0 10.0 20.0 50.0 100.0 200.0",
    "iteration_tokens_total": "1.0 8.0 16.0 32.0 64.0 128.0 256.0 512.0 1024.0 2048.0 4096.0 8192.0 16384.0",
    "request_params_n": "1.0 2.0 5.0 10.0 20.0",
}


def exposition(server: Live) -> str:
    status, text, headers = server.request("/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    return str(text)


def values(server: Live) -> dict[str, float]:
    """Sample name, with the label that tells samples of one metric apart → value; buckets left out."""
    found = {}
    for name, labels, value in re.findall(r"^lean_engine:(\w+)\{(.*)\} (\S+)$", exposition(server), re.MULTILINE):
        if not name.endswith("_bucket"):
            which = re.search(r'(?:finished_reason|source)="(\w+)"', labels)
            found[name + (f" {which[1]}" if which else "")] = float(value)
    return found


def test_names_types_labels_and_buckets_are_frozen(live: Live) -> None:
    text = exposition(live)
    types = dict(re.findall(r"^# TYPE (\S+) (\w+)$", text, re.MULTILINE))
    own = {name: kind for name, kind in types.items() if name.startswith("lean_engine:")}
    assert own == {name: kind for name, (kind, _) in EXPECTED.items()}
    assert all(name.startswith(("lean_engine:", "process_")) for name in types)
    for name, (kind, labels) in EXPECTED.items():
        suffix = "_sum" if kind == "histogram" else ""
        sample = re.search(rf"^{re.escape(name + suffix)}\{{(.*)\}} ", text, re.MULTILINE)
        assert sample is not None, name
        assert set(re.findall(r'(\w+)="', sample[1])) == labels, name
    for name, expected in BUCKETS.items():
        found = re.findall(rf'^lean_engine:{name}_bucket\{{.*le="(.*?)".*\}}', text, re.MULTILINE)
        assert " ".join(found) == f"{expected} +Inf", name
    assert 'model_name="tiny"' in text


def test_counts_are_those_of_the_requests(start: Start) -> None:
    server = start(num_gpu_blocks_override=64)
    prompt = list(range(5, 45))  # 40 tokens: two full blocks of 16
    fields = {"max_tokens": 10, "ignore_eos": True}
    server.complete(prompt, **fields)
    server.complete(prompt, **fields)
    server.complete([7, 8, 9], n=2, **{**fields, "temperature": 1, "seed": 1})
    server.wait_until_idle()
    found = values(server)
    assert found["request_success_total length"] == 4
    assert found["generation_tokens_total"] == 40
    assert found["prompt_tokens_total"] == 40 + 40 + 3
    assert found["prompt_tokens_cached_total"] == 32
    assert found["prompt_tokens_by_source_total local_cache_hit"] == 32
    assert found["prompt_tokens_by_source_total local_compute"] == 51
    assert found["prefix_cache_hits_total"] == 32
    assert found["prefix_cache_queries_total"] >= 80
    assert found["time_to_first_token_seconds_count"] == 4
    assert found["inter_token_latency_seconds_count"] == 36
    assert found["e2e_request_latency_seconds_count"] == 4
    assert found["request_params_n_count"] == 3
    assert found["request_params_n_sum"] == 4
    assert found["request_params_max_tokens_sum"] == 30
    assert found["request_max_num_generation_tokens_sum"] == 30
    assert found["request_prompt_tokens_sum"] == 86
    assert found["request_generation_tokens_sum"] == 40
    assert found["num_requests_running"] == 0
    assert found["kv_cache_usage_perc"] == 0  # what is cached is free
    assert found["iteration_tokens_total_sum"] >= 40 + 8 + 3 + 36


def test_intervals_add_up(start: Start) -> None:
    server = start()
    server.complete("hello", max_tokens=20, ignore_eos=True)
    server.wait_until_idle()
    found = {name: value for name, value in values(server).items() if name.endswith("_sum")}
    queue, prefill, decode = (found[f"request_{part}_time_seconds_sum"] for part in ("queue", "prefill", "decode"))
    assert queue + prefill + decode == pytest.approx(found["e2e_request_latency_seconds_sum"], abs=1e-3)
    assert prefill + decode == pytest.approx(found["request_inference_time_seconds_sum"], abs=1e-3)
    assert queue + prefill == pytest.approx(found["time_to_first_token_seconds_sum"], abs=2e-3)
    assert decode == pytest.approx(found["inter_token_latency_seconds_sum"], abs=2e-3)


def test_aborts_and_preemptions_are_counted(start: Start) -> None:
    server = start(num_gpu_blocks_override=10, max_num_seqs=4)
    prompts = [list(range(5 + i, 35 + i)) for i in range(3)]
    status, body = server.complete(prompts, max_tokens=60, ignore_eos=True)
    assert status == 200, body
    server.wait_until_idle()
    found = values(server)
    assert found["num_preemptions_total"] > 0
    assert found["num_preemptions_total"] == found["request_num_preemptions_sum"]
    assert found["request_success_total abort"] == 0


def test_the_statistics_line(live: Live, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    import asyncio
    import logging

    from lean_engine.server import statistics

    monkeypatch.setattr(statistics, "INTERVAL_SECONDS", 0.05)

    async def watch() -> None:
        task = asyncio.create_task(statistics.log_statistics(live.http.service))
        await asyncio.to_thread(live.complete, max_tokens=20, ignore_eos=True)
        await asyncio.sleep(0.3)
        task.cancel()

    with caplog.at_level(logging.INFO, logger="lean_engine"):
        asyncio.run(watch())
    lines: list[Any] = [r.getMessage() for r in caplog.records if "generation" in r.getMessage()]
    assert lines
    assert re.search(r"prompts [\d.]+ tokens/s, generation [1-9][\d.]* tokens/s, \d+ running, \d+ waiting", lines[0])
    assert len(lines) <= 4  # silent when idle
