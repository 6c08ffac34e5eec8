"""The sampling kernels in the emulator against the CPU's sampler, on the same logits: the same tokens, bit for bit."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from cuda_kernel_running import ORDERS, Array
from cuda_sampling_running import Answer, DeviceSampler, Form, ask, compare, sample_on_cpu, sample_on_device

from lean_engine.checkpoint.demo_model import cache_directory
from lean_engine.errors import ConfigError
from lean_engine.runtime.cuda.cubin_cache import CubinCache
from lean_engine.runtime.cuda.instances import ARCHITECTURES
from lean_engine.runtime.cuda.nvrtc import Nvrtc
from lean_engine.runtime.cuda.sampling import KERNELS, PART_TOKENS
from lean_engine.runtime.cuda.sources import kernel_source
from lean_engine.sampling.sampler import candidates

ONE_ORDER = ((5, 0),)
SMALL = pytest.mark.parametrize("vocab_size", [8, 1027])
LARGE = pytest.mark.parametrize("vocab_size", [8, 4099])
# Chi-square exceeded once in 10,000, by degrees of freedom.
CHI_SQUARE_LIMIT = {3: 21.11, 7: 29.88}
SKEWED = np.array([0.5, 2.0, -0.5, 1.5, -3.0, -0.5, 1.0, 0.0], np.float32)


def normal(num_rows: int, vocab_size: int, seed: int = 0, scale: float = 3.0) -> Array:
    return np.random.default_rng([seed, vocab_size]).normal(0, scale, (num_rows, vocab_size)).astype(np.float32)


def every_shape(vocab_size: int) -> Array:
    """Usual, flat, peaked, with many ties, with excluded tokens, equal, single."""
    rows = normal(7, vocab_size)
    rows[1] *= 0.01
    rows[2] *= 10
    rows[3] = np.round(rows[3])
    rows[4, ::2] = -np.inf
    rows[5] = 1.25
    rows[6] = -np.inf
    rows[6, vocab_size // 2] = -70
    return rows


def compare_all_shapes(vocab_size: int, orders: Any = ONE_ORDER, **options: Any) -> None:
    rows = every_shape(vocab_size)
    compare(rows, [ask(**{"seed": row, **options}) for row in range(len(rows))], orders)


# ---- the choice


@LARGE
def test_greedy_and_plain_sampling_in_every_order_of_threads(vocab_size: int) -> None:
    compare_all_shapes(vocab_size, ORDERS, temperature=0)
    compare_all_shapes(vocab_size, ORDERS)


def test_greedy_takes_the_lowest_id_of_equal_ones() -> None:
    logits = normal(4, 3 * PART_TOKENS + 5)
    for row, ids in enumerate([(7, 6), (PART_TOKENS, 2 * PART_TOKENS), (3 * PART_TOKENS + 4, 9), (5, 4)]):
        logits[row, list(ids)] = 20
    logits[3, [4, 5]] = 0.0, -0.0
    logits[3] = np.minimum(logits[3], 0)
    logits[3, 4:] = np.where(logits[3, 4:] == 0, -0.0, logits[3, 4:])
    logits[3, :4], logits[3, 9] = -1, 0.0
    found = compare(logits, [ask(temperature=0)] * 4)
    assert found.token_ids == [6, PART_TOKENS, 9, 4]


FILTERS: list[dict[str, Any]] = [
    {"temperature": 0.01},
    {"temperature": 0.3},
    {"temperature": 1e308},
    {"top_k": 1},
    {"top_k": 7},
    {"top_k": 4000},
    {"top_p": 1e-9},
    {"top_p": 0.6},
    {"top_p": 0.99},
    {"top_p": 1 - 2**-53},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 20, "top_p": 0.7},
    {"min_p": 0.02, "top_p": 0.5},
    {"min_p": 0.2, "top_k": 40},
    {"temperature": 2.5, "min_p": 0.05, "top_k": 12, "top_p": 0.8},
    {"temperature": 0.2, "top_k": 50, "top_p": 0.95},
]


@SMALL
@pytest.mark.parametrize("options", FILTERS, ids=str)
def test_filters(options: dict[str, Any], vocab_size: int) -> None:
    compare_all_shapes(vocab_size, **options)


def test_filters_in_every_order_of_threads() -> None:
    logits = normal(3, 4099)
    compare(logits, [ask(top_k=9, seed=1), ask(top_p=0.9, seed=2), ask(min_p=0.01, top_k=40, top_p=0.8, seed=3)])


def kept(device: DeviceSampler, logits: Array, row: int) -> list[int]:
    """The ids that a row's cut leaves."""
    cut = device.arrays.cuts[row]
    lowest, scaled_lowest = cut[:2].view(np.float32)
    scaled = (logits[row] - logits[row].max()) / np.float32(device.answers[row].params.temperature)
    equal = (scaled == scaled_lowest) & (np.arange(len(scaled)) <= cut[2])
    ids: list[int] = np.flatnonzero((logits[row] >= lowest) & ((scaled > scaled_lowest) | equal)).tolist()
    return ids


CUTS: list[dict[str, Any]] = [
    {"top_p": 0.9},
    {"top_p": 0.5, "temperature": 0.7},
    {"top_p": 0.999},
    {"top_k": 40, "top_p": 0.6},
    {"top_p": 0.8, "min_p": 0.01},
]


@pytest.mark.parametrize("vocab_size", [9, 3000])
@pytest.mark.parametrize("options", CUTS, ids=str)
def test_cut_leaves_exactly_what_the_cpu_leaves(options: dict[str, Any], vocab_size: int) -> None:
    logits = np.concatenate([every_shape(vocab_size), np.round(normal(5, vocab_size, 1) * 2) / 2])
    device = DeviceSampler(vocab_size, [ask(**options) for _ in logits])
    device.step(device.place(logits, "float32"))
    for row, answer in enumerate(device.answers):
        assert kept(device, logits, row) == candidates(logits[row], answer.params)[0].tolist()


@pytest.mark.parametrize(("scale", "step"), [(0.0, 1.0), (0.02, 2.0**-30), (0.5, 0.125)])
def test_cuts_beyond_the_list_search_the_row(scale: float, step: float) -> None:
    logits = np.round(normal(3, 6001, 3, scale) / step).astype(np.float32) * np.float32(step)
    options: list[dict[str, Any]] = [{"top_p": 0.9}, {"top_k": 5000}, {"top_k": 5500, "top_p": 0.95}]
    device = DeviceSampler(6001, [ask(**o) for o in options])
    device.step(device.place(logits, "float32"))
    assert len(candidates(logits[0], device.answers[0].params)[0]) > 4096
    for row in (0, 2):
        assert kept(device, logits, row) == candidates(logits[row], device.answers[row].params)[0].tolist()
    assert len(kept(device, logits, 1)) >= 5000
    compare(logits, device.answers, ONE_ORDER)


def test_of_equal_tokens_top_p_draws_the_first_and_top_k_draws_all() -> None:
    logits = np.zeros((80, 10))
    answers = [ask(seed=row, **({"top_p": 0.5} if row % 2 else {"top_k": 3})) for row in range(80)]
    tokens = compare(logits, answers, ONE_ORDER).token_ids
    assert set(tokens[1::2]) == set(range(5))
    assert set(tokens[::2]) == set(range(10))


# ---- what a request changes

CHANGES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 1e-30},
    {"frequency_penalty": 1.1},
    {"presence_penalty": -2.0},
    {"repetition_penalty": 0.7, "frequency_penalty": -0.3, "presence_penalty": 0.9},
    {"logit_bias": {0: 100.0, 3: -100.0, 7: 2.5}},
    {"allowed_token_ids": [7, 1, 4, 1]},
    {"min_tokens": 7, "stop_token_ids": [3, 5]},
    {"min_tokens": 6, "stop_token_ids": [3, 5]},
    {"min_tokens": 10**12, "stop_token_ids": [7], "max_tokens": None},
    {"bad_words": [(4,), (0, 6), (5, 6, 7), (1,), (3, 2, 5, 6, 6, 3)]},
    {
        "bad_words": [(4,), (6, 7)],
        "allowed_token_ids": [7, 1, 4, 3, 5, 6],
        "min_tokens": 9,
        "stop_token_ids": [3],
        "logit_bias": {1: 1.0, 3: 5.0, 6: 0.1, 2: 50.0},
        "repetition_penalty": 1.2,
        "frequency_penalty": 0.4,
    },
]


@SMALL
@pytest.mark.parametrize("temperature", [0.0, 1.5])
@pytest.mark.parametrize("options", CHANGES, ids=lambda o: "+".join(o))
def test_masks_biases_and_penalties(options: dict[str, Any], temperature: float, vocab_size: int) -> None:
    outputs: list[tuple[int, ...]] = [(), (6,), (3, 5, 5, 6, 5, 6), (3, 3, 3, 2, 5, 6, 6), (0,)]
    logits = every_shape(vocab_size)[:5]
    answers = [
        ask([1, 4, 4], output, **{"temperature": temperature, "seed": row, "top_p": 0.9, "max_tokens": 100, **options})
        for row, output in enumerate(outputs)
    ]
    compare(logits, answers, ONE_ORDER)


def test_penalties_and_biases_round_as_on_the_cpu() -> None:
    rng = np.random.default_rng(4)
    answers, rows = [], normal(100, 8)
    for row in rows:
        penalties = dict(zip(("frequency_penalty", "presence_penalty"), rng.uniform(-2, 2, 2).tolist(), strict=True))
        bias = {4: float(rng.uniform(-3, 3))}
        output = [0] * int(rng.integers(1, 9)) + [1, 4]
        answer = ask([3], output, temperature=0, repetition_penalty=1.3, logit_bias=bias, **penalties)
        row[[2, 5, 6, 7]] = -50
        changed = row.copy()
        answer.state.apply(changed)
        row[7] = changed.max()  # a rival that wins if the others come out one unit in the last place lower
        answers.append(answer)
    assert 7 not in compare(rows, answers, ONE_ORDER).token_ids
    rows[:, 7] = np.nextafter(rows[:, 7], np.float32(np.inf))  # and one that loses if they come out higher
    assert set(compare(rows, answers, ONE_ORDER).token_ids) == {7}


@SMALL
@pytest.mark.parametrize("is_done", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_forms_leave_what_they_allow_and_a_finished_one_ends_all_else(
    temperature: float, is_done: bool, vocab_size: int
) -> None:
    options: list[dict[str, Any]] = [
        {},
        {"top_k": 3, "top_p": 0.8},
        {"logit_bias": {2: 9.0, 5: 50.0, 6: -5.0}, "repetition_penalty": 1.4},
        {"min_tokens": 4, "stop_token_ids": [6], "bad_words": [(4, 2), (7,)]},
        {"allowed_token_ids": [0, 2, 6], "logprobs": 3},
        {"min_p": 0.1},
    ]
    allowed: list[list[int]] = [[2], [0, 1, 5, 6, 7], [2, 5, 6], [2, 3, 6, 7], [2, 6, 7], list(range(vocab_size))]
    logits = normal(7, vocab_size, 2)
    answers = [
        ask([1, 4], [5], temperature=temperature, max_tokens=99, form=Form(ids, vocab_size, is_done), **one)
        for ids, one in zip(allowed, options, strict=True)
    ]
    answers.append(ask([1, 4], [5], temperature=temperature))  # held to none, beside the others
    tokens = compare(logits, answers, ORDERS[:2]).token_ids
    assert all(token in ids for token, ids in zip(tokens, allowed, strict=False))


def test_form_that_leaves_no_token_is_an_error_of_its_row() -> None:
    contradicted = ask(form=Form([3], 40), allowed_token_ids=[4], index=1)  # what is refused of a first answer
    answers = [ask(form=Form([], 40)), contradicted, ask()]
    assert [error is None for error in compare(normal(3, 40), answers, ONE_ORDER).errors] == [False, False, True]


def test_bad_word_needs_all_its_tokens_in_the_output() -> None:
    logits = np.tile(np.arange(8, dtype=np.float32), (4, 1))
    outputs: list[list[int]] = [[], [0], [0, 0], [3, 0]]
    answers = [ask([0, 0], output, temperature=0, bad_words=[(1, 2, 7), (0, 0, 7), (3, 0, 6)]) for output in outputs]
    assert compare(logits, answers).token_ids == [7, 7, 6, 7]


def test_many_seen_tokens_and_specials_in_every_order_of_threads() -> None:
    vocab_size = 2 * PART_TOKENS + 3
    ids = np.random.default_rng(1).integers(0, vocab_size, 900).tolist()
    bias = {token: float(token % 7) for token in ids[:40]}
    options: dict[str, Any] = {"repetition_penalty": 1.5, "frequency_penalty": 0.2, "logit_bias": bias}
    answers = [ask(ids[:500], ids[500:], **options), ask(ids[:2], ids[2:], temperature=0, logprobs=3, **options)]
    compare(normal(2, vocab_size), answers)


def test_what_only_penalties_or_masks_leave_without_a_token_is_an_error_of_its_row() -> None:
    logits = normal(4, 8)
    logits[1:3, 5] = -np.inf
    answers = [
        ask(),
        ask(allowed_token_ids=[5]),
        ask(allowed_token_ids=[5], logit_bias={5: 100.0}),
        ask(temperature=0, repetition_penalty=1e-300),
    ]
    logits[3] = 1
    answers[3] = ask(range(8), temperature=0, repetition_penalty=1e-300)
    errors = compare(logits, answers).errors
    assert [error is None for error in errors] == [True, False, False, False]


def test_damaged_rows_harm_no_other() -> None:
    logits = normal(8, 4099)
    logits[1, 4098] = np.nan
    logits[2, 0] = np.uint32(0xFFC00001).view(np.float32)  # a negative NaN
    logits[3, 77] = np.inf
    logits[4] = -np.inf
    logits[5, [3, 4]] = np.nan, np.inf
    answers = [ask(seed=row, top_k=5, logprobs=2) for row in range(7)] + [ask(temperature=0)]
    answers[5] = ask(allowed_token_ids=[9], logprobs=0)  # the damage is elsewhere
    found = compare(logits, answers)
    assert [error is None for error in found.errors] == [True, False, False, False, False, False, True, True]
    alone = compare(logits[[0, 6, 7]], [answers[0], answers[6], answers[7]])
    assert [found.token_ids[row] for row in (0, 6, 7)] == alone.token_ids


# ---- noise


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32, 2**63, 2**64 - 2, -5])
def test_seeds_of_64_bits(seed: int) -> None:
    compare(normal(3, 50), [ask(seed=seed), ask(seed=seed, index=1), ask([1] * 33, seed=seed)], ONE_ORDER)


def test_answers_of_one_request_and_positions_differ() -> None:
    logits = np.repeat(normal(1, 400, scale=0.3), 12, axis=0)
    answers = [ask(index=i) for i in range(6)] + [ask([1] * (2 + i)) for i in range(6)]
    found = compare(logits, answers, ONE_ORDER)
    assert len(set(found.token_ids[:6])) > 3
    assert len(set(found.token_ids[6:])) > 3


def draws(options: dict[str, Any], num_steps: int = 20, num_rows: int = 100) -> Array:
    """How often each token of SKEWED is drawn."""
    answers = [ask(seed=1000 + row, **options) for row in range(num_rows)]
    device = DeviceSampler(8, answers)
    logits = device.place(np.tile(SKEWED, (num_rows, 1)), "float32")
    tokens = [token for _ in range(num_steps) for token, _ in device.step(logits)]
    return np.bincount(tokens, minlength=8)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "top_k": 4}], ids=str)
def test_draws_have_the_distribution(options: dict[str, Any]) -> None:
    counts = draws({**options, "max_tokens": None, "ignore_eos": True})
    probabilities = np.exp(SKEWED.astype(np.float64) / options.get("temperature", 1))
    probabilities[np.argsort(-SKEWED)[options.get("top_k", 8) :]] = 0
    expected = probabilities / probabilities.sum() * counts.sum()
    is_possible = expected > 0
    assert not counts[~is_possible].any()
    chi_square = ((counts - expected)[is_possible] ** 2 / expected[is_possible]).sum()
    assert chi_square < CHI_SQUARE_LIMIT[int(is_possible.sum()) - 1]


def test_a_token_depends_on_nothing_else_in_the_batch() -> None:
    logits = normal(5, 1003)
    answers = [ask(seed=row, top_p=0.9, repetition_penalty=1.1) for row in range(5)]
    together = sample_on_device(logits, answers, ONE_ORDER).token_ids
    backwards = sample_on_device(logits[::-1], answers[::-1], ONE_ORDER).token_ids
    alone = [sample_on_device(logits[r : r + 1], [answers[r]], ONE_ORDER).token_ids[0] for r in range(5)]
    assert together == backwards[::-1] == alone


# ---- log-probabilities


@pytest.mark.parametrize("vocab_size", [8, 257, 4099])
@pytest.mark.parametrize("num_logprobs", [0, 1, 5, 20])
def test_logprobs_of_the_chosen_and_the_likeliest(num_logprobs: int, vocab_size: int) -> None:
    compare_all_shapes(vocab_size, ORDERS[1:], logprobs=num_logprobs)


def test_logprobs_are_of_the_raw_logits_over_several_parts() -> None:
    logits = np.round(normal(3, 3 * PART_TOKENS + 1))
    options: dict[str, Any] = {"logit_bias": {5: 60.0}, "repetition_penalty": 2.0, "top_k": 3}
    answers = [ask(logprobs=20, **options), ask(temperature=0, logprobs=4), ask()]
    found = compare(logits, answers)
    assert found.token_ids[0] == 5
    assert found.logprobs[2] is None


# ---- the comparison itself, and the compiler


def test_comparison_sees_a_changed_token_of_either_sampler() -> None:
    logits = normal(2, 50)
    answers = [ask(seed=1), ask(seed=2)]
    moved = Answer(dataclasses.replace(answers[0].params, seed=3))
    assert sample_on_device(logits, answers, ONE_ORDER).token_ids == sample_on_cpu(logits, answers).token_ids
    assert (
        sample_on_device(logits, [moved, answers[1]], ONE_ORDER).token_ids != sample_on_cpu(logits, answers).token_ids
    )


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_kernel_compiles_without_spills_or_local_memory(arch: str) -> None:
    try:
        cubins = CubinCache(cache_directory() / "cubin", Nvrtc())
    except ConfigError as error:
        pytest.skip(str(error))
    for source, names in KERNELS.items():
        for name, r in cubins.get(kernel_source(source), names, arch).resources.items():
            assert (r.spill_bytes, r.stack_bytes) == (0, 0), name
            assert r.registers <= 96, name
            assert r.shared_bytes <= 40 * 1024, name
