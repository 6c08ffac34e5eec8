"""Counter-based noise: one Gumbel number for each (seed, position, token), the same on every device.

The definition, which the CUDA kernels reproduce:

    key     = (seed & 0xffffffff, seed >> 32)                       seed: unsigned 64-bit, one per request
    counter = (position & 0xffffffff, position >> 32, token >> 2, 0)  position: index in the sequence of the token drawn
    word    = philox4x32_10(counter, key)[token & 3]                four tokens share one block
    u       = ((word >> 9) + 0.5) * 2^-23                           float32, exact: 2^-24 … 1 - 2^-24, never 0 or 1
    gumbel  = -log(-log(u))                                         float32, logarithms good to a unit in the last place

23 bits and not 24: (word >> 8) + 0.5 does not fit float32's 24 bits, and its largest value rounds to u = 1, noise +inf.
The last counter word is the stream: 0 here; other uses of a request's seed (speculative acceptance) take another.
`argmax(logits / temperature + gumbel)` then draws from the softmax of the scaled logits (Gumbel-max).

Philox4x32-10: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

UInt64s = npt.NDArray[np.uint64]
# What takes part in the arithmetic below; arrays and Python integers broadcast against each other.
Integers = int | Sequence[int] | npt.NDArray[np.integer]

_MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
_KEY_STEPS = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
_NUM_ROUNDS = 10
_LOW_WORD = np.uint64(0xFFFFFFFF)
_WORD_BITS = np.uint64(32)
_DROPPED_BITS = np.uint64(9)

MAX_GUMBEL = 16.64  # -log(-log(1 - 2^-24)), rounded up
MIN_GUMBEL = -2.82  # -log(-log(2^-24)), rounded down


def philox4x32(
    counter: tuple[Integers, Integers, Integers, Integers], key: tuple[Integers, Integers]
) -> tuple[UInt64s, UInt64s, UInt64s, UInt64s]:
    """Ten rounds of Philox4x32 on each element.

    Args:
        counter: four words, each an integer or an array of integers in [0, 2^32); they broadcast.
        key: two words, likewise.

    Returns:
        Four arrays of words, 32-bit values kept in uint64, of the broadcast shape.
    """
    c0, c1, c2, c3 = (np.asarray(word, dtype=np.uint64) for word in counter)
    k0, k1 = (np.asarray(word, dtype=np.uint64) for word in key)
    for _ in range(_NUM_ROUNDS):
        product0 = c0 * _MULTIPLIERS[0]
        product1 = c2 * _MULTIPLIERS[1]
        c0 = (product1 >> _WORD_BITS) ^ c1 ^ k0
        c1 = product1 & _LOW_WORD
        c2 = (product0 >> _WORD_BITS) ^ c3 ^ k1
        c3 = product0 & _LOW_WORD
        k0 = (k0 + _KEY_STEPS[0]) & _LOW_WORD
        k1 = (k1 + _KEY_STEPS[1]) & _LOW_WORD
    return c0, c1, c2, c3


def gumbel(seeds: Integers, positions: Integers, tokens: Integers) -> npt.NDArray[np.float32]:
    """The noise of single tokens: seeds, positions and tokens broadcast; float32 of the broadcast shape."""
    token_ids = np.asarray(tokens, dtype=np.uint64)
    words = _words(seeds, positions, token_ids >> np.uint64(2))
    lane = token_ids & np.uint64(3)
    word = np.where(lane < 2, np.where(lane == 0, words[0], words[1]), np.where(lane == 2, words[2], words[3]))
    return _gumbel_of_words(word)


def gumbel_rows(seeds: Integers, positions: Integers, vocab_size: int) -> npt.NDArray[np.float32]:
    """The noise of every token: seeds [B] and positions [B] give float32 [B, V]. A quarter of the work of `gumbel`."""
    num_blocks = -(-vocab_size // 4)
    seeds_column = np.asarray(seeds, dtype=np.uint64).reshape(-1, 1)
    positions_column = np.asarray(positions, dtype=np.uint64).reshape(-1, 1)
    words = _words(seeds_column, positions_column, np.arange(num_blocks, dtype=np.uint64)[None, :])
    noise = np.stack([_gumbel_of_words(word) for word in words], axis=-1)  # [B, blocks, 4]
    return noise.reshape(noise.shape[0], -1)[:, :vocab_size]


def _words(seeds: Integers, positions: Integers, blocks: UInt64s) -> tuple[UInt64s, UInt64s, UInt64s, UInt64s]:
    seed = np.asarray(seeds, dtype=np.uint64)
    position = np.asarray(positions, dtype=np.uint64)
    counter = (position & _LOW_WORD, position >> _WORD_BITS, blocks, 0)
    return philox4x32(counter, (seed & _LOW_WORD, seed >> _WORD_BITS))


def _gumbel_of_words(words: UInt64s) -> npt.NDArray[np.float32]:
    # Through int32: NumPy turns it into float32 many at a time, uint64 one by one.
    u = (words >> _DROPPED_BITS).astype(np.int32).astype(np.float32)
    u = (u + np.float32(0.5)) * np.float32(2.0**-23)
    return -np.log(-np.log(u))
