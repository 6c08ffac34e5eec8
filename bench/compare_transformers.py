"""lean-engine beside transformers on the CPU: decode rate, prefill, peak memory, cold start.

    python bench/export_demo_model.py /tmp/smollm2-f32
    python bench/compare_transformers.py --model /tmp/smollm2-f32 --transformers-python OTHER/bin/python

Run it with the Python that has lean-engine; the other one has torch and transformers. Each engine is one loaded
process. They take turns on the same token ids, the one whose turn it is not is stopped; ratios are taken within a
round, then their median. Decode rate: output tokens per second between the first and the last token of a batch. Cold
start: process start to first token of a new process, files in the page cache.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROMPT_TOKENS, NEW_TOKENS, PREFILL_TOKENS = 128, 64, 512
BATCHES = (1, 8, 16)
RESULTS = Path(__file__).parent / "results" / "compare_transformers.jsonl"


def prompts(batch: int, length: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(200, 40000) for _ in range(length)] for _ in range(batch)]


def peak_memory_mib() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


# -- the engines, each in a process of its own: (prompts, new tokens) → the time of each step's tokens


Generate = Callable[[list[list[int]], int], list[float]]


def load_lean_engine(model: str, threads: int) -> tuple[Generate, str]:
    import lean_engine
    from lean_engine import LLM, SamplingParams

    # Prompts are random, and the peer keeps nothing of finished requests: no prefix cache here either.
    llm = LLM(model, threads=threads, max_model_len=1024, enable_prefix_caching=False)
    engine = llm.engine

    def generate(batch: list[list[int]], new_tokens: int) -> list[float]:
        params = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
        groups = [engine.add(str(i), ids, params) for i, ids in enumerate(batch)]
        times = []
        while engine.has_work():
            engine.step()
            if all(g.answers[0].token_ids for g in groups):
                times.append(time.perf_counter())
        return times

    return generate, f"lean-engine {lean_engine.__version__}"


def load_transformers(model: str, threads: int) -> tuple[Generate, str]:
    import torch
    import transformers
    from transformers import AutoModelForCausalLM, StoppingCriteria

    torch.set_num_threads(threads)
    transformers.utils.logging.set_verbosity_error()
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa").eval()
    settings = loaded.generation_config
    settings.eos_token_id, settings.pad_token_id, settings.do_sample = None, 0, False

    class Clock(StoppingCriteria):
        def __init__(self) -> None:
            self.times: list[float] = []

        def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
            self.times.append(time.perf_counter())
            return torch.zeros(input_ids.shape[0], dtype=torch.bool)

    def generate(batch: list[list[int]], new_tokens: int) -> list[float]:
        clock, ids = Clock(), torch.tensor(batch)
        with torch.inference_mode():
            loaded.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, stopping_criteria=[clock]
            )
        return clock.times

    return generate, f"transformers {transformers.__version__}, torch {torch.__version__}"


LOADERS = {"lean-engine": load_lean_engine, "transformers": load_transformers}


def serve(engine: str, model: str, threads: int) -> None:
    """Worker: answer one JSON line for each line `BATCH LENGTH NEW SEED` on stdin."""
    generate, version = LOADERS[engine](model, threads)
    generate(prompts(1, 16, 0), 1)
    print(json.dumps({"ready": time.time(), "version": version}), flush=True)
    for line in sys.stdin:
        batch, length, new_tokens, seed = map(int, line.split())
        started = time.perf_counter()
        times = generate(prompts(batch, length, seed), new_tokens)
        print(json.dumps({"started": started, "times": times, "peak_mib": peak_memory_mib()}), flush=True)


# -- the run


class Peer:
    def __init__(self, engine: str, python: str, args: argparse.Namespace) -> None:
        self.engine = engine
        command = [python, __file__, "--worker", engine, "--model", args.model, "--threads", str(args.threads)]
        keep = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "OPENBLAS_", "MKL_"))}
        self.spawned = time.time()
        self.process = subprocess.Popen(command, env=keep, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.ready = self._read()
        self.cold_start_s = self.ready["ready"] - self.spawned

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.engine}: the worker ended with exit code {self.process.wait()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, batch: int, length: int, new_tokens: int, seed: int) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.send_signal(signal.SIGCONT)
        self.process.stdin.write(f"{batch} {length} {new_tokens} {seed}\n")
        self.process.stdin.flush()
        answer = self._read()
        self.process.send_signal(signal.SIGSTOP)
        return answer

    def close(self) -> None:
        self.process.send_signal(signal.SIGCONT)
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def measure(peers: list[Peer], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Metric → engine → one figure per round. The first round warms up and is not counted."""
    figures: dict[str, dict[str, list[float]]] = {}

    def note(metric: str, peer: Peer, value: float, turn: int) -> None:
        if turn:
            figures.setdefault(metric, {}).setdefault(peer.engine, []).append(value)

    for turn in range(rounds + 1):
        order = peers if turn % 2 else peers[::-1]
        for batch in BATCHES:
            for peer in order:
                times = peer.ask(batch, PROMPT_TOKENS, NEW_TOKENS, 1000 * turn + batch)["times"]
                note(f"decode, batch {batch} (tok/s)", peer, batch * (len(times) - 1) / (times[-1] - times[0]), turn)
        for peer in order:
            answer = peer.ask(1, PREFILL_TOKENS, 1, 1000 * turn)
            note("prefill of 512 (tok/s)", peer, PREFILL_TOKENS / (answer["times"][0] - answer["started"]), turn)
            note("peak memory (MiB)", peer, answer["peak_mib"], turn)
    return figures


def table(figures: dict[str, dict[str, list[float]]]) -> str:
    lines = ["| | lean-engine | transformers | ratio (median of rounds, min–max) |", "|---|--:|--:|--:|"]
    for metric, by_engine in figures.items():
        ours, theirs = by_engine["lean-engine"], by_engine["transformers"]
        ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
        digits = 2 if "(s)" in metric else 1
        lines.append(
            f"| {metric} | {statistics.median(ours):.{digits}f} | {statistics.median(theirs):.{digits}f} "
            f"| {statistics.median(ratios):.2f} ({ratios[0]:.2f}–{ratios[-1]:.2f}) |"
        )
    return "\n".join(lines)


def cpu_name() -> str:
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.split(":")[1].strip() for line in info.splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True, help="a float32 safetensors directory")
    parser.add_argument("--transformers-python", help="the interpreter that has torch and transformers")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cold-starts", type=int, default=3)
    parser.add_argument("--worker", choices=LOADERS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        serve(args.worker, args.model, args.threads)
        return
    if not args.transformers_python:
        parser.error("--transformers-python is needed")
    pythons = {"lean-engine": sys.executable, "transformers": args.transformers_python}
    cold: dict[str, list[float]] = {name: [] for name in pythons}
    for _ in range(args.cold_starts):
        for name, python in pythons.items():
            peer = Peer(name, python, args)
            cold[name].append(peer.cold_start_s)
            peer.close()
    peers = [Peer(name, python, args) for name, python in pythons.items()]
    for peer in peers:
        peer.process.send_signal(signal.SIGSTOP)
    figures = measure(peers, args.rounds)
    figures["cold start (s)"] = cold
    for peer in peers:
        peer.close()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    record = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit.stdout.strip(),
        "machine": cpu_name(),
        "threads": args.threads,
        "versions": [p.ready["version"] for p in peers],
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": NEW_TOKENS,
        "figures": figures,
    }
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("a") as file:
        file.write(json.dumps(record) + "\n")
    print(
        f"{record['machine']}, {args.threads} threads, {', '.join(record['versions'])}, {args.rounds} rounds in turns\n"
    )
    print(table(figures))


if __name__ == "__main__":
    main()
