"""elementwise.cu in the emulator: activations far from zero too, arrays that fill no vector, storage taken over."""

from __future__ import annotations

import numpy as np
import pytest
from cuda_kernel_running import check, normal

DTYPES = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
IN_PLACE = pytest.mark.parametrize("in_place", [{}, {0: 0}], ids=str)
SHAPES = pytest.mark.parametrize("shape", [(1, 1), (3, 19), (5, 24), (2, 1031)], ids=str)


@DTYPES
@IN_PLACE
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
@SHAPES
def test_activations(shape: tuple[int, int], kind: str, in_place: dict[int, int], dtype: str) -> None:
    check(kind, [normal(*shape) * 3], dtype, in_place)


@DTYPES
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_activations_far_from_zero(kind: str, dtype: str) -> None:
    x = np.array([[-6e4, -1e4, -200.0, -90.0, -88.5, -20.0, -0.0, 0.0, 20.0, 90.0, 200.0, 1e4, 6e4]])
    (out,) = check(kind, [x], dtype)
    assert np.isfinite(out.astype(np.float32)).all()


@DTYPES
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("columns", [1, 19, 40, 1032])
def test_act_and_mul(columns: int, activation: str, dtype: str) -> None:
    check("act_and_mul", [normal(3, 2 * columns) * 2], dtype, activation=activation)


@DTYPES
@IN_PLACE
@pytest.mark.parametrize("kind", ["add", "mul"])
@SHAPES
def test_sums_and_products(shape: tuple[int, int], kind: str, in_place: dict[int, int], dtype: str) -> None:
    check(kind, [normal(*shape), normal(*shape, seed=1)], dtype, in_place)


@IN_PLACE
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@SHAPES
def test_softcap(shape: tuple[int, int], dtype: str, in_place: dict[int, int]) -> None:
    check("softcap", [normal(*shape) * 40], dtype, in_place, cap=30.0)
