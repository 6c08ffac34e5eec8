"""--max-header-bytes holds to the byte, whatever the header is made of and however it comes."""

import json
import socket
from collections.abc import Callable, Iterator

import h11
import pytest
from live_server import Live

from lean_engine.server.connection import LimitedParser

LIMIT = 2000
CHUNKED = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"


@pytest.fixture(scope="module")
def strict() -> Iterator[Live]:
    server = Live(max_header_bytes=LIMIT)
    yield server
    server.close()


def one_line(size: int) -> bytes:
    start, end = b"GET /version HTTP/1.1\r\nHost: x\r\nX: ", b"\r\n\r\n"
    return start + b"a" * (size - len(start) - len(end)) + end


def blanks(size: int) -> bytes:
    """What a parser strips counts too."""
    start, end = b"GET /version HTTP/1.1\r\nHost: x\r\nX:", b"a\r\n\r\n"
    return start + b" " * (size - len(start) - len(end)) + end


def many_lines(size: int) -> bytes:
    lines = b"GET /version HTTP/1.1\r\nHost: x\r\n" + b"X: a\r\n" * 100
    return lines + b"Y: " + b"a" * (size - len(lines) - 7) + b"\r\n\r\n"


def long_target(size: int) -> bytes:
    start, end = b"GET /version?", b" HTTP/1.1\r\nHost: x\r\n\r\n"
    return start + b"a" * (size - len(start) - len(end)) + end


@pytest.mark.parametrize("header", [one_line, blanks, many_lines, long_target])
def test_the_limit_holds_to_the_byte(strict: Live, header: Callable[[int], bytes]) -> None:
    for num_pieces in (1, 3):
        for size, expected in ((LIMIT, b"200"), (LIMIT + 1, b"431"), (10 * LIMIT, b"431")):
            data = header(size)
            assert len(data) == size
            step = -(-size // num_pieces)
            answer = send_and_read(strict, *(data[i : i + step] for i in range(0, size, step)))
            assert answer.split(b" ", 2)[1] == expected, (num_pieces, size)
    error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
    assert (error["code"], error["type"]) == (431, "HeadersTooLargeError")
    assert "2000 bytes (--max-header-bytes)" in error["message"]


def send_and_read(server: Live, *pieces: bytes) -> bytes:
    """One response, of a connection that the client leaves open."""
    with socket.create_connection(server.address, timeout=10) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for piece in pieces:
            connection.sendall(piece)
        answer = b""
        while not answer.endswith(b"}"):
            part = connection.recv(65536)
            assert part, answer
            answer += part
    return answer


def test_a_pipelined_header_and_one_behind_a_body_are_held_to_it(strict: Live) -> None:
    body = json.dumps({"prompt": "hello"}).encode()
    post = b"POST /tokenize HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body
    for first in (one_line(LIMIT), post):
        found = send_and_read_all(strict, first + one_line(LIMIT + 1))
        assert (found.count(b"HTTP/1.1 200"), found.count(b"HTTP/1.1 431")) == (1, 1)
        found = send_and_read_all(strict, first + one_line(LIMIT) + one_line(LIMIT + 1))
        assert (found.count(b"HTTP/1.1 200"), found.count(b"HTTP/1.1 431")) == (2, 1)


def send_and_read_all(server: Live, data: bytes) -> bytes:
    """All responses, until the server says that nothing follows."""
    with socket.create_connection(server.address, timeout=10) as connection:
        connection.sendall(data)
        parts = []
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)


def test_fields_behind_a_chunked_body_are_held_to_it(strict: Live) -> None:
    body = b'{"prompt": "hello"}'
    chunks = b"%x\r\n%s\r\n0\r\n" % (len(body), body)
    assert b" 200 " in send_and_read(strict, CHUNKED + chunks + b"X: a\r\n\r\n")
    found = send_and_read_all(strict, CHUNKED + chunks + b"X: " + b"a" * (LIMIT + 1) + b"\r\n\r\n")
    assert b" 431 " in found


def test_megabytes_of_header_are_answered_and_not_kept(strict: Live) -> None:
    answer = b""
    with socket.create_connection(strict.address, timeout=10) as connection:
        for _ in range(10):
            connection.sendall(b"GET / HTTP/1.1\r\nX: " + b"a" * 50_000)
        while part := connection.recv(65536):
            answer += part
    assert answer.startswith(b"HTTP/1.1 431")
    strict.wait_until(lambda: not strict.http.num_connections)


def test_no_more_than_one_read_is_kept_beyond_the_limit() -> None:
    parser = LimitedParser(LIMIT)

    def feed() -> None:
        for _ in range(1000):
            parser.receive_data(b"X" * 300)
            parser.next_event()

    with pytest.raises(h11.RemoteProtocolError):
        feed()
    assert len(parser.trailing_data[0]) <= LIMIT + 300
    assert parser.status == 431
