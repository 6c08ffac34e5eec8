"""`lean-engine bench sweep`: grids of loads and servers, the table, the plot."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_server import __file__ as fake_server_file
from fake_server import fake_server
from tiny import directory

from lean_engine.bench.sweep import Measured, axis_of, given_command, lean_engine_command, parse_grid
from lean_engine.bench.sweep_plot import draw_sweep, lines_of
from lean_engine.cli import run
from lean_engine.errors import ConfigError

TOKENIZER = ["--tokenizer", str(directory("qwen3"))]
SMALL = [*TOKENIZER, "--num-prompts", "4", "--input-len", "9", "--output-len", "3"]
Capture = pytest.CaptureFixture[str]


def sweep(capsys: Capture, *args: str) -> str:
    code = run(["bench", "sweep", *args])
    out, err = capsys.readouterr()
    assert code == 0, err
    return out


def test_names_of_the_load_and_of_the_server_are_told_apart() -> None:
    grid = parse_grid(["block-size=8,16", "request-rate=2,inf", "max-concurrency=1,4"], has_server=True)
    assert grid.servers == [{"block-size": "8"}, {"block-size": "16"}]
    assert grid.loads[0] == {"request-rate": 2.0, "max-concurrency": 1}
    assert grid.loads[-1] == {"request-rate": math.inf, "max-concurrency": 4}
    assert len(grid.loads) == 4
    assert parse_grid([], has_server=True).loads == [{}]


def test_settings_become_flags_of_the_server() -> None:
    point = {"block-size": "8", "enable-prefix-caching": "off", "enable-chunked-prefill": "on"}
    command, port = lean_engine_command("./model", ["--threads", "2"], point)
    assert command[3:8] == ["serve", "./model", "--host", "127.0.0.1", "--port"]
    assert command[8] == str(port)
    assert command[-6:] == [
        "--threads", "2", "--block-size", "8", "--no-enable-prefix-caching", "--enable-chunked-prefill",
    ]  # fmt: skip
    words, port = given_command("server -c {ctx} -p {port}", {"ctx": "2048"})
    assert words == ["server", "-c", "2048", "-p", str(port)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("max-concurrency", "write NAME=V1,V2"),
        ("max-concurrency=1,", "write NAME=V1,V2"),
        ("max-concurrency=0", "sweep max-concurrency: '0' is not an integer of at least 1"),
        ("request-rate=fast", "sweep request-rate: 'fast' is not a number above 0"),
        ("random-range-ratio=1", "is not at least 0 and below 1"),
        ("block-size=8", "a server that runs already can only be swept over: request-rate"),
    ],
)
def test_a_bad_sweep_is_named(text: str, expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        parse_grid([text], has_server=False)


def test_a_running_server_is_swept_over_loads(capsys: Capture, tmp_path: Path) -> None:
    with fake_server({"ttft": 0.01, "gaps": [0.0, 0.0]}) as server:
        args = ["--base-url", server.base_url, *SMALL, "--sweep", "max-concurrency=1,4", "--num-runs", "2"]
        lines = sweep(capsys, *args, "--result-dir", str(tmp_path), "--goodput", "ttft:5000").splitlines()
        prompts = [tuple(entry["body"]["prompt"]) for entry in server.log()["requests"]]
    assert lines[0].split()[:3] == ["max-concurrency", "req/s", "out"]
    assert [line.split()[0] for line in lines[1:]] == ["1", "4"]
    assert len({len(line) for line in lines}) == 1
    assert [line.split()[-2:] for line in lines[1:]] == [["4", "0"]] * 2
    kept = [json.loads(line) for line in (tmp_path / "sweep.jsonl").read_text().splitlines()]
    assert [one["sweep"]["max-concurrency"] for one in kept] == [1, 4, 1, 4]  # in turns
    assert len(set(prompts)) == 16  # no run finds the prompts of another in a cache


def test_a_server_is_started_for_each_of_its_settings(capsys: Capture) -> None:
    command = f"{sys.executable} {fake_server_file} '[{{\"usage\": {{tokens}}}}]' - {{port}}"
    args = ["--server-command", command, "--sweep", "tokens=3,7", "--sweep", "request-rate=inf,100", *SMALL, "--json"]
    runs = json.loads(sweep(capsys, *args))
    assert [(one["sweep"]["tokens"], one["sweep"]["request-rate"]) for one in runs] == [
        ("3", "inf"), ("3", 100.0), ("7", "inf"), ("7", 100.0),
    ]  # fmt: skip
    assert [one["total_output_tokens"] for one in runs] == [12, 12, 28, 28]


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ([], "nothing to sweep; give --sweep"),
        (["--sweep", "request-rate=1", "--base-url", "http://h", "--server-command", "x"], "does not go with"),
        (["--sweep", "request-rate=1", "--base-url", "http://h", "--threads", "2"], "--threads does not go with"),
        (["m", "--sweep", "request-rate=1", "--base-url", "http://h"], "MODEL does not go with --base-url"),
        (["--sweep", "ctx=1", "--server-command", "x {port}"], "the command has no {ctx}"),
        (["--sweep", "request-rate=1", "--turn-delay", "1"], "--turn-delay does not go with --dataset-name random"),
        (["--sweep", "request-rate=1", "--plot", "a.pdf"], "plot file is 'a.pdf', must end in .png or .svg"),
        (["--sweep", "n=1", "--server-command", "sh -c 'echo {n}; exit 1' {port}"], "ended with exit code 1: 1"),
    ],
)
def test_what_is_wrong_is_one_line(capsys: Capture, args: list[str], expected: str) -> None:
    assert run(["bench", "sweep", *args]) in (1, 2)
    out, err = capsys.readouterr()
    assert out == ""
    assert expected in err
    assert err.count("\n") == 1


def measured(server: str, concurrency: int, throughput: float) -> Measured:
    figures: dict[str, Any] = {"output_throughput": throughput, "median_e2el_ms": 50.0 * concurrency}
    figures |= {f"p{p}_{name}_ms": p * concurrency for p in (50, 90, 99) for name in ("ttft", "itl")}
    return Measured(
        {"block-size": server}, {"max-concurrency": concurrency}, [figures, {**figures, "p99_itl_ms": None}]
    )


POINTS = [measured(server, c, 10.0 * c) for server in ("8", "16") for c in (4, 1)]


def test_points_that_differ_in_the_load_alone_are_one_line() -> None:
    assert axis_of(POINTS) == "max-concurrency"
    lines = lines_of(POINTS, "max-concurrency")
    assert [[m.load["max-concurrency"] for m in line] for line in lines] == [[1, 4], [1, 4]]
    assert POINTS[0].median("p99_itl_ms") == 99 * 4
    assert POINTS[0].median("nothing") is None


@pytest.mark.parametrize("name", ["sweep.png", "sweep.svg"])
def test_a_plot_is_drawn(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / name
    draw_sweep(str(path), "model, random", POINTS)
    content = path.read_bytes()
    assert len(content) > 10_000
    assert content.startswith(b"\x89PNG") if name.endswith(".png") else content.rstrip().endswith(b"</svg>")


def test_a_plot_without_matplotlib_says_what_to_install(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert run(["bench", "sweep", "--sweep", "request-rate=1", "--plot", "a.png"]) == 2
    assert "pip install 'lean-engine[plot]'" in capsys.readouterr().err
