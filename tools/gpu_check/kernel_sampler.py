"""The device's sampler beside the CPU's, on the same logits; and the arrays that timing it needs too."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu_check.arrays import Array, fetch, overwrite, place
from gpu_check.kernel_gemms import run_calls
from lean_engine.engine.device_sampling import slot_setup
from lean_engine.runtime.cuda.driver import Driver
from lean_engine.runtime.cuda.sampling import (
    SamplingArrays,
    SamplingKind,
    SamplingSizes,
    sampling_calls,
    start_call,
    start_record,
)
from lean_engine.sampling import SamplingParams
from lean_engine.sampling.sampler import Sampler, SamplingState

PROMPT = (1, 5, 9)
SamplerCase = tuple[int, tuple[dict[str, Any], ...]]  # V, options of each row


def sampler_cases() -> Iterator[SamplerCase]:
    kinds: tuple[dict[str, Any], ...] = (
        {"temperature": 0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 40},
        {"temperature": 1.3, "top_p": 0.9},
        {"temperature": 0.9, "top_k": 50, "top_p": 0.8, "min_p": 0.02},
        {"temperature": 0.8, "repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.3},
        {"temperature": 1.0, "logit_bias": {7: 4.0, 11: -3.0}},
    )
    for vocab_size in (1000, 32_003, 151_936):
        yield vocab_size, kinds


def check_sampler(driver: Driver, case: SamplerCase) -> float:
    """0 where all tokens are equal; each differing token is an error, since both samplers use the same noise."""
    vocab_size, options = case
    params = [SamplingParams(seed=i + 1, **option) for i, option in enumerate(options)]
    logits = np.random.default_rng(vocab_size).standard_normal((len(params), vocab_size)).astype(np.float32) * 3
    device = DeviceSampler.start(driver, vocab_size, params)
    run_calls(driver, sampling_calls(device.arrays, place(driver, logits, "float32"), device.kind))
    found = fetch(driver, device.arrays.results)[:, 0].tolist()
    states = [SamplingState(p, PROMPT, eos_token_ids=(2,)) for p in params]
    wanted = Sampler(vocab_size).sample(logits.copy(), states, [len(PROMPT)] * len(params)).token_ids
    assert found == wanted, f"tokens are {found}, the CPU's {wanted}"
    return 0.0


@dataclass(frozen=True, eq=False)
class DeviceSampler:
    """A slot for each row, started."""

    arrays: SamplingArrays
    kind: SamplingKind

    @classmethod
    def start(cls, driver: Driver, vocab_size: int, params: Sequence[SamplingParams]) -> DeviceSampler:
        sizes = SamplingSizes(vocab_size, len(params), len(params), list_words=256)
        arrays = SamplingArrays.allocate(sizes, driver.allocate)
        setups = [
            slot_setup(
                p, PROMPT, num_prompt=len(PROMPT), seed=seed_of(p), max_total_tokens=1_000_000, eos_token_ids=(2,)
            )
            for p in params
        ]
        records = [start_record(setup, slot, vocab_size) for slot, setup in enumerate(setups)]
        starts = np.cumsum([0, *map(len, records)])[:-1]
        words: Array = place(driver, np.concatenate(records), "int32")
        run_calls(driver, [start_call(arrays, words, place(driver, starts, "int32"), vocab_size)])
        overwrite(driver, arrays.row_slots, np.arange(len(params)))
        kind = SamplingKind()
        for setup in setups:
            kind |= setup.kind()
        return cls(arrays, kind)


def seed_of(params: SamplingParams) -> int:
    return SamplingState(params, PROMPT).seed
