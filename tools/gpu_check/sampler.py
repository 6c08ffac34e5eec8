"""The device's sampler: microseconds of a step by graph replay, for sizes of vocabulary, rows and kinds of request.

The logits are those that the head has just written, so they are in the cache where they fit; nothing is rotated.
"""

from __future__ import annotations

from typing import Any

from gpu_check.arrays import noise
from gpu_check.ceilings import bandwidth_of, share
from gpu_check.context import Context
from gpu_check.kernel_sampler import DeviceSampler
from gpu_check.timing import Stopwatch
from gpu_check.wiring import open_driver
from lean_engine.runtime.cuda.sampling import sampling_calls, sampling_instances
from lean_engine.sampling import SamplingParams

VOCAB_SIZES = (32_000, 49_152, 128_256, 151_936)
ROWS = (1, 8, 32, 128, 256)
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 0.8},
    "top-k and top-p": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "penalties": {"temperature": 0.8, "repetition_penalty": 1.1},
    "greedy, 5 logprobs": {"temperature": 0, "logprobs": 5},
}


def run(context: Context) -> None:
    driver = open_driver(context)
    driver.prepare(sampling_instances())
    watch, bandwidth = Stopwatch(driver), bandwidth_of(context)
    sizes = [(1000, 2)] if context.is_emulated else [(v, r) for v in VOCAB_SIZES for r in ROWS]
    for vocab_size, num_rows in sizes:
        logits = noise(driver, num_rows * vocab_size, "float32").reshape(num_rows, vocab_size)
        for kind, options in KINDS.items():
            params = [SamplingParams(seed=i, ignore_eos=True, **options) for i in range(num_rows)]
            device = DeviceSampler.start(driver, vocab_size, params)
            calls = sampling_calls(device.arrays, logits, device.kind)

            def step(calls: Any = calls) -> None:
                for call in calls:
                    driver.launch(call)

            us = watch.graph_us([step])
            gb_s = 4e-3 * num_rows * vocab_size / us
            context.row(
                f"V={vocab_size} R={num_rows} {kind}", us=us, launches=len(calls), gb_s=gb_s,
                share=share(gb_s, bandwidth), measured=f"{watch.clock.name}; logits once are the bytes",
            )  # fmt: skip
