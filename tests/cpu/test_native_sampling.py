"""Sampling by compiled kernels against NumPy's: the same tokens, errors, ranks and ids, always."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from native_running import MACHINES, library_path
from numpy.typing import NDArray

from lean_engine.runtime.cpu.native.library import Library, Native
from lean_engine.runtime.cpu.native.sampling import ARGUMENTS, MAX_TOP, RowSampling
from lean_engine.sampling import SamplingParams
from lean_engine.sampling.philox import gumbel_rows
from lean_engine.sampling.sampler import Sampler, SampleResult, SamplingState

Float32s = NDArray[np.float32]


@pytest.fixture(scope="module", params=MACHINES)
def kernels(request: pytest.FixtureRequest) -> Iterator[RowSampling]:
    native = Native(Library(library_path(request.param), ARGUMENTS), 2)
    yield RowSampling(native)
    native.close()


class Counting:
    """Kernels whose undecided rows are counted."""

    def __init__(self, kernels: RowSampling) -> None:
        self._kernels = kernels
        self.greatest, self.logprobs = kernels.greatest, kernels.logprobs
        self.num_draws = self.num_undecided = 0

    def draw(self, draws: Sequence[Any]) -> list[list[int]]:
        found = self._kernels.draw(draws)
        self.num_draws += len(found)
        self.num_undecided += sum(not ids for ids in found)
        return found


def normal(*shape: int, seed: int = 0, scale: float = 3.0) -> Float32s:
    return np.random.default_rng([*shape, seed]).normal(0, scale, shape).astype(np.float32)


def both(kernels: Any, logits: Float32s, params: Sequence[SamplingParams], position: int = 0) -> SampleResult:
    """The kernels' result, having checked that it is NumPy's."""
    vocab_size = logits.shape[1]
    states = [SamplingState(p, []) for p in params]
    positions = [position + row for row in range(len(states))]
    with np.errstate(all="ignore"):
        wanted = Sampler(vocab_size).sample(logits.copy(), states, positions)
        found = Sampler(vocab_size, kernels).sample(logits.copy(), states, positions)
    assert found.token_ids == wanted.token_ids
    assert found.errors == wanted.errors
    for entry, expected in zip(found.logprobs, wanted.logprobs, strict=True):
        assert (entry is None) == (expected is None)
        if entry is not None and expected is not None:
            assert np.array_equal(entry.ids, expected.ids)
            assert np.array_equal(entry.ranks, expected.ranks)
            np.testing.assert_allclose(entry.logprobs, expected.logprobs, rtol=3e-6, atol=3e-6)
    return found


# ---- the greatest


@pytest.mark.parametrize("vocab_size", [1, 2, 15, 16, 17, 1000, 1024, 1025, 5003])
def test_greatest_is_the_first_of_equal_ones(kernels: RowSampling, vocab_size: int) -> None:
    rows = np.round(normal(40, vocab_size, scale=1.0))
    assert kernels.greatest(rows).tolist() == rows.argmax(axis=1).tolist()


def test_greatest_stops_at_the_first_nan(kernels: RowSampling) -> None:
    rows = normal(7, 3000)
    for row, places in enumerate([[5], [2999], [1500, 7], [1023, 1024], [0], [2047, 2048], []]):
        rows[row, places] = np.nan
    rows[5, 0] = np.inf
    assert kernels.greatest(rows).tolist() == rows.argmax(axis=1).tolist()


def test_greatest_of_few_rows(kernels: RowSampling) -> None:
    rows = np.round(normal(1, 3000))
    assert kernels.greatest(rows).tolist() == rows.argmax(axis=1).tolist()


def test_greatest_of_infinities(kernels: RowSampling) -> None:
    rows = np.full((4, 2000), -np.inf, np.float32)
    rows[1, [1700, 1800]] = np.inf
    rows[2, 1999] = -3e38
    rows[3, :] = 3e38  # whose sum overflows
    assert kernels.greatest(rows).tolist() == [0, 1700, 1999, 0]


# ---- draws

OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.01},
    {"temperature": 100.0},
    {"temperature": 3e38},
    {"top_k": 1},
    {"top_k": 40},
    {"top_k": 700},
    {"top_k": 100_000},
    {"top_p": 1e-9},
    {"top_p": 0.5, "temperature": 0.7},
    {"top_p": 0.95},
    {"top_p": 0.9999, "temperature": 1.5},
    {"top_p": 1 - 2**-53},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"min_p": 0.01, "top_k": 50, "top_p": 0.9, "temperature": 1.3},
]


def masked(*shape: int) -> Float32s:
    rows = normal(*shape)
    rows[:, 1:][np.random.default_rng(0).random((shape[0], shape[1] - 1)) < 0.9] = -np.inf
    return rows


def wild(*shape: int) -> Float32s:
    exponents = np.random.default_rng(0).integers(-40, 36, shape)
    return (normal(*shape, scale=1.0) * 10.0**exponents).astype(np.float32)


def peaked(*shape: int) -> Float32s:
    rows = normal(*shape, scale=2.0) - 8
    rows[:, :: shape[1] // 7 + 1] += 12
    return rows


ROWS_OF = {
    "sharp": lambda *shape: normal(*shape, scale=10.0),
    "usual": normal,
    "flat": lambda *shape: normal(*shape, scale=0.05),
    "equal": lambda *shape: np.zeros(shape, np.float32),
    "rounded": lambda *shape: np.round(normal(*shape)),
    "peaked": peaked,
    "masked": masked,
    "wild": wild,
    "subnormal": lambda *shape: (np.round(normal(*shape, scale=9.0)) * 1e-44).astype(np.float32),
}


@pytest.mark.parametrize("vocab_size", [1, 7, 33, 5003])
@pytest.mark.parametrize("kind", ROWS_OF)
def test_draws_are_those_of_numpy(kernels: RowSampling, kind: str, vocab_size: int) -> None:
    rows = ROWS_OF[kind](len(OPTIONS), vocab_size)
    params = [SamplingParams(seed=2**64 - 3 - i, **options) for i, options in enumerate(OPTIONS)]
    both(kernels, rows, params, position=2**33)


@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"top_k": 50, "top_p": 0.8}, {"min_p": 0.02}], ids=str)
@pytest.mark.parametrize("kind", ["usual", "peaked"])
def test_usual_rows_are_decided_by_the_kernels(kernels: RowSampling, kind: str, options: dict[str, Any]) -> None:
    counting = Counting(kernels)
    both(counting, ROWS_OF[kind](60, 5000), [SamplingParams(seed=i, **options) for i in range(60)])
    assert counting.num_draws == 60
    assert counting.num_undecided <= 1


def test_sums_that_are_nearly_equal_are_compared_by_numpy(kernels: RowSampling) -> None:
    """Logits that bring the sums of all tokens within a few units in the last place of each other."""
    noise = gumbel_rows([5] * 30, range(30), 64)
    logits = (-noise + np.random.default_rng(0).choice([0, 1e-6, 2e-6], noise.shape)).astype(np.float32)
    counting = Counting(kernels)
    both(counting, logits, [SamplingParams(seed=5)] * 30)
    assert counting.num_undecided == 30  # more contenders than the kernel reports
    logits[:, 5:] -= 1  # five are left
    contenders = kernels.draw([(row, 5, i, 1.0, 0, float(row.max()), 1.0, -3e38) for i, row in enumerate(logits)])
    assert contenders == [[0, 1, 2, 3, 4]] * 30
    both(kernels, logits, [SamplingParams(seed=5)] * 30)


def test_noise_is_that_of_philox(kernels: RowSampling) -> None:
    """Of equal logits the token with the greatest noise wins: every position and place in a block comes up."""
    rows = np.zeros((400, 50), np.float32)
    found = both(kernels, rows, [SamplingParams(seed=3)] * 400, position=2**40)
    assert found.token_ids == gumbel_rows([3] * 400, range(2**40, 2**40 + 400), 50).argmax(axis=1).tolist()
    assert len(set(found.token_ids)) == 50


def test_rows_with_errors_masks_and_greedy_ones_together(kernels: RowSampling) -> None:
    rows = normal(6, 300)
    rows[1, 5], rows[2, 7], rows[3] = np.nan, np.inf, -np.inf
    params = [
        SamplingParams(temperature=0, logprobs=2),
        SamplingParams(),
        SamplingParams(temperature=0),
        SamplingParams(),
        SamplingParams(seed=1, allowed_token_ids=[4, 9, 200], logprobs=3),
        SamplingParams(seed=2, logit_bias={8: 50.0}, top_p=0.5),
    ]
    result = both(kernels, rows, params)
    assert [error is None for error in result.errors] == [True, False, False, False, True, True]
    assert result.token_ids[4] in (4, 9, 200)
    assert result.token_ids[5] == 8


# ---- log-probabilities


@pytest.mark.parametrize("num_top", [0, 1, 5, 20, MAX_TOP, MAX_TOP + 1, -1])
@pytest.mark.parametrize("kind", ["usual", "equal", "rounded", "masked"])
def test_logprobs(kernels: RowSampling, kind: str, num_top: int) -> None:
    params = [SamplingParams(seed=i, logprobs=num_top) for i in range(4)]
    both(kernels, ROWS_OF[kind](4, 500), params)
    both(kernels, ROWS_OF[kind](4, 3), params)


def test_log_sum_is_exact_to_float32(kernels: RowSampling) -> None:
    row = normal(1, 49_152)[0]
    ((log_sum, rank, _),) = kernels.logprobs([(row, 11, 0)])  # type: ignore[misc]
    assert math.isclose(log_sum, math.log(np.exp(row.astype(np.float64)).sum()), rel_tol=1e-7)
    assert rank == 1 + np.count_nonzero(row > row[11])


def test_results_do_not_depend_on_threads() -> None:
    rows = normal(9, 5003)
    params = [SamplingParams(seed=i, top_p=0.9, logprobs=3) for i in range(9)]
    results = []
    for threads in (1, 3):
        native = Native(Library(library_path(), ARGUMENTS), threads)
        results.append(both(RowSampling(native), rows, params))
        native.close()
    assert results[0].token_ids == results[1].token_ids
    assert [e.logprobs.tolist() for e in results[0].logprobs if e] == [
        e.logprobs.tolist() for e in results[1].logprobs if e
    ]
