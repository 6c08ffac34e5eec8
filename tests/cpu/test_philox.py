"""The noise: published answers of Philox4x32-10, and Gumbel numbers against the definition in plain Python."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from lean_engine.sampling.philox import MAX_GUMBEL, MIN_GUMBEL, _gumbel_of_words, gumbel, gumbel_rows, philox4x32

ALL_ONES = 2**32 - 1
# kat_vectors of Random123, the authors' library: counter, key, answer.
KNOWN_ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ALL_ONES,) * 4, (ALL_ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
SEEDS = [0, 1, 2**32, 2**63 + 12345, 2**64 - 1]
POSITIONS = [0, 5, 2**31, 2**32 + 3, 70_000]


def plain_gumbel(seed: int, position: int, token: int) -> float:
    """The definition of philox.py's head, with Python's integers and float64 logarithms."""
    c = [position % 2**32, position >> 32, token >> 2, 0]
    k = [seed % 2**32, seed >> 32]
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 % 2**32, (p0 >> 32) ^ c[3] ^ k[1], p0 % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    u = ((c[token & 3] >> 9) + 0.5) * 2.0**-23
    return -math.log(-math.log(u))


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_philox_gives_the_published_answers(counter: Any, key: Any, answer: tuple[int, ...]) -> None:
    assert tuple(int(word) for word in philox4x32(counter, key)) == answer


def test_philox_of_arrays_is_philox_of_each_element() -> None:
    counters = tuple(np.array([c[i] for c, _, _ in KNOWN_ANSWERS]) for i in range(4))
    keys = tuple(np.array([k[i] for _, k, _ in KNOWN_ANSWERS]) for i in range(2))
    words = np.stack(philox4x32(counters, keys), axis=1)  # type: ignore[arg-type]
    assert words.tolist() == [list(answer) for _, _, answer in KNOWN_ANSWERS]


@pytest.mark.parametrize(("seed", "position"), list(zip(SEEDS, POSITIONS, strict=True)))
def test_gumbel_follows_its_definition(seed: int, position: int) -> None:
    tokens = [0, 1, 2, 3, 4, 7, 1000, 49_151, 262_143]
    noise = gumbel(seed, position, tokens)
    assert noise.dtype == np.float32
    np.testing.assert_allclose(noise, [plain_gumbel(seed, position, token) for token in tokens], rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("vocab_size", [1, 3, 4, 5, 1001])
def test_rows_hold_the_noise_of_each_token(vocab_size: int) -> None:
    rows = gumbel_rows(SEEDS, POSITIONS, vocab_size)
    assert rows.shape == (len(SEEDS), vocab_size)
    assert rows.dtype == np.float32
    for row, seed, position in zip(rows, SEEDS, POSITIONS, strict=True):
        np.testing.assert_array_equal(row, gumbel(seed, position, np.arange(vocab_size)))


def test_seeds_positions_and_tokens_broadcast() -> None:
    noise = gumbel(np.array([[1], [2]], dtype=np.uint64), np.array([3]), np.array([7, 9, 11]))
    assert noise.shape == (2, 3)
    assert noise[1, 2] == gumbel(2, 3, 11)


def test_every_bit_of_seed_and_position_counts() -> None:
    base = gumbel(0, 0, 0)
    values = [base, *(gumbel(1 << bit, 0, 0) for bit in range(64)), *(gumbel(0, 1 << bit, 0) for bit in range(63))]
    assert len({float(value) for value in values}) == len(values)


def test_the_extreme_words_give_finite_noise_within_the_stated_bounds() -> None:
    words = np.array([0, 1, 511, 2**31, 2**32 - 513, 2**32 - 512, 2**32 - 1], dtype=np.uint64)
    noise = _gumbel_of_words(words)
    assert np.isfinite(noise).all()
    assert (np.diff(noise) >= 0).all()
    assert MIN_GUMBEL < noise[0] < MIN_GUMBEL + 0.02
    assert MAX_GUMBEL - 0.02 < noise[-1] < MAX_GUMBEL


def test_noise_has_the_gumbel_distribution() -> None:
    noise = np.sort(gumbel_rows(range(100), range(100), 1000).ravel().astype(np.float64))
    expected = np.exp(-np.exp(-noise))
    distance = np.abs(expected - np.arange(1, noise.size + 1) / noise.size).max()  # Kolmogorov-Smirnov
    assert distance < 2.2 / math.sqrt(noise.size)  # passed by chance once in 8,000
    assert abs(noise.mean() - np.euler_gamma) < 0.015
