"""Incremental detokenization: exact text, no flicker, stop strings that are never partly shown."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lean_engine.errors import RequestError
from lean_engine.text import IncrementalDetokenizer, Tokenizer

TINY = Path(__file__).parents[1] / "data" / "tiny"
BYTE_LEVEL, LLAMA2, GEMMA = "qwen2", "mixtral", "gemma2"
STYLES = (BYTE_LEVEL, LLAMA2, GEMMA)
REPLACEMENT = "\ufffd"
HARD_TEXTS = (
    "😀 ok 👍🏽",
    "한국어 문장",
    "family 👨‍👩‍👧‍👦!",
    "é é ǅ 中文字符 ½",
    "  two  spaces\n\n\ttab ",
    "🇩🇪🇫🇷 zero\u200dwidth",
)


@cache
def tokenizer_of(name: str) -> Tokenizer:
    return Tokenizer.from_directory(TINY / name)


@cache
def ids_by_bytes(tokenizer: Tokenizer) -> dict[bytes, int]:
    """Token bytes → id."""
    return {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}


def byte_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """A text as tokens of one byte each."""
    return [ids_by_bytes(tokenizer)[bytes([byte])] for byte in text.encode()]


def stream(detokenizer: IncrementalDetokenizer, token_ids: Sequence[int]) -> list[str]:
    """The deltas of one token per step, and what `finish` adds."""
    return [detokenizer.append([token_id]) for token_id in token_ids] + [detokenizer.finish()]


def joint_text(tokenizer: Tokenizer, prompt: list[int], output: list[int], skip: bool = True) -> str:
    """What prompt and output read together have after the prompt."""
    before = tokenizer.decode(prompt, skip_special_tokens=skip)
    return tokenizer.decode(prompt + output, skip_special_tokens=skip)[len(before) :]


# ---- text


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("text", HARD_TEXTS)
def test_one_token_per_step_shows_only_whole_characters_that_stay(style: str, text: str) -> None:
    tokenizer = tokenizer_of(style)
    ids = tokenizer.encode(text, add_special_tokens=False)
    deltas = stream(IncrementalDetokenizer(tokenizer, []), ids)
    assert "".join(deltas) == tokenizer.decode(ids) == text
    assert not any(REPLACEMENT in delta for delta in deltas)


@pytest.mark.parametrize("style", STYLES)
def test_a_character_is_shown_with_its_last_byte_and_not_later(style: str) -> None:
    tokenizer = tokenizer_of(style)
    ids = byte_ids(tokenizer, "€")
    assert stream(IncrementalDetokenizer(tokenizer, []), ids) == ["", "", "€", ""]


@given(text=st.text(max_size=30), style=st.sampled_from(STYLES))
@settings(max_examples=100, deadline=None)
def test_deltas_of_any_text_join_to_its_decode(text: str, style: str) -> None:
    tokenizer = tokenizer_of(style)
    ids = tokenizer.encode(text, add_special_tokens=False)
    deltas = stream(IncrementalDetokenizer(tokenizer, []), ids)
    assert "".join(deltas) == tokenizer.decode(ids)
    assert "".join(deltas).count(REPLACEMENT) == text.count(REPLACEMENT)


@given(ids=st.lists(st.integers(0, 511), max_size=30), style=st.sampled_from(STYLES), skip=st.booleans())
@settings(max_examples=150, deadline=None)
def test_deltas_of_any_ids_join_to_their_decode(ids: list[int], style: str, skip: bool) -> None:
    tokenizer = tokenizer_of(style)
    ids = [i for i in ids if i < tokenizer.vocab_size]
    detokenizer = IncrementalDetokenizer(tokenizer, [], skip_special_tokens=skip)
    assert "".join(stream(detokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=skip) == detokenizer.text


@given(prompt=st.text(max_size=15), output=st.text(max_size=15), style=st.sampled_from(STYLES), skip=st.booleans())
@settings(max_examples=150, deadline=None)
def test_text_is_what_prompt_and_output_have_after_the_prompt(prompt: str, output: str, style: str, skip: bool) -> None:
    tokenizer = tokenizer_of(style)
    prompt_ids, output_ids = tokenizer.encode(prompt), tokenizer.encode(output, add_special_tokens=False)
    detokenizer = IncrementalDetokenizer(tokenizer, prompt_ids, skip_special_tokens=skip)
    assert "".join(stream(detokenizer, output_ids)) == joint_text(tokenizer, prompt_ids, output_ids, skip)


@pytest.mark.parametrize(
    ("prompt", "shown"),
    [
        ([], "Hello"),
        (["<|bos|>"], "Hello"),  # a skipped special token is no text
        (["<|bos|>", "▁a"], " Hello"),
        (["▁a", "<|im_end|>", "<|im_start|>"], " Hello"),  # text far back, special tokens since
        (["▁"], " Hello"),  # the prompt's own space was the one that is dropped
    ],
)
def test_leading_space_of_llama2_output_stays_where_the_prompt_has_text(prompt: list[str], shown: str) -> None:
    tokenizer = tokenizer_of(LLAMA2)
    prompt_ids = [ids_by_bytes(tokenizer)[token.replace("▁", " ").encode()] for token in prompt]
    output_ids = tokenizer.encode("Hello", add_special_tokens=False)
    assert "".join(stream(IncrementalDetokenizer(tokenizer, prompt_ids), output_ids)) == shown


def test_leading_space_alone_in_the_first_token_is_dropped_once() -> None:
    tokenizer = tokenizer_of(LLAMA2)
    assert stream(IncrementalDetokenizer(tokenizer, []), byte_ids(tokenizer, "  ")) == ["", " ", ""]


def test_unfinished_character_is_shown_as_decode_shows_it_when_generation_ends() -> None:
    tokenizer = tokenizer_of(BYTE_LEVEL)
    ids = byte_ids(tokenizer, "a€")[:3]
    detokenizer = IncrementalDetokenizer(tokenizer, [])
    assert stream(detokenizer, ids) == ["a", "", "", REPLACEMENT]
    assert detokenizer.text == tokenizer.decode(ids)
    assert detokenizer.finish() == ""


def test_character_that_the_prompt_begins_and_the_output_completes_belongs_to_the_output() -> None:
    tokenizer = tokenizer_of(BYTE_LEVEL)
    ids = byte_ids(tokenizer, "x😀y")
    assert stream(IncrementalDetokenizer(tokenizer, ids[:4]), ids[4:]) == ["😀", "y", ""]


def test_prompt_that_ends_with_a_real_replacement_character_does_not_repeat_it() -> None:
    tokenizer = tokenizer_of(BYTE_LEVEL)
    prompt, output = tokenizer.encode("x\ufffd"), tokenizer.encode("y")
    assert stream(IncrementalDetokenizer(tokenizer, prompt), output) == ["y", ""]


def test_ids_without_a_token_have_no_text() -> None:
    tokenizer = tokenizer_of(BYTE_LEVEL)
    padding_row = tokenizer.vocab_size + 7
    ids = [padding_row, *tokenizer.encode("ab"), padding_row]
    detokenizer = IncrementalDetokenizer(tokenizer, [padding_row])
    assert detokenizer.append(ids) == "ab"
    assert detokenizer.num_tokens_kept == len(ids)


def test_special_tokens_show_only_when_asked_for() -> None:
    tokenizer = tokenizer_of(BYTE_LEVEL)
    ids = tokenizer.encode("a<|im_end|>b")
    assert IncrementalDetokenizer(tokenizer, []).append(ids) == "ab"
    assert IncrementalDetokenizer(tokenizer, [], skip_special_tokens=False).append(ids) == "a<|im_end|>b"


def test_no_step_decodes_what_was_decoded_before(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = tokenizer_of(LLAMA2)
    asked: list[int] = []
    real = Tokenizer.token_bytes
    monkeypatch.setattr(Tokenizer, "token_bytes", lambda self, i: asked.append(i) or real(self, i))
    monkeypatch.setattr(Tokenizer, "decode", lambda *_, **__: pytest.fail("decodes whole sequences"))
    ids = [tokenizer.eos_token_id or 0] * 500 + tokenizer.encode("word " * 50) + [200] * 500
    stream(IncrementalDetokenizer(tokenizer, []), ids)
    assert len(asked) <= len(ids)


# ---- stop strings


def run_stops(
    pieces: Sequence[str], stop: Sequence[str] | str, **options: object
) -> tuple[IncrementalDetokenizer, list[str]]:
    """Stream pieces of ASCII text, each appended as one list of single-character tokens."""
    tokenizer = tokenizer_of(BYTE_LEVEL)
    detokenizer = IncrementalDetokenizer(tokenizer, [], stop=stop, **options)  # type: ignore[arg-type]
    deltas = [detokenizer.append(byte_ids(tokenizer, piece)) for piece in pieces]
    return detokenizer, [*deltas, detokenizer.finish()]


def test_stop_string_over_several_tokens_is_never_partly_shown() -> None:
    detokenizer, deltas = run_stops(list("Hi STOP!"), ["STOP"])
    assert deltas == ["H", "i", " ", "", "", "", "", "", ""]
    assert (detokenizer.stopped, detokenizer.text, detokenizer.num_tokens_kept) == ("STOP", "Hi ", 7)


def test_beginning_of_a_stop_string_is_shown_once_it_goes_another_way() -> None:
    detokenizer, deltas = run_stops(list("STOxSTO"), ["STOP"])
    assert deltas == ["", "", "", "STOx", "", "", "", "STO"]
    assert (detokenizer.stopped, detokenizer.num_tokens_kept) == (None, 7)


def test_only_the_longest_end_that_can_become_a_stop_string_is_kept_back() -> None:
    _, deltas = run_stops(["xaab", "a"], ["aabaac"])
    assert deltas == ["x", "", "aaba"]
    _, deltas = run_stops(list("aaaab"), ["aab"])
    assert deltas == ["", "", "a", "a", "", ""]


def test_what_follows_the_stop_string_in_the_same_token_is_dropped() -> None:
    tokenizer = tokenizer_of(BYTE_LEVEL)
    detokenizer = IncrementalDetokenizer(tokenizer, [], stop="a")
    assert detokenizer.append([ids_by_bytes(tokenizer)[b"hat"]]) == "h"
    assert (detokenizer.stopped, detokenizer.num_tokens_kept) == ("a", 1)


def test_stop_inside_a_run_of_tokens_keeps_them_up_to_the_one_that_completes_it() -> None:
    detokenizer, deltas = run_stops(["ab", "cSTOPdefg", "h"], ["STOP"])
    assert deltas == ["ab", "c", "", ""]
    assert detokenizer.num_tokens_kept == 7


def test_earliest_complete_stop_wins_whatever_its_place_in_the_list() -> None:
    for stop in (["world", "Hello"], ["Hello", "world"]):
        detokenizer, _ = run_stops(["say Hello world"], stop)
        assert (detokenizer.text, detokenizer.stopped) == ("say ", "Hello")


@pytest.mark.parametrize("pieces", [["xabcd"], list("xabcd"), ["xa", "bcd"]])
def test_overlapping_stops_do_not_depend_on_the_cut_into_tokens(pieces: list[str]) -> None:
    assert run_stops(pieces, ["abcd", "bc"])[0].text == "xa"  # "bc" is complete first
    detokenizer, _ = run_stops(pieces, ["c", "abc", "bc"])
    assert (detokenizer.text, detokenizer.stopped) == ("x", "abc")  # complete together: the longest


def test_of_two_stops_within_one_token_the_first_complete_wins() -> None:
    tokenizer = tokenizer_of(BYTE_LEVEL)
    detokenizer = IncrementalDetokenizer(tokenizer, [], stop=["ance", "nc"])
    assert detokenizer.append([ids_by_bytes(tokenizer)[b"ance"]]) == "a"
    assert detokenizer.stopped == "nc"


def test_stop_string_stays_when_it_is_to_be_included() -> None:
    detokenizer, deltas = run_stops(list("aSTOPb"), ["STOP"], include_stop_str_in_output=True)
    assert deltas == ["a", "S", "T", "O", "P", "", ""]
    assert (detokenizer.text, detokenizer.stopped, detokenizer.num_tokens_kept) == ("aSTOP", "STOP", 5)
    detokenizer, deltas = run_stops(["aST", "OPbc"], ["STOP"], include_stop_str_in_output=True)
    assert deltas == ["aST", "OP", ""]


def test_included_stop_string_that_does_not_come_is_shown_once() -> None:
    _, deltas = run_stops(list("aSTx"), ["STOP"], include_stop_str_in_output=True)
    assert deltas == ["a", "S", "T", "x", ""]


def test_stop_complete_within_min_tokens_does_not_count() -> None:
    detokenizer, _ = run_stops(list("STOPabSTOPc"), ["STOP"], min_tokens=4)
    assert (detokenizer.text, detokenizer.num_tokens_kept) == ("STOPab", 10)


def test_stop_passed_over_in_min_tokens_is_not_found_again_in_what_is_kept_back() -> None:
    detokenizer, deltas = run_stops(list("abcx"), ["abcd", "bc"], min_tokens=3)
    assert (deltas, detokenizer.stopped) == (["", "", "", "abcx", ""], None)


def test_stop_that_begins_within_min_tokens_and_ends_after_them_counts() -> None:
    detokenizer, _ = run_stops(list("xSTOPy"), ["STOP"], min_tokens=3)
    assert (detokenizer.text, detokenizer.num_tokens_kept) == ("x", 5)


def test_stop_may_be_one_string_of_whole_characters() -> None:
    tokenizer = tokenizer_of(LLAMA2)
    detokenizer = IncrementalDetokenizer(tokenizer, [], stop="😀")
    deltas = stream(detokenizer, tokenizer.encode("a😀b", add_special_tokens=False))
    assert "".join(deltas) == "a"
    assert detokenizer.stopped == "😀"


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(RequestError, match="empty") as caught:
        IncrementalDetokenizer(tokenizer_of(BYTE_LEVEL), [], stop=["a", ""])
    assert caught.value.param == "stop"


def oracle(pieces: Sequence[str], stops: Sequence[str], include: bool, min_tokens: int) -> tuple[str, str | None, int]:
    """Text, stop and tokens kept, read character by character."""
    text, num_tokens = "", 0
    for piece in pieces:
        num_tokens += 1
        for character in piece:
            text += character
            complete = [stop for stop in stops if text.endswith(stop) and num_tokens > min_tokens]
            if complete:
                stop = max(complete, key=len)
                return (text if include else text[: -len(stop)]), stop, num_tokens
    return text, None, num_tokens


PIECES = st.lists(st.sampled_from(["a", "b", "n", "an", "nc", "ance", "nce", " a"]), max_size=14)
STOPS = st.lists(
    st.sampled_from(["a", "ab", "nc", "nce", "ance", "cea", "ancea", "n ab", "aaa"]), min_size=1, max_size=3
)


@given(pieces=PIECES, stops=STOPS, include=st.booleans(), min_tokens=st.integers(0, 4), step=st.integers(1, 3))
@settings(max_examples=200, deadline=None)
def test_stops_agree_with_a_reader_of_single_characters(
    pieces: list[str], stops: list[str], include: bool, min_tokens: int, step: int
) -> None:
    tokenizer = tokenizer_of(BYTE_LEVEL)
    ids = [ids_by_bytes(tokenizer)[piece.encode()] for piece in pieces]
    text, stop, num_tokens = oracle(pieces, stops, include, min_tokens)
    detokenizer = IncrementalDetokenizer(
        tokenizer, [], stop=stops, include_stop_str_in_output=include, min_tokens=min_tokens
    )
    shown = ""
    for start in range(0, len(ids), step):
        shown += detokenizer.append(ids[start : start + step])
        assert text.startswith(shown)
        if detokenizer.stopped is None and not include:
            kept_back = "".join(pieces[: start + step])[len(shown) :]
            assert kept_back == "" or any(s.startswith(kept_back) and s != kept_back for s in stops)
    shown += detokenizer.finish()
    assert (shown, detokenizer.stopped, detokenizer.num_tokens_kept) == (text, stop, num_tokens)
    assert detokenizer.text == text
