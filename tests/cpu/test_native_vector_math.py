"""exp, tanh and what is made of them, for every kind of processor the tests can build for."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from native_running import MACHINES, MapArgs, probe_library
from numpy.typing import NDArray

from lean_engine.runtime.cpu.native.launches import NativeLaunch, address
from lean_engine.runtime.cpu.native.library import Native

Float32 = NDArray[np.float32]
SPECIAL = [0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, -1e-38, 88.72283, 88.7229, -87.336, -87.34, -103.97, -104.0, 1e30]


@pytest.fixture(scope="module", params=MACHINES)
def native(request: pytest.FixtureRequest) -> Iterator[Native]:
    native = Native(probe_library(request.param), 1)
    yield native
    native.close()


def apply(native: Native, function: str, x: Float32) -> Float32:
    out = np.empty_like(x)
    native.run([NativeLaunch(f"map_{function}", MapArgs(address(x), address(out), x.size), 1)])
    return out


def inputs() -> Float32:
    """Every size a float32 can have, both signs, denser where results change; a multiple of 16."""
    sizes = np.arange(0, 0x7F800000, 9973, dtype=np.uint32).view(np.float32)
    near = np.linspace(-110, 110, 200_001, dtype=np.float32)
    x = np.concatenate([np.array(SPECIAL, np.float32), sizes, -sizes, near])
    return x[: len(x) // 16 * 16]


def units_off(found: Float32, wanted: NDArray[np.float64]) -> NDArray[np.float64]:
    """Distance in units of the last place of the right result, which at the least is that of subnormals."""
    with np.errstate(over="ignore"):
        nearest = np.abs(wanted.astype(np.float32))
    spacing = np.spacing(np.minimum(nearest, np.float32(3e38)))
    return np.abs(found.astype(np.float64) - wanted) / spacing


def check(found: Float32, wanted: NDArray[np.float64], max_units: float) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        rounded = wanted.astype(np.float32)
        off = units_off(found, wanted)
    assert np.array_equal(np.isnan(found), np.isnan(rounded))
    assert np.array_equal(np.isinf(found), np.isinf(rounded))
    finite = np.isfinite(rounded)
    assert off[finite].max() <= max_units


def test_exp_is_right_to_a_unit_and_a_half(native: Native) -> None:
    x = inputs()
    with np.errstate(over="ignore", under="ignore"):
        check(apply(native, "exp", x), np.exp(x.astype(np.float64)), 1.5)


def test_exp_of_the_ends_is_exact(native: Native) -> None:
    x = np.array([0, -0.0, np.inf, -np.inf, 1000, -1000, *[0] * 10], np.float32)
    assert apply(native, "exp", x)[:6].tolist() == [1, 1, np.inf, 0, np.inf, 0]


def test_tanh_is_right_to_two_units_and_keeps_the_sign_of_zero(native: Native) -> None:
    x = inputs()
    found = apply(native, "tanh", x)
    check(found, np.tanh(x.astype(np.float64)), 2)
    assert np.array_equal(np.signbit(found[~np.isnan(x)]), np.signbit(x[~np.isnan(x)]))


def test_silu_is_right_relative_to_its_input(native: Native) -> None:
    """Where exp(-x) overflows, the result is 0 instead of something below 1e-36."""
    x = inputs()
    x = x[np.isfinite(x)][: len(x) // 16 * 16 - 16]
    exact = x.astype(np.float64)
    with np.errstate(over="ignore"):
        wanted = exact / (1 + np.exp(-exact))
    found = apply(native, "silu", x)
    assert (np.abs(found - wanted) <= np.maximum(4e-7 * np.abs(wanted), 1e-35)).all()


def test_gelu_is_right_relative_to_its_input(native: Native) -> None:
    x = np.linspace(-20, 20, 160_000, dtype=np.float32)
    exact = x.astype(np.float64)
    wanted = 0.5 * exact * (1 + np.tanh(np.sqrt(2 / np.pi) * (exact + 0.044715 * exact**3)))
    assert (np.abs(apply(native, "gelu_tanh", x) - wanted) <= 3e-7 * np.abs(exact)).all()


@pytest.mark.parametrize("function", ["exp", "tanh", "silu", "gelu_tanh"])
def test_nan_stays_nan_in_its_lane_alone(native: Native, function: str) -> None:
    x = np.ones(48, np.float32)
    x[[0, 17, 47]] = np.nan
    assert np.flatnonzero(np.isnan(apply(native, function, x))).tolist() == [0, 17, 47]
