"""Engines side by side on the same token ids, in turns; medians, and ratios taken within a round.

    python bench/peers/compare.py --peers transformers,lean-engine --rounds 3 --result-dir bench/results
    python bench/peers/compare.py --report bench/results/peers.jsonl [--max-other 0.3]
    python bench/peers/compare.py --check [--peers …]
    python bench/peers/compare.py --sizes

Peers and their paths stand in peers.json beside this file (see peers.example.json); the first one of --peers is what
the others are compared with. A ratio pairs neighbours in time, so slow drifts of a shared machine cancel; `other` is
the share of the machine that anything else used during the samples. Run it with the Python that has lean-engine.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from turns import Peer, add_options, chosen, read_peers, run, say, stopping

from lean_engine.bench.environment import append_result
from lean_engine.bench.results import read_results
from lean_engine.bench.serving.tokenizers import load_tokenizer

HERE = Path(__file__).parent
RATIO_OF = {
    "W0": "output_tok_s",
    "W1": "output_tok_s",
    "W2": "output_tok_s",
    "W3": "total_tok_s",
    "W4": "total_tok_s",
    "W5": "total_tok_s",
}
START_COLUMNS = {"import_s": "import s", "load_s": "loaded s", "first_token_s": "first token s", "memory_mib": "MiB"}
COLUMNS = {
    "output_tok_s": "out tok/s",
    "total_tok_s": "total tok/s",
    "median_ttft_ms": "TTFT p50 ms",
    "max_ttft_ms": "TTFT max ms",
    "median_tpot_ms": "TPOT p50 ms",
    "median_e2el_ms": "E2EL p50 ms",
    "peak_memory_mib": "peak MiB",
    "other_cpu": "other",
}
Sample = Mapping[str, Any]


def start_table(samples: Sequence[Sample]) -> str:
    """Medians of the starts."""
    lines = ["| peer | " + " | ".join(START_COLUMNS.values()) + " | n |", "|---|" + "--:|" * (len(START_COLUMNS) + 1)]
    for peer in dict.fromkeys(s["peer"] for s in samples):
        ready = [s for s in samples if s["peer"] == peer and s.get("event") == "ready"]
        cells = [median_cell(ready, key) for key in START_COLUMNS]
        lines.append(f"| {peer} | {' | '.join(cells)} | {len(ready)} |")
    return "\n".join(lines)


def workload_table(workload: str, samples: Sequence[Sample], baseline: str, max_other: float) -> str:
    """Medians over rounds, and the ratio to the baseline within each."""
    key = RATIO_OF[workload]
    rounds: dict[str, dict[int, Sample]] = {}
    for sample in samples:
        if sample.get("workload") == workload and "error" not in sample and sample["other_cpu"] <= max_other:
            rounds.setdefault(sample["peer"], {})[sample["round"]] = sample
    lines = [f"| peer | {' | '.join(COLUMNS.values())} | {key} to {baseline} | n |"]
    lines.append("|---|" + "--:|" * (len(COLUMNS) + 2))
    for peer in dict.fromkeys(s["peer"] for s in samples):
        own, base = rounds.get(peer, {}), rounds.get(baseline, {})
        if not own:
            errors = [s["error"] for s in samples if s["peer"] == peer and "error" in s]
            lines.append(f"| {peer} | {errors[-1] if errors else 'no sample that is quiet enough'} |")
            continue
        cells = [median_cell(list(own.values()), column) for column in COLUMNS]
        ratios = sorted(own[i][key] / base[i][key] for i in own if i in base)
        shown = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}–{ratios[-1]:.2f})" if ratios else "-"
        lines.append(f"| {peer} | {' | '.join(cells)} | {shown} | {len(own)} |")
    return "\n".join(lines)


def median_cell(samples: Sequence[Sample], key: str) -> str:
    values = [s[key] for s in samples if s.get(key) is not None]
    if not values:
        return "-"
    value = statistics.median(values)
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def print_report(samples: Sequence[Sample], baseline: str, max_other: float) -> None:
    print("\n## Start\n\n" + start_table(samples))
    for workload in sorted({s["workload"] for s in samples if s.get("workload")}):
        print(f"\n## {workload}\n\n" + workload_table(workload, samples, baseline, max_other))


def print_sizes(peers: Mapping[str, Mapping[str, Any]]) -> None:
    """Install sizes, bytecode left out."""
    print("| install | MiB | distributions |\n|---|--:|--:|")
    roots = {e.get("install") or str(Path(e["python"]).parents[1]) for e in peers.values()}
    for root in map(Path, sorted(roots)):
        if root.is_dir():
            files = [f for f in root.rglob("*") if f.is_file() and not f.is_symlink() and "__pycache__" not in f.parts]
            count = len(list(root.glob("lib/python*/site-packages/*.dist-info")))
            print(f"| {root.name} | {sum(f.stat().st_size for f in files) / 2**20:,.0f} | {count} |")


def check(names: Sequence[str], entries: Mapping[str, Mapping[str, Any]], args: argparse.Namespace) -> None:
    """Start each peer alone and print how much of its greedy answer is that of the first one, which gives token ids."""
    decode = load_tokenizer(entries[names[0]]["model"], True).decode
    expected: list[int] = []
    print(f"| peer | the same as {names[0]} says |\n|---|---|", flush=True)
    for name in names:
        with open_log() as log, stopping([peer := Peer(name, entries[name], args.threads, log)]):
            answer = peer.start(args.timeout)
            answer = answer if "error" in answer else peer.ask("check", 0, args.timeout)
        said = answer.get("said", [])
        expected = expected or said
        is_text = isinstance(said, str)
        num_same = num_equal(said, decode(expected) if is_text else expected)
        unit = "characters" if is_text else "tokens"
        print(f"| {name} | {answer.get('error') or f'{num_same} of {len(said)} {unit}'} |", flush=True)


def num_equal(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Elements before the first that differs."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def open_log() -> IO[str]:
    """What peers print goes there."""
    return (Path(tempfile.gettempdir()) / "peers.log").open("a")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_options(parser, HERE / "peers.json")
    parser.add_argument("--peers", help="names, the baseline first")
    parser.add_argument("--workloads", default="W1,W2,W3,W4,W5")
    parser.add_argument("--starts", type=int, default=1, help="how often each peer is started")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for a start or a workload")
    parser.add_argument("--check", action="store_true", help="compare greedy answers instead of measuring")
    parser.add_argument("--sizes", action="store_true", help="print the sizes of the installations")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.report:
        result = read_results(args.report)[-1]
        print_report(result["samples"], result["peers"][0], args.max_other)
        return
    entries = read_peers(args.config)
    if args.sizes:
        print_sizes(entries)
        return
    names = chosen(args.peers, entries, "peer")
    if args.check:
        check(names, entries, args)
        return
    samples: list[dict[str, Any]] = []

    def note(sample: dict[str, Any]) -> None:
        samples.append(sample)
        keys = ("event", "workload", "first_token_s", "output_tok_s", "total_tok_s", "other_cpu", "error")
        say(sample["peer"], sample, keys)

    with open_log() as log:
        peers = [Peer(name, entries[name], args.threads, log) for name in names]
        run(
            peers,
            args.workloads.split(","),
            args.rounds,
            args.starts,
            note,
            timeout=args.timeout,
            quiet=args.quiet,
            quiet_seconds=args.quiet_seconds,
        )
    print_report(samples, names[0], args.max_other)
    if args.result_dir:
        about = {"peers": names, "threads": args.threads, "rounds": args.rounds}
        append_result(args.result_dir, "peers", {**about, "samples": samples})


if __name__ == "__main__":
    main()
