"""Attention of the CPU device alone: compiled kernels beside NumPy's, in one run, taken in turns.

Decodes (one query per request) are told in GB/s of keys and values, beside what one thread reads from memory and a
cache; prompt chunks in GFLOP/s, beside the peak of the processor's multiply-adds as a loop in registers reaches it.
A variant is named by its kernels and its cache; "tiles" are those of dtype="bfloat16", where AMX tiles multiply.
Each case runs over enough layers of its own that the caches do not stay in the processor's.

    python bench/cpu_attention.py [--threads 2] [--rounds 5] [--case "decode 16"] [--json results.jsonl]

With one thread its CPU time is taken, which other work on the machine disturbs less than the time of the wall.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lean_engine.checkpoint.demo_model import cache_directory
from lean_engine.dtypes import numpy_dtype
from lean_engine.runtime.cpu.device import CpuDevice
from lean_engine.runtime.cpu.native.compiler import find_compiler
from lean_engine.runtime.cpu.native.device import NativeCpuDevice
from lean_engine.runtime.cpu.native.launches import Precision
from lean_engine.runtime.cpu.native.library import build_library
from lean_engine.runtime.cpu.native.sources import kernel_sources
from lean_engine.runtime.device import LaunchArgs
from lean_engine.runtime.kernels import KERNELS

NUM_KV_HEADS, GROUP, HEAD_DIM, BLOCK_SIZE = 3, 3, 64, 16  # of SmolLM2-135M
MAX_BYTES = 200 << 20  # of the layers of a case
CASES = [
    *(
        (f"decode {batch} x {context}", [(context - 1, 1)] * batch)
        for batch in (1, 16, 64)
        for context in (128, 512, 4096)
    ),
    ("prefill 512 over 0", [(0, 512)]),
    ("prefill 512 over 1024", [(1024, 512)]),
    ("prefill 512 over 1536", [(1536, 512)]),
]
VARIANTS = (
    *("numpy float32", "native float32", "native bfloat16", "native float16"),
    *("tiles float32", "tiles bfloat16"),
)

PEAK = r"""
#include "common.h"
EXPORT float multiply_adds(int64_t count) {
    vecf sums[WIDTH == 16 ? 24 : 12], x = vbroadcast(0.999f), y = vbroadcast(1e-3f), total = {0};
    const int n = sizeof sums / sizeof *sums;
    for (int i = 0; i < n; i++) sums[i] = vbroadcast((float)i);
    for (int64_t k = 0; k < count; k++) {
        _Pragma("GCC unroll 32") for (int i = 0; i < n; i++) sums[i] = sums[i] * x + y;
        __asm__ volatile("");
    }
    for (int i = 0; i < n; i++) total += sums[i];
    return vsum(total);
}
EXPORT int64_t flops(void) { return (WIDTH == 16 ? 24 : 12) * WIDTH * 2; }
EXPORT float read_all(const float *p, int64_t count) {
    vecf sums[8] = {{0}}, total = {0};
    for (int64_t i = 0; i < count; i += 8 * WIDTH)
        _Pragma("GCC unroll 8") for (int j = 0; j < 8; j++) sums[j] += vload(p + i + j * WIDTH);
    for (int j = 0; j < 8; j++) total += sums[j];
    return vsum(total);
}
"""


@dataclass
class Result:
    case: str
    variant: str
    us: float  # of one layer, the least of all rounds
    gb_s: float
    gflop_s: float


class Machine:
    """What one thread reaches: multiply-adds in registers, and reading."""

    def __init__(self) -> None:
        compiler = find_compiler()
        with tempfile.TemporaryDirectory() as directory:
            source, library = Path(directory) / "peak.c", Path(directory) / "peak.so"
            source.write_text(PEAK)
            include = f"-I{kernel_sources().include}"
            flags = ("-std=gnu11", "-O3", "-fPIC", "-shared", "-fvisibility=hidden", *compiler.machine)
            subprocess.run([*compiler.command, *flags, include, str(source), "-o", str(library), "-lm"], check=True)
            self._library = ctypes.CDLL(str(library))
        for name in ("multiply_adds", "read_all"):
            getattr(self._library, name).restype = ctypes.c_float
        self._memory = np.ones(1 << 26, np.float32)

    def peak_gflop_s(self) -> float:
        seconds = least(lambda: self._library.multiply_adds(ctypes.c_int64(400_000)), 5)
        return float(self._library.flops()) * 400_000 / seconds / 1e9

    def read_gb_s(self, num_bytes: int) -> float:
        count, repeats = num_bytes // 4, max(1, (64 << 20) // num_bytes)
        pointer = ctypes.c_void_p(self._memory.ctypes.data)

        def read() -> None:
            for _ in range(repeats):
                self._library.read_all(pointer, ctypes.c_int64(count))

        return num_bytes * repeats / least(read, 5) / 1e9


def least(run: Callable[[], Any], rounds: int, clock: Callable[[], float] = time.thread_time) -> float:
    """Seconds, the shortest of some rounds."""
    times = []
    for _ in range(rounds):
        start = clock()
        run()
        times.append(clock() - start)
    return min(times)


def devices(threads: int) -> dict[str, Any]:
    path = build_library(find_compiler(), kernel_sources(), cache_directory() / "cpu")
    made: dict[str, Any] = {"numpy float32": CpuDevice(threads)}
    for variant in VARIANTS[1:]:
        kernels, cache_type = variant.split()
        precision = Precision(products="bfloat16" if kernels == "tiles" else "float32")
        made[variant] = NativeCpuDevice(path, threads, precision, cache_type)
    return made


def layers_of(requests: Sequence[tuple[int, int]]) -> int:
    num_bytes = sum(sum(request) for request in requests) * NUM_KV_HEADS * HEAD_DIM * 2 * 4
    return int(np.clip(MAX_BYTES // num_bytes, 1, 30))


def capture(device: Any, variant: str, requests: Sequence[tuple[int, int]], num_layers: int) -> Callable[[], None]:
    """A replay of paged_attention over each layer's caches, whose blocks are dealt out in random order."""
    random = np.random.default_rng(0)
    lengths = np.array([context + new for context, new in requests], np.int32)
    blocks = -(-lengths // BLOCK_SIZE)
    tables = np.zeros((len(requests), blocks.max()), np.int32)
    order = 1 + random.permutation(blocks.sum())
    for row, stop, count in zip(tables, np.cumsum(blocks), blocks, strict=True):
        row[:count] = order[stop - count : stop]
    starts = np.cumsum([0, *(new for _, new in requests)]).astype(np.int32)
    q = random.standard_normal((starts[-1], NUM_KV_HEADS * GROUP * HEAD_DIM)).astype(np.float32)
    out = np.empty_like(q)
    shape = (1 + int(blocks.sum()), NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
    dtype = numpy_dtype(variant.split()[1])
    scalars = {"head_dim": HEAD_DIM, "scale": HEAD_DIM**-0.5, "window": None, "softcap": None}
    launches = []
    for _ in range(num_layers):
        caches = [random.standard_normal(shape, np.float32).astype(dtype) for _ in range(2)]
        inputs = [q, *caches, tables, starts, lengths]
        workspace = np.empty(workspace_bytes(device, inputs, scalars), np.uint8)
        checked = KERNELS["paged_attention"].check(inputs, [out], scalars, "float32", caches[0].dtype.name)
        launches.append(LaunchArgs("paged_attention", inputs, [out], checked, workspace))
    return device.capture(launches)


def workspace_bytes(device: Any, inputs: Sequence[Any], scalars: dict[str, Any]) -> int:
    from lean_engine.ir.graph import TensorType, Value
    from lean_engine.passes import Launch

    values = tuple(Value(f"in{i}", TensorType(a.shape, a.dtype.name)) for i, a in enumerate(inputs))
    return int(device.workspace_bytes(Launch("paged_attention", values, (), scalars), {}))


def measure(case: str, requests: Sequence[tuple[int, int]], by_variant: dict[str, Any], rounds: int) -> list[Result]:
    num_layers = layers_of(requests)
    replays = {v: capture(device, v, requests, num_layers) for v, device in by_variant.items()}
    times = dict.fromkeys(replays, np.inf)
    for _ in range(rounds + 1):  # in turns
        for variant, replay in replays.items():
            clock = time.thread_time if by_variant[variant].num_threads == 1 else time.perf_counter
            times[variant] = min(times[variant], least(replay, 1, clock) / num_layers)
    elements = sum(sum(request) for request in requests) * NUM_KV_HEADS * HEAD_DIM * 2
    seen = sum(context + i + 1 for context, new in requests for i in range(new))
    flops = 4 * HEAD_DIM * NUM_KV_HEADS * GROUP * seen
    return [
        Result(case, v, t * 1e6, elements * numpy_dtype(v.split()[1]).itemsize / t / 1e9, flops / t / 1e9)
        for v, t in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--case", default="", help="only those whose name has this in it")
    parser.add_argument("--json", type=Path, help="append one line per case and variant")
    options = parser.parse_args()
    machine, by_variant = Machine(), devices(options.threads)
    for case, requests in CASES:
        if options.case not in case:
            continue
        peak, memory, cache = machine.peak_gflop_s(), machine.read_gb_s(256 << 20), machine.read_gb_s(1 << 20)
        results = measure(case, requests, by_variant, options.rounds)
        print(f"{case}: one thread reaches {peak:.0f} GFLOP/s, reads {memory:.1f} GB/s (cache {cache:.0f})")
        slowest = results[0].us
        for r in results:
            rate = f"{r.gb_s:6.1f} GB/s" if case.startswith("decode") else f"{r.gflop_s:6.1f} GFLOP/s"
            print(f"  {r.variant:16} {r.us:10.0f} us {rate}  {slowest / r.us:5.2f} x", flush=True)
            if options.json:
                with options.json.open("a", encoding="utf-8") as file:
                    file.write(
                        json.dumps(asdict(r) | {"threads": options.threads, "peak": peak, "read": memory}) + "\n"
                    )


if __name__ == "__main__":
    main()
