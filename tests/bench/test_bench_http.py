"""Responses and event streams, cut anywhere."""

from __future__ import annotations

import pytest

from lean_engine.bench.serving.http import ProtocolError, ResponseParser
from lean_engine.bench.serving.sse import EventParser

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
BODY = b"data: {}\n\ndata: [DONE]\n\n"
RESPONSES = {
    "chunked": CHUNKED + b"6\r\ndata: \r\n7;name=x\r\n{}\n\ndat\r\nA\r\na: [DONE]\n\r\n1\r\n\n\r\n0\r\n\r\n",
    "with trailers": CHUNKED + b"018\r\n" + BODY + b"\r\n0\r\nChecksum: 1\r\nOther: 2\r\n\r\n",
    "of a length": HEAD + b"content-LENGTH:  24\r\n\r\n" + BODY,
    "until the end": HEAD + b"\r\n" + BODY,
    "after an interim response": b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + b"Content-Length: 24\r\n\r\n" + BODY,
}


@pytest.mark.parametrize("name", RESPONSES)
def test_a_response_is_the_same_wherever_it_is_cut(name: str) -> None:
    response = RESPONSES[name]
    for size in (1, 2, 3, 7, 50, len(response)):
        parser = ResponseParser()
        pieces = [parser.feed(response[i : i + size]) for i in range(0, len(response), size)]
        assert b"".join(pieces) == BODY
        assert (parser.status, parser.headers["content-type"]) == (200, "text/event-stream")
        assert parser.is_complete == (name != "until the end")
        assert parser.keeps_alive == (name != "until the end")
        assert parser.close()


@pytest.mark.parametrize("name", [n for n in RESPONSES if n != "until the end"])
def test_a_response_is_incomplete_until_its_last_byte(name: str) -> None:
    for size in range(len(RESPONSES[name])):
        parser = ResponseParser()
        parser.feed(RESPONSES[name][:size])
        assert not parser.is_complete
        assert not parser.close()


def test_an_answer_without_a_body_is_complete_with_its_head() -> None:
    for head in (b"HTTP/1.1 204 No Content\r\n\r\n", b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n"):
        parser = ResponseParser()
        assert parser.feed(head) == b""
        assert parser.is_complete


@pytest.mark.parametrize(
    ("head", "keeps_alive"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: Close\r\n\r\n", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n", False),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\nConnection: Keep-Alive\r\n\r\n", True),
    ],
)
def test_whether_a_connection_can_be_used_again(head: bytes, keeps_alive: bool) -> None:
    parser = ResponseParser()
    parser.feed(head)
    assert parser.keeps_alive == keeps_alive


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"SSH-2.0-OpenSSH_9\r\n\r\n", "must be an HTTP/1.1 status line"),
        (b"HTTP/1.1 200 OK\r\nnonsense\r\n\r\n", "a header is 'nonsense'"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n", "content-length is 'many'"),
        (CHUNKED + b"xyz\r\n", "a chunk's size is b'xyz'"),
        (CHUNKED + b"2\r\nabcd\r\n", "a chunk is longer than its size says"),
        (HEAD + b"Content-Length: 2\r\n\r\nabc", "1 bytes follow the end"),
        (b"HTTP/1.1 200 " + b"x" * 70000, "headers of more than 65536 bytes"),
        (CHUNKED + b"1;" + b"x" * 70000, "a line of more than 65536 bytes"),
    ],
)
def test_what_is_no_response_is_said(data: bytes, expected: str) -> None:
    with pytest.raises(ProtocolError, match=expected):
        ResponseParser().feed(data)


# -- events


EVENTS = [b"one", b"two\nlines", b" spaced", b"", b"[DONE]"]


@pytest.mark.parametrize("newline", [b"\n", b"\r\n", b"\r"])
@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
def test_events_are_the_same_wherever_they_are_cut(newline: bytes, mark: bytes) -> None:
    lines = [
        b": a comment", b"", b"data:one", b"", b"event: message", b"id: 7", b"data: two", b"data: lines", b"", b"",
        b"retry: 10", b"", b"data:  spaced", b":", b"", b"data", b"", b"data: [DONE]", b"", b"data: without an end",
    ]  # fmt: skip
    stream = mark + newline.join(lines)
    for size in (1, 2, 3, 5, 11, len(stream)):
        parser = EventParser()
        found = [event for i in range(0, len(stream), size) for event in parser.feed(stream[i : i + size])]
        assert found == EVENTS


def test_an_event_is_there_with_its_empty_line_and_not_before() -> None:
    parser = EventParser()
    assert [parser.feed(bytes([byte])) for byte in b"data: x\r\n\r\n"] == [[]] * 9 + [[b"x"]] + [[]]
    assert EventParser().feed(b"data: a\n\ndata: b\n\ndata: c\n") == [b"a", b"b"]


def test_a_line_without_an_end_does_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lean_engine.bench.serving.sse.MAX_LINE_BYTES", 100)
    parser = EventParser()
    parser.feed(b"data: " + b"x" * 90)
    with pytest.raises(ProtocolError, match="an event's line of more than 100 bytes"):
        parser.feed(b"x" * 10)
