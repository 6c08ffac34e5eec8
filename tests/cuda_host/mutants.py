"""Bugs to plant in kernels: a text, what stands in its place, and the rule by which the emulator must catch it.

The samples' mutants break synchronisation; the engine's, run by the engine's own launch code, break bounds, padding and
arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from cuda_kernel_running import Array, CudaRun, normal
from host_running import CUDA, HERE

WRONG = "wrong result"
SYNC = "__syncthreads();"


@dataclass(frozen=True)
class Mutant:
    file: str
    kernel: str
    old: str  # stands in the file once, or in the header
    new: str
    rule: str  # regular expression of what is reported
    run: Callable[[], CudaRun] | None = None  # None: a sample, run by sample_runs
    header: str | None = None  # which the file includes

    def source(self) -> str:
        """The file with the bug; a header that has it is written into it."""
        directory = HERE if self.run is None else CUDA
        text = (directory / self.file).read_text()
        if self.header is None:
            return replace_once(text, self.old, self.new)
        changed = replace_once((directory / self.header).read_text(), self.old, self.new)
        return replace_once(text, f'#include "{self.header}"', changed.replace("#pragma once", ""))


def replace_once(text: str, old: str, new: str) -> str:
    assert text.count(old) == 1, f"the text to change is there {text.count(old)} times: {old}"
    return text.replace(old, new)


def mutants(
    file: str,
    kernel: str,
    run: Callable[[], CudaRun] | None,
    bugs: dict[str, tuple[str, str, str]],
    header: str | None = None,
) -> dict[str, Mutant]:
    return {f"{kernel}: {name}": Mutant(file, kernel, *bug, run, header) for name, bug in bugs.items()}


# ---- samples

PRODUCT = {
    "no wait for the last copy": ("} else {\n            cp_async_wait<0>();\n", "} else {\n", "cp.async"),
    "a wait for one copy too few": ("cp_async_wait<0>();", "cp_async_wait<1>();", "cp.async"),
    "copies that are never committed": ("        cp_async_commit();\n", "", "cp.async|uninitialised"),
    "no barrier after the wait": (f"{SYNC}  // the", "// the", "race|cp.async|uninitialised"),
    "no barrier before the next fetch": (f"{SYNC}  // before", "// before", "race"),
    "no __syncwarp before the stores": ("    __syncwarp();\n", "", "race|uninitialised"),
    "rows past the tile": ("i < TILE * DEPTH / 8", "i < (TILE + 64) * DEPTH / 8", "race|out of bounds"),
    "rows past the matrix": ("min(first_row + row, num_rows - 1)", "first_row + row", "out of bounds"),
    "results past the matrix": ("row < num_rows && ", "", "out of bounds"),
    "misaligned copies": ("cp_async16(a_tile(buffer) + row", "cp_async16(a_tile(buffer) + 1 + row", "aligned"),
    "misaligned rows of a matrix": ("STRIDE = DEPTH + 8;", "STRIDE = DEPTH + 4;", "aligned"),
    "one lane fewer in the product": (
        "mma_16816<T>(sums[2 * n], l",
        "if (lane) mma_16816<T>(sums[2 * n], l",
        "deadlock",
    ),
}
SPLIT_SUM = {
    "no fence before the counter": ("        __threadfence();\n", "", "race.*fence and atomic"),
    "a counter that is not atomic": ("atomicInc(counter, gridDim.x - 1)", "(*counter)++", "race"),
    "no barrier in the reduction": (
        f"    {SYNC}\n    if (threadIdx.x == 0) {{",
        "    if (threadIdx.x == 0) {",
        "uninitialised|race",
    ),
    "a barrier that most threads skip": (
        f"    }}\n    {SYNC}\n    if (!is_last",
        f"        {SYNC}\n    }}\n    if (!is_last",
        "uninitialised|race|deadlock|barrier",
    ),
}
HISTOGRAM = {
    "increments that are not atomic": ("atomicAdd(bins + x[i], 1)", "bins[x[i]] += 1", "race"),
    "bins that are not cleared": ("bins[threadIdx.x] = 0;", ";", "uninitialised"),
    "counts read too early": (f"{SYNC}\n    if (threadIdx.x < 16) counts", "if (threadIdx.x < 16) counts", "race"),
}
REVERSE = {
    "one thread too many": ("if (i < count)", "if (i <= count)", "out of bounds"),
    "input written": ("out[i] = x[count - 1 - i];", "const_cast<float*>(x)[i] = out[i];", "read-only"),
}
SAMPLES = {
    **mutants("samples.cu", "tile_product<bfloat16>", None, PRODUCT),
    **mutants("samples.cu", "split_sum", None, SPLIT_SUM),
    **mutants("samples.cu", "histogram", None, HISTOGRAM),
    **mutants("samples.cu", "reverse", None, REVERSE),
}


# ---- the engine's kernels


def norm() -> CudaRun:
    inputs = [normal(3, 2056), normal(3, 2056, seed=1), normal(2056)]  # 257 vectors: 288 threads, of which 31 idle
    return CudaRun("add_rms_norm", inputs, "bfloat16", {"eps": 1e-6, "unit_offset": True}, {0: 0, 1: 1})


def fused(head_dim: int = 64) -> CudaRun:
    slots = np.array([21, -1, 40, 22])
    angles = np.arange(8)[:, None] * np.linspace(1, 0.1, head_dim // 2)
    table = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)
    caches = np.full((2, 3, 1, 16, head_dim), np.nan)
    inputs = [normal(4, 5 * head_dim), np.array([3, 0, 5, 7]), slots, table, *caches]
    attrs = {"num_q_heads": 3, "num_kv_heads": 1, "head_dim": head_dim, "eps": 1e-6, "unit_offset": False}
    norms = [normal(head_dim), normal(head_dim, seed=1)]
    return CudaRun("qk_norm_rope_write_kv", [*inputs, *norms], "bfloat16", attrs)


class ClampedGather(CudaRun):
    """A gather with indices out of range, which the oracle does not know."""

    def __init__(self) -> None:
        super().__init__("gather_rows", [normal(9, 48), np.array([3, -1, 2**30])], "bfloat16")

    def expected(self) -> list[Array]:
        return [self.inputs[0].astype(np.float64)[[3, 0, 8]]]


def gated() -> CudaRun:
    return CudaRun("act_and_mul", [normal(3, 80)], "bfloat16", {"activation": "gelu_tanh"})


def total() -> CudaRun:
    return CudaRun("add", [normal(3, 19), normal(3, 19, seed=1)], "bfloat16", None, {0: 0})


NORM = {
    "no barrier": (f"    {SYNC}\n", "", "race|uninitialised"),
    "one vector too many": (
        "if (column >= num_columns) break;\n        weights[i].load",
        "if (column > num_columns) break;\n        weights[i].load",
        "out of bounds|race",
    ),
    "misaligned vector": ("load(x + column, values[i])", "load(x + column + 1, values[i])", "misaligned"),
    "sum stored over x": ("store(sum + column, values[i])", "store(out + column, values[i])", WRONG),
    "offset left out": ("(w[j] + offset)", "w[j]", WRONG),
    "another row's residual": ("residual + start, weight", "residual, weight", f"race|{WRONG}"),
}
FUSED = {
    "padded rows written": (
        "if (is_past || (!is_q && slot < 0)) return;",
        "if (is_past) return;",
        "out of bounds",
    ),
    "slot -1 as the last slot": (
        "slot = slots[blockIdx.x];\n    const T* const x",
        "slot = slots[blockIdx.x] < 0 ? 47 : slots[blockIdx.x];\n    const T* const x",
        WRONG,
    ),
    "block and place exchanged": (
        "block = slot / block_size, place = slot % block_size",
        "block = slot % block_size, place = slot / block_size",
        f"out of bounds|read-only|{WRONG}",
    ),
    "V normed": ("q_norm != nullptr && !is_v", "q_norm != nullptr", WRONG),
    "K by Q's weight": ("is_q ? q_norm : k_norm", "q_norm", WRONG),
    "neighbours turned": (
        "return {index * N, half_dim + index * N, true}",
        "return {2 * index * N, (2 * index + 1) * N, true}",
        f"out of bounds|{WRONG}",
    ),
    "position not looked up": (
        "position = clamp(positions[blockIdx.x], 0, num_positions - 1);\n    T* out",
        "position = blockIdx.x;\n    T* out",
        WRONG,
    ),
}
LANES = {
    "lanes without a pair gone before the shuffles": (
        "    const bool has_norm",
        "    if (lane >= num_pairs) return;\n    const bool has_norm",
        "takes no part",
    ),
}
GATHER = {"index not clamped": ("clamp(rows[blockIdx.x], 0, num_rows - 1)", "rows[blockIdx.x]", "out of bounds")}
GATED = {
    "gate and up exchanged": (
        "ACTIVATION::apply(gate[i]) * up[i]",
        "ACTIVATION::apply(up[i]) * gate[i]",
        WRONG,
    ),
}
ACTIVATION = {"cube left out": ("x + 0.044715f * x * x * x", "x", WRONG)}
TOTAL = {
    "tail left out": ("at < count; ++at", "at < start; ++at", WRONG),
    "tail as a vector": ("start + N <= count", "start < count", "out of bounds"),
}
ENGINE = {
    **mutants("norm.cu", "add_rms_norm<bfloat16, 8, 1>", norm, NORM),
    **mutants("rope_cache.cu", "qk_norm_rope_write_kv<bfloat16, 8, 4>", fused, FUSED),
    **mutants("rope_cache.cu", "qk_norm_rope_write_kv<bfloat16, 8, 8>", lambda: fused(80), LANES),
    **mutants("gather.cu", "gather_rows<bfloat16, 8>", ClampedGather, GATHER),
    **mutants("elementwise.cu", "act_and_mul<bfloat16, 8, GeluTanh>", gated, GATED),
    **mutants("elementwise.cu", "act_and_mul<bfloat16, 8, GeluTanh>", gated, ACTIVATION, "activation.cuh"),
    **mutants("elementwise.cu", "add<bfloat16>", total, TOTAL),
}
MUTANTS = SAMPLES | ENGINE
