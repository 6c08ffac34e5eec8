from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lean_engine.errors import ConfigError
from lean_engine.text.reasoning import (
    REASONING_PARSERS,
    ReasoningDelta,
    ReasoningParser,
    make_reasoning_parser,
    split_reasoning,
)

OPENED = "user: hi\nassistant: <think>\n"
PLAIN = "user: what is <think>?\nassistant: "


def pieces_of(text: str, cuts: list[int]) -> list[str]:
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    return [text[a:b] for a, b in pairwise(places)]


def stream(parser: ReasoningParser, pieces: list[str]) -> ReasoningDelta:
    deltas = [*map(parser.append, pieces), parser.finish()]
    return ReasoningDelta("".join(d.reasoning for d in deltas), "".join(d.content for d in deltas))


@pytest.mark.parametrize(
    ("name", "prompt", "text", "reasoning", "content"),
    [
        ("qwen3", PLAIN, "<think>\na\nb\n</think>\n\nHi\n", "a\nb", "Hi\n"),
        ("qwen3", PLAIN, "\n <think>a</think>b", "a", "b"),
        ("qwen3", PLAIN, "<think>\n\n</think>\n\nHi", "", "Hi"),
        ("qwen3", PLAIN, "Hi <think>a</think>", "", "Hi <think>a</think>"),
        ("qwen3", PLAIN, "a</think>b", "", "a</think>b"),
        ("qwen3", PLAIN, "<thin", "", "<thin"),
        ("qwen3", PLAIN, "\n\nHi", "", "\n\nHi"),
        ("qwen3", OPENED, "a</think>b", "a", "b"),
        ("qwen3", OPENED, "\na", "a", ""),
        ("qwen3", PLAIN, "<think>never ends </thin\n", "never ends </thin", ""),
        ("qwen3", PLAIN, "<think>a<think>b</think>c</think>d", "a<think>b", "c</think>d"),
        ("qwen3", "…<think>\n\n</think>\n\n", "<think>a</think>b", "", "<think>a</think>b"),
        ("deepseek_r1", PLAIN, "a\n</think>\nb<think>c</think>", "a", "b<think>c</think>"),
        ("deepseek_r1", PLAIN, "<think>\na</think>b", "a", "b"),
        ("deepseek_r1", OPENED, "a", "a", ""),
        ("deepseek_r1", OPENED, "", "", ""),
        ("deepseek_r1", OPENED, "  code</think>  b", "  code", "  b"),
        ("deepseek_r1", "…<think></think>", "a</think>b", "", "a</think>b"),
    ],
)
def test_every_cut_of_a_text_gives_the_same_two_parts(
    name: str, prompt: str, text: str, reasoning: str, content: str
) -> None:
    wanted = ReasoningDelta(reasoning, content)
    assert split_reasoning(make_reasoning_parser(name, prompt), text) == wanted
    assert stream(make_reasoning_parser(name, prompt), list(text)) == wanted
    for first in range(len(text) + 1):
        for second in range(first, len(text) + 1):
            pieces = [text[:first], text[first:second], text[second:]]
            assert stream(make_reasoning_parser(name, prompt), pieces) == wanted, pieces


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "<th", "/think>", "a", " ", "\n", "<", ">"])).map("".join),
    st.lists(st.integers(0, 200)),
    st.sampled_from(REASONING_PARSERS),
    st.sampled_from([PLAIN, OPENED]),
)
def test_random_texts_cut_at_random_lose_nothing_but_tags_and_breaks(
    text: str, cuts: list[int], name: str, prompt: str
) -> None:
    whole = split_reasoning(make_reasoning_parser(name, prompt), text)
    assert stream(make_reasoning_parser(name, prompt), pieces_of(text, cuts)) == whole

    def kept(part: str) -> str:
        return part.replace("\n", "").replace(" ", "").replace("<think>", "").replace("</think>", "")

    assert kept(whole.reasoning) + kept(whole.content) == kept(text)
    assert "</think>" not in whole.reasoning


def test_no_part_of_a_tag_is_shown_before_it_is_decided() -> None:
    parser = make_reasoning_parser("qwen3", PLAIN)
    shown = [parser.append(char) for char in "<think>ab</think>cd"]
    assert [d.reasoning for d in shown if d.reasoning] == ["a", "b"]
    assert [d.content for d in shown if d.content] == ["c", "d"]


def test_a_tag_that_is_not_completed_comes_out_as_soon_as_that_is_known() -> None:
    parser = make_reasoning_parser("deepseek_r1", PLAIN)
    assert parser.append("a </th") == ReasoningDelta("a ", "")
    assert parser.append("e") == ReasoningDelta("</the", "")
    assert parser.is_reasoning


def test_without_thinking_everything_is_content() -> None:
    parser = make_reasoning_parser("qwen3", OPENED, enable_thinking=False)
    assert split_reasoning(parser, "<think>a</think>b") == ReasoningDelta("", "<think>a</think>b")


def test_the_form_of_an_answer_begins_behind_its_reasoning() -> None:
    start, end = {"reasoning_start": "<think>"}, {"reasoning_end": "</think>"}
    assert make_reasoning_parser("qwen3", PLAIN).grammar_tags == start | end
    assert make_reasoning_parser("qwen3", OPENED).grammar_tags == end
    assert make_reasoning_parser("deepseek_r1", PLAIN).grammar_tags == end
    assert make_reasoning_parser("deepseek_r1", PLAIN, enable_thinking=False).grammar_tags == {}


def test_an_unknown_name_is_refused_with_those_that_are_known() -> None:
    with pytest.raises(ConfigError, match="'r1' is not known; known: qwen3, deepseek_r1"):
        make_reasoning_parser("r1", "")
