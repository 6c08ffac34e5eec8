"""The workloads of the comparison with peers: token ids and output lengths from a fixed seed. Standard library only.

    W0   warm-up: 4 requests, 16 prompt and 8 output tokens
    W1   latency: one request, 128/128
    W2   batch: 16 requests at once, 128/128
    W3   mixed serving: 32 requests at once, prompts of 16 to 512 (log-uniform), outputs of 16 to 256, 16 run together
    W4   shared prefix: 32 requests, 384 shared and 32 own prompt tokens, 32 output tokens, 16 run together
    W5   prefill: one prompt of 1536, one output token

Every variant of a workload has the same lengths and other token ids, so that no cache knows them from a round before.
"""

from __future__ import annotations

import math
import random
from typing import NamedTuple

SEED = 20240607
LOWEST_ID, END_ID = 100, 49000  # away from the special tokens of small vocabularies
NAMES = ("W0", "W1", "W2", "W3", "W4", "W5")


class Request(NamedTuple):
    prompt: list[int]  # token ids
    max_tokens: int


class Workload(NamedTuple):
    name: str
    requests: list[Request]  # all submitted at once
    max_concurrent: int  # that run together


def lengths(name: str) -> list[tuple[int, int]]:
    """Prompt and output tokens of each request."""
    if name == "W3":
        rng = random.Random(SEED)
        low, high = math.log(16), math.log(512)
        return [(round(math.exp(rng.uniform(low, high))), rng.randint(16, 256)) for _ in range(32)]
    simple = {"W0": (16, 8, 4), "W1": (128, 128, 1), "W2": (128, 128, 16), "W4": (416, 32, 32), "W5": (1536, 1, 1)}
    prompt_len, output_len, count = simple[name]
    return [(prompt_len, output_len)] * count


def make_workload(name: str, variant: int) -> Workload:
    """One of NAMES; the same name and variant give the same ids everywhere."""
    rng = random.Random(f"{SEED}-{name}-{variant}")
    shared = [rng.randrange(LOWEST_ID, END_ID) for _ in range(384 if name == "W4" else 0)]
    requests = []
    for prompt_len, output_len in lengths(name):
        own = [rng.randrange(LOWEST_ID, END_ID) for _ in range(prompt_len - len(shared))]
        requests.append(Request(shared + own, output_len))
    return Workload(name, requests, 1 if name in ("W1", "W5") else 16)
