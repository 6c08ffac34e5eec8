"""Tool calls in an answer's text, found while it is written.

A parser takes the answer's text in pieces of whatever size and gives back what is new: content, and of each call its
name once and its arguments as they grow. No part of a tag is shown as content, the blanks around calls belong to
nothing, and how the text was cut makes no difference. What turns out to be no call is content, tags and all: nothing is
lost. A call counts from where its arguments begin; a streaming parser cannot take it back when it breaks off later,
one that is not streaming waits for the whole of it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import ClassVar

from lean_engine.text.call_scanner import CallScanner, Status, is_object_text
from lean_engine.text.detokenizer import longest_beginning


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
    """What is new of one call."""

    index: int  # of the call in its answer
    id: str | None  # with the first delta of the call only
    name: str | None  # the same
    arguments: str  # JSON text that continues what came before


@dataclass(slots=True)
class ToolDelta:
    """What is new of an answer."""

    content: str = ""
    calls: list[ToolCallDelta] = field(default_factory=list)


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class ToolCallParser:
    """What the forms have in common. `append` each piece of an answer's text; `finish` when it ends.

    Args:
        names: of the tools that a call may name; None = any.
        is_streaming: show a call from the beginning of its arguments on; otherwise only a whole and valid one.
        max_calls: calls after so many are dropped; None = no limit.
        new_id: makes the id of each call.

    Attributes:
        num_calls: calls shown so far.
    """

    TAGS: ClassVar[tuple[str, ...]]  # text that the form needs to see

    def __init__(
        self,
        names: Collection[str] | None = None,
        *,
        is_streaming: bool = True,
        max_calls: int | None = None,
        new_id: Callable[[], str] = new_call_id,
    ) -> None:
        self.num_calls = 0
        self._names = names
        self._is_streaming = is_streaming
        self._max_calls = max_calls
        self._new_id = new_id
        self._state: Callable[[], bool] = self._between  # does what it can with _pending; False: it needs more
        self._pending = ""  # text that nothing has been made of yet
        self._delta = ToolDelta()
        self._scanner = CallScanner()
        self._raw = ""  # the text of the call being read, with what led to it, until it is accepted
        self._is_accepted = False  # it counts as one
        self._is_dropped = False  # it is one too many
        self._has_calls = False

    def append(self, text: str) -> ToolDelta:
        """Take the next piece; return what is new."""
        self._pending += text
        while self._state():
            pass
        return self._take_delta()

    def finish(self) -> ToolDelta:
        """End the answer; return what was held back."""
        if self._state == self._in_call:
            if not self._is_accepted:
                self._delta.content += self._raw
        elif self._state == self._in_content or not self._is_end(self._pending):
            self._delta.content += self._pending
        self._pending = ""
        return self._take_delta()

    def _take_delta(self) -> ToolDelta:
        delta, self._delta = self._delta, ToolDelta()
        return delta

    def _between(self) -> bool:
        """At the start of the answer or behind a call, with nothing but blanks since."""
        raise NotImplementedError

    def _behind_call(self) -> bool:
        """Behind the object of a call."""
        raise NotImplementedError

    def _in_content(self) -> bool:
        """Inside content."""
        raise NotImplementedError

    def _is_end(self, text: str) -> bool:
        """Whether what is left outside of content at the end of the answer belongs to nothing."""
        return self._has_calls and not text.strip()

    def _begin_call(self, led_to: str, rest: str) -> bool:
        """Read a call in `rest`; where it is none, `led_to` is content too."""
        self._raw, self._pending = led_to, rest
        self._scanner, self._is_accepted = CallScanner(self._names), False
        self._state = self._in_call
        return True

    def _in_call(self) -> bool:
        scanner, text = self._scanner, self._pending
        num_read = 0
        for char in text:
            scanner.feed(char)
            if scanner.status is Status.BROKEN:
                break  # the character is left to what follows
            num_read += 1
            if scanner.status is Status.COMPLETE:
                break
        self._raw += "" if self._is_accepted else text[:num_read]
        self._pending = text[num_read:]
        self._show_call()
        if scanner.status is Status.OPEN:
            return False
        if not self._is_accepted:
            self._delta.content += self._raw
        self._state = self._behind_call if self._is_accepted else self._in_content
        return True

    def _show_call(self) -> None:
        """Show what is new of the call, once it counts as one."""
        scanner = self._scanner
        if not scanner.is_begun or not (self._is_streaming or scanner.status is Status.COMPLETE):
            return
        arguments = scanner.take_arguments()
        if not self._is_streaming and not is_object_text(arguments):
            return
        is_first, self._is_accepted, self._has_calls = not self._is_accepted, True, True
        if is_first:
            self._is_dropped = self.num_calls == self._max_calls
            self.num_calls += not self._is_dropped
        if self._is_dropped:
            return
        if is_first:
            self._delta.calls.append(ToolCallDelta(self.num_calls - 1, self._new_id(), scanner.name, arguments))
        elif arguments:
            self._delta.calls.append(ToolCallDelta(self.num_calls - 1, None, None, arguments))


class HermesParser(ToolCallParser):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`, of Hermes and Qwen, anywhere in the answer."""

    START = "<tool_call>"
    END = "</tool_call>"
    TAGS = (START, END)

    def _between(self) -> bool:
        text = self._pending.lstrip()
        if text.startswith(self.START):
            blanks = self._pending[: len(self._pending) - len(text)]
            return self._begin_call(blanks + self.START, text[len(self.START) :])
        if self.START.startswith(text):
            return False
        self._state = self._in_content
        return True

    def _behind_call(self) -> bool:
        text = self._pending.lstrip()
        if not text.startswith(self.END) and self.END.startswith(text):
            return False
        self._pending = text[len(self.END) :] if text.startswith(self.END) else self._pending
        self._state = self._between
        return True

    def _in_content(self) -> bool:
        before, tag, after = self._pending.partition(self.START)
        if tag:
            self._delta.content += before
            return self._begin_call(tag, after)
        self._pending = longest_beginning(before, (self.START,))
        self._delta.content += before[: len(before) - len(self._pending)]
        return False

    def _is_end(self, text: str) -> bool:
        is_end_tag = self._state == self._behind_call and self.END.startswith(text.strip())
        return is_end_tag or super()._is_end(text)


class Llama3JsonParser(ToolCallParser):
    """`{"name": …, "parameters": {…}}`, of Llama 3: at the start of the answer or behind `<|python_tag|>`.

    Several follow one another, with a semicolon or blanks between them.
    """

    TAG = "<|python_tag|>"
    TAGS = ()  # a call at the start of the answer needs none

    def _between(self) -> bool:
        text = self._pending.lstrip()
        if self._has_calls and text.startswith(";"):
            text = text[1:].lstrip()
        if text.startswith(self.TAG):
            text = text[len(self.TAG) :].lstrip()
        if self.TAG.startswith(text):
            return False
        if text.startswith("{"):
            return self._begin_call(self._pending[: len(self._pending) - len(text)], text)
        self._state = self._in_content
        return True

    def _behind_call(self) -> bool:
        self._state = self._between
        return True

    def _in_content(self) -> bool:
        before, tag, after = self._pending.partition(self.TAG)
        call = after.lstrip()
        if call.startswith("{"):
            self._delta.content += before
            return self._begin_call(tag + after[: len(after) - len(call)], call)
        if tag and call:
            self._delta.content += before + tag
            self._pending = after
            return True
        self._pending = tag + after if tag else longest_beginning(before, (self.TAG,))
        self._delta.content += before if tag else before[: len(before) - len(self._pending)]
        return False

    def _is_end(self, text: str) -> bool:
        return super()._is_end(text.strip().removeprefix(";"))
