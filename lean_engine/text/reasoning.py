"""An answer's reasoning apart from its content: `<think>…</think>` before what the user is to read.

A parser takes the answer's text in pieces of whatever size and gives back what is new of either part. No part of a tag
is ever shown, the line breaks next to a tag belong to neither part, and how the text was cut makes no difference. An
end of a piece that may be the beginning of a tag is held back until more text, or `finish`, decides.

The names are those of --reasoning-parser:
  - qwen3: an answer that begins with `<think>` reasons; any other is content. Where the prompt ends with `<think>`
    (the template opened it) the answer reasons from the start.
  - deepseek_r1: an answer reasons from the start, whether it writes `<think>` or the prompt did.
An answer whose reasoning does not end is all reasoning. One whose prompt ends with `</think>`, or for which thinking is
disabled, is all content.
"""

from __future__ import annotations

from typing import NamedTuple

from lean_engine.errors import ConfigError
from lean_engine.text.detokenizer import longest_beginning

START = "<think>"
END = "</think>"
TAGS = (START, END)
REASONING_PARSERS = ("qwen3", "deepseek_r1")


class ReasoningDelta(NamedTuple):
    """What is new of an answer's two parts."""

    reasoning: str
    content: str


class ReasoningParser:
    """Splits one answer. `append` each piece of text; `finish` when the answer ends.

    Args:
        may_reason: the answer may begin with `<think>`; otherwise all of it is content.
        is_open: the answer begins inside the reasoning; a `<think>` at its start is left out.

    Attributes:
        grammar_tags: fields of StructuredOutputsParams that make the answer's form begin behind the reasoning.
    """

    def __init__(self, *, may_reason: bool = True, is_open: bool = False) -> None:
        self.grammar_tags: dict[str, str] = {}
        if is_open:
            self.grammar_tags = {"reasoning_end": END}
        elif may_reason:
            self.grammar_tags = {"reasoning_start": START, "reasoning_end": END}
        self._is_undecided = may_reason or is_open  # whether `<think>` comes first is still open
        self._is_reasoning = is_open
        self._held = ""  # not shown: blanks at a boundary, or what may be the beginning of a tag
        self._drops_breaks = is_open  # line breaks that come next stand behind a tag

    @property
    def is_reasoning(self) -> bool:
        """Whether the answer is inside its reasoning."""
        return self._is_reasoning

    def append(self, text: str) -> ReasoningDelta:
        """Take the next piece; return what is new of both parts."""
        text, self._held = self._held + text, ""
        if self._is_undecided:
            begun = text.lstrip()
            if START.startswith(begun[: len(START)]) and len(begun) < len(START):
                self._held = text
                return ReasoningDelta("", "")
            self._is_undecided = False
            if begun.startswith(START):
                text, self._is_reasoning, self._drops_breaks = begun[len(START) :], True, True
        return self._reason(text) if self._is_reasoning else ReasoningDelta("", self._without_breaks(text))

    def finish(self) -> ReasoningDelta:
        """End the answer; return what was held back."""
        held, self._held = self._held, ""
        if not self._is_reasoning:
            return ReasoningDelta("", held)
        return ReasoningDelta(held.rstrip("\n"), "")

    def _reason(self, text: str) -> ReasoningDelta:
        text = self._without_breaks(text)
        before, tag, after = text.partition(END)
        if tag:
            self._is_reasoning, self._drops_breaks = False, True
            return ReasoningDelta(before.rstrip("\n"), self._without_breaks(after))
        shown = text[: len(text) - len(longest_beginning(text, (END,)))].rstrip("\n")
        self._held = text[len(shown) :]
        return ReasoningDelta(shown, "")

    def _without_breaks(self, text: str) -> str:
        """The text without the line breaks that stand behind a tag."""
        if self._drops_breaks:
            text = text.lstrip("\n")
            self._drops_breaks = not text
        return text


def make_reasoning_parser(name: str, prompt: str, *, enable_thinking: bool = True) -> ReasoningParser:
    """The parser of one answer.

    Args:
        name: one of REASONING_PARSERS.
        prompt: the rendered prompt; what it ends with tells where the answer begins.
        enable_thinking: the variable of that name that the chat template was given, true where it was not.

    Raises:
        ConfigError: the name is unknown.
    """
    if name not in REASONING_PARSERS:
        raise ConfigError(f"reasoning parser {name!r} is not known; known: {', '.join(REASONING_PARSERS)}")
    end = prompt.rstrip()
    if not enable_thinking or end.endswith(END):
        return ReasoningParser(may_reason=False)
    return ReasoningParser(is_open=name == "deepseek_r1" or end.endswith(START))


def split_reasoning(parser: ReasoningParser, text: str) -> ReasoningDelta:
    """A whole answer at once."""
    first, last = parser.append(text), parser.finish()
    return ReasoningDelta(first.reasoning + last.reasoning, first.content + last.content)
