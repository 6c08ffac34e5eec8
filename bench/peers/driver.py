"""What every driver of a peer shares: the command line, timing, memory, and the lines it speaks. Standard library only.

A driver is a process of its own, run by the peer's Python. It loads the engine, prints one JSON line with "event":
"ready", and then answers each line `WORKLOAD VARIANT` on its standard input with one JSON line of figures, and the line
`check 0` with what it says after CHECK_PROMPT: a peer that computes something else is no peer. To add one: subclass
Driver in drivers/, call `main` with it, and give it an entry in peers.json.

Rules, the same for all: prompts are token ids and no special token is added; greedy; end-of-text is ignored, so that
every request gives exactly max_tokens tokens; all requests of a workload are submitted at once and at most
--max-batch run together; --threads threads; caches as users get them by default.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from workloads import Request, make_workload

THREAD_VARIABLES = ("OMP", "MKL", "OPENBLAS", "NUMEXPR", "NUMBA")
FIRST_PROMPT = list(range(200, 216))
# "The alphabet: A, B, C, D, E, F," for the demo model, whose next 32 tokens are never a close call: the best one leads
# by at least 0.16 in log-probability
CHECK_PROMPT = [504, 12567, 42, 330, 28, 389, 28, 340, 28, 422, 28, 414, 28, 426, 28]
NUM_CHECKED = 32


class Answer(NamedTuple):
    """One request's tokens, seconds on time.perf_counter's clock, when a caller could read them."""

    first: float
    last: float
    num_tokens: int
    said: Sequence[int] | str  # its token ids, or its text where the engine gives no ids


class Driver:
    """An engine."""

    def __init__(self) -> None:
        self.import_s: float | None = None
        self.versions: dict[str, Any] = {}

    def load(self, args: argparse.Namespace) -> None:
        """Import the engine and load the model; sets import_s and versions."""
        raise NotImplementedError

    def run(self, requests: Sequence[Request], max_concurrent: int) -> list[Answer]:
        """Serve the requests, all submitted now."""
        raise NotImplementedError

    def process_ids(self) -> list[int]:
        """Processes whose memory is the engine's."""
        return process_tree(os.getpid())

    def close(self) -> None:
        """Before the process ends."""


class Stamps:
    """Token times of one request as they come."""

    def __init__(self) -> None:
        self.first = self.last = 0.0
        self.token_ids: list[int] = []

    def add(self, token_ids: Sequence[int], moment: float) -> None:
        """These tokens more are there; maybe none."""
        if token_ids:
            self.first = self.first or moment
            self.last = moment
            self.token_ids += token_ids

    def answer(self) -> Answer:
        return Answer(self.first, self.last, len(self.token_ids), self.token_ids)


def of_batch(times: Sequence[float], requests: Sequence[Request], said: Sequence[Sequence[int]]) -> list[Answer]:
    """Answers of a static batch whose steps ended at these times; tokens after a request's own length do not count.

    said: the new tokens of each row, as many as there were steps.
    """
    return [
        Answer(times[0], times[r.max_tokens - 1], r.max_tokens, ids[: r.max_tokens])
        for r, ids in zip(requests, said, strict=True)
    ]


def batches(requests: Sequence[Request], size: int) -> Iterable[Sequence[Request]]:
    """First come, first served, for engines whose batches are static."""
    return (requests[i : i + size] for i in range(0, len(requests), size))


# -- processes


def process_tree(root: int) -> list[int]:
    """A process and all that descend from it."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            fields = stat_fields(int(entry))
            if fields:
                children.setdefault(int(fields[1]), []).append(int(entry))
    found, todo = [], [root]
    while todo:
        found.append(todo.pop())
        todo += children.get(found[-1], [])
    return found


def stat_fields(process_id: int) -> list[str]:
    """/proc/PID/stat after the name; empty where the process has ended."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rsplit(") ", 1)[1].split()
    except (OSError, IndexError):
        return []


def cpu_seconds(process_ids: Iterable[int]) -> float:
    ticks = sum(int(f[11]) + int(f[12]) for f in map(stat_fields, process_ids) if f)
    return ticks / os.sysconf("SC_CLK_TCK")


def machine_busy_seconds() -> float:
    """CPU time that anything has used since the machine started, stolen time included."""
    fields = [int(x) for x in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def start_of_process() -> float:
    """time.time() when this process was made."""
    age = float(Path("/proc/uptime").read_text().split()[0])
    return time.time() - age + int(stat_fields(os.getpid())[19]) / os.sysconf("SC_CLK_TCK")


def reset_peak_memory(process_ids: Iterable[int]) -> None:
    for process_id in process_ids:
        try:
            Path(f"/proc/{process_id}/clear_refs").write_text("5")
        except OSError:  # not ours to reset: its peak is that of its whole life
            continue


def peak_memory_mib(process_ids: Iterable[int]) -> float:
    """Sum of the processes' peaks of resident memory."""
    total = 0
    for process_id in process_ids:
        try:
            lines = Path(f"/proc/{process_id}/status").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    return total / 1024


# -- figures


def measure(driver: Driver, name: str, variant: int) -> dict[str, Any]:
    """Run a workload; every time counts from its submission."""
    workload = make_workload(name, variant)
    reset_peak_memory(driver.process_ids())
    own, busy = cpu_seconds(process_tree(os.getpid())), machine_busy_seconds()
    started = time.perf_counter()
    answers = driver.run(workload.requests, workload.max_concurrent)
    elapsed = time.perf_counter() - started
    own = cpu_seconds(process_tree(os.getpid())) - own
    busy = machine_busy_seconds() - busy
    for request, answer in zip(workload.requests, answers, strict=True):
        if answer.num_tokens != request.max_tokens:
            raise RuntimeError(f"{name}: {answer.num_tokens} tokens came, {request.max_tokens} were asked for")
    num_prompt = sum(len(r.prompt) for r in workload.requests)
    num_output = sum(a.num_tokens for a in answers)
    seconds = max(a.last for a in answers) - started
    tpot = [(a.last - a.first) / (a.num_tokens - 1) for a in answers if a.num_tokens > 1]
    return {
        "workload": name,
        "variant": variant,
        "seconds": seconds,
        "output_tok_s": num_output / seconds,
        "total_tok_s": (num_prompt + num_output) / seconds,
        "median_ttft_ms": 1000 * statistics.median(a.first - started for a in answers),
        "max_ttft_ms": 1000 * max(a.first - started for a in answers),
        "median_tpot_ms": 1000 * statistics.median(tpot) if tpot else None,
        "median_e2el_ms": 1000 * statistics.median(a.last - started for a in answers),
        "peak_memory_mib": peak_memory_mib(driver.process_ids()),
        "cpu_seconds": own,
        # share of the machine that others used meanwhile: much of it marks a sample that says little
        "other_cpu": max(0.0, busy - own) / (elapsed * (os.cpu_count() or 1)),
    }


def check(driver: Driver) -> dict[str, Any]:
    """What it says after CHECK_PROMPT, beside a longer prompt, so that a static batch is padded."""
    requests = [Request(prompt, NUM_CHECKED) for prompt in (FIRST_PROMPT + CHECK_PROMPT, CHECK_PROMPT)]
    said = driver.run(requests, len(requests))[1].said
    return {"said": said if isinstance(said, str) else [int(token) for token in said]}


# -- the process


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--max-batch", type=int, default=16)
    parser.add_argument("--opt", action="append", default=[], metavar="KEY=VALUE", help="options of the driver")
    args = parser.parse_args()
    args.opt = dict(option.split("=", 1) for option in args.opt)
    return args


def main(driver: Driver) -> None:
    """Speak the protocol until standard input ends."""
    out = os.fdopen(os.dup(1), "w")  # engines print to stdout: they get stderr, the protocol keeps the real one
    os.dup2(2, 1)
    born = start_of_process()
    args = arguments()
    for name in THREAD_VARIABLES:
        os.environ[f"{name}_NUM_THREADS"] = str(args.threads)
    try:
        serve(driver, args, out, born)
    except Exception as error:
        traceback.print_exc()
        say(out, {"event": "failed", "error": f"{type(error).__name__}: {error}"[:300]})
    finally:
        driver.close()
        out.flush()
        os._exit(0)  # some engines hang in their destructors


def serve(driver: Driver, args: argparse.Namespace, out: TextIO, born: float) -> None:
    driver.load(args)
    loaded = time.time()
    driver.run([Request(FIRST_PROMPT, 1)], 1)
    first = time.time()
    memory = peak_memory_mib(driver.process_ids())
    for variant in range(2):
        driver.run(make_workload("W0", variant).requests, 16)
    figures = {"import_s": driver.import_s, "load_s": loaded - born, "first_token_s": first - born}
    say(out, {"event": "ready", **figures, "memory_mib": memory, "versions": driver.versions})
    for line in sys.stdin:
        name, variant = line.split()
        try:
            say(out, check(driver) if name == "check" else measure(driver, name, int(variant)))
        except Exception as error:  # one workload may fail, the others go on
            traceback.print_exc()
            say(out, {"workload": name, "error": f"{type(error).__name__}: {error}"[:300]})


def say(out: TextIO, what: dict[str, Any]) -> None:
    out.write(json.dumps(what) + "\n")
    out.flush()
