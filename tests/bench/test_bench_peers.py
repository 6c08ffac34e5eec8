"""bench/peers: workloads, the protocol of drivers, turns, and the tables, with drivers that make up their tokens."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny import directory

MODEL = directory("qwen3")
PEERS = Path(__file__).parents[2] / "bench" / "peers"
DRIVER = """
import sys, time
sys.path.insert(0, {peers!r})
from driver import Answer, Driver, main

class Made(Driver):
    def load(self, args):
        self.delay = float(args.opt["delay"])
        self.said = args.opt.get("text") or [int(token) for token in args.opt.get("ids", "7").split()]
        self.versions = {{"threads": args.threads}}
        print("chatter that is no protocol")

    def run(self, requests, max_concurrent):
        now = time.perf_counter()
        if len(requests) == 16:
            raise ValueError("no batches")
        return [Answer(now + self.delay, now + 2 * self.delay, r.max_tokens, self.said) for r in requests]

main(Made())
"""


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(PEERS))
    yield
    for name in ("compare", "turns", "driver", "workloads"):
        sys.modules.pop(name, None)


def entry(tmp_path: Path, delay: float, **opt: str) -> dict[str, Any]:
    path = tmp_path / "made.py"
    path.write_text(DRIVER.format(peers=str(PEERS)))
    return {"driver": str(path), "python": sys.executable, "model": str(MODEL), "opt": {"delay": str(delay), **opt}}


def test_workloads_have_their_lengths_and_each_variant_its_own_ids() -> None:
    from workloads import NAMES, make_workload

    sums = {}
    for name in NAMES[1:]:
        first, again, other = make_workload(name, 0), make_workload(name, 0), make_workload(name, 1)
        assert first == again != other
        assert [len(r.prompt) for r in first.requests] == [len(r.prompt) for r in other.requests]
        sums[name] = (sum(len(r.prompt) for r in first.requests), sum(r.max_tokens for r in first.requests))
    assert sums == {"W1": (128, 128), "W2": (2048, 2048), "W3": (4864, 4093), "W4": (13312, 1024), "W5": (1536, 1)}
    shared = {tuple(r.prompt[:384]) for r in make_workload("W4", 0).requests}
    assert len(shared) == 1


def test_peers_take_turns_and_a_failed_workload_is_no_end(tmp_path: Path) -> None:
    from turns import Peer, run

    samples: list[dict[str, Any]] = []
    with (tmp_path / "log").open("w") as log:
        peers = [Peer(name, entry(tmp_path, delay), 3, log) for name, delay in (("a", 0.25), ("b", 0.5))]
        run(peers, ["W1", "W2"], 2, 1, samples.append, timeout=60, quiet=1.0, quiet_seconds=0)
    assert not any(peer.is_running for peer in peers)
    ready = samples[:2]
    assert [(s["peer"], s["event"], s["versions"]) for s in ready] == [(n, "ready", {"threads": 3}) for n in "ab"]
    asked = [(s["peer"], s["workload"], s["round"]) for s in samples[2:]]
    assert asked == [
        ("a", "W1", 0), ("b", "W1", 0), ("a", "W2", 0), ("b", "W2", 0),
        ("b", "W1", 1), ("a", "W1", 1), ("b", "W2", 1), ("a", "W2", 1),
    ]  # fmt: skip
    one = samples[2]
    assert one["seconds"] == pytest.approx(0.5, abs=0.05)
    assert one["output_tok_s"] == pytest.approx(128 / one["seconds"])
    assert one["median_ttft_ms"] == pytest.approx(250, abs=25)
    assert one["median_tpot_ms"] == pytest.approx(250 / 127, rel=0.1)
    assert samples[4]["error"] == "ValueError: no batches"


def test_a_peer_that_is_paused_does_not_run(tmp_path: Path) -> None:
    from driver import stat_fields
    from turns import Peer

    with (tmp_path / "log").open("w") as log:
        peer = Peer("a", entry(tmp_path, 0.1), 1, log)
        peer.start(timeout=60)
        assert peer.process is not None
        deadline = time.monotonic() + 10
        while stat_fields(peer.process.pid)[0] != "T" and time.monotonic() < deadline:
            time.sleep(0.01)
        assert stat_fields(peer.process.pid)[0] == "T"
        peer.stop()


def test_a_peer_that_cannot_start_says_so(tmp_path: Path) -> None:
    from turns import Peer

    wrong = entry(tmp_path, 0.1) | {"opt": {"delay": "soon"}}
    with (tmp_path / "log").open("w") as log:
        peer = Peer("a", wrong, 1, log)
        assert "could not convert string to float" in peer.start(timeout=60)["error"]
        peer.stop()


def test_a_check_says_how_much_of_an_answer_is_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import argparse

    from compare import check

    from lean_engine.text.tokenizer import Tokenizer

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    text = Tokenizer.from_directory(MODEL).decode([40, 41, 42])
    peers = {
        "a": entry(tmp_path, 0.0, ids="40 41 42"),
        "same text": entry(tmp_path, 0.0, text=text),
        "other": entry(tmp_path, 0.0, ids="40 41 43"),
        "gone": entry(tmp_path, 0.0) | {"opt": {"delay": "soon"}},
    }
    check(list(peers), peers, argparse.Namespace(threads=1, timeout=60.0))
    rows = capsys.readouterr().out.splitlines()[2:]
    assert rows[0] == "| a | 3 of 3 tokens |"
    assert rows[1] == f"| same text | {len(text)} of {len(text)} characters |"
    assert rows[2] == "| other | 2 of 3 tokens |"
    assert rows[3].startswith("| gone | ValueError: could not convert string")


def test_ratios_are_taken_within_a_round() -> None:
    from compare import start_table, workload_table

    def sample(peer: str, turn: int, rate: float, other: float = 0.1) -> dict[str, Any]:
        figures = dict.fromkeys(("median_ttft_ms", "max_ttft_ms", "median_tpot_ms", "median_e2el_ms"), 5.0)
        rates = {"output_tok_s": rate, "total_tok_s": 2 * rate, "peak_memory_mib": 500.0, "other_cpu": other}
        return {"peer": peer, "round": turn, "workload": "W1", **figures, **rates}

    samples = [sample("a", i, rate) for i, rate in enumerate((10.0, 20.0, 40.0))]
    samples += [sample("b", i, rate) for i, rate in enumerate((20.0, 44.0, 40.0))]
    samples += [sample("b", 3, 1000.0, other=0.9), {"peer": "c", "workload": "W1", "round": 0, "error": "no model"}]
    lines = workload_table("W1", samples, "a", max_other=0.5).splitlines()
    assert lines[2].endswith("| 1.00 (1.00–1.00) | 3 |")
    assert lines[3].endswith("| 2.00 (1.00–2.20) | 3 |")
    assert lines[3].startswith("| b | 40.0 | 80.0 | 5.00 |")
    assert lines[4] == "| c | no model |"
    ready = {"peer": "a", "event": "ready", "import_s": None, "load_s": 1.5, "first_token_s": 2.0, "memory_mib": 300.0}
    assert start_table([ready]).splitlines()[-1] == "| a | - | 1.50 | 2.00 | 300 | 1 |"
