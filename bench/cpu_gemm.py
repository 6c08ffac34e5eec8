"""Products of the compiled CPU device: microseconds, GB/s and GFLOP/s per format, shape and rows, beside NumPy's.

    python bench/cpu_gemm.py [--formats float32,int8] [--shapes 1536x576] [--rows 1,16,512] [--threads 1,2]
        [--products float32,bfloat16] [--rounds 40]

Weights stand in as many copies as it takes to leave the second-level cache (--working-set), and are used in turn, as
the layers of a model are. NumPy multiplies float32 [O, C] the faster way of x @ W.T and (W @ x.T).T, with as many BLAS
threads. Ceilings: a loop that only reads the same bytes, and multiply-adds in registers. Everything runs in turn in
each round; the figures are minima over rounds (--median: medians), for a machine that others use too, and with one
thread they are of CPU time.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lean_engine.checkpoint.demo_model import cache_directory
from lean_engine.runtime.cpu import blas
from lean_engine.runtime.cpu.native import gemm
from lean_engine.runtime.cpu.native.compiler import find_compiler
from lean_engine.runtime.cpu.native.launches import NativeLaunch, Pointer, Precision, address
from lean_engine.runtime.cpu.native.library import Library, Native, build_library
from lean_engine.runtime.cpu.native.matrices import BLOCKS, FORMATS, Matrix, matrix_of
from lean_engine.runtime.cpu.native.pool import LaunchList
from lean_engine.runtime.cpu.native.sources import Sources, kernel_sources

SHAPES = "576x576,960x576,1536x576,576x1536,49152x576"
READ_BYTES = 1 << 18  # of a task of the read loop
FMA_ROUNDS = 20_000
CHUNK_SECONDS = 1e-3  # of one timing
Int = ctypes.c_int64


class ReadBytesArgs(ctypes.Structure):
    _fields_ = (("bytes", Pointer), ("out", Pointer), ("count", Int), ("per_task", Int))


class MultiplyRegistersArgs(ctypes.Structure):
    _fields_ = (("out", Pointer), ("rounds", Int))


class Figures:
    """Seconds of the candidates, timed in turn.

    Each candidate is a list of calls that are worth the same: a timing is of some of them, about a millisecond, so that
    it fits between the time slices of others; the next timing goes on where the last one ended.
    """

    def __init__(self, rounds: int, clock: Callable[[], float], pick: Callable[[list[float]], float]) -> None:
        self.rounds, self.clock, self.pick = rounds, clock, pick

    def measure(self, **candidates: Sequence[Callable[[], Any]]) -> dict[str, float]:
        """Seconds of one call of each candidate."""
        chunks = {name: chunk_length(self.clock, calls) for name, calls in candidates.items()}
        seconds: dict[str, list[float]] = {name: [] for name in candidates}
        for round_number in range(self.rounds):
            for name, calls in candidates.items():
                length = chunks[name]
                chosen = [calls[(round_number * length + i) % len(calls)] for i in range(length)]
                started = self.clock()
                for call in chosen:
                    call()
                seconds[name].append((self.clock() - started) / length)
        return {name: self.pick(values) for name, values in seconds.items()}


def chunk_length(clock: Callable[[], float], calls: Sequence[Callable[[], Any]]) -> int:
    best = math.inf
    for call in calls[:3]:
        started = clock()
        call()
        best = min(best, clock() - started)
    return max(1, round(CHUNK_SECONDS / best))


def open_native(num_threads: int) -> Native:
    sources = kernel_sources()
    with_ceilings = Sources([*sources.files, Path(__file__).with_name("cpu_ceilings.c")], sources.include)
    path = build_library(find_compiler(), with_ceilings, cache_directory() / "cpu")
    return Native(Library(path, (*gemm.ARGUMENTS, ReadBytesArgs, MultiplyRegistersArgs)), num_threads)


def random_weights(
    rng: np.random.Generator, format: str, rows: int, depth: int, native: Native, products: str
) -> Matrix:
    """A packed matrix with about as small weights as a model's."""
    weights = (rng.standard_normal((rows, depth)) / np.sqrt(depth)).astype(np.float32)
    if format not in BLOCKS:
        return matrix_of(weights, native, Precision(format, products))
    if not format.endswith("k"):
        from gguf import GGMLQuantizationType, quants

        return matrix_of(
            quants.quantize(weights, GGMLQuantizationType[format.upper()]),
            native,
            Precision("stored", products),
            format,
        )
    block = {"q4_k": 144, "q6_k": 210}[format]  # which the gguf package cannot make: random bits, small scales
    raw = rng.integers(0, 256, (rows, depth // 256, block), dtype=np.uint8)
    scale = np.full((rows, depth // 256, 1), 1e-4, np.float16).view(np.uint8)
    for place in (0, 2) if format == "q4_k" else (208,):
        raw[..., place : place + 2] = scale
    return matrix_of(raw.reshape(rows, -1), native, Precision("stored", products), format)


def copies_of(native: Native, matrix: Matrix, working_set: int) -> list[Matrix]:
    count = max(1, -(-working_set // matrix.nbytes))
    copies = [matrix]
    for _ in range(count - 1):
        parts = []
        for part in matrix.parts:
            panels = native.weight_memory.take(part.panels.shape, np.uint8)
            panels[...] = part.panels
            parts.append(replace(part, panels=panels))
        copies.append(Matrix(matrix.shape, parts, matrix.products))
    return copies


def read_launch(matrix: Matrix, sink: np.ndarray) -> NativeLaunch:
    panels = matrix.parts[0].panels
    args = ReadBytesArgs(address(panels), address(sink), panels.nbytes, READ_BYTES)
    return NativeLaunch("read_bytes", args, -(-panels.nbytes // READ_BYTES))


def numpy_product(weights: np.ndarray, x: np.ndarray, turned: bool) -> Callable[[], Any]:
    out = np.empty((len(weights), len(x)) if turned else (len(x), len(weights)), np.float32)
    return (lambda: np.matmul(weights, x.T, out=out)) if turned else (lambda: np.matmul(x, weights.T, out=out))


@dataclass(frozen=True)
class Weights:
    """One shape in one format, in as many copies as the working set needs, and as NumPy's float32."""

    packed: list[Matrix]
    plain: list[NDArray[np.float32]]


def make_weights(native: Native, format: str, shape: tuple[int, int], products: str, options: Any) -> Weights:
    rng = np.random.default_rng(0)
    packed = copies_of(native, random_weights(rng, format, *shape, native, products), options.working_set << 20)
    count = -(-(options.working_set << 18) // math.prod(shape)) if options.numpy else 0
    one = rng.standard_normal(shape, np.float32)
    return Weights(packed, [one.copy() for _ in range(count)])


def bench(native: Native, weights: Weights, rows: int, figures: Figures) -> str:
    """One line of figures."""
    first = weights.packed[0]
    outputs, depth = first.shape
    x = np.random.default_rng(1).standard_normal((rows, depth)).astype(np.float32)
    out, sink = np.empty((rows, outputs), np.float32), np.empty(1 << 16, np.float32)
    num_bytes = gemm.workspace_bytes([x.shape, first.shape], {}, native.num_threads)
    workspace = native.weight_memory.take((num_bytes,), np.uint8)
    modes = gemm.Modes.of(native.library)

    def call(launches: list[NativeLaunch]) -> Callable[[], None]:
        return partial(native.pool.run, LaunchList(native.library, launches))

    def launches(matrix: Matrix) -> list[NativeLaunch]:
        places = address(x), x.shape, 0, address(out), address(workspace)
        return gemm.launches(modes, native.num_threads, matrix, *places)

    candidates: dict[str, Sequence[Callable[[], Any]]] = {
        "ours": [call(launches(matrix)) for matrix in weights.packed],
        "read": [call([read_launch(matrix, sink)]) for matrix in weights.packed],
    }
    if weights.plain:
        candidates["numpy"] = [numpy_product(w, x, False) for w in weights.plain]
        candidates["turned"] = [numpy_product(w, x, True) for w in weights.plain]
    seconds = figures.measure(**candidates)
    ours, read, flops = seconds["ours"], seconds["read"], 2e-9 * rows * outputs * depth
    line = (
        f"{first.format:8s} {first.products:8s} {outputs:6d}x{depth:<5d} T={rows:<4d} {native.num_threads} thr"
        f" {ours * 1e6:9.1f} us {first.nbytes / ours / 1e9:6.1f} GB/s ({read / ours:4.2f} of read"
        f" {first.nbytes / read / 1e9:5.1f}) {flops / ours:7.1f} GFLOP/s"
    )
    if weights.plain:
        numpy = min(seconds["numpy"], seconds["turned"])
        line += f" | NumPy {numpy * 1e6:9.1f} us {flops / numpy:6.1f} GFLOP/s, {numpy / ours:5.2f} times"
    return line


def fma_peak(native: Native, figures: Figures) -> float:
    """GFLOP/s of multiply-adds in registers."""
    sink = np.empty(1 << 10, np.float32)
    launch = NativeLaunch("multiply_registers", MultiplyRegistersArgs(address(sink), FMA_ROUNDS), native.num_threads)
    launches = LaunchList(native.library, [launch])
    width = int(native.library.function("registers_width", Int)())
    seconds = figures.measure(peak=[partial(native.pool.run, launches)])["peak"]
    return native.num_threads * FMA_ROUNDS * 12 * 2 * width / seconds / 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--products", default="float32")
    parser.add_argument("--shapes", default=SHAPES)
    parser.add_argument("--rows", default="1,2,4,8,16,32,64,512")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--working-set", type=int, default=128, help="MiB of weights that are used in turn")
    parser.add_argument("--median", action="store_true")
    parser.add_argument("--no-numpy", dest="numpy", action="store_false")
    options = parser.parse_args()
    texts = options.formats, options.products, options.shapes
    blas.hold()
    for threads in map(int, options.threads.split(",")):
        native = open_native(threads)
        clock = time.thread_time if threads == 1 else time.perf_counter
        figures = Figures(options.rounds, clock, statistics.median if options.median else min)
        blas.set_num_threads(threads)
        print(
            f"{threads} of {os.cpu_count()} threads: {fma_peak(native, figures):.0f} GFLOP/s in registers", flush=True
        )
        for format, products, shape in product(*(text.split(",") for text in texts)):
            outputs, depth = map(int, shape.split("x"))
            weights = make_weights(native, format, (outputs, depth), products, options)
            for rows in map(int, options.rows.split(",")):
                print(bench(native, weights, rows, figures), flush=True)
        native.close()


if __name__ == "__main__":
    main()
