"""Paged attention by graph replay: decodes of many batches and contexts, and chunks of prompts.

A graph has several layers over different caches, whose bytes together are more than the L2 cache holds, and the plan
that all layers read; the time is that of the graph divided by its layers. Bytes are keys and values, once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from gpu_check.arrays import Array, noise, place, shaped
from gpu_check.ceilings import bandwidth_of, share
from gpu_check.context import Context
from gpu_check.timing import Stopwatch
from gpu_check.wiring import open_driver
from lean_engine.runtime.cuda import attention
from lean_engine.runtime.cuda.device import CudaDevice
from lean_engine.runtime.device import LaunchArgs
from lean_engine.runtime.kernels import KERNELS

HEADS = {"llama-3.1-8b": (32, 8, 128), "llama-3.2-1b": (32, 8, 64), "qwen3-0.6b": (16, 8, 128)}  # Q, K, D
BATCHES = (1, 8, 32, 64, 128, 256)
CONTEXTS = (1024, 4096, 8192, 32768)
CHUNKS = ((512, 512), (512, 4096), (2048, 2048), (2048, 8192), (2048, 32768))  # queries, keys
BLOCK_SIZE = 16
POOL_BYTES = 8 << 30  # of keys, and as much of values
EMULATED_POOL_BYTES = 1 << 20
ROTATION_BYTES = 256 << 20
MAX_LAYERS = 16


@dataclass(frozen=True)
class Case:
    model: str
    heads: tuple[int, int, int]  # Q, K, D
    queries: tuple[int, ...]  # of each request
    keys: tuple[int, ...]
    title: str

    @property
    def num_blocks(self) -> int:
        return sum(-(-n // BLOCK_SIZE) for n in self.keys) + 1

    @property
    def cache_shape(self) -> tuple[int, int, int, int]:
        _, num_kv, head_dim = self.heads
        return self.num_blocks, num_kv, BLOCK_SIZE, head_dim

    @property
    def kv_bytes(self) -> int:
        _, num_kv, head_dim = self.heads
        return 2 * 2 * num_kv * head_dim * sum(self.keys)

    @property
    def flops(self) -> float:
        """Of scores and values that the causal mask keeps."""
        pairs = sum(q * n - q * (q - 1) / 2 for q, n in zip(self.queries, self.keys, strict=True))
        return 4.0 * self.heads[0] * self.heads[2] * pairs


def run(context: Context) -> None:
    driver = open_driver(context)
    device, watch, bandwidth = CudaDevice(driver, "bfloat16"), Stopwatch(driver), bandwidth_of(context)
    pool_bytes = EMULATED_POOL_BYTES if context.is_emulated else POOL_BYTES
    pools = [noise(driver, pool_bytes // 2, "bfloat16") for _ in range(2)]
    left_out = []
    for case in emulated_cases() if context.is_emulated else cases():
        if 2 * math.prod(case.cache_shape) > pool_bytes:
            left_out.append(f"{case.model} {case.title}")
            continue
        layers = max(1, min(MAX_LAYERS, pool_bytes // (2 * math.prod(case.cache_shape)), rotation(case)))
        us = watch.median_us(device.capture(launches(device, case, pools, layers)), layers)
        gb_s = 1e-3 * case.kv_bytes / us
        context.row(
            f"{case.model} {case.title}", us=us, gb_s=gb_s, share=share(gb_s, bandwidth), tflops=1e-6 * case.flops / us,
            kv_mb=1e-6 * case.kv_bytes, layers=layers, measured=f"{watch.clock.name}, graph of plan and layers",
        )  # fmt: skip
    if left_out:
        context.row("more keys than the pool holds", left_out=left_out)


def rotation(case: Case) -> int:
    return -(-ROTATION_BYTES // case.kv_bytes)


def cases() -> Iterator[Case]:
    for model, heads in HEADS.items():
        for context_len in CONTEXTS:
            for batch in BATCHES:
                yield decodes(model, heads, batch, context_len)
        skewed = (32768, *[1024] * 63)
        yield Case(model, heads, (1,) * 64, skewed, "decode B=64 one context 32768, others 1024")
        for queries, keys in CHUNKS:
            yield Case(model, heads, (queries,), (keys,), f"chunk of {queries} in {keys}")
        yield Case(
            model, heads, (*[1] * 64, 448), (*[1024] * 64, 2048), "64 decodes of 1024 and a chunk of 448 in 2048"
        )


def emulated_cases() -> Iterator[Case]:
    heads = (4, 2, 64)
    yield decodes("tiny", heads, 2, 100)
    yield Case("tiny", heads, (20,), (40,), "chunk of 20 in 40")
    yield decodes("tiny", heads, 64, 32768)


def decodes(model: str, heads: tuple[int, int, int], batch: int, context_len: int) -> Case:
    return Case(model, heads, (1,) * batch, (context_len,) * batch, f"decode B={batch} context={context_len}")


def launches(device: CudaDevice, case: Case, pools: list[Array], layers: int) -> list[LaunchArgs]:
    """The layers of one step, each over its own part of the pools."""
    driver, (num_q, _, head_dim) = device.driver, case.heads
    num_tokens = sum(case.queries)
    shape = case.cache_shape
    q, out = (driver.allocate((num_tokens, num_q * head_dim), "bfloat16") for _ in range(2))
    driver.download(shaped(pools[0], 0, q.shape), host := driver.allocate_host(q.shape, "bfloat16"))
    driver.upload(host, q)
    driver.synchronize()
    steps = [place(driver, array, "int32") for array in step_arrays(case)]
    workspace = driver.allocate((attention.parts_bytes(driver.arch, head_dim, driver.num_sms),), "uint8")
    attrs = {"head_dim": head_dim, "scale": head_dim**-0.5, "window": None, "softcap": None}
    found = []
    for layer in range(layers):
        caches = [shaped(pool, layer * math.prod(shape), shape) for pool in pools]
        inputs = [q, *caches, *steps]
        scalars = KERNELS["paged_attention"].check(inputs, [out], attrs, "bfloat16")
        found.append(LaunchArgs("paged_attention", inputs, [out], scalars, workspace))
    return found


def step_arrays(case: Case) -> list[Array]:
    """Block tables in random order, starts of queries, lengths."""
    counts = [-(-n // BLOCK_SIZE) for n in case.keys]
    tables = np.zeros((len(counts), max(counts)), np.int32)
    ids = np.random.default_rng(0).permutation(case.num_blocks - 1) + 1
    start = 0
    for b, count in enumerate(counts):
        tables[b, :count] = ids[start : start + count]
        start += count
    return [tables, np.cumsum([0, *case.queries]), np.array(case.keys)]
