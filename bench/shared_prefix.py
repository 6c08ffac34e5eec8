"""What sharing a cold prefix is worth: 32 requests with 384 tokens in common submitted at once, caching on and off.

    python bench/shared_prefix.py [--model MODEL] [--rounds 3]

One process holds both engines; they take turns on the same token ids, new ones in each round, so that the prefix is
cold every time. The rate is (prompt + output tokens) / seconds from the submission to the last token.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

from compare_transformers import cpu_name

from lean_engine import LLM, SamplingParams

NUM_REQUESTS, SHARED_TOKENS, OWN_TOKENS, NEW_TOKENS = 32, 384, 32, 32
RESULTS = Path(__file__).parent / "results" / "shared_prefix.jsonl"


def prompts(seed: int) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    shared, *own = (
        [rng.randrange(200, 40000) for _ in range(length)] for length in [SHARED_TOKENS] + [OWN_TOKENS] * NUM_REQUESTS
    )
    return [{"prompt_token_ids": shared + tail} for tail in own]


def measure(llm: LLM, seed: int) -> dict[str, float]:
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    before = llm.engine.scheduler.stats.num_prefill_tokens
    started = time.perf_counter()
    outputs = llm.generate(prompts(seed), params)
    seconds = time.perf_counter() - started
    first = [output.metrics.time_to_first_token or 0.0 for output in outputs]
    return {
        "tok_s": NUM_REQUESTS * (SHARED_TOKENS + OWN_TOKENS + NEW_TOKENS) / seconds,
        "first_token_s": statistics.median(first),
        "prefill_tokens": llm.engine.scheduler.stats.num_prefill_tokens - before,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="as for LLM; default: the demo model")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    llms = {
        name: LLM(args.model, enable_prefix_caching=name == "on", max_model_len=1024, threads=args.threads)
        for name in ("on", "off")
    }
    figures: dict[str, list[dict[str, float]]] = {name: [] for name in llms}
    for turn in range(args.rounds):
        for name in list(llms)[:: 1 if turn % 2 else -1]:
            figures[name].append(measure(llms[name], seed=turn))
    ratios = sorted(on["tok_s"] / off["tok_s"] for on, off in zip(figures["on"], figures["off"], strict=True))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    record = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit.stdout.strip(),
        "machine": cpu_name(),
        "model": Path(llms["on"].model).name,
        "figures": figures,
    }
    with RESULTS.open("a") as file:
        file.write(json.dumps(record) + "\n")
    print(f"{record['machine']}, {record['model']}, {args.rounds} rounds in turns\n")
    print("| prefix caching | tok/s | first token (s) | prompt tokens computed |\n|---|--:|--:|--:|")
    for name, rounds in figures.items():
        medians = {key: statistics.median(one[key] for one in rounds) for key in rounds[0]}
        print(
            f"| {name} | {medians['tok_s']:.0f} | {medians['first_token_s']:.1f} | {medians['prefill_tokens']:,.0f} |"
        )
    print(f"\nratio on/off: {statistics.median(ratios):.2f} ({ratios[0]:.2f}–{ratios[-1]:.2f})")


if __name__ == "__main__":
    main()
