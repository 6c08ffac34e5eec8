"""Token ids → text that is safe to show, one step at a time, with stop strings.

Exact, and every token costs the same. The tokens' bytes pass through an incremental UTF-8 decoder, which keeps back an
unfinished character (at most three bytes); the characters pass through a matcher, which keeps back only an end of the
text that may still become a stop string.

The text continues the prompt: it is what prompt and output read together have after the prompt. A SentencePiece
vocabulary drops one space at the start of a text; the output's leading space therefore stays where the prompt has any
visible text, and is dropped where the prompt is empty or holds skipped special tokens only. A character that the prompt
begins and the output completes belongs to the output.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from lean_engine.errors import RequestError
from lean_engine.text.tokenizer import Tokenizer

MAX_UNFINISHED_BYTES = 3  # of a UTF-8 character


class StopMatch(NamedTuple):
    """Where a stop string stands in a text."""

    start: int
    end: int
    stop: str


class IncrementalDetokenizer:
    """The text of one request's output. `append` each step's tokens; `finish` when generation ends.

    Args:
        tokenizer: the model's tokenizer.
        prompt_token_ids: what the output continues.
        skip_special_tokens: leave special tokens out of the text.
        stop: a string or several; the text ends where one is first complete. RequestError for an empty one.
        include_stop_str_in_output: keep the stop string in the text.
        min_tokens: a stop string that is complete within the first `min_tokens` tokens does not count.

    Attributes:
        stopped: the stop string that ended the text, None while there is none.
        num_tokens_kept: tokens appended, up to and with the one that completed the stop string.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        *,
        skip_special_tokens: bool = True,
        stop: str | Sequence[str] = (),
        include_stop_str_in_output: bool = False,
        min_tokens: int = 0,
    ) -> None:
        self._stops = (stop,) if isinstance(stop, str) else tuple(stop)
        if "" in self._stops:
            raise RequestError("stop holds an empty string; should be non-empty strings", param="stop")
        self.stopped: str | None = None
        self.num_tokens_kept = 0
        self._tokenizer = tokenizer
        self._skipped = tokenizer.special_ids if skip_special_tokens else frozenset()
        self._include_stop = include_stop_str_in_output
        self._min_tokens = min_tokens
        self._parts: list[str] = []
        self._tail = ""  # the longest end of the text that is the beginning of a stop string
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._utf8.decode(self._last_bytes(prompt_token_ids))
        self._num_leading = self._leading_left(prompt_token_ids)

    @property
    def text(self) -> str:
        """Everything shown so far."""
        self._parts = ["".join(self._parts)]
        return self._parts[0]

    def append(self, token_ids: Iterable[int]) -> str:
        """Take the next tokens; return the new text that is safe to show.

        Nothing after a stop string is shown or counted, be it in the same token, the same call or a later one.
        """
        shown = []
        for token_id in token_ids:
            if self.stopped is not None:
                break
            self.num_tokens_kept += 1
            shown.append(self._advance(self._characters(token_id)))
        return self._show("".join(shown))

    def finish(self) -> str:
        """End the text: return what was kept back, with U+FFFD for a character that never became complete.

        Nothing is kept back where a stop string ended the text.
        """
        if self.stopped is not None:
            return ""
        rest = self._utf8.decode(b"", final=True)
        kept = "" if self._include_stop else self._tail
        self._tail = ""
        return self._show(kept + rest)

    def _show(self, text: str) -> str:
        if text:
            self._parts.append(text)
        return text

    def _visible_bytes(self, token_ids: Iterable[int]) -> Iterator[bytes]:
        """The bytes of each token that shows."""
        return (self._tokenizer.token_bytes(i) for i in token_ids if i not in self._skipped)

    def _last_bytes(self, prompt_token_ids: Sequence[int]) -> bytes:
        """Enough of the prompt's end to hold the beginning of an unfinished character."""
        last = b""
        for piece in self._visible_bytes(reversed(prompt_token_ids)):
            last = piece + last
            if len(last) >= MAX_UNFINISHED_BYTES:
                break
        return last

    def _leading_left(self, prompt_token_ids: Sequence[int]) -> int:
        """How many leading characters the spelling may still drop after the prompt."""
        num_left = self._tokenizer.spelling.max_leading
        for piece in self._visible_bytes(prompt_token_ids):
            if not num_left:
                break
            _, num_left = self._tokenizer.spelling.strip_leading(piece, num_left)
        return num_left

    def _characters(self, token_id: int) -> str:
        """The characters that this token completes."""
        if token_id in self._skipped:
            return ""
        piece = self._tokenizer.token_bytes(token_id)
        if self._num_leading:
            piece, self._num_leading = self._tokenizer.spelling.strip_leading(piece, self._num_leading)
        return self._utf8.decode(piece)

    def _advance(self, new: str) -> str:
        """Pass new characters through the matcher; return those to show."""
        if not self._stops or not new:
            return new
        text = self._tail + new
        # With the stop string included, the tail was shown already: it is kept for matching only.
        num_shown = len(self._tail) if self._include_stop else 0
        match = self._first_stop(text) if self.num_tokens_kept > self._min_tokens else None
        if match is not None:
            self.stopped = match.stop
            self._tail = ""
            return text[num_shown : match.end if self._include_stop else match.start]
        self._tail = longest_beginning(text, self._stops)
        return text[num_shown:] if self._include_stop else text[: len(text) - len(self._tail)]

    def _first_stop(self, text: str) -> StopMatch | None:
        """The stop string that is complete first, and of several complete at once the longest.

        That is the one a reader of single characters finds: how the text was cut into tokens makes no difference. Only
        new characters complete one; what ends within the tail was passed over because of `min_tokens`.
        """
        matches = []
        for stop in self._stops:
            start = text.find(stop, max(0, len(self._tail) - len(stop) + 1))
            if start >= 0:
                matches.append(StopMatch(start, start + len(stop), stop))
        return min(matches, key=lambda match: (match.end, match.start), default=None)


def longest_beginning(text: str, stops: Sequence[str]) -> str:
    """The longest end of `text` that is the beginning of a stop string, but not the whole of it."""
    longest = max(len(stop) for stop in stops) - 1
    for start in range(max(0, len(text) - longest), len(text)):
        end = text[start:]
        if any(stop.startswith(end) and stop != end for stop in stops):
            return end
    return ""
