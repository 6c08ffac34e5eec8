"""From the bytes of a streamed completion to its Record.

A delta is an event that brings text (content, reasoning, a tool call, or a completion's text). The first one is the
first token, whatever empty events came before it; where no event brings text although there are tokens (a model without
a tokenizer), every event with a choice is a delta. An answer ends with the later of its last delta and its
finish_reason. It is complete when `data: [DONE]` came, or a finish_reason and a proper end of the response; a stream
that just stops is cut, and so is one that the server aborts (finish_reason "abort").
"""

from __future__ import annotations

import json
from typing import Any

from lean_engine.bench.serving.http import ProtocolError, ResponseParser
from lean_engine.bench.serving.record import Outcome, Record
from lean_engine.bench.serving.sse import EventParser

TEXT_FIELDS = ("content", "reasoning_content", "reasoning", "refusal")
MAX_BODY_BYTES = 64 * 1024  # of an error's body that are kept
REFUSED = 429
STREAM_TYPE = "text/event-stream"


class AnswerReader:
    """Reads one response; its owner tells it of bytes with the time they arrived, and of the connection's end.

    Attributes:
        is_done: the Record is final.
        keeps_alive: the connection can carry another request then.
        has_begun: a byte of the response has come.
        was_dropped: the connection ended before that; a request on a reused connection may be sent again then.
    """

    def __init__(self, record: Record) -> None:
        self.record = record
        self.is_done = False
        self.has_begun = False
        self.was_dropped = False
        self._http = ResponseParser()
        self._sse = EventParser()
        self._texts: list[str] = []
        self._choice_times: list[float] = []  # arrivals of all events with a choice
        self._has_done = False  # "[DONE]" came
        self._body = b""  # of what is no stream

    @property
    def keeps_alive(self) -> bool:
        return self._http.is_complete and self._http.keeps_alive

    def feed(self, time: float, data: bytes) -> None:
        """Bytes that arrived at `time`, in seconds since the run began."""
        self.has_begun = True
        try:
            body = self._http.feed(data)
            if body:
                self._take(time, body)
        except ProtocolError as error:
            self._fail(time, "error", str(error))
        if self._http.is_complete and not self.is_done:
            self._finish(time)

    def close(self, time: float, reason: str) -> None:
        """The connection has ended."""
        if self.is_done:
            return
        if self._http.close():
            self._finish(time)
        elif not self.has_begun:
            self.was_dropped = True
            self._fail(time, "error", reason)
        elif self._has_done:  # all but the end of the framing
            self._finish(time)
        else:
            self._fail(time, "cut", f"cut after {len(self.record.delta_times)} deltas: {reason}")

    def give_up(self, time: float, outcome: Outcome, reason: str) -> None:
        """End it from outside: a time-out, a failed connection, an interrupt."""
        if not self.is_done:
            self._fail(time, outcome, reason)

    # -- inside

    def _take(self, time: float, body: bytes) -> None:
        is_stream = self._http.headers.get("content-type", "").startswith(STREAM_TYPE)
        if self._http.status != 200 or not is_stream:
            self._body = (self._body + body)[:MAX_BODY_BYTES]
            return
        for data in self._sse.feed(body):
            if data == b"[DONE]":
                self._has_done = True
            elif not self.is_done:
                self._take_event(time, data)

    def _take_event(self, time: float, data: bytes) -> None:
        try:
            event = json.loads(data)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            self._fail(time, "error", f"an event is {shown(data)}, must be a JSON object")
            return
        if event.get("error"):
            self._fail(time, "error", error_message(event))
            return
        self._take_usage(event.get("usage"))
        choices = event.get("choices")
        if choices:
            self._take_choice(time, choices[0])

    def _take_choice(self, time: float, choice: dict[str, Any]) -> None:
        self._choice_times.append(time)
        record, delta = self.record, choice.get("delta")
        text, is_delta = read_delta(delta) if delta is not None else (choice.get("text") or "", False)
        if text or is_delta:
            record.delta_times.append(time)
            record.ended_at = time
            self._texts.append(text)
        if choice.get("finish_reason") is not None:
            record.finish_reason = choice["finish_reason"]
            record.ended_at = time

    def _take_usage(self, usage: dict[str, Any] | None) -> None:
        if not usage:
            return
        record = self.record
        record.usage_prompt_tokens = usage.get("prompt_tokens")
        record.usage_completion_tokens = usage.get("completion_tokens")
        details = usage.get("prompt_tokens_details") or {}
        record.cached_tokens = details.get("cached_tokens")

    def _finish(self, time: float) -> None:
        """The response is complete: what was it?"""
        record, status = self.record, self._http.status
        record.status = status
        if not record.delta_times and record.usage_completion_tokens:  # tokens without any text
            record.delta_times = self._choice_times
        kind = self._http.headers.get("content-type", "")
        if status == REFUSED:
            self._fail(time, "refused", f"HTTP {status}: {body_message(self._body)}")
        elif status != 200:
            self._fail(time, "error", f"HTTP {status}: {body_message(self._body)}")
        elif not kind.startswith(STREAM_TYPE):
            self._fail(time, "error", f"content-type is {kind!r}, must be {STREAM_TYPE}: {body_message(self._body)}")
        elif record.finish_reason in ("abort", "error"):
            self._fail(time, "cut", f"finish_reason is {record.finish_reason!r}")
        elif not self._has_done and record.finish_reason is None:
            self._fail(time, "cut", f"the stream ended after {len(record.delta_times)} deltas without [DONE]")
        elif not record.delta_times:
            self._fail(time, "error", "the answer has no text")
        else:
            self._end("completed")

    def _fail(self, time: float, outcome: Outcome, message: str) -> None:
        self.record.ended_at = time
        self.record.error = message
        self.record.status = self._http.status
        self._end(outcome)

    def _end(self, outcome: Outcome) -> None:
        self.record.outcome = outcome
        self.record.text = "".join(self._texts)
        counted = self.record.usage_completion_tokens
        self.record.num_output_tokens = len(self.record.delta_times) if counted is None else counted
        self.is_done = True


def read_delta(delta: dict[str, Any]) -> tuple[str, bool]:
    """The text of a chat delta, and whether it brings something that is no text (a tool call)."""
    text = "".join(delta.get(name) or "" for name in TEXT_FIELDS)
    return text, bool(delta.get("tool_calls"))


def body_message(body: bytes) -> str:
    """What the body of a failed request says, on one line."""
    try:
        found = json.loads(body)
    except ValueError:
        return shown(body) if body else "an empty body"
    return error_message(found) if isinstance(found, dict) else shown(body)


def error_message(body: dict[str, Any]) -> str:
    """OpenAI's {"error": {"message": …}}, the flat form of it, or the whole."""
    error = body.get("error", body)
    message = error.get("message") if isinstance(error, dict) else error
    return " ".join(str(message or body).split())[:500]


def shown(data: bytes) -> str:
    text = " ".join(data.decode("utf-8", errors="replace").split())
    return text if len(text) <= 200 else f"{text[:199]}…"
