"""RoPE tables: frequencies as transformers 5.24 computes them, cos beside sin, the two ways of scaling the result."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from lean_engine.config import RopeConfig
from lean_engine.runtime.rope import inverse_frequencies, rope_table

LLAMA3: dict[str, Any] = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
YARN: dict[str, Any] = {
    "kind": "yarn",
    "theta": 1e4,
    "rotary_dim": 16,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
FACTOR_4 = 1.138629436111989  # 0.1 · ln 4 + 1

# The numbers are transformers' (ROPE_INIT_FUNCTIONS); none of them was computed by this project.
FREQUENCIES: dict[str, tuple[RopeConfig, list[float], float]] = {
    "linear": (
        RopeConfig(kind="linear", theta=1e4, rotary_dim=12, factor=4.0),
        [0.25, 0.053860862, 0.011603971, 0.0024999999, 0.00053860858, 0.00011603974],
        1.0,
    ),
    "llama3, one frequency between": (
        RopeConfig(kind="llama3", theta=5e5, rotary_dim=12, factor=8.0, **LLAMA3),
        [1.0, 0.01872319, 0.001574901, 0.00017677668, 1.9842508e-05, 2.2272475e-06],
        1.0,
    ),
    "llama3, other bounds": (
        RopeConfig(1e4, 12, "llama3", 32.0, 1.0, 8.0, 300),
        [1.0, 0.21544345, 0.0092628794, 0.00031249999, 6.7326073e-05, 1.4504967e-05],
        1.0,
    ),
    "yarn": (
        RopeConfig(**YARN),
        [1.0, 0.23717082, 0.049999997, 0.0079056947, 0.0024999999, 0.00079056947, 0.00025000001, 7.9056947e-05],
        FACTOR_4,
    ),
    "yarn, bounds not truncated": (
        RopeConfig(**YARN, truncate=False),
        [1.0, 0.19858353, 0.02559525, 0.0079056947, 0.0024999999, 0.00079056947, 0.00025000001, 7.9056947e-05],
        FACTOR_4,
    ),
    "yarn, factor given": (
        RopeConfig(**YARN, attention_factor=1.75),
        [1.0, 0.23717082, 0.049999997, 0.0079056947, 0.0024999999, 0.00079056947, 0.00025000001, 7.9056947e-05],
        1.75,
    ),
    "yarn, factor from two mscales": (
        RopeConfig(**{**YARN, "factor": 16.0}, mscale=1.0, mscale_all_dim=0.5),
        [1.0, 0.21740657, 0.037499998, 0.0019764237, 0.00062499999, 0.00019764237, 6.2500003e-05, 1.9764237e-05],
        1.121751143713058,
    ),
    "yarn, other betas": (
        RopeConfig(1e6, 16, "yarn", 8.0, original_max_position_embeddings=512, beta_fast=8.0, beta_slow=2.0),
        [1.0, 0.17782794, 0.017787812, 0.00070292666, 0.00012500001, 2.2228493e-05, 3.9528468e-06, 7.0292668e-07],
        1.2079441541679836,
    ),
    "yarn that stretches nothing": (
        RopeConfig(1e4, 16, "yarn", 1.0, original_max_position_embeddings=512),
        [1.0, 0.31622776, 0.1, 0.031622779, 0.0099999998, 0.0031622779, 0.001, 0.00031622779],
        1.0,
    ),
    "yarn whose ramp has no width": (
        RopeConfig(1e4, 4, "yarn", 2.0, original_max_position_embeddings=4),
        [1.0, 0.0049999999],
        1.0693147180559945,
    ),
}


@pytest.mark.parametrize(("rope", "frequencies", "scale"), FREQUENCIES.values(), ids=FREQUENCIES)
def test_scaled_frequencies_are_those_of_transformers(rope: RopeConfig, frequencies: list[float], scale: float) -> None:
    found, found_scale = inverse_frequencies(rope)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, frequencies, rtol=1e-6)
    assert found_scale == pytest.approx(scale, rel=1e-12)


def test_default_frequencies_fall_from_one() -> None:
    found, scale = inverse_frequencies(RopeConfig(theta=1e4, rotary_dim=8))
    np.testing.assert_allclose(found, [1, 0.1, 0.01, 0.001], rtol=1e-6)
    assert scale == 1.0


def test_frequency_factors_divide_each_frequency() -> None:
    rope = RopeConfig(theta=1e4, rotary_dim=8, kind="frequency_factors", frequency_factors=(1.0, 2.0, 4.0, 8.0))
    np.testing.assert_allclose(inverse_frequencies(rope)[0], [1, 0.05, 0.0025, 0.000125], rtol=1e-6)


def test_table_holds_cosines_beside_sines_of_position_times_frequency() -> None:
    table = rope_table(RopeConfig(theta=1e4, rotary_dim=4), 300)
    assert (table.shape, table.dtype.name, table.flags.c_contiguous) == ((300, 4), "float32", True)
    for position in (0, 1, 7, 299):
        angles = [position, position * 0.01]
        wanted = [math.cos(angles[0]), math.cos(angles[1]), math.sin(angles[0]), math.sin(angles[1])]
        np.testing.assert_allclose(table[position], wanted, atol=2e-5)


def test_attention_factor_multiplies_the_whole_table() -> None:
    plain, scaled = (rope_table(RopeConfig(**YARN, attention_factor=f), 20) for f in (1.0, 1.5))
    np.testing.assert_allclose(scaled, plain * 1.5, rtol=1e-6)


def test_table_has_its_rows_whatever_their_number() -> None:
    rope = RopeConfig(theta=1e4, rotary_dim=4)
    assert np.array_equal(rope_table(rope, 10), rope_table(rope, 300)[:10])
