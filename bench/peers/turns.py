"""Peers that take turns: each is one loaded process, and only the one whose turn it is may run."""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

from driver import THREAD_VARIABLES, machine_busy_seconds

DRIVERS = Path(__file__).parent / "drivers"
Note = Callable[[dict[str, Any]], None]


def read_peers(path: Path) -> dict[str, dict[str, Any]]:
    """Name → its entry, with {root} filled in; exits where there is no such file."""
    if not path.exists():
        sys.exit(f"{path}: no such file; copy peers.example.json there and change its paths")
    content = json.loads(path.read_text())
    peers: dict[str, dict[str, Any]] = json.loads(json.dumps(content["peers"]).replace("{root}", content["root"]))
    return peers


def add_options(parser: argparse.ArgumentParser, config: Path, rounds: int = 3) -> None:
    """Those of every comparison by turns."""
    parser.add_argument("--config", type=Path, default=config)
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quiet", type=float, default=1.0, help="wait until others use less of the machine than this")
    parser.add_argument("--quiet-seconds", type=float, default=60.0, help="… but not longer")
    parser.add_argument("--max-other", type=float, default=1.0, help="leave out samples with more of it used by others")
    parser.add_argument("--result-dir", help="append all samples as one line of a file there")
    parser.add_argument("--report", type=Path, help="print the last run of this file again")


def say(name: str, sample: Mapping[str, Any], keys: Sequence[str]) -> None:
    """A line on stderr: those fields that a sample has."""
    shown = {k: round(v, 2) if isinstance(v, float) else v for k in keys if (v := sample.get(k)) is not None}
    print(f"[{time.strftime('%H:%M:%S')}] {name:20} {json.dumps(shown)}", file=sys.stderr, flush=True)


def chosen(names: str | None, entries: Mapping[str, Any], kind: str) -> list[str]:
    """Names of a comma-separated list, or all; exits where one is unknown."""
    wanted = (names or ",".join(entries)).split(",")
    for name in wanted:
        if name not in entries:
            sys.exit(f"unknown {kind} {name}; known: {', '.join(entries)}")
    return wanted


class Peer:
    """One peer's process. It leads a session of its own, so a signal reaches what it has started, and nothing else."""

    def __init__(self, name: str, entry: Mapping[str, Any], threads: int, log: IO[str]) -> None:
        self.name = name
        self.command = [entry["python"], "-u", str(DRIVERS / entry["driver"]), "--model", entry["model"]]
        self.command += ["--dtype", entry.get("dtype", "float32"), "--threads", str(threads)]
        for key, value in entry.get("opt", {}).items():
            self.command += ["--opt", f"{key}={value}"]
        ours = tuple(f"{name}_" for name in THREAD_VARIABLES)
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith(ours)} | entry.get("env", {})
        self.log = log
        self.process: subprocess.Popen[str] | None = None

    @property
    def is_running(self) -> bool:
        return self.process is not None

    def start(self, timeout: float) -> dict[str, Any]:
        """Its "ready" line, or what went wrong; paused afterwards."""
        self.stop()
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
            env=self.environment,
            start_new_session=True,
        )
        answer = self._read(timeout)
        self._signal(signal.SIGSTOP)
        return answer

    def ask(self, workload: str, variant: int, timeout: float) -> dict[str, Any]:
        """Let it run one workload: its figures, or what went wrong."""
        assert self.process is not None
        assert self.process.stdin is not None
        self._signal(signal.SIGCONT)
        try:
            self.process.stdin.write(f"{workload} {variant}\n")
            self.process.stdin.flush()
        except OSError:
            return {"workload": workload, "error": "the process ended"}
        answer = self._read(timeout)
        self._signal(signal.SIGSTOP)
        return {"workload": workload, **answer}

    def stop(self) -> None:
        if self.process is None:
            return
        self._signal(signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with suppress(OSError):
                stream.close()
        self.process = None

    def _read(self, timeout: float) -> dict[str, Any]:
        assert self.process is not None
        assert self.process.stdout is not None
        deadline = time.monotonic() + timeout
        while True:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.process.stdout], [], [], left)[0]:
                self.stop()
                return {"error": f"no answer within {timeout:g} s"}
            line = self.process.stdout.readline()
            if not line:
                self.stop()
                return {"error": "the process ended"}
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer

    def _signal(self, number: signal.Signals) -> None:
        if self.process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, number)


def other_share(seconds: float) -> float:
    """Share of the machine that is used, over so many seconds in which no peer runs."""
    before = machine_busy_seconds()
    time.sleep(seconds)
    return (machine_busy_seconds() - before) / (seconds * (os.cpu_count() or 1))


def wait_until_quiet(share: float, longest: float) -> None:
    """Until others use less than this share of the machine, but not longer than so many seconds."""
    deadline = time.monotonic() + longest
    while share < 1 and time.monotonic() < deadline and other_share(1.0) > share:
        time.sleep(2.0)


@contextmanager
def stopping(peers: Sequence[Peer]) -> Iterator[None]:
    """Within, peers may be started; none is left behind."""
    try:
        yield
    finally:
        for peer in peers:
            peer.stop()


def run(
    peers: Sequence[Peer],
    workloads: Sequence[str],
    rounds: int,
    starts: int,
    note: Note,
    *,
    timeout: float,
    quiet: float,
    quiet_seconds: float,
) -> None:
    """Start every peer a few times, then let them take turns: A B C, B C A, …, the same variant for all in a round."""
    with stopping(peers):
        for turn in range(starts):
            for peer in peers:
                peer.stop()
                wait_until_quiet(quiet, quiet_seconds)
                note({"peer": peer.name, "round": turn, **peer.start(timeout)})
        for turn in range(rounds):
            for workload in workloads:
                first = turn % len(peers)
                for peer in (*peers[first:], *peers[:first]):
                    if not peer.is_running:
                        continue  # it has failed; the line that says so is noted
                    wait_until_quiet(quiet, quiet_seconds)
                    note({"peer": peer.name, "round": turn, **peer.ask(workload, turn, timeout)})
