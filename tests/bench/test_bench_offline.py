"""`bench latency`, `throughput` and `startup`: what is measured, vLLM's keys and lines, results that are kept."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from fake_server import __file__ as fake_server_file
from tiny import directory

from lean_engine.bench.offline import LatencyReport, measure_latency, random_requests
from lean_engine.bench.server_process import read_command
from lean_engine.bench.startup import StartupError, report_of, time_library
from lean_engine.cli import run
from lean_engine.errors import ConfigError
from lean_engine.llm import LLM

MODEL = str(directory("qwen3"))
NUMPY = ("--cpu-kernels", "numpy")  # needs no compiler
SMALL = ("--input-len", "5", "--output-len", "3", *NUMPY)
Capture = pytest.CaptureFixture[str]


def succeed(capsys: Capture, *args: str) -> str:
    code = run(["bench", *args])
    out, err = capsys.readouterr()
    assert code == 0, err
    return out


def fail(capsys: Capture, *args: str) -> str:
    assert run(["bench", *args]) in (1, 2)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("Error: ")
    assert err.count("\n") == 1
    return err


# -- latency


def test_latency_figures_by_hand() -> None:
    figures = LatencyReport([1.0, 2.0, 3.0, 2.0], 10).figures()
    assert (figures["avg_latency"], figures["std_latency"]) == (2.0, pytest.approx(0.5**0.5))
    assert list(figures["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert figures["percentiles"]["50"] == 2.0
    assert figures["percentiles"]["90"] == pytest.approx(2.7)
    assert figures["output_tokens_per_second"] == 5.0


def test_every_iteration_answers_the_whole_batch_at_full_length() -> None:
    steps: list[tuple[int, int]] = []
    with LLM(MODEL, cpu_kernels="numpy", enable_prefix_caching=False) as llm:
        requests = random_requests(llm, 3, 5, 4, prefix_len=2)
        ids = [r.prompt["prompt_token_ids"] for r in requests if isinstance(r.prompt, dict)]
        report = measure_latency(llm, requests, 2, 1, lambda *done: steps.append(done), n=2, detokenize=False)
        assert llm.engine.scheduler.stats.num_decode_tokens == 3 * (4 - 1) * 3 * 2
    assert (len(report.latencies), report.num_output_tokens, steps) == (2, 3 * 4 * 2, [(1, 3), (2, 3), (3, 3)])
    assert [len(one) for one in ids] == [7] * 3
    assert len({tuple(one[:2]) for one in ids}) == 1
    assert len({tuple(one) for one in ids}) == 3


def test_latency_prints_vllms_lines_and_keeps_the_result(capsys: Capture, tmp_path: Path) -> None:
    args = ["latency", MODEL, *SMALL, "--batch-size", "2", "--num-iters", "2", "--num-iters-warmup", "0"]
    kept = ["--result-dir", str(tmp_path), "--output-json", str(tmp_path / "l.json")]
    lines = succeed(capsys, *args, *kept).splitlines()
    assert re.fullmatch(r"Avg latency: \d+\.\d+ seconds", lines[0])
    assert re.fullmatch(r"Std latency: \d+\.\d+(e-\d+)? seconds", lines[1])
    assert [line.split("%")[0] for line in lines[2:]] == ["10", "25", "50", "75", "90", "99"]
    result = json.loads((tmp_path / "latency.jsonl").read_text())
    assert {"avg_latency", "std_latency", "latencies", "percentiles", "environment"} <= result.keys()
    assert result["configuration"]["enable_prefix_caching"] is False
    assert (result["configuration"]["batch_size"], result["configuration"]["model"]) == (2, MODEL)
    assert json.loads((tmp_path / "l.json").read_text())["latencies"] == result["latencies"]


# -- throughput


def test_throughput_prints_vllms_lines_and_keys(capsys: Capture) -> None:
    args = ["throughput", "--model", MODEL, *SMALL, "--num-prompts", "4"]
    lines = succeed(capsys, *args, "--prefix-len", "2").splitlines()
    number = r"\d+\.\d\d"
    assert re.fullmatch(
        rf"Throughput: {number} requests/s, {number} total tokens/s, {number} output tokens/s", lines[0]
    )
    assert lines[1:] == ["Total num prompt tokens:  28", "Total num output tokens:  12"]
    figures = json.loads(succeed(capsys, *args, "--n", "2", "--json"))
    assert (figures["num_requests"], figures["total_num_tokens"]) == (4, 4 * 5 + 4 * 3 * 2)
    assert figures["tokens_per_second"] == pytest.approx(figures["total_num_tokens"] / figures["elapsed_time"])
    assert figures["requests_per_second"] == pytest.approx(4 / figures["elapsed_time"])


def test_throughput_of_a_file(capsys: Capture, tmp_path: Path) -> None:
    path = tmp_path / "c.jsonl"
    path.write_text('{"prompt": [5, 6, 7], "output_tokens": 2}\n{"prompt": [5, 6, 7, 8], "output_tokens": 4}\n')
    args = ["throughput", MODEL, "--dataset-name", "custom", "--dataset-path", str(path), "--num-prompts", "2"]
    figures = json.loads(succeed(capsys, *args, *NUMPY, "--json"))
    assert (figures["total_num_prompt_tokens"], figures["total_num_output_tokens"]) == (7, 6)


# -- startup


def test_a_start_of_the_library_passes_its_marks_in_order(capsys: Capture, tmp_path: Path) -> None:
    args = ["startup", MODEL, "--num-iters", "1", "--num-iters-warmup", "0", *NUMPY]
    figures = json.loads(succeed(capsys, *args, "--json", "--result-dir", str(tmp_path)))
    marks = [figures[f"median_{name}_s"] for name in ("interpreter", "import", "load", "first_token")]
    assert 0 < marks[0] < marks[1] < marks[2] < marks[3] < 60
    assert figures["peak_memory_bytes"] > 20 * 2**20
    assert (tmp_path / "startup.jsonl").exists()


def test_a_start_of_a_server_is_timed_until_health_and_a_token(capsys: Capture) -> None:
    command = f"{sys.executable} {fake_server_file} '[{{\"ttft\": 0.2}}]' - {{port}}"
    args = ["startup", "--command", command, "--num-iters", "1", "--num-iters-warmup", "0"]
    figures = json.loads(succeed(capsys, *args, "--json"))
    waits = zip(figures["samples"]["healthy"], figures["samples"]["first_token"], strict=True)
    assert all(0.02 < healthy < token - 0.2 for healthy, token in waits)
    lines = succeed(capsys, *args).splitlines()
    assert lines[1].startswith("/health is 200 ")
    assert lines[2].startswith("the first token is there ")


def test_medians_are_over_the_runs() -> None:
    report = report_of([({"load": 1.0, "first token": 5.0}, 10), ({"load": 2.0, "first token": 3.0}, 30)])
    assert report.figures() == {
        "median_load_s": 1.5,
        "median_first_token_s": 4.0,
        "peak_memory_bytes": 20,
        "num_iters": 2,
        "samples": {"load": [1.0, 2.0], "first_token": [5.0, 3.0]},
    }


def test_a_start_that_fails_says_why() -> None:
    with pytest.raises(StartupError, match="/nowhere/x: no such file or directory"):
        time_library("/nowhere/x", {})


def test_a_port_is_put_into_the_command() -> None:
    words, port = read_command("serve 'a b' --port {port}", None)
    assert words == ["serve", "a b", "--port", str(port)]
    assert read_command("serve --port 80", 80) == (["serve", "--port", "80"], 80)
    for text, expected in (("serve", "write {port} where it takes a port"), ("'", "closing quot"), ("", "is empty")):
        with pytest.raises(ConfigError, match=expected):
            read_command(text, None)


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["latency", "/nowhere/x"], "/nowhere/x: no such file or directory"),
        (["latency", MODEL, "--model", "b"], "and --model is b; leave out one of them"),
        (["latency", MODEL, "--batch-size", "0"], "Invalid value for '--batch-size'"),
        (["latency", MODEL, *SMALL, "--max-model-len", "4"], "max_model_len"),
        (["throughput", MODEL, "--dataset-path", "x"], "--dataset-path does not go with --dataset-name random"),
        (["throughput", MODEL, "--dataset-name", "chat", "--input-len", "3"], "--input-len does not go with"),
        (["throughput", MODEL, "--dataset-name", "custom", *NUMPY], "the data set 'custom' needs --dataset-path"),
        (["startup", "--port", "1"], "--port needs --command"),
        (["startup", "m", "--command", "x {port}"], "MODEL does not go with --command"),
        (["startup", "--threads", "1", "--command", "x {port}"], "--threads does not go with --command"),
        (["startup", "--command", "/nowhere/x {port}"], "/nowhere/x: cannot be started: No such file"),
        (["startup", "--command", "sh -c 'echo lost; exit 3' {port}"], "ended with exit code 3: lost"),
    ],
)
def test_what_is_wrong_is_one_line(capsys: Capture, args: list[str], expected: str) -> None:
    assert expected in fail(capsys, *args)


def test_a_server_that_never_gets_healthy_is_ended(capsys: Capture) -> None:
    command = f"{sys.executable} -c 'import time; print(\"waiting\", flush=True); time.sleep(60)' {{port}}"
    err = fail(capsys, "startup", "--command", command, "--timeout", "1")
    assert "/health within 1 s: waiting" in err
