"""Clients that misbehave: nothing they do harms another request, and nothing of theirs stays."""

import json
import resource
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from live_server import Live

LONG = {"prompt": "hello", "max_tokens": 200, "ignore_eos": True, "temperature": 0}
Start = Callable[..., Live]


def connect(server: Live) -> socket.socket:
    made = socket.create_connection(server.address, timeout=20)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return made


def http(path: str, body: Any, *headers: str) -> bytes:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(data)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + data


def read_all(connection: socket.socket) -> bytes:
    parts = []
    while part := connection.recv(65536):
        parts.append(part)
    return b"".join(parts)


def slow_steps(monkeypatch: pytest.MonkeyPatch, server: Live, seconds: float) -> None:
    """Make every step take at least so long."""
    step = server.engine.step

    def slower() -> Any:
        time.sleep(seconds)
        return step()

    monkeypatch.setattr(server.engine, "step", slower)


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"GET\r\n\r\n",
        b"\x00" * 100 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",  # no Host
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n12345",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    ],
)
def test_garbage_is_answered_by_400(live: Live, garbage: bytes) -> None:
    with connect(live) as connection:
        connection.sendall(garbage)
        answer = read_all(connection)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert json.loads(body)["error"]["code"] == 400
    assert live.complete(max_tokens=2)[0] == 200


def test_a_flood_of_headers_is_refused(live: Live) -> None:
    headers = [f"X-{i}: {i}" for i in range(1000)]
    with connect(live) as connection:
        connection.sendall(http("/v1/completions", LONG, *headers))
        answer = connection.recv(65536)
    assert answer.startswith(b"HTTP/1.1 431")


def test_a_body_that_is_too_large_is_refused_however_it_is_sent(start: Start) -> None:
    server = start(max_body_bytes=1000)
    assert server.complete("x" * 900, max_tokens=1)[0] != 413
    assert server.complete("x" * 1000)[0] == 413
    with connect(server) as connection:  # nothing of the body needs to come
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999\r\n\r\n")
        assert b" 413 " in read_all(connection).split(b"\r\n")[0]
    with connect(server) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n")
        connection.sendall(b"3e8\r\n" + b"x" * 1000 + b"\r\n" + b"3e8\r\n" + b"x" * 1000 + b"\r\n")
        assert b" 413 " in connection.recv(65536).split(b"\r\n")[0]


def test_a_client_that_does_not_finish_its_request_is_dropped(start: Start) -> None:
    server = start(client_timeout=0.4)
    silent, header, body, drip = (connect(server) for _ in range(4))
    header.sendall(b"POST /v1/completions HTTP/1.1\r\nHost:")
    body.sendall(http("/v1/completions", LONG)[:-10])
    started = time.monotonic()
    assert silent.recv(100) == b""
    with pytest.raises(OSError, match=r"reset|pipe"):  # noqa: PT012 - which of the writes fails is open
        for byte in b"GET / HTTP/1.1\r\n" + b"X-Long: " + b"a" * 100:
            drip.sendall(bytes([byte]))
            time.sleep(0.02)
    assert header.recv(100) == b""
    assert b" 408 " in read_all(body).split(b"\r\n")[0]
    assert time.monotonic() - started < 5
    for connection in (silent, header, body, drip):
        connection.close()
    server.wait_until_idle()


@pytest.mark.parametrize("stream", [True, False])
def test_a_disconnect_frees_the_blocks(live: Live, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
    slow_steps(monkeypatch, live, 0.01)
    with connect(live) as connection:
        connection.sendall(http("/v1/completions", {**LONG, "stream": stream, "n": 2, "temperature": 1}))
        live.wait_until(lambda: live.engine.stats().num_running == 2)
    started = time.monotonic()
    live.wait_until_idle()
    assert time.monotonic() - started < 1.0  # 200 steps would take two seconds


def test_a_disconnect_while_waiting_leaves_nothing(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start(max_num_seqs=1)
    slow_steps(monkeypatch, server, 0.01)
    with connect(server) as runs:
        runs.sendall(http("/v1/completions", {**LONG, "max_tokens": 60}))
        server.wait_until(lambda: server.engine.stats().num_running == 1)
        with connect(server) as waits:
            waits.sendall(http("/v1/completions", LONG))
            server.wait_until(lambda: server.http.service.client.num_open == 2)
        server.wait_until(lambda: server.http.service.client.num_open == 1)
        assert b" 200 " in runs.recv(100)
    server.wait_until_idle()


def test_a_client_that_never_reads_holds_little_and_is_dropped(start: Start) -> None:
    server = start(client_timeout=0.5)
    server.http._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)  # of the connections it takes
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(server.address)
    wanted = {"prompt": [5], "max_tokens": 250, "ignore_eos": True, "temperature": 1, "n": 4, "logprobs": 20}
    connection.sendall(http("/v1/completions", {**wanted, "stream": True}))
    server.wait_until(lambda: server.http.service.client.num_open > 0)
    assert server.complete(max_tokens=3)[0] == 200  # another one is served beside it
    server.wait_until_idle()
    server.wait_until(lambda: not server.http.num_connections)
    connection.close()


def test_text_is_merged_while_a_client_does_not_read(live: Live) -> None:
    """What a slow reader gets is whole, in fewer and larger events."""
    expected = live.complete(**{k: v for k, v in LONG.items() if k != "prompt"})[1]["choices"][0]["text"]
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(20)
        connection.connect(live.address)
        connection.sendall(http("/v1/completions", {**LONG, "stream": True}, "Connection: close"))
        live.wait_until(lambda: not live.engine.has_work())
        answer = read_all(connection).decode()
    events = [line.removeprefix("data: ") for line in answer.split("\n") if line.startswith("data: ")]
    assert events[-1] == "[DONE]"
    assert "".join(json.loads(e)["choices"][0]["text"] for e in events[:-1]) == expected


def test_pipelined_requests_are_answered_in_order(live: Live) -> None:
    bodies = [{"prompt": "hello", "max_tokens": n, "temperature": 0, "ignore_eos": True} for n in (3, 1, 2)]
    with connect(live) as connection:
        requests = [http("/v1/completions", body) for body in bodies[:-1]]
        connection.sendall(b"".join(requests) + http("/v1/completions", bodies[-1], "Connection: close"))
        answer = read_all(connection)
    found = [json.loads(part.partition(b"HTTP/1.1 200")[0]) for part in answer.split(b"\r\n\r\n")[1:]]
    assert [body["usage"]["completion_tokens"] for body in found] == [3, 1, 2]


def test_a_connection_is_kept_for_the_next_request(live: Live) -> None:
    with connect(live) as connection:
        for _ in range(3):
            connection.sendall(http("/tokenize", {"prompt": "hello"}))
            answer = connection.recv(65536)
            while not answer.endswith(b"}"):
                answer += connection.recv(65536)
            assert answer.startswith(b"HTTP/1.1 200")


def test_half_closed_and_reset_connections_do_no_harm(live: Live) -> None:
    for _ in range(20):
        with connect(live) as connection:
            connection.sendall(http("/v1/completions", {**LONG, "stream": True}))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        with connect(live) as connection:
            connection.sendall(http("/v1/completions", LONG)[:50])
            connection.shutdown(socket.SHUT_WR)
    assert live.complete(max_tokens=3)[0] == 200
    live.wait_until_idle()


def test_many_connections_at_once_leave_no_file_open(live: Live) -> None:
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 300
    expected = live.complete(max_tokens=8)[1]["choices"][0]["text"]
    wrong: list[Any] = []

    def ask() -> None:
        status, body = live.complete(max_tokens=8)
        if status != 200 or body["choices"][0]["text"] != expected:
            wrong.append(body)

    threads = [threading.Thread(target=ask) for _ in range(64)]
    idle = [connect(live) for _ in range(64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for connection in idle:
        connection.close()
    assert not wrong
    live.wait_until_idle()
    live.wait_until(lambda: not live.http.num_connections)


def test_too_many_waiting_requests_are_refused_with_429(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start(max_num_seqs=2, max_queued_requests=1)
    slow_steps(monkeypatch, server, 0.01)
    held = [connect(server) for _ in range(3)]
    for number, connection in enumerate(held):
        connection.sendall(http("/v1/completions", {**LONG, "max_tokens": 80}))
        server.wait_until(lambda number=number: server.http.service.client.num_open == number + 1)  # type: ignore[misc]
    status, body, headers = server.request("/v1/completions", LONG)
    assert status == 429
    assert int(headers["retry-after"]) > 0
    assert body["error"]["code"] == 429
    held[0].close()
    server.wait_until(lambda: server.http.service.client.num_open == 2)
    assert server.complete(max_tokens=2)[0] == 200
    for connection in held[1:]:
        connection.close()
    assert "admission_rejections_total{" in server.request("/metrics")[1]
    server.wait_until_idle()


def test_a_request_that_takes_too_long_is_ended(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start(request_timeout=0.3)
    slow_steps(monkeypatch, server, 0.02)
    status, body, _ = server.request("/v1/completions", LONG)
    assert status == 504
    assert "0.3 s" in body["error"]["message"]
    *some, error, done = server.events("/v1/completions", LONG)
    assert some
    assert json.loads(error)["error"]["code"] == 504
    assert done == "[DONE]"
    server.wait_until_idle()
