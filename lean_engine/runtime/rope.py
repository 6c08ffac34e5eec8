"""RoPE tables: cos and sin of every position, with the frequency scalings of RopeConfig.

Sources: RoFormer (Su et al. 2021); linear position interpolation (Chen et al. 2023); YaRN (Peng et al. 2023);
the llama3 rule as published with Llama 3.1.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from lean_engine.config import RopeConfig

Float32 = NDArray[np.float32]


def rope_table(rope: RopeConfig, max_positions: int) -> Float32:
    """[max_positions, rotary_dim] float32: the cosines of all rotary_dim / 2 frequencies, then the sines."""
    frequencies, scale = inverse_frequencies(rope)
    angles = np.arange(max_positions, dtype=np.float32)[:, None] * frequencies
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * np.float32(scale)


def inverse_frequencies(rope: RopeConfig) -> tuple[Float32, float]:
    """Radians per position [rotary_dim / 2] float32, and the factor that multiplies cos and sin."""
    exponents = np.arange(0, rope.rotary_dim, 2, dtype=np.float32) / np.float32(rope.rotary_dim)
    base: Float32 = np.divide(1.0, np.power(np.float32(rope.theta), exponents), dtype=np.float32)
    if rope.kind == "linear":
        return (base / np.float32(rope.factor)).astype(np.float32), 1.0
    if rope.kind == "llama3":
        return llama3(rope, base), 1.0
    if rope.kind == "yarn":
        return yarn(rope, base), yarn_attention_factor(rope)
    if rope.kind == "frequency_factors":
        return (base / np.array(rope.frequency_factors)).astype(np.float32), 1.0
    return base, 1.0


def llama3(rope: RopeConfig, base: Float32) -> Float32:
    """Long wavelengths are stretched by factor, short ones kept, those between interpolated."""
    wavelengths = 2 * math.pi / base
    original = rope.original_max_position_embeddings
    span = rope.high_freq_factor - rope.low_freq_factor
    keep = np.clip((original / wavelengths - rope.low_freq_factor) / span, 0.0, 1.0)
    return ((1 - keep) * base / rope.factor + keep * base).astype(np.float32)


def yarn(rope: RopeConfig, base: Float32) -> Float32:
    """Dimensions that turn often are kept, slow ones stretched by factor, with a linear ramp between."""
    dim, original = rope.rotary_dim, rope.original_max_position_embeddings

    def dimension(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    span = high - low or 0.001
    stretched = np.clip((np.arange(dim // 2, dtype=np.float32) - low) / span, 0, 1)
    return (base / rope.factor * stretched + base * (1 - stretched)).astype(np.float32)


def yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return rope.attention_factor

    def mscale(weight: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * weight * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return mscale(rope.mscale) / mscale(rope.mscale_all_dim)
    return mscale(1.0)
