"""`lean-engine bench serve` against servers, each started anew in its turn; medians over rounds.

    python bench/serve_peers.py --servers lean-serve-f32,llama-server-f32,vllm-serve-f32 --result-dir bench/results
    python bench/serve_peers.py --report bench/results/serve_peers.jsonl

A server is an entry of bench/peers/peers.json whose driver is openai_server.py. In its turn it is started, sent a few
requests that do not count, then each of --loads by a `lean-engine bench serve` of its own, the same command for all but
for the address; then it is stopped. A round's prompts are its own, so that no prefix cache knows them, and the same for
all servers. The order rotates from round to round. Run it with the Python that has lean-engine.

Ready is the time from the start of the process to the first 200 of /health; peak MiB the sum of the peaks of resident
memory over the server's processes; other the share of the machine that neither server nor client used meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "peers"))

from driver import THREAD_VARIABLES, cpu_seconds, machine_busy_seconds, peak_memory_mib, process_tree
from turns import add_options, chosen, read_peers, say, wait_until_quiet

from lean_engine.bench.environment import append_result
from lean_engine.bench.results import read_results
from lean_engine.bench.server_process import LEAN_ENGINE, read_command, running
from lean_engine.bench.serving.target import ServerError

CONFIG = Path(__file__).parent / "peers" / "peers.json"
SHAPE = "--dataset-name random --random-input-len 128 --random-output-len 64 --ignore-eos --request-rate inf"
LOADS = "16:64,1:8"  # requests under way at once, and in all
COLUMNS = {
    "output_throughput": "out tok/s",
    "median_ttft_ms": "TTFT p50 ms",
    "median_tpot_ms": "TPOT p50 ms",
    "median_itl_ms": "ITL p50 ms",
    "peak_memory_mib": "peak MiB",
    "ready_s": "ready s",
    "other_cpu": "other",
}
SAID = ("concurrency", "ready_s", "output_throughput", "median_ttft_ms", "other_cpu", "error")  # while it runs
Sample = dict[str, Any]


# -- one server's turn


def measure_server(entry: Mapping[str, Any], tokenizer: str, args: argparse.Namespace, turn: int) -> list[Sample]:
    """Start it, send every load, stop it: a sample per load, or one that says what went wrong."""
    words, port = command_of(entry, args.threads, max(args.loads))
    first_seed = turn * (len(args.loads) + 1)
    samples = []
    try:
        with running(words, port) as server:
            ready = server.wait_until_healthy(args.timeout) - server.started_at
            bench_serve(server.base_url, tokenizer, max(args.loads), max(args.loads), first_seed)
            for seed, (concurrency, num_prompts) in enumerate(args.loads.items(), first_seed + 1):
                wait_until_quiet(args.quiet, args.quiet_seconds)
                sample = measure_load(server.base_url, tokenizer, concurrency, num_prompts, seed)
                samples.append({"concurrency": concurrency, "ready_s": ready, **sample})
    except ServerError as error:
        samples.append({"error": str(error)})
    return samples


def command_of(entry: Mapping[str, Any], threads: int, max_batch: int) -> tuple[list[str], int]:
    """The words that start a server of peers.json, and the port it will listen on."""
    values = {"model": entry["model"], "port": "{port}", "threads": threads, "max_batch": max_batch}
    text = entry["opt"]["command"].format(**values)
    words, port = read_command(text, None)
    variables = {f"{name}_NUM_THREADS": str(threads) for name in THREAD_VARIABLES} | entry.get("env", {})
    return ["env", *(f"{name}={value}" for name, value in variables.items()), *words], port


def measure_load(base_url: str, tokenizer: str, concurrency: int, num_prompts: int, seed: int) -> Sample:
    """The result of a `bench serve`, and what the server and others used meanwhile."""
    started, busy, own = time.perf_counter(), machine_busy_seconds(), own_seconds()
    sample = bench_serve(base_url, tokenizer, concurrency, num_prompts, seed)
    seconds, busy, own = time.perf_counter() - started, machine_busy_seconds() - busy, own_seconds() - own
    sample["other_cpu"] = max(0.0, busy - own) / (seconds * (os.cpu_count() or 1))
    sample["peak_memory_mib"] = peak_memory_mib(process_tree(os.getpid())[1:])  # the client has ended
    return sample


def own_seconds() -> float:
    """CPU time of this process, the server, and clients that have ended."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return cpu_seconds(process_tree(os.getpid())) + ended.ru_utime + ended.ru_stime


def bench_serve(base_url: str, tokenizer: str, concurrency: int, num_prompts: int, seed: int) -> Sample:
    """Its result.

    Raises:
        ServerError: it gave none, or requests failed.
    """
    words = [*LEAN_ENGINE, "bench", "serve", "--base-url", base_url, "--tokenizer", tokenizer, *shlex.split(SHAPE)]
    words += ["--max-concurrency", str(concurrency), "--num-prompts", str(num_prompts), "--seed", str(seed)]
    ran = subprocess.run([*words, "--json", "--disable-tqdm"], capture_output=True, text=True, check=False)
    if not ran.stdout.startswith("{"):
        raise ServerError((ran.stderr.strip() or f"exit code {ran.returncode}").splitlines()[-1])
    result: Sample = json.loads(ran.stdout)
    if result["failed"] or result["completed"] != num_prompts:
        raise ServerError(f"{result['failed']} requests failed: {next(iter(result['failures']['messages']), '')}")
    return result


# -- tables


def table(concurrency: int, samples: Sequence[Sample], baseline: str, max_other: float) -> str:
    """Medians over rounds, and the ratio of output tokens per second to the baseline's within each."""
    rates = {(s["server"], s["round"]): s["output_throughput"] for s in samples if is_good(s, concurrency, max_other)}
    lines = [f"| server | {' | '.join(COLUMNS.values())} | out tok/s to {baseline} | n |"]
    lines.append("|---|" + "--:|" * (len(COLUMNS) + 2))
    for server in dict.fromkeys(s["server"] for s in samples):
        own = [s for s in samples if s["server"] == server and is_good(s, concurrency, max_other)]
        if not own:
            errors = [s["error"] for s in samples if s["server"] == server and "error" in s]
            lines.append(f"| {server} | {errors[-1] if errors else 'no sample that is quiet enough'} |")
            continue
        bases = [(s, rates[baseline, s["round"]]) for s in own if (baseline, s["round"]) in rates]
        ratios = sorted(s["output_throughput"] / base for s, base in bases)
        shown = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}–{ratios[-1]:.2f})" if ratios else "-"
        cells = [shown_median([s[column] for s in own]) for column in COLUMNS]
        lines.append(f"| {server} | {' | '.join(cells)} | {shown} | {len(own)} |")
    return "\n".join(lines)


def is_good(sample: Sample, concurrency: int, max_other: float) -> bool:
    return sample.get("concurrency") == concurrency and bool(sample["other_cpu"] <= max_other)


def shown_median(values: Sequence[float]) -> str:
    value = statistics.median(values)
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def print_report(samples: Sequence[Sample], loads: Mapping[int, int], baseline: str, max_other: float) -> None:
    print(f"lean-engine bench serve {SHAPE}")
    for concurrency, num_prompts in loads.items():
        print(f"\n## {num_prompts} requests, {concurrency} at a time\n")
        print(table(concurrency, samples, baseline, max_other))


# -- the command


def read_loads(text: str) -> dict[int, int]:
    """CONCURRENCY:REQUESTS,…; ValueError for anything else."""
    return {int(concurrency): int(count) for concurrency, count in (part.split(":") for part in text.split(","))}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser, CONFIG)
    parser.add_argument("--servers", help="names, the baseline first; default: all of the file")
    parser.add_argument("--tokenizer", help="whose vocabulary prompts are made of; default: the first server's model")
    parser.add_argument("--loads", type=read_loads, default=LOADS, help="CONCURRENCY:REQUESTS,… (%(default)s)")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for a start")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.report:
        result = read_results(args.report)[-1]
        print_report(result["samples"], read_loads(result["loads"]), result["servers"][0], args.max_other)
        return
    entries = {name: e for name, e in read_peers(args.config).items() if e["driver"] == "openai_server.py"}
    names = chosen(args.servers, entries, "server")
    tokenizer = args.tokenizer or entries[names[0]]["model"]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that a server is stopped then too
    samples: list[Sample] = []
    for turn in range(args.rounds):
        first = turn % len(names)
        for name in (*names[first:], *names[:first]):
            wait_until_quiet(args.quiet, args.quiet_seconds)
            for sample in measure_server(entries[name], tokenizer, args, turn):
                samples.append({"server": name, "round": turn, **sample})
                say(name, sample, SAID)
    print_report(samples, args.loads, names[0], args.max_other)
    if args.result_dir:
        loads = ",".join(f"{concurrency}:{count}" for concurrency, count in args.loads.items())
        about = {"servers": names, "threads": args.threads, "rounds": args.rounds, "shape": SHAPE, "loads": loads}
        append_result(args.result_dir, "serve_peers", {**about, "samples": samples})


if __name__ == "__main__":
    main()
