"""How long it takes from nothing to the first token, each time in a fresh process.

Of the library: the process starts, the interpreter runs, the engine's modules are imported, the model is loaded, the
first token of a prompt of 16 comes. Of a server: the process starts, /health is 200, the first token of a short
completion comes. All times are on one clock, that of time.perf_counter, which processes of a machine share on Linux.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lean_engine.bench.server_process import read_command, running
from lean_engine.bench.serving.benchmark import LoadOptions, measure
from lean_engine.bench.serving.datasets import Conversation, ServeTurn
from lean_engine.bench.serving.target import ServerError, first_model, make_target

PROMPT_TOKENS = 16
PROMPT_TEXT = "The sea is"
CHILD = f"""
import time
marks = {{"interpreter": time.perf_counter()}}
import json, resource, sys
model, options = json.loads(sys.argv[1])
from lean_engine import LLM, SamplingParams
import lean_engine.engine.start
marks["import"] = time.perf_counter()
llm = LLM(model, **options)
marks["load"] = time.perf_counter()
ids = list(range(1, {PROMPT_TOKENS + 1}))
llm.generate({{"prompt_token_ids": ids}}, SamplingParams(temperature=0, max_tokens=1, ignore_eos=True))
marks["first token"] = time.perf_counter()
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps([marks, peak * (1 if sys.platform == "darwin" else 1024)]))
"""


class StartupError(Exception):
    """The process that was to be timed failed; the message is its last line."""


@dataclass(frozen=True, slots=True)
class StartupReport:
    """Seconds from the start of the process until each of the marks, in their order, per run."""

    marks: Mapping[str, Sequence[float]]
    peak_memory_bytes: Sequence[int]  # resident, at the last mark; empty where it is not known

    def figures(self) -> dict[str, Any]:
        """median_MARK_s, and all samples."""
        medians = {f"median_{name.replace(' ', '_')}_s": statistics.median(s) for name, s in self.marks.items()}
        memory = {"peak_memory_bytes": statistics.median(self.peak_memory_bytes)} if self.peak_memory_bytes else {}
        samples = {name.replace(" ", "_"): list(seconds) for name, seconds in self.marks.items()}
        return {**medians, **memory, "num_iters": len(next(iter(self.marks.values()))), "samples": samples}


def time_library(model: str | None, options: Mapping[str, Any]) -> tuple[dict[str, float], int]:
    """One fresh process that loads a model and makes a token: seconds until each mark, peak memory in bytes.

    Args:
        options: of LLM.

    Raises:
        StartupError: it failed.
    """
    started = time.perf_counter()
    command = [sys.executable, "-c", CHILD, json.dumps([model, dict(options)])]
    ran = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if ran.returncode != 0:
        lines = [line for line in ran.stderr.splitlines() if line.strip()]
        raise StartupError(lines[-1] if lines else f"exit code {ran.returncode}")
    marks, peak = json.loads(ran.stdout.splitlines()[-1])
    return {name: moment - started for name, moment in marks.items()}, peak


def time_server(command: str, port: int | None, timeout: float) -> tuple[dict[str, float], int | None]:
    """One start of a server: seconds until it is healthy and until a first token, its peak memory.

    Raises:
        ServerError: it did not get so far within `timeout` seconds.
    """
    words, chosen = read_command(command, port)
    with running(words, chosen) as server:
        healthy = server.wait_until_healthy(timeout)
        first = asyncio.run(first_token(server.base_url, timeout))
        peak = server.peak_memory_bytes()
        return {"healthy": healthy - server.started_at, "first token": first - server.started_at}, peak


async def first_token(base_url: str, timeout: float) -> float:
    """time.perf_counter() when the first token of a completion arrives."""
    name, _ = await first_model(base_url, {})
    target = make_target("openai", base_url, None, name, extra_body={"temperature": 0.0}, ignore_eos=True)
    conversation = Conversation((ServeTurn(PROMPT_TEXT, None, 1),))
    asked = time.perf_counter()
    report, _ = await measure(target, [conversation], LoadOptions(timeout=timeout), lambda prompt, answer, new: new)
    record = report.records[0]
    if not record.is_completed:
        raise ServerError(f"{base_url}: {record.error}")
    return asked + record.delta_times[0]


def report_of(runs: Sequence[tuple[Mapping[str, float], int | None]]) -> StartupReport:
    names = list(runs[0][0])
    peaks = [peak for _, peak in runs if peak is not None]
    return StartupReport({name: [marks[name] for marks, _ in runs] for name in names}, peaks)
