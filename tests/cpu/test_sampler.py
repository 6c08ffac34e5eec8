"""The sampler against a plain float64 reference: every parameter, distributions, seeds, damaged rows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from lean_engine.errors import LaunchError
from lean_engine.sampling import SamplingParams
from lean_engine.sampling.constraints import NOTHING_LEFT
from lean_engine.sampling.logprobs import FloatArray
from lean_engine.sampling.philox import gumbel_rows
from lean_engine.sampling.sampler import NO_TOKEN, Sampler, SamplingState, candidates, resolve_seed

# Chi-square exceeded once in 10,000, by degrees of freedom.
CHI_SQUARE_LIMIT = {1: 15.14, 2: 18.42, 3: 21.11, 4: 23.51, 5: 25.74, 6: 27.86, 7: 29.88}
SKEWED = np.array([2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -3.0], dtype=np.float32)[[3, 0, 6, 1, 7, 5, 2, 4]]


def reference_logits(
    row: FloatArray,
    params: SamplingParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    eos: Sequence[int] = (),
    bad_words: Sequence[tuple[int, ...]] = (),
) -> list[float]:
    """Masks, bias and penalties, token by token."""
    logits = [float(x) for x in row]
    for token in range(len(logits)):
        excluded = params.allowed_token_ids is not None and token not in params.allowed_token_ids
        for *before, last in bad_words:
            excluded |= token == last and list(output[len(output) - len(before) :]) == before
        excluded |= len(output) < params.min_tokens and (token in eos or token in params.stop_token_ids)
        if excluded:
            logits[token] = -math.inf
        logits[token] += params.logit_bias.get(token, 0.0)
        if token in prompt or token in output:
            rate = params.repetition_penalty
            logits[token] = logits[token] / rate if logits[token] > 0 else logits[token] * rate
        logits[token] -= params.frequency_penalty * output.count(token)
        logits[token] -= params.presence_penalty * (token in output)
    return logits


def reference_probabilities(logits: Sequence[float], params: SamplingParams) -> np.ndarray:
    """What temperature, min_p, top_k and top_p leave, one after the other, renormalised."""
    scaled = np.array(logits, dtype=np.float64) / params.temperature
    probabilities = np.exp(scaled - scaled.max())
    probabilities[probabilities < params.min_p * probabilities.max()] = 0
    if 0 < params.top_k < len(logits):
        probabilities[probabilities < np.sort(probabilities)[-params.top_k]] = 0
    probabilities /= probabilities.sum()
    kept, mass = [], 0.0
    for token in sorted(range(len(logits)), key=lambda token: (-probabilities[token], token)):
        if mass < params.top_p:
            kept.append(token)
        mass += probabilities[token]
    probabilities[np.setdiff1d(np.arange(len(logits)), kept)] = 0
    return np.asarray(probabilities / probabilities.sum())


def sampled(row: FloatArray, state: SamplingState, position: int = 0) -> int:
    result = Sampler(len(row)).sample(row[None].copy(), [state], [position])
    assert result.errors == [None]
    return result.token_ids[0]


def processed(row: FloatArray, state: SamplingState) -> FloatArray:
    changed = row.copy()
    state.apply(changed)
    return changed


def state_with_output(params: SamplingParams, output: Sequence[int], prompt: Sequence[int] = (), **more: Any) -> Any:
    state = SamplingState(params, prompt, **more)
    for token in output:
        state.accept(token)
    return state


def normal(*shape: int, seed: int = 0, scale: float = 3.0) -> FloatArray:
    return np.random.default_rng(seed).normal(0, scale, shape).astype(np.float32)


def test_greedy_takes_the_greatest_logit_and_the_lowest_id_of_equal_ones() -> None:
    logits = np.array([[0, 2, 1, 2], [5, 5, 5, 5], [-9, -8, -np.inf, -7]], dtype=np.float32)
    states = [SamplingState(SamplingParams(temperature=0), []) for _ in range(3)]
    assert Sampler(4).sample(logits, states, [0, 0, 0]).token_ids == [1, 0, 3]


FILTERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 4.0},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 10_000},
    {"top_p": 0.05},
    {"top_p": 0.6},
    {"top_p": 0.97},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.7},
    {"min_p": 0.02, "top_p": 0.5},
    {"min_p": 0.2, "top_k": 40},
    {"temperature": 2.5, "min_p": 0.05, "top_k": 12, "top_p": 0.8},
]
COMBINED: dict[str, Any] = {"temperature": 1.5, "min_p": 0.05, "top_k": 6, "top_p": 0.9}


@pytest.mark.parametrize("options", FILTERS)
@pytest.mark.parametrize(("vocab_size", "scale"), [(50, 2.0), (3000, 10.0), (3000, 0.05)])
def test_what_is_left_has_the_reference_probabilities(options: dict[str, Any], vocab_size: int, scale: float) -> None:
    params = SamplingParams(**options)
    row = normal(vocab_size, seed=vocab_size, scale=scale)
    ids, scaled = candidates(row, params)
    weights = np.exp(scaled.astype(np.float64))
    found = np.zeros(vocab_size)
    found[ids] = weights / weights.sum()
    expected = reference_probabilities(row.tolist(), params)
    assert set(ids.tolist()) <= set(np.flatnonzero(expected).tolist())
    assert (np.diff(ids) > 0).all()
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-8)


def test_top_k_keeps_every_token_equal_to_the_last_one_in() -> None:
    row = np.array([1, 3, 2, 2, 0, 2], dtype=np.float32)
    assert candidates(row, SamplingParams(top_k=2))[0].tolist() == [1, 2, 3, 5]


def test_top_p_keeps_the_smallest_set_and_the_lower_ids_of_equal_tokens() -> None:
    assert candidates(np.zeros(8, dtype=np.float32), SamplingParams(top_p=0.5))[0].tolist() == [0, 1, 2, 3]
    row = np.log(np.array([1, 1, 4, 1, 1], dtype=np.float32))
    assert candidates(row, SamplingParams(top_p=0.7))[0].tolist() == [0, 1, 2]
    assert candidates(row, SamplingParams(top_p=1e-9))[0].tolist() == [2]


def test_top_p_on_a_flat_row_looks_beyond_the_first_thousand() -> None:
    ids, _ = candidates(np.zeros(5000, dtype=np.float32), SamplingParams(top_p=0.9))
    assert ids.tolist() == list(range(4500))


@pytest.mark.parametrize("options", [{"top_p": 1 - 2**-53}, {"temperature": 1e308}])
def test_values_that_exclude_nearly_nothing_keep_what_the_model_allows(options: dict[str, Any]) -> None:
    row = np.array([0, -np.inf, 0, 0], dtype=np.float32)
    assert candidates(row, SamplingParams(**options))[0].tolist() == [0, 2, 3]
    for seed in range(10):  # sums of many terms are rounded either way
        assert len(candidates(normal(3000, seed=seed, scale=4.0), SamplingParams(**options))[0]) > 2990


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.5}, {"temperature": 3.0}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.2}, COMBINED],
)
@pytest.mark.parametrize("varies", ["position", "seed"])
def test_draws_follow_the_reference_distribution(options: dict[str, Any], varies: str) -> None:
    num_draws = 200_000
    ids, scaled = candidates(SKEWED, SamplingParams(**options))
    many, one = np.arange(num_draws), np.full(num_draws, 77)
    noise = gumbel_rows(one, many, 8) if varies == "position" else gumbel_rows(many, one, 8)
    drawn = np.bincount(ids[np.argmax(scaled + noise[:, ids], axis=1)], minlength=8)
    expected = num_draws * reference_probabilities(SKEWED.tolist(), SamplingParams(**options))
    possible = expected > 0
    assert drawn[~possible].sum() == 0
    chi_square = float(((drawn - expected)[possible] ** 2 / expected[possible]).sum())
    assert chi_square < CHI_SQUARE_LIMIT[int(possible.sum()) - 1]


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.8}, {"top_k": 50}, {"top_p": 0.95}])
@pytest.mark.parametrize("vocab_size", [8, 1001])
def test_sample_takes_the_greatest_sum_of_logit_and_noise(options: dict[str, Any], vocab_size: int) -> None:
    params = SamplingParams(seed=2**64 - 3, temperature=1.3, **options)
    row = normal(vocab_size, seed=1)
    ids, scaled = candidates(row, params)
    noise = gumbel_rows([2**64 - 3] * 100, range(100), vocab_size)
    expected = ids[np.argmax(scaled + noise[:, ids], axis=1)]
    states = [SamplingState(params, [])] * 100
    found = Sampler(vocab_size).sample(np.repeat(row[None], 100, axis=0), states, range(100))
    assert found.token_ids == expected.tolist()


SEEDED: list[dict[str, Any]] = [{}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}, {"temperature": 2.0}]


@pytest.mark.parametrize("options", SEEDED)
def test_a_seeded_request_does_not_see_its_batch(options: dict[str, Any]) -> None:
    row, others = normal(500), normal(6, 500, seed=9)
    params = SamplingParams(seed=11, **options)
    alone = [sampled(row, SamplingState(params, []), position) for position in range(20)]
    mates = [SamplingParams(), SamplingParams(temperature=0), SamplingParams(top_k=3), SamplingParams(top_p=0.5)]
    for position in range(20):
        batch = others.copy()
        place = position % 6
        batch[place] = row
        states = [SamplingState(mates[i % 4], []) for i in range(6)]
        states[place] = SamplingState(params, [])
        positions = [3 * i for i in range(6)]
        positions[place] = position
        assert Sampler(500).sample(batch, states, positions).token_ids[place] == alone[position]
    assert len(set(alone)) > 1


def test_a_draw_repeated_before_it_is_accepted_gives_the_same_token() -> None:
    """What preemption does: a step's result is lost, its tokens are computed again, the state was not told."""

    def run(loses_every_other_step: bool) -> list[int]:
        params = SamplingParams(seed=5, repetition_penalty=1.3, frequency_penalty=0.5, min_tokens=8, stop_token_ids=[1])
        state = SamplingState(params, [4, 5, 6], eos_token_ids=[0])
        output: list[int] = []
        while len(output) < 30:
            row = normal(40, seed=1000 + len(output))
            if loses_every_other_step:
                sampled(row, state, 3 + len(output))
            output.append(sampled(row, state, 3 + len(output)))
            state.accept(output[-1])
        return output

    assert run(loses_every_other_step=True) == run(loses_every_other_step=False)


def test_unseeded_requests_get_fresh_entropy() -> None:
    row = normal(500, scale=0.1)
    states = [SamplingState(SamplingParams(), []) for _ in range(8)]
    assert len({state.seed for state in states}) == 8
    assert len({tuple(sampled(row, state, p) for p in range(4)) for state in states}) == 8


def test_each_answer_of_a_seeded_request_has_its_own_noise() -> None:
    params = SamplingParams(seed=2**64 - 1, n=3)
    assert [SamplingState(params, [], answer_index=i).seed for i in range(3)] == [2**64 - 1, 0, 1]
    assert resolve_seed(-2) == 2**64 - 2


MASKS = {"allowed_token_ids": [1, 2, 5, 9, 10], "logit_bias": {1: 3, 5: -2}, "min_tokens": 9, "stop_token_ids": [2]}


@pytest.mark.parametrize(
    "options",
    [
        {"allowed_token_ids": [3, 4, 11]},
        {"min_tokens": 6, "stop_token_ids": [7, 8]},
        {"min_tokens": 5, "stop_token_ids": [7, 8]},
        {"logit_bias": {2: 100, 3: -100, 4: 0.5}},
        {"repetition_penalty": 1.7},
        {"repetition_penalty": 0.6},
        {"frequency_penalty": 0.7},
        {"frequency_penalty": -1.1},
        {"presence_penalty": 1.9},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.4, "presence_penalty": -0.3, **MASKS},
    ],
)
@pytest.mark.parametrize("bad_words", [[], [(5,), (2, 9, 10), (2, 9, 11), (9, 3), (5, 9, 4), (1, 2, 1, 2, 9, 2, 9, 6)]])
def test_processed_logits_agree_with_the_reference(options: dict[str, Any], bad_words: list[tuple[int, ...]]) -> None:
    params = SamplingParams(**options)
    prompt, output, eos = [9, 1, 1, 6], [2, 5, 2, 2, 9], [0, 10]
    row = normal(12, seed=4)
    state = state_with_output(params, output, prompt, eos_token_ids=eos, bad_words_token_ids=bad_words)
    expected = reference_logits(row, params, prompt, output, eos, bad_words)
    np.testing.assert_allclose(processed(row, state), expected, rtol=1e-6, atol=1e-6)
    greedy = dataclasses.replace(params, temperature=0)
    state = state_with_output(greedy, output, prompt, eos_token_ids=eos, bad_words_token_ids=bad_words)
    assert sampled(row, state) == np.argmax(expected)


def test_repetition_sees_the_prompt_but_frequency_and_presence_only_the_output() -> None:
    row = np.ones(4, dtype=np.float32)
    repetition = SamplingState(SamplingParams(repetition_penalty=2.0), [1, 1])
    assert processed(row, repetition).tolist() == [1, 0.5, 1, 1]
    repetition.accept(2)
    assert processed(row, repetition).tolist() == [1, 0.5, 0.5, 1]
    counted = SamplingState(SamplingParams(frequency_penalty=0.5, presence_penalty=0.25), [1, 1])
    assert processed(row, counted).tolist() == [1, 1, 1, 1]
    counted.accept(2)
    counted.accept(2)
    assert processed(row, counted).tolist() == [1, 1, -0.25, 1]


def test_penalties_hold_for_outputs_of_many_distinct_tokens() -> None:
    params = SamplingParams(frequency_penalty=0.5, repetition_penalty=1.5)
    rng = np.random.default_rng(0)
    prompt, output = rng.integers(0, 500, 100).tolist(), rng.integers(0, 500, 700).tolist()
    row = normal(500)
    state = state_with_output(params, output, prompt)
    np.testing.assert_allclose(
        processed(row, state), reference_logits(row, params, prompt, output), rtol=1e-5, atol=1e-5
    )


def test_a_bias_of_one_hundred_decides() -> None:
    row = normal(50)
    assert sampled(row, SamplingState(SamplingParams(logit_bias={7: 100}), [])) == 7
    banned = int(row.argmax())
    state = SamplingState(SamplingParams(logit_bias={banned: -100}, seed=0), [])
    assert all(sampled(row, state, position) != banned for position in range(200))


def test_min_tokens_excludes_every_ending_token_until_they_are_out() -> None:
    row = np.array([9, 8, 7, 0, 0], dtype=np.float32)
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=[1], ignore_eos=True)
    state = SamplingState(params, [], eos_token_ids=[0])
    for expected in (2, 2, 0):
        assert sampled(row, state) == expected
        state.accept(expected)


def test_a_bad_word_of_several_tokens_is_cut_off_at_its_last() -> None:
    row = np.array([0, 0, 9, 8], dtype=np.float32)
    state = SamplingState(SamplingParams(temperature=0), [0, 1], bad_words_token_ids=[(0, 1, 2)])
    assert sampled(row, state) == 2  # the prompt does not count
    state.accept(0)
    assert sampled(row, state) == 2
    state.accept(1)
    assert sampled(row, state) == 3


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 1e308},
        {"temperature": 1e308, "min_p": 5e-324, "top_p": 0.5},
        {"repetition_penalty": 1e300},
        {"top_p": 5e-324},
        {"min_p": 5e-324},
        {"top_k": 10**30},
    ],
)
@pytest.mark.parametrize("greatest", [1.0, 65_504.0, 3e38])
def test_extreme_but_valid_values_still_give_a_token_that_is_not_excluded(
    options: dict[str, Any], greatest: float
) -> None:
    row = np.array([-np.inf, 0.0, greatest, -greatest, 0.5], dtype=np.float32)
    state = SamplingState(SamplingParams(seed=3, **options), [0, 1, 2, 3])
    assert all(sampled(row, state, position) in (1, 2, 3, 4) for position in range(20))


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = normal(3, 30)
    wide = logits.astype(np.float64)
    expected = wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))
    params = SamplingParams(logprobs=2, temperature=0.5, logit_bias={4: 100}, repetition_penalty=1.5, top_k=3)
    states = [
        SamplingState(params, [1]),
        SamplingState(SamplingParams(), []),
        SamplingState(SamplingParams(logprobs=0), []),
    ]
    result = Sampler(30).sample(logits.copy(), states, [0, 0, 0])
    assert result.token_ids[0] == 4
    first, second, third = result.logprobs
    assert first is not None
    assert first.ids.tolist() == [4, *np.argsort(-expected[0])[:2]]
    np.testing.assert_allclose(first.logprobs, expected[0][first.ids], atol=2e-6)
    assert second is None
    assert third is not None
    assert third.ids.tolist() == [result.token_ids[2]]


@pytest.mark.parametrize("options", [{"temperature": 0}, {"top_k": 2}, {"allowed_token_ids": [5, 6]}])
@pytest.mark.parametrize("damage", [np.nan, np.inf, -np.inf])
def test_a_damaged_row_fails_alone(options: dict[str, Any], damage: float) -> None:
    params = SamplingParams(seed=1, logprobs=1, **options)
    clean = normal(3, 20)
    expected = Sampler(20).sample(clean.copy(), [SamplingState(params, []) for _ in range(3)], [0, 0, 0]).token_ids
    logits = clean.copy()
    if damage == -np.inf:
        logits[1] = damage
    else:
        logits[1, 13] = damage
    result = Sampler(20).sample(logits, [SamplingState(params, []) for _ in range(3)], [0, 0, 0])
    assert result.token_ids == [expected[0], NO_TOKEN, expected[2]]
    assert result.errors[0] is None
    assert "logits" in (result.errors[1] or "")
    assert result.errors[2] is None
    assert [entry is None for entry in result.logprobs] == [False, True, False]


def test_masks_that_leave_no_token_are_an_error() -> None:
    state = SamplingState(SamplingParams(allowed_token_ids=[3]), [], bad_words_token_ids=[(3, 3)])
    state.accept(3)
    result = Sampler(5).sample(normal(1, 5), [state], [0])
    assert result.errors == [NOTHING_LEFT]
    assert result.token_ids == [NO_TOKEN]


def test_an_empty_batch_gives_an_empty_result() -> None:
    result = Sampler(5).sample(np.empty((0, 5), dtype=np.float32), [], [])
    assert (result.token_ids, result.logprobs, result.errors) == ([], [], [])


def test_logits_of_another_shape_or_type_are_refused() -> None:
    state = SamplingState(SamplingParams(), [])
    with pytest.raises(LaunchError, match=r"\(1, 5\), found float32 \(1, 6\)"):
        Sampler(5).sample(normal(1, 6), [state], [0])
    with pytest.raises(LaunchError, match="float64"):
        Sampler(5).sample(normal(1, 5).astype(np.float64), [state], [0])
    with pytest.raises(LaunchError, match="positions"):
        Sampler(5).sample(normal(1, 5), [state], [])
