"""bench/serve_peers.py: servers started in turns, the same load for all, and the table; with a scripted server."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_server import __file__ as fake_server_file
from tiny import directory

BENCH = Path(__file__).parents[2] / "bench"
FAST = {"gaps": [0.0] * 63, "usage": 64}
Capture = pytest.CaptureFixture[str]


@pytest.fixture(name="script")
def _script(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names of the script; what it imports from bench/peers is forgotten afterwards."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("driver", "turns", "workloads"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return runpy.run_path(str(BENCH / "serve_peers.py"))


def entry(*scripts: dict[str, Any]) -> dict[str, Any]:
    """Of a server that answers by these scripts."""
    text = json.dumps(scripts).replace("{", "{{").replace("}", "}}").replace('"', '\\"')
    command = f'{sys.executable} {fake_server_file} "{text}" - {{port}}'
    return {"driver": "openai_server.py", "model": str(directory("qwen3")), "opt": {"command": command}}


@pytest.fixture(name="run")
def _run(script: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    monkeypatch.setenv("PYTHONPATH", str(BENCH.parent))

    def run(peers: dict[str, Any], *args: str) -> list[Any]:
        config = tmp_path / "peers.json"
        config.write_text(json.dumps({"root": str(tmp_path), "peers": peers}))
        words = ["--config", str(config), "--result-dir", str(tmp_path), "--loads", "2:4,1:1", *args]
        monkeypatch.setattr(sys, "argv", ["serve_peers.py", *words])
        script["main"]()
        lines = (tmp_path / "serve_peers.jsonl").read_text().splitlines()
        samples: list[Any] = json.loads(lines[-1])["samples"]
        return samples

    return run


def test_servers_take_turns_with_every_load(run: Callable[..., list[Any]], capsys: Capture) -> None:
    samples = run({"a": entry(FAST), "b": entry(FAST), "other": {"driver": "made.py"}}, "--rounds", "2")
    assert [(s["server"], s["round"], s["concurrency"]) for s in samples] == [
        ("a", 0, 2), ("a", 0, 1), ("b", 0, 2), ("b", 0, 1), ("b", 1, 2), ("b", 1, 1), ("a", 1, 2), ("a", 1, 1),
    ]  # fmt: skip
    assert {(s["completed"], s["failed"], s["total_output_tokens"]) for s in samples[::2]} == {(4, 0, 256)}
    assert all(0 < s["ready_s"] < 60 and s["peak_memory_mib"] > 5 and s["other_cpu"] >= 0 for s in samples)
    out = capsys.readouterr().out
    assert "## 4 requests, 2 at a time" in out
    assert "## 1 requests, 1 at a time" in out
    rows = [line for line in out.splitlines() if line.startswith("| a |")]
    assert len(rows) == 2
    assert rows[0].endswith("| 1.00 (1.00–1.00) | 2 |")


def test_a_server_that_fails_is_a_line_of_the_table(run: Callable[..., list[Any]], capsys: Capture) -> None:
    gone = entry(FAST) | {"opt": {"command": f"{sys.executable} -c 'exit(\"no model\")' {{port}}"}}
    refuses = entry(*[FAST] * 6, {"status": 500})  # 2 to warm up, 4 of the first load
    samples = run({"a": entry(FAST), "gone": gone, "refuses": refuses}, "--rounds", "1")
    assert [s.get("error") for s in samples] == [
        None, None, "the server ended with exit code 1: no model", None, "1 requests failed: HTTP 500: scripted",
    ]  # fmt: skip
    assert "| gone | the server ended with exit code 1: no model |" in capsys.readouterr().out


def test_the_environment_of_an_entry_reaches_its_server(script: dict[str, Any]) -> None:
    made = {
        "model": "m",
        "env": {"A": "b c"},
        "opt": {"command": "serve {model} -p {port} -t {threads} -n {max_batch}"},
    }
    words, port = script["command_of"](made, 3, 16)
    assert words[0] == "env"
    assert {"A=b c", "OMP_NUM_THREADS=3"} < set(words)
    assert words[-8:] == ["serve", "m", "-p", str(port), "-t", "3", "-n", "16"]
