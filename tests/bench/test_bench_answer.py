"""Records made of bytes with exact times: which event is the first token, when an answer ends, and how it failed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lean_engine.bench.serving.answer import AnswerReader
from lean_engine.bench.serving.record import Record

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"
DONE = "[DONE]"
Event = dict[str, Any] | str


def chunk(*events: Event) -> bytes:
    texts = [event if isinstance(event, str) else json.dumps(event) for event in events]
    data = "".join(f"data: {text}\n\n" for text in texts).encode()
    return b"%x\r\n%s\r\n" % (len(data), data)


def text(content: str, finish: str | None = None) -> Event:
    return {"choices": [{"text": content, "finish_reason": finish}]}


def delta(finish: str | None = None, **fields: Any) -> Event:
    return {"choices": [{"delta": fields, "finish_reason": finish}]}


def usage(num_tokens: int, **more: Any) -> Event:
    return {"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": num_tokens, **more}}


def read(*parts: tuple[float, bytes], close_at: float | None = None) -> Record:
    record = Record(0, max_tokens=3, prompt_len=4, scheduled_at=0.5, due_at=1.0, sent_at=1.0)
    reader = AnswerReader(record)
    for moment, data in parts:
        reader.feed(moment, data)
    if close_at is not None:
        reader.close(close_at, "connection closed")
    assert reader.is_done
    return record


def test_times_are_those_of_the_events_with_text() -> None:
    record = read(
        (1.1, HEAD),
        (1.2, chunk(delta(role="assistant", content=""))),
        (1.5, chunk(delta(content="a"))),
        (1.75, chunk(delta(content="b"))),
        (2.5, chunk(delta(content="c"))),
        (2.625, chunk(delta("stop"))),
        (3.0, chunk(usage(3), DONE) + END),
    )
    assert record.is_completed
    assert (record.ttft, record.latency) == (0.5, 1.625)
    assert record.itls == [0.25, 0.75]
    assert record.tpot == (1.625 - 0.5) / 2
    assert (record.text, record.num_output_tokens, record.num_input_tokens) == ("abc", 3, 5)


def test_an_event_that_arrives_in_two_parts_arrives_with_the_second() -> None:
    whole = HEAD + chunk(text("a"), text("b", "length")) + chunk(usage(2), DONE) + END
    middle = whole.index(b'{"choices": [{"text": "b"') + 10
    record = read((1.5, whole[:middle]), (2.0, whole[middle:]))
    assert record.delta_times == [1.5, 2.0]


def test_several_events_that_arrive_together_have_one_time() -> None:
    record = read((1.5, HEAD + chunk(text("a"), text("b"), text("c", "length"), usage(3), DONE) + END))
    assert (record.delta_times, record.tpot, record.itls) == ([1.5] * 3, 0.0, [0.0, 0.0])


@pytest.mark.parametrize(
    "fields",
    [{"reasoning_content": "x"}, {"reasoning": "x"}, {"tool_calls": [{"index": 0}]}, {"content": None, "refusal": "x"}],
)
def test_reasoning_and_tool_calls_are_deltas(fields: dict[str, Any]) -> None:
    record = read((2.0, HEAD + chunk(delta(**fields))), (3.0, chunk(delta("stop"), DONE) + END))
    assert (record.is_completed, record.delta_times, record.latency) == (True, [2.0], 2.0)


def test_tokens_are_those_of_usage_and_else_deltas() -> None:
    parts = (1.5, HEAD + chunk(text("a"), text("b", "length")))
    assert read(parts, (2.0, chunk(usage(7), DONE) + END)).num_output_tokens == 7
    without = read(parts, (2.0, chunk(DONE) + END))
    assert (without.num_output_tokens, without.num_input_tokens, without.usage_completion_tokens) == (2, 4, None)
    cached = read(parts, (2.0, chunk(usage(2, prompt_tokens_details={"cached_tokens": 3}), DONE) + END))
    assert cached.cached_tokens == 3


def test_where_no_event_has_text_each_event_with_a_choice_is_a_delta() -> None:
    record = read((2.0, HEAD + chunk(text(""))), (3.0, chunk(text("", "length"))), (4.0, chunk(usage(2), DONE) + END))
    assert (record.delta_times, record.latency, record.tpot) == ([2.0, 3.0], 2.0, 1.0)


@pytest.mark.parametrize(
    ("parts", "outcome", "message"),
    [
        ([HEAD + chunk(text("a"))], "cut", "cut after 1 deltas: connection closed"),
        ([HEAD + chunk(text("a"), text("b", "length"))], "cut", "cut after 2 deltas: connection closed"),
        ([HEAD[:20]], "cut", "cut after 0 deltas: connection closed"),
        ([HEAD + chunk(text("a")) + END], "cut", "the stream ended after 1 deltas without [DONE]"),
        ([HEAD + chunk(text("a", "abort"), DONE) + END], "cut", "finish_reason is 'abort'"),
        ([], "error", "connection closed"),
        ([HEAD + chunk(DONE) + END], "error", "the answer has no text"),
        ([HEAD + chunk(text("a"), {"error": {"message": "out\nof memory"}}, DONE)], "error", "out of memory"),
        ([HEAD + chunk(text("a"), {"error": "flat"}, DONE)], "error", "flat"),
        ([HEAD + chunk("{")], "error", "an event is {, must be a JSON object"),
        ([HEAD + chunk("7")], "error", "an event is 7, must be a JSON object"),
        ([b"HTTP/1.1 429 X\r\nContent-Length: 0\r\n\r\n"], "refused", "HTTP 429: an empty body"),
        ([b"HTTP/1.1 503 X\r\nContent-Length: 4\r\n\r\nbusy"], "error", "HTTP 503: busy"),
        ([b'HTTP/1.1 400 X\r\nContent-Length: 17\r\n\r\n{"message":"bad"}'], "error", "HTTP 400: bad"),
        ([b"HTTP/1.1 200 X\r\nContent-Length: 2\r\n\r\n{}"], "error", "content-type is '', must be text/event-stream"),
        ([b"220 mail.example ESMTP\r\n\r\n"], "error", "must be an HTTP/1.1 status line"),
    ],
)
def test_what_went_wrong_is_told_apart(parts: list[bytes], outcome: str, message: str) -> None:
    record = read(*((2.0, part) for part in parts), close_at=3.0)
    assert record.outcome == outcome
    assert message in record.error


def test_an_answer_with_done_or_a_finish_reason_is_whole() -> None:
    done = read((2.0, HEAD + chunk(text("a"), DONE)), close_at=3.0)  # its framing is not whole, though
    assert (done.is_completed, done.latency) == (True, 1.0)
    assert read((2.0, HEAD + chunk(text("a", "stop")) + END)).is_completed


def test_a_connection_is_kept_only_after_a_whole_response() -> None:
    for data, keeps in ((HEAD + chunk(text("a"), DONE) + END, True), (HEAD + chunk({"error": "x"}), False)):
        reader = AnswerReader(Record(0, 1, None, 0.0))
        reader.feed(1.0, data)
        assert reader.is_done
        assert reader.keeps_alive == keeps
