"""What an ending server does: open answers end in peace, and whoever asks meanwhile is sent elsewhere."""

import http.client
import json
import os
import signal
import socket
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
from server_process import SLOW, STREAM, Process

from lean_engine.server.listener import SocketFile

Launch = Callable[..., Process]


def ask(connection: http.client.HTTPConnection, path: str, method: str = "GET") -> tuple[int, bytes, dict[str, str]]:
    body = json.dumps(STREAM) if method == "POST" else None
    connection.request(method, path, body)
    response = connection.getresponse()
    return response.status, response.read(), {name.lower(): value for name, value in response.getheaders()}


def connect(server: Process) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", int(server.url.rpartition(":")[2]), timeout=10)


def test_sigterm_in_mid_load_lets_requests_finish(launch: Launch) -> None:
    server = launch(before=SLOW)
    streams = [server.stream() for _ in range(4)]
    server.process.send_signal(signal.SIGTERM)
    for stream in streams:
        events = stream.end()
        assert events[-1]["choices"][0]["finish_reason"] == "length"
    code, errors = server.end()
    assert code == 0
    assert "ending 4 answers" in errors
    with pytest.raises(OSError, match=r"refused|reset"):
        urllib.request.urlopen(f"{server.url}/health", timeout=5)


def test_while_answers_end_health_and_new_work_get_503(launch: Launch) -> None:
    server = launch(before=SLOW)
    kept = connect(server)
    assert ask(kept, "/health")[0] == 200
    streams = [server.stream(max_tokens=100) for _ in range(2)]
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    for connection, path, method in (
        (connect(server), "/health", "GET"),
        (connect(server), "/v1/completions", "POST"),
        (connect(server), "/v1/models", "GET"),
        (kept, "/v1/completions", "POST"),  # a connection from before
    ):
        status, body, headers = ask(connection, path, method)
        assert status == 503, body
        assert headers["connection"] == "close"
        assert int(headers["retry-after"]) > 0
        if path == "/health":
            assert json.loads(body)["error"]["message"] == "not ready: draining, 2 answers to end first"
        connection.close()
    status, body, headers = ask(connect(server), "/metrics")
    assert (status, headers["connection"]) == (200, "close")
    assert b"num_requests_running" in body
    for stream in streams:
        events = stream.end()
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert len(events) > 50
    assert server.end()[0] == 0


def test_an_idle_server_ends_at_once_however_many_connections_it_keeps(launch: Launch) -> None:
    server = launch()
    kept = [connect(server) for _ in range(3)]
    assert {ask(connection, "/health")[0] for connection in kept} == {200}
    started = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    assert server.end()[0] == 0
    assert time.monotonic() - started < 3
    for connection in kept:
        connection.close()


@pytest.mark.parametrize("times", [1, 2])
def test_the_socket_file_goes_with_ctrl_c(launch: Launch, tmp_path: Path, times: int) -> None:
    path = tmp_path / "engine.sock"
    server = launch(before=SLOW, uds=str(path))
    assert path.is_socket()
    body = json.dumps({**STREAM, "max_tokens": 200 if times == 2 else 5}).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(path))
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        assert connection.recv(10) == b"HTTP/1.1 2"
        for _ in range(times):
            server.process.send_signal(signal.SIGINT)
            time.sleep(0.2)
    assert server.end()[0] == 130
    assert not path.exists()


def test_a_socket_file_of_another_server_is_left(tmp_path: Path) -> None:
    path = str(tmp_path / "engine.sock")
    with socket.socket(socket.AF_UNIX) as ours, socket.socket(socket.AF_UNIX) as another:
        ours.bind(path)
        file = SocketFile.of(path)
        os.unlink(path)
        another.bind(path)
        file.remove()
        assert os.path.exists(path)
        SocketFile.of(path).remove()
        assert not os.path.exists(path)
        file.remove()
