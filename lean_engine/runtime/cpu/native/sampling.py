"""Rows of logits by cpu/sampling.c: what sampling.sampler.Sampler takes as its `kernels`.

Rows are shared out over the device's threads, at once: not while a captured step is being replayed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from lean_engine.runtime.cpu.native.launches import NativeLaunch, Pointer, address
from lean_engine.runtime.cpu.native.library import Native

MAX_CONTENDERS = 16
MIN_ROWS = 4  # for fewer NumPy's argmax is as fast as a launch
MAX_TOP = 64  # logprobs of a row that are found here
Int, Int32, Float, Double = ctypes.c_int64, ctypes.c_int32, ctypes.c_float, ctypes.c_double
Float32s = NDArray[np.float32]
# logits [V], seed, position, top_p, top_k (0 = all), the greatest logit, temperature, the least logit that is kept
Draw: TypeAlias = tuple[Float32s, int, int, float, int, float, float, float]


class GreatestArgs(ctypes.Structure):
    _fields_ = (("logits", Pointer), ("ids", Pointer), ("vocab_size", Int))


class DrawRow(ctypes.Structure):
    _fields_ = (
        ("logits", Pointer),
        ("seed", ctypes.c_uint64),
        ("position", ctypes.c_uint64),
        ("top_p", Double),
        ("top_k", Int),
        *((name, Float) for name in ("peak", "temperature", "least")),
        ("num_contenders", Int32),
        ("contenders", Int32 * MAX_CONTENDERS),
    )


class DrawArgs(ctypes.Structure):
    _fields_ = (("rows", Pointer), ("vocab_size", Int))


class LogprobsRow(ctypes.Structure):
    _fields_ = (
        ("logits", Pointer),
        ("top_ids", Pointer),
        ("log_sum", Double),
        ("rank", Int),
        ("num_top", Int),
        ("chosen", Int32),
        ("is_done", Int32),
    )


class LogprobsArgs(ctypes.Structure):
    _fields_ = (("rows", Pointer), ("vocab_size", Int))


ARGUMENTS: tuple[type[ctypes.Structure], ...] = (GreatestArgs, DrawRow, DrawArgs, LogprobsRow, LogprobsArgs)


class RowSampling:
    """See sampling.row_kernels.RowKernels."""

    def __init__(self, native: Native) -> None:
        self._native = native

    def greatest(self, logits: Float32s) -> NDArray[np.int32]:
        """argmax of each row [R, V]: the first NaN, else the first of the greatest."""
        num_rows, vocab_size = logits.shape
        ids = np.empty(num_rows, np.int32)
        if num_rows < MIN_ROWS:
            ids[:] = logits.argmax(axis=1)
            return ids
        self._run("greatest", GreatestArgs(address(logits), address(ids), vocab_size), num_rows)
        return ids

    def draw(self, draws: Sequence[Draw]) -> list[list[int]]:
        """For each row the tokens, ascending, of which one has the greatest sum of scaled logit and noise.

        Nearly always it is one; none where this cannot be said here.
        """
        rows = (DrawRow * len(draws))(*(DrawRow(address(draw[0]), *draw[1:]) for draw in draws))
        self._run("draw", DrawArgs(ctypes.addressof(rows), len(draws[0][0])), len(draws))
        return [row.contenders[: row.num_contenders] for row in rows]

    def logprobs(
        self, wanted: Sequence[tuple[Float32s, int, int]]
    ) -> list[tuple[float, int, NDArray[np.int32]] | None]:
        """Of each (logits [V], chosen id, number of top tokens): ln Σ e^logit, the chosen token's rank, the top ids.

        None for rows with more than MAX_TOP top tokens, or fewer finite logits than that.
        """
        tops = [np.empty(num_top if 0 <= num_top <= MAX_TOP else 0, np.int32) for _, _, num_top in wanted]
        pairs = zip(wanted, tops, strict=True)
        rows = (LogprobsRow * len(wanted))(
            *(LogprobsRow(address(row), address(top), 0.0, 0, len(top), chosen) for (row, chosen, _), top in pairs)
        )
        self._run("logprobs", LogprobsArgs(ctypes.addressof(rows), len(wanted[0][0])), len(wanted))
        return [
            (row.log_sum, row.rank, top) if row.is_done and len(top) == num_top else None
            for row, top, (_, _, num_top) in zip(rows, tops, wanted, strict=True)
        ]

    def _run(self, kernel: str, args: ctypes.Structure, count: int) -> None:
        self._native.run([NativeLaunch(kernel, args, count)])
