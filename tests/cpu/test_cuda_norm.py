"""norm.cu in the emulator: rows from one element to the widest, heads, storage taken over, values of every size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuda_kernel_running import CudaRun, check, normal

from lean_engine.errors import LaunchError
from lean_engine.runtime.cuda.instances import kernel_calls
from lean_engine.runtime.device import LaunchArgs

DTYPES = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
ONE_ORDER = ((3, 0),)


@DTYPES
@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize(
    ("columns", "width"), [(1, 1), (7, 7), (256, 256), (264, 264), (577, 577), (1024, 1024), (64, 8), (39, 13)]
)
def test_rms_norm_over_rows_and_heads(columns: int, width: int, unit_offset: bool, dtype: str) -> None:
    x = normal(3, columns) * np.exp(normal(3, 1) * 2)  # rows of very different size
    check("rms_norm", [x, 1 + normal(width)], dtype, eps=1e-5, unit_offset=unit_offset)


@pytest.mark.parametrize(("columns", "times"), [(8192, "8, 1"), (8200, "8, 2"), (16384, "8, 2"), (8191, "1, 8")])
def test_rms_norm_of_wide_rows(columns: int, times: str) -> None:
    inputs = [normal(2, columns), normal(columns)]
    attrs: dict[str, Any] = {"eps": 1e-6, "unit_offset": False}
    (call,) = CudaRun("rms_norm", inputs, "bfloat16", attrs).calls()
    assert call.instance.expression == f"rms_norm<bfloat16, {times}>"
    check("rms_norm", inputs, "bfloat16", orders=ONE_ORDER, **attrs)


def test_rms_norm_of_more_rows_than_a_block_has() -> None:
    check("rms_norm", [normal(13, 8 * 24), normal(24)], "bfloat16", eps=1e-6, unit_offset=False)


def test_rms_norm_of_large_small_and_zero_rows() -> None:
    x = np.stack([normal(64) * 20_000, normal(64) * 1e-6, np.zeros(64)])
    (out,) = check("rms_norm", [x, np.ones(64)], "float16", eps=1e-5, unit_offset=False)
    assert np.isfinite(out).all()
    assert not out[2].any()


@DTYPES
@pytest.mark.parametrize("in_place", [{}, {0: 0}, {1: 1}, {0: 0, 1: 1}], ids=str)
@pytest.mark.parametrize("columns", [37, 72, 2048])
def test_add_rms_norm(columns: int, in_place: dict[int, int], dtype: str) -> None:
    inputs = [normal(3, columns), normal(3, columns, seed=1), normal(columns)]
    check("add_rms_norm", inputs, dtype, in_place, eps=1e-6, unit_offset=columns == 72)


def test_rows_that_no_instance_can_hold_are_refused() -> None:
    for columns, limit in ((16392, 16384), (8193, 8192)):
        x, weight = np.zeros((1, columns), np.float16), np.zeros(columns, np.float16)
        scalars = {"eps": np.float32(0), "unit_offset": False}
        with pytest.raises(LaunchError, match=f"rows of {columns} columns, at most {limit} can be normed"):
            kernel_calls(LaunchArgs("rms_norm", [x, weight], [x], scalars, x))
