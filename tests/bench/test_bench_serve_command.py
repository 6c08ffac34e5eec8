"""`lean-engine bench serve` as its users meet it: flags, files, JSON, exit codes, one line for every mistake."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_server import fake_server
from tiny import directory

from lean_engine.bench.environment import without_secrets
from lean_engine.bench.results import read_results
from lean_engine.cli import run
from lean_engine.cli.bench_serve_options import several

Capture = pytest.CaptureFixture[str]
TOKENIZER = ["--tokenizer", str(directory("qwen3"))]
SMALL = [*TOKENIZER, "--num-prompts", "4", "--random-input-len", "9", "--random-output-len", "3"]
FAST = {"gaps": [0.0, 0.0]}
KEYS = """
    date backend model_id tokenizer_id num_prompts request_rate burstiness max_concurrency duration completed failed
    total_input_tokens total_output_tokens request_throughput request_goodput output_throughput
    total_token_throughput max_output_tokens_per_s max_concurrent_requests
    mean_ttft_ms median_ttft_ms std_ttft_ms p99_ttft_ms mean_tpot_ms median_tpot_ms std_tpot_ms p99_tpot_ms
    mean_itl_ms median_itl_ms std_itl_ms p99_itl_ms mean_e2el_ms median_e2el_ms std_e2el_ms p99_e2el_ms
"""
DETAILED = ["input_lens", "output_lens", "ttfts", "itls", "latencies", "generated_texts", "errors"]


def bench(*args: str) -> int:
    return run(["bench", "serve", *args])


def figures_of(capsys: Capture, *args: str) -> dict[str, Any]:
    assert bench(*args, "--json") == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def fail(capsys: Capture, *args: str) -> str:
    code = bench(*args)
    out, err = capsys.readouterr()
    assert (code in (1, 2), out) == (True, "")
    assert err.startswith("Error: ")
    assert err.count("\n") == 1
    return err


def test_the_block_and_what_is_beside_it(capsys: Capture) -> None:
    with fake_server(FAST, {"status": 429}) as server:
        assert bench(*SMALL, "--base-url", server.base_url, "--percentile-metrics", "e2el,ttft") == 0
        bodies = [entry["body"] for entry in server.log()["requests"]]
    out = capsys.readouterr().out
    assert out.startswith("============ Serving Benchmark Result ============\n")
    headings = re.findall(r"^-+([A-Z].*?)-+$", out, re.MULTILINE)
    assert headings == ["Time to First Token", "End-to-end Latency"]
    assert "1 × HTTP 429: scripted" in out or "2 × HTTP 429: scripted" in out
    assert "% of a CPU" in out
    assert {body["model"] for body in bodies} == {"fake"}
    assert all(len(body["prompt"]) == 9 and body["max_tokens"] == 3 and body["temperature"] == 0 for body in bodies)
    assert not any("ignore_eos" in body for body in bodies)


def test_json_has_the_keys_of_vllm(capsys: Capture) -> None:
    with fake_server(FAST) as server:
        found = figures_of(capsys, *SMALL, "--base-url", server.base_url, "--goodput", "ttft:5000", "e2el:9000")
        assert [key for key in KEYS.split() if key not in found] == []
        assert (found["completed"], found["request_rate"], found["model_id"]) == (4, "inf", "fake")
        assert found["request_goodput"] == found["request_throughput"] > 0
        assert not set(DETAILED) & set(found)
        detailed = figures_of(capsys, *SMALL, "--base-url", server.base_url, "--save-detailed")
    assert all(len(detailed[key]) == 4 for key in DETAILED)
    assert detailed["output_lens"] == [3] * 4


def test_flags_reach_the_requests(capsys: Capture) -> None:
    flags = ["--backend", "openai-chat", "--ignore-eos", "--temperature", "0.5", "--top-p", "0.9", "--top-k", "3"]
    flags += ["--extra-body", '{"min_p": 0.1}', "--api-key", "secret", "--header", "X-A=b", "X-C=d=e"]
    with fake_server(FAST) as server:
        figures_of(capsys, *SMALL, "--base-url", server.base_url, "--served-model-name", "other", *flags)
        entry = server.log()["requests"][0]
    body, head = entry["body"], entry["head"]
    expected = {"model": "other", "ignore_eos": True, "temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1}
    assert expected.items() <= body.items()
    assert "POST /v1/chat/completions " in head
    assert all(line in head for line in ("Authorization: Bearer secret", "X-A: b", "X-C: d=e"))


def test_results_are_kept_with_what_they_were_made_on(capsys: Capture, tmp_path: Path) -> None:
    kept = ["--result-dir", str(tmp_path), "--metadata", "note=a", "branch=b", "--api-key", "secret"]
    with fake_server(FAST) as server:
        for _ in range(2):
            assert bench(*SMALL, "--base-url", server.base_url, *kept) == 0
        save = ["--save-result", "--append-result", "--result-filename", "r.json", "--max-concurrency", "2"]
        assert bench(*SMALL, "--base-url", server.base_url, *kept, *save) == 0
        assert bench(*SMALL, "--base-url", server.base_url, *kept, "--save-result", "--label", "x") == 0
    capsys.readouterr()
    lines = [json.loads(line) for line in (tmp_path / "serve.jsonl").read_text().splitlines()]
    assert [line["completed"] for line in lines] == [4] * 4
    assert (lines[0]["note"], lines[0]["branch"], lines[2]["max_concurrency"]) == ("a", "b", 2)
    environment = lines[0]["environment"]
    assert {"lean_engine", "commit", "machine", "python", "numpy", "command"} <= environment.keys()
    assert {"cpu", "cores", "memory_bytes", "gpus"} <= environment["machine"].keys()
    assert lines[0]["configuration"]["random_input_len"] == 9
    assert "secret" not in (tmp_path / "serve.jsonl").read_text()
    assert json.loads((tmp_path / "r.json").read_text())["completed"] == 4
    named = [path.name for path in tmp_path.glob("x-*.json")]
    assert re.fullmatch(r"x-infqps-fake-\d{8}-\d{6}\.json", named[0])
    assert len(read_results(tmp_path / "serve.jsonl")) == 4
    assert len(read_results(tmp_path / "r.json")) == len(read_results(tmp_path / named[0])) == 1


def test_nothing_that_succeeds_is_a_failure(capsys: Capture) -> None:
    with fake_server({"status": 500}) as server:
        assert bench(*SMALL, "--base-url", server.base_url) == 1
    out, err = capsys.readouterr()
    assert "Failed requests:                         4 " in out
    assert err.endswith("Error: no request succeeded: HTTP 500: scripted\n")


def test_a_server_that_is_not_there(capsys: Capture) -> None:
    err = fail(capsys, *SMALL, "--port", "1", "--ready-check-timeout-sec", "0.3")
    assert "no server at http://127.0.0.1:1: " in err
    assert err.endswith("after 0.3 s\n")


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--dataset-name", "poems"], "'poems' is not one of 'random'"),
        (["--base-url", "http://h", "--port", "1"], "--port does not go with --base-url"),
        (["--base-url", "h:1"], "base URL is 'h:1'"),
        (["--endpoint", "/v1/x"], "endpoint is '/v1/x'"),
        (["--dataset-name", "custom", "--random-input-len", "3"], "--random-input-len does not go with --dataset-name"),
        (["--turn-delay", "3"], "--turn-delay does not go with --dataset-name random"),
        (["--dataset-path", "x"], "--dataset-path does not go with --dataset-name random"),
        (["--append-result"], "--append-result needs --save-result"),
        (["--save-detailed"], "--save-detailed needs --save-result, --result-dir or --json"),
        (["--goodput", "itl:3"], "goodput is 'itl:3', must be NAME:MILLISECONDS with one of: ttft, tpot, e2el"),
        (["--goodput", "ttft:x"], "goodput is 'ttft:x'"),
        (["--metadata", "a"], "metadata is 'a', must be KEY=VALUE"),
        (["--header", "a"], "header is 'a', must be KEY=VALUE"),
        (["--percentile-metrics", "ttft,x"], "percentile_metrics has 'x', must be of: ttft, tpot, itl, e2el"),
        (["--metric-percentiles", "p99"], "metric_percentiles is 'p99', must be numbers"),
        (["--extra-body", "[1]"], "extra_body is '[1]', must be a JSON object"),
        (["--extra-body", "{"], "extra_body is not valid JSON"),
        (["--ramp-up-start-rps", "1"], "need --ramp-up-strategy"),
        (["--ramp-up-strategy", "linear"], "needs --ramp-up-start-rps and --ramp-up-end-rps"),
        (["--request-rate", "0"], "request rate is 0, must be above 0"),
        (["--tokenizer", "/nowhere/x"], "/nowhere/x: no such file or directory"),
    ],
)
def test_what_is_wrong_is_one_line(capsys: Capture, args: list[str], expected: str) -> None:
    with fake_server(FAST) as server:
        address = [] if "--base-url" in args else ["--base-url", server.base_url]
        tokenizer = [] if "--tokenizer" in args else TOKENIZER
        assert expected in fail(capsys, *address, *tokenizer, *args)


def test_a_model_that_is_no_tokenizer_says_what_to_give(capsys: Capture) -> None:
    with fake_server(FAST) as server:
        err = fail(capsys, "--base-url", server.base_url)
    assert "no tokenizer for the server's model 'fake'" in err
    assert "give --tokenizer" in err


def test_values_in_a_row_are_those_of_one_flag() -> None:
    args = ["--goodput", "a:1", "b:2", "--seed", "3", "--metadata", "x=1", "--metadata", "y=2", "z=3"]
    expected = "--goodput a:1 --goodput b:2 --seed 3 --metadata x=1 --metadata y=2 --metadata z=3"
    assert " ".join(several(args)) == expected


def test_secrets_are_left_out_of_what_is_kept() -> None:
    args = ["--api-key", "k", "--seed", "1", "--hf-token=t", "--header", "A=b", "C=d", "--port", "2"]
    assert " ".join(without_secrets(args)) == "--api-key *** --seed 1 --hf-token=*** --header *** *** --port 2"


def test_help_names_the_data_sets_and_the_command_starts_without_heavy_packages(capsys: Capture) -> None:
    assert bench("--help") == 0
    out = capsys.readouterr().out
    assert "prefix_repetition  groups of prompts that begin alike" in out
    assert "multi-turn" in out
    code = "import sys, lean_engine.cli.bench_serve; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"numpy", "matplotlib", "tokenizers", "httpx"} & set(loaded)
