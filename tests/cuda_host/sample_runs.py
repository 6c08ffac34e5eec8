"""How each kernel of samples.cu is launched, and what it should give."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from cuda_host import HostKernel
from numpy.typing import NDArray

Result = tuple[NDArray[Any], NDArray[Any]]  # found, wanted
Run = Callable[[HostKernel, int, int], Result]
BF16 = np.dtype(ml_dtypes.bfloat16)


def read_only(array: NDArray[Any]) -> NDArray[Any]:
    array.flags.writeable = False
    return array


def tile_product(kernel: HostKernel, order: int, preempt: int) -> Result:
    random = np.random.default_rng(0)
    a, b = (read_only(random.standard_normal((rows, 96)).astype(BF16)) for rows in (70, 60))
    out = np.full((70, 60), np.nan, np.float32)
    args = (out, a, b, np.int32(70), np.int32(60), np.int32(96))
    kernel((2, 1), (128,), args, shared_mem=4 * 64 * 40 * 2, order=order, preempt=preempt)
    return out, a.astype(np.float64) @ b.astype(np.float64).T


def split_sum(kernel: HostKernel, order: int, preempt: int) -> Result:
    x = read_only(np.random.default_rng(1).standard_normal(2000).astype(np.float32) + 1)
    total, parts, counter = np.full(1, np.nan, np.float32), np.full(5, np.nan, np.float32), np.zeros(1, np.uint32)
    kernel((5,), (128,), (total, parts, counter, x, np.int32(2000)), order=order, preempt=preempt)
    assert counter[0] == 0
    return total, x.astype(np.float64).sum(keepdims=True)


def histogram(kernel: HostKernel, order: int, preempt: int) -> Result:
    x = read_only(np.random.default_rng(2).integers(0, 16, 300).astype(np.int32))
    counts = np.full(16, -1, np.int32)
    kernel((1,), (96,), (counts, x, np.int32(300)), order=order, preempt=preempt)
    return counts, np.bincount(x, minlength=16)


def reverse(kernel: HostKernel, order: int, preempt: int) -> Result:
    x = read_only(np.random.default_rng(3).standard_normal(200).astype(np.float32))
    out = np.full(200, np.nan, np.float32)
    kernel((4,), (64,), (out, x, np.int32(200)), order=order, preempt=preempt)
    return out, x[::-1]


RUNS: dict[str, Run] = {
    "tile_product<bfloat16>": tile_product,
    "split_sum": split_sum,
    "histogram": histogram,
    "reverse": reverse,
}


def relative_error(result: Result) -> float:
    """Of the worst element, by the largest one; infinite where a NaN is."""
    found, wanted = result
    worst = np.abs(found.astype(np.float64) - wanted).max() / np.abs(wanted).max()
    return float(worst) if np.isfinite(worst) else np.inf
