"""Log-probabilities against a float64 log-softmax; ranks, ties, order, prompt chunks."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lean_engine.errors import RequestError
from lean_engine.sampling.logprobs import (
    FloatArray,
    Logprob,
    logits_error,
    prompt_logprobs,
    row_logprobs,
    to_dicts,
    token_logprobs,
)


def log_softmax(row: FloatArray) -> np.ndarray:
    wide = row.astype(np.float64)
    return np.asarray(wide - wide.max() - np.log(np.exp(wide - wide.max()).sum()))


def random_logits(num_rows: int, vocab_size: int, scale: float = 4.0) -> FloatArray:
    return np.random.default_rng(vocab_size).normal(0, scale, (num_rows, vocab_size)).astype(np.float32)


@pytest.mark.parametrize("num_top", [0, 1, 5, 99, 100, 1000, -1])
def test_rows_agree_with_a_float64_log_softmax(num_top: int) -> None:
    logits = random_logits(4, 100)
    chosen = [3, 99, 0, 50]
    for row, chosen_id, entry in zip(logits, chosen, token_logprobs(logits, chosen, [num_top] * 4), strict=True):
        expected = log_softmax(row)
        order = np.argsort(-row)[: 100 if num_top in (-1, 1000) else num_top]
        assert entry.ids.tolist() == [chosen_id, *order]
        assert entry.logprobs.dtype == np.float32
        np.testing.assert_allclose(entry.logprobs, expected[entry.ids], atol=2e-6)
        assert entry.ranks.tolist() == [1 + sum(row > row[i]) for i in entry.ids]


def test_each_row_has_its_own_number_of_top_tokens() -> None:
    entries = token_logprobs(random_logits(3, 10), [1, 2, 3], [0, 2, -1])
    assert [len(entry.ids) for entry in entries] == [1, 3, 11]


def test_equal_logits_share_a_rank_and_come_in_order_of_id() -> None:
    row = np.array([1, 3, 2, 3, 2, 2], dtype=np.float32)
    entry = row_logprobs(row, 4, 4)
    assert entry.ids.tolist() == [4, 1, 3, 2, 4]
    assert entry.ranks.tolist() == [3, 1, 1, 3, 3]


def test_an_excluded_token_has_minus_infinity() -> None:
    entry = row_logprobs(np.array([-np.inf, 0, -np.inf], dtype=np.float32), 2, -1)
    assert entry.ids.tolist() == [2, 1, 0, 2]
    assert entry.logprobs.tolist() == [-math.inf, 0.0, -math.inf, -math.inf]
    assert entry.ranks.tolist() == [2, 1, 2, 2]


def test_great_logits_neither_overflow_nor_lose_the_small_differences() -> None:
    entry = row_logprobs(np.array([30_000.0, 30_000.5, -3e38, 3e38], dtype=np.float32)[:3], 0, 0)
    np.testing.assert_allclose(entry.logprobs, [-0.5 - math.log1p(math.exp(-0.5))], atol=1e-6)
    assert row_logprobs(np.array([-3e38, 3e38], dtype=np.float32), 1, 0).logprobs.tolist() == [0.0]


def test_the_users_form_has_the_chosen_token_first_then_the_likeliest_by_rank() -> None:
    row = np.array([0, 3, 1, 2], dtype=np.float32)
    found = to_dicts(row_logprobs(row, 0, 2), lambda token_id: f"<{token_id}>")
    expected = log_softmax(row)
    assert list(found) == [0, 1, 3]
    assert [entry.rank for entry in found.values()] == [4, 1, 2]
    assert [entry.decoded_token for entry in found.values()] == ["<0>", "<1>", "<3>"]
    assert all(abs(entry.logprob - expected[token_id]) < 1e-6 for token_id, entry in found.items())


def test_a_chosen_token_among_the_likeliest_appears_once() -> None:
    found = to_dicts(row_logprobs(np.array([0, 3, 1], dtype=np.float32), 1, 2), None)
    assert list(found) == [1, 2]
    assert found[1] == Logprob(found[1].logprob, 1, None)


def test_prompt_chunks_give_what_the_whole_prompt_gives() -> None:
    logits, targets = random_logits(9, 50), list(range(10, 19))
    whole = prompt_logprobs(logits, targets, 3)
    chunks = prompt_logprobs(logits[:4], targets[:4], 3) + prompt_logprobs(logits[4:], targets[4:], 3)
    for row, target, one, other in zip(logits, targets, whole, chunks, strict=True):
        assert one.ids.tolist() == other.ids.tolist()
        assert one.logprobs.tolist() == other.logprobs.tolist()
        np.testing.assert_allclose(one.logprobs, log_softmax(row)[one.ids], atol=2e-6)
        assert one.ids[0] == target


def test_an_empty_prompt_chunk_has_no_entries() -> None:
    assert prompt_logprobs(np.empty((0, 5), dtype=np.float32), [], 3) == []


def test_a_damaged_prompt_row_fails_its_request() -> None:
    logits = random_logits(3, 10)
    logits[1, 4] = np.nan
    with pytest.raises(RequestError, match="NaN") as caught:
        prompt_logprobs(logits, [0, 1, 2], 1)
    assert caught.value.status == 500


@pytest.mark.parametrize(
    ("peak", "word"), [(math.nan, "NaN"), (math.inf, "infinite"), (-math.inf, "minus infinity for every token")]
)
def test_the_error_says_what_the_logits_are(peak: float, word: str) -> None:
    assert word in (logits_error(peak) or "")
    assert logits_error(65_504.0) is None
