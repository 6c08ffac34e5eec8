"""Decode steps of whole models with weights of noise: the graph alone by events, and the engine's step by the clock.

The graph is what the engine replays, its inputs set once to requests of the context's length in blocks of their own.
Engine steps are the engine's own loop: tokens chosen on the device, a step launched before the results of the one
before are read; and, beside it, without that. Idle is the share of the time in which the GPU has no step's work to do.
The roofline is the time in which the best measured bandwidth reads weights once and all keys and values.
"""

from __future__ import annotations

import gc
import statistics
import time
from typing import Any

import numpy as np

from gpu_check.arrays import repeat
from gpu_check.ceilings import bandwidth_of
from gpu_check.context import Context, describe
from gpu_check.loading import NoiseCheckpoint, start
from gpu_check.shapes import CONFIGS, Shape, shape_of
from gpu_check.timing import Stopwatch, Timeline
from gpu_check.wiring import open_driver
from lean_engine.engine.core import Engine
from lean_engine.engine.start import Started
from lean_engine.runtime.cuda.device import CudaDevice
from lean_engine.runtime.cuda.driver import Driver
from lean_engine.runtime.program import Program
from lean_engine.sampling.params import SamplingParams

LARGEST = ("llama-3.1-8b",)
MODELS = ("qwen3-0.6b", "llama-3.2-1b", "smollm2-135m")
BATCHES = (1, 8, 32, 128)
CONTEXT_LEN = 1024
ENGINE_STEPS = 30
BLOCK_SIZE = 16
STEP_TOKENS = 2048  # of prompts
NOISE_ELEMENTS = 1 << 22


def run_largest(context: Context) -> None:
    run(context, LARGEST)


def run(context: Context, models: tuple[str, ...] = MODELS) -> None:
    driver = open_driver(context)
    names = ("tiny",) if context.is_emulated else models
    failed: list[str] = []
    for name in names:
        try:
            measure_model(context, driver, shape_of(name))
        except Exception as error:  # the other models may fit where this one does not
            failed.append(name)
            context.row(name, error=describe(error))
        gc.collect()
    if len(failed) == len(names):
        raise RuntimeError(f"no decode step could be measured: {', '.join(failed)}")


def measure_model(context: Context, driver: Driver, shape: Shape) -> None:
    batches = (1, 3) if context.is_emulated else BATCHES
    context_len, steps = (40, 4) if context.is_emulated else (CONTEXT_LEN, ENGINE_STEPS)
    began = time.monotonic()
    started = load(driver, shape, max(batches), context_len + steps + BLOCK_SIZE)
    context.row(f"{shape.name} loaded", seconds=time.monotonic() - began, weight_gb=1e-9 * shape.weight_bytes)
    watch, bandwidth, graphs = Stopwatch(driver), bandwidth_of(context), {}
    for batch in batches:
        us = graphs[batch] = graph_us(watch, started.engine.runner.program, batch, context_len)
        num_bytes = shape.decode_bytes(batch, context_len)
        gb_s = 1e-3 * num_bytes / us
        context.row(
            f"{shape.name} B={batch} context={context_len} graph", model=shape.name, batch=batch, graph_ms=us / 1000,
            tok_s=1e6 * batch / us, gb_s=gb_s, roofline=None if bandwidth is None else gb_s / bandwidth,
            measured=f"{watch.clock.name}; graph of a step without sampling; bytes: weights once, keys and values",
        )  # fmt: skip
    timeline = Timeline(driver)
    timeline.listen(started.engine.runner)
    for batch, is_ahead in [*((batch, True) for batch in batches), *((batch, False) for batch in batches[::2])]:
        started.engine.runs_ahead = is_ahead
        found = engine_steps(started.engine, timeline, batch, context_len, steps)
        wall_ms = found["wall_ms"]
        context.row(
            f"{shape.name} B={batch} context={context_len} engine{'' if is_ahead else ', not ahead'}",
            model=shape.name, batch=batch, is_ahead=is_ahead, **found, tok_s=1000 * batch / wall_ms,
            over_graph=wall_ms * 1000 / graphs[batch],
            measured=f"wall clock of Engine.step, median, sampling included; idle by {watch.clock.name}; prefill: with "
            "capturing new sizes",
        )  # fmt: skip


def load(driver: Driver, shape: Shape, batch: int, max_model_len: int) -> Started:
    blocks = -(-max_model_len // BLOCK_SIZE) * batch + 8
    started = start(
        NoiseCheckpoint(CONFIGS[shape.name], "bfloat16"), CudaDevice(driver, "bfloat16"), max_model_len=max_model_len,
        max_num_seqs=batch, num_gpu_blocks_override=blocks, max_num_batched_tokens=max(STEP_TOKENS, batch),
        enable_prefix_caching=False,
    )  # fmt: skip
    host = driver.allocate_host((NOISE_ELEMENTS,), "bfloat16")
    host[...] = np.random.default_rng(0).standard_normal(NOISE_ELEMENTS, np.float32).astype(host.dtype)
    for cache in started.engine.runner.program.caches.values():
        repeat(driver, cache.reshape(-1), host)
    return started


def graph_us(watch: Stopwatch, program: Program, batch: int, context_len: int) -> float:
    """Microseconds of the graph of so many decodes at this context."""
    padded, _, num_rows = program.device.padded(batch, batch, batch, program.max_dims)
    arrays, blocks = program.inputs, -(-context_len // BLOCK_SIZE)
    tables = 1 + np.arange(batch * blocks).reshape(batch, blocks)
    position = context_len - 1
    arrays["block_tables"][:batch, :blocks] = np.random.default_rng(0).permutation(tables.ravel()).reshape(tables.shape)
    fills = {"input_ids": 5, "positions": position, "slot_mapping": -1, "seq_lens": 0, "sample_rows": 0}
    for name, value in fills.items():
        arrays[name][:padded] = value
    arrays["slot_mapping"][:batch] = arrays["block_tables"][:batch, blocks - 1] * BLOCK_SIZE + position % BLOCK_SIZE
    arrays["seq_lens"][:batch] = context_len
    arrays["sample_rows"][:batch] = np.arange(batch)
    arrays["cu_seqlens_q"][: padded + 1] = np.minimum(np.arange(padded + 1), batch)
    program.run(padded, padded, num_rows)
    replay, _ = program._captures[padded, padded, num_rows]
    return watch.median_us(replay)


def engine_steps(engine: Engine, timeline: Timeline, batch: int, context_len: int, steps: int) -> dict[str, Any]:
    """Prefill a batch, then time steps in which all decode."""
    rng = np.random.default_rng(batch)
    params = SamplingParams(temperature=0, max_tokens=steps + 4, ignore_eos=True, detokenize=False)
    vocab_size = engine.model_config.vocab_size
    prompts = [rng.integers(5, vocab_size, context_len).tolist() for _ in range(batch)]
    groups = [engine.add(f"{engine.num_steps}-{i}", prompt, params) for i, prompt in enumerate(prompts)]
    began = time.perf_counter()
    while not all(group.answers[0].token_ids for group in groups) and engine.has_work():
        engine.step()
    prefill_seconds = time.perf_counter() - began
    times: list[float] = []
    while engine.has_work() and len(times) < steps:
        begin = time.perf_counter()
        engine.step()
        if not any(group.is_finished for group in groups):
            times.append(time.perf_counter() - begin)
    last = timeline.num_steps - 1 - len(engine._in_flight)
    errors = {group.answers[0].error for group in groups} - {None}
    for group in groups:
        engine.abort(group.request_id)
    if len(times) < 3:
        raise RuntimeError(
            f"only {len(times)} of {steps} steps had the whole batch: {errors or 'it never ran at once'}"
        )
    idle_share = timeline.idle_share(last - len(times) + 1, last)
    prefill = batch * context_len / prefill_seconds
    return {
        "wall_ms": 1000 * statistics.median(times[1:]),
        "idle_percent": 100 * idle_share,
        "prefill_tok_s": prefill,
        "errors": sorted(errors) or None,
    }
