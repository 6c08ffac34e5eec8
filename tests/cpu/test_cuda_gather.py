"""gather.cu in the emulator: rows by index and columns, at odd sizes, and indices that are out of range."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_kernel_running import CudaRun, check, normal

DTYPES = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])


@DTYPES
@pytest.mark.parametrize("scale", [1.0, 48.0])
@pytest.mark.parametrize("columns", [1, 13, 64, 2080])
def test_embedding(columns: int, scale: float, dtype: str) -> None:
    ids = np.random.default_rng(columns).integers(0, 11, 5)
    check("embedding", [ids, normal(11, columns)], dtype, scale=scale)


@DTYPES
@pytest.mark.parametrize("columns", [1, 19, 24, 1032])
def test_gather_rows(columns: int, dtype: str) -> None:
    rows = np.random.default_rng(columns).integers(0, 9, 4)
    check("gather_rows", [normal(9, columns), rows], dtype)


@pytest.mark.parametrize("index", [-1, 9, 2**31 - 1, -(2**31)])
def test_index_out_of_range_reads_the_nearest_row(index: int) -> None:
    x = normal(9, 16)
    for kind, inputs in (("gather_rows", [x, np.array([index])]), ("embedding", [np.array([index]), x])):
        run = CudaRun(kind, inputs, "float16", {"scale": 1.0} if kind == "embedding" else {})
        (out,) = run.run()
        assert np.array_equal(out[0], x.astype(np.float16)[0 if index < 0 else 8])


@DTYPES
@pytest.mark.parametrize(
    ("columns", "start", "stop"), [(19, 0, 5), (19, 5, 19), (24, 8, 24), (24, 4, 12), (24, 8, 9), (1040, 16, 1040)]
)
def test_slice_columns(columns: int, start: int, stop: int, dtype: str) -> None:
    check("slice_columns", [normal(3, columns)], dtype, start=start, stop=stop)


def test_vectors_are_moved_16_bytes_at_a_time() -> None:
    for columns, width in ((64, 8), (60, 1)):
        (call,) = CudaRun("gather_rows", [normal(9, columns), np.arange(4)], "bfloat16").calls()
        assert call.instance.expression == f"gather_rows<bfloat16, {width}>"
