"""What a device may compute of rows of logits for the sampler: faster than NumPy, with the same outcome."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

Float32s = npt.NDArray[np.float32]
# logits [V], seed, position, top_p, top_k (0 = all), the greatest logit, temperature, the least logit that is kept
Draw: TypeAlias = tuple[Float32s, int, int, float, int, float, float, float]
# ln Σ e^logit, the chosen token's rank, the ids of the likeliest in order
Found: TypeAlias = tuple[float, int, npt.NDArray[np.int32]]


class RowKernels(Protocol):
    """Rows of logits are contiguous float32 [V]."""

    def greatest(self, logits: Float32s) -> npt.NDArray[np.int32]:
        """argmax of each row of [R, V]: the first NaN, else the first of the greatest."""

    def draw(self, draws: Sequence[Draw]) -> list[list[int]]:
        """For each row the tokens, ascending, of which one has the greatest sum of scaled logit and noise (philox.py);
        none where that cannot be said."""

    def logprobs(self, wanted: Sequence[tuple[Float32s, int, int]]) -> list[Found | None]:
        """Of each (logits, chosen id, number of likeliest tokens); None for a row that is left to NumPy."""
