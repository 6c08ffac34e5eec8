"""The matrix products of decode steps by graph replay, over weights that are in no cache.

A row per shape and number of rows T: the way that the device chooses, its share of the measured bandwidth (weights,
activations and results count), and what cuBLASLt's favourite and the likeliest skinny kernel take; then torch.matmul in
a process of its own. The choices are kept: what decode steps have chosen is found here.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from operator import itemgetter

from gpu_check.arrays import Array, noise, shaped
from gpu_check.ceilings import bandwidth_of, share
from gpu_check.context import Context, Row
from gpu_check.shapes import ELEMENT_BYTES, shape_of
from gpu_check.timing import Stopwatch
from gpu_check.torch_process import torch_rows
from gpu_check.wiring import LIBRARY, MakeLaunch, chosen_gemm, gemm_candidates, open_driver
from lean_engine.errors import LaunchError
from lean_engine.runtime.cuda.driver import Driver
from lean_engine.runtime.cuda.gemm_kernels import Gemm, Problem

MODELS = ("llama-3.1-8b", "llama-3.2-1b", "qwen3-0.6b")
ROWS = (1, 8, 32, 128, 2, 4, 16, 64, 512)  # what tells most first
ROTATION_BYTES = 256 << 20  # several times the largest L2
MAX_COPIES = 64
TORCH_SECONDS = 45.0
KEPT_SECONDS = 15.0  # of them, at the end
Shapes = dict[tuple[int, int], str]  # columns, depth → names
Times = dict[tuple[int, int, int], float]  # columns, depth, rows → microseconds


def run(context: Context) -> None:
    driver = open_driver(context)
    watch = Stopwatch(driver)
    bandwidth = bandwidth_of(context)
    shapes = shapes_of(("tiny",) if context.is_emulated else MODELS)
    every_t = (1, 8) if context.is_emulated else ROWS
    own: Times = {}
    pool = noise(driver, pool_elements(shapes, context.is_emulated), "bfloat16", scale=0.02)
    left_out = []
    for num_rows in every_t:
        for (columns, depth), title in shapes.items():
            if context.seconds_left() < KEPT_SECONDS:
                left_out.append(f"{title} T={num_rows}")
                continue
            problem = problem_of(title, num_rows, columns, depth)
            try:
                own[columns, depth, num_rows] = measure(context, watch, pool, problem, title, bandwidth)
            except LaunchError as error:
                context.row(f"{title} T={num_rows}", error=str(error))
    if left_out:
        context.row("no time was left", left_out=left_out)
    if not context.is_emulated:
        del pool
        questions = [{"columns": n, "depth": k, "rows": t} for n, k, t in own]
        compare(context, own, torch_rows(context, "gemm", questions, min(TORCH_SECONDS, context.seconds_left() - 2)))


def compare(context: Context, own: Times, others: Sequence[Row]) -> None:
    """One row over all shapes: how many times faster than torch.matmul, and where slower."""
    ratios = {
        key: row["us"] / own[key]
        for row in others
        if "us" in row and (key := (row["columns"], row["depth"], row["rows"])) in own
    }
    if ratios:
        slower = [f"N={n} K={k} T={t}: {r:.2f}" for (n, k, t), r in sorted(ratios.items(), key=itemgetter(1)) if r < 1]
        context.row(
            "torch.matmul's time / ours", shapes=len(ratios), median=statistics.median(ratios.values()),
            worst=min(ratios.values()), best=max(ratios.values()), slower=slower,
        )  # fmt: skip


def shapes_of(names: tuple[str, ...]) -> Shapes:
    found: Shapes = {}
    for name in names:
        for gemm, sizes in shape_of(name).gemms.items():
            label = f"{name} {gemm}"
            found[sizes] = f"{found[sizes]}, {label}" if sizes in found else label
    return found


def pool_elements(shapes: Shapes, is_emulated: bool) -> int:
    largest = max(columns * depth for columns, depth in shapes)
    return largest if is_emulated else max(2 * largest, ROTATION_BYTES // ELEMENT_BYTES)


def problem_of(title: str, num_rows: int, columns: int, depth: int) -> Problem:
    """Logits are float32."""
    return Problem(num_rows, columns, depth, "bfloat16", "float32" if title.endswith("head") else "bfloat16")


def measure(
    context: Context, watch: Stopwatch, pool: Array, problem: Problem, title: str, bandwidth: float | None
) -> float:
    """Microseconds of the device's choice; beside it the favourites of cuBLASLt and among the skinny kernels."""
    gemms = rotated(watch.driver, pool, problem)

    def time_of(make: MakeLaunch) -> float:
        return watch.graph_us([make(gemm) for gemm in gemms], rounds=3)

    choice, make = chosen_gemm(watch.driver, problem)
    us = time_of(make)
    offered = gemm_candidates(watch.driver, problem)
    library = next((make for name, make in offered if name.startswith(LIBRARY)), None)
    skinny = next((make for name, make in offered if not name.startswith(LIBRARY)), None)
    gb_s = 1e-3 * num_bytes(problem) / us
    context.row(
        f"{title} N={problem.num_out} K={problem.depth} T={problem.num_rows}",
        columns=problem.num_out, depth=problem.depth, rows=problem.num_rows, choice=choice, us=us, gb_s=gb_s,
        share=share(gb_s, bandwidth), tflops=2e-6 * problem.num_rows * problem.num_out * problem.depth / us,
        cublaslt_us=time_of(library) if library else None, skinny_us=time_of(skinny) if skinny else None,
        measured=f"{watch.clock.name}, graph of {len(gemms)} products over {len(gemms)} copies of the weights",
    )  # fmt: skip
    return us


def rotated(driver: Driver, pool: Array, problem: Problem) -> list[Gemm]:
    """The same product over as many different weights as the pool has and the cache has not room for."""
    size = problem.num_out * problem.depth
    copies = max(1, min(MAX_COPIES, pool.shape[0] // size))
    x = shaped(pool, 0, (problem.num_rows, problem.depth))
    out = driver.allocate((problem.num_rows, problem.num_out), problem.out_dtype)
    return [Gemm(out, x, shaped(pool, i * size, (problem.num_out, problem.depth))) for i in range(copies)]


def num_bytes(problem: Problem) -> int:
    out_bytes = 4 if problem.out_dtype == "float32" else 2
    weights_and_x = (problem.num_out + problem.num_rows) * problem.depth * ELEMENT_BYTES
    return weights_and_x + math.prod((problem.num_rows, problem.num_out)) * out_bytes
