"""Start, shutdown and failure of the server, as a process where signals and exit codes count."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from live_server import ENGINE, MODEL, TINY, Live
from server_process import RUN, SLOW, STREAM, Process, get, post

from lean_engine import LLM
from lean_engine.errors import ConfigError
from lean_engine.server.config import ServerConfig
from lean_engine.server.run import HttpServer

Start = Callable[..., Live]


def test_what_is_not_finished_in_time_ends_with_abort(launch: Callable[..., Process]) -> None:
    server = launch("--shutdown-timeout", "0.3", before=SLOW)
    stream = server.stream(max_tokens=200)
    server.process.send_signal(signal.SIGTERM)
    events = stream.end()
    assert events[-1]["choices"][0]["finish_reason"] == "abort"
    assert server.end()[0] == 0


def test_ctrl_c_drains_and_a_second_one_ends_at_once(launch: Callable[..., Process]) -> None:
    idle = launch()
    idle.process.send_signal(signal.SIGINT)
    assert idle.end()[0] == 130
    busy = launch(before=SLOW)
    connection = socket.create_connection(("127.0.0.1", int(busy.url.rpartition(":")[2])))
    body = json.dumps({**STREAM, "max_tokens": 200}).encode()
    connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
    assert connection.recv(10) == b"HTTP/1.1 2"
    busy.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert busy.process.poll() is None
    started = time.monotonic()
    busy.process.send_signal(signal.SIGINT)
    assert busy.end()[0] == 130
    assert time.monotonic() - started < 1
    connection.close()


def test_a_crash_of_the_engine_fails_requests_and_ends_the_process(launch: Callable[..., Process]) -> None:
    crash = "def step(self):\n    if self.num_steps > 5: raise ZeroDivisionError('boom')\n    return s(self)\n"
    server = launch(before=f"{SLOW}\n{crash}Engine.step = step\n")
    waiting = threading.Thread(target=lambda: answers.append(post(server.url, {**STREAM, "stream": False})))
    answers: list[tuple[int, Any]] = []
    waiting.start()
    events = server.stream().end()
    waiting.join(10)
    assert events[-1]["error"]["code"] == 500
    assert "ZeroDivisionError: boom" in events[-1]["error"]["message"]
    ((status, body),) = answers
    assert status == 500
    assert "boom" in body["error"]["message"]
    assert get(f"{server.url}/health")[0] == 503
    assert post(server.url, STREAM)[0] == 503
    code, errors = server.end()
    assert code == 1
    assert "the engine has failed" in errors


def test_a_model_that_cannot_be_loaded_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RUN, "serve", str(tmp_path), "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode in (1, 2)
    assert done.stderr.startswith("Error: ")
    assert done.stderr.count("\n") == 1


def test_a_port_that_is_taken_is_named_before_a_model_is_loaded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port}: Address already in use"):
            HttpServer(lambda: pytest.fail("loaded"), ServerConfig(host="127.0.0.1", port=port))


def test_health_says_503_until_the_model_is_loaded(start: Start) -> None:
    may_load = threading.Event()

    def load() -> LLM:
        assert may_load.wait(10)
        return LLM(MODEL, **ENGINE)

    http = HttpServer(load, ServerConfig(host="127.0.0.1", port=0, disable_access_log=True))
    thread = threading.Thread(target=http.serve)
    thread.start()
    status, body = get(f"{http.url}/health")
    assert status == 503
    assert "loading" in json.loads(body)["error"]["message"]
    assert post(http.url, STREAM)[0] == 503
    assert get(f"{http.url}/v1/models")[0] == 503
    assert get(f"{http.url}/metrics")[0] == 200
    may_load.set()
    assert http.is_ready.wait(20)
    assert get(f"{http.url}/health")[0] == 200
    http.request_exit()
    thread.join(10)


def test_health_says_503_when_no_step_completes(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start(watchdog_timeout=0.2)
    go_on = threading.Event()
    step = server.engine.step
    monkeypatch.setattr(server.engine, "step", lambda: (go_on.wait(10), step())[1])
    asked = threading.Thread(target=lambda: server.complete(max_tokens=2))
    asked.start()
    server.wait_until(lambda: server.request("/health")[0] == 503)
    assert "no step was completed" in server.request("/health")[1]["error"]["message"]
    go_on.set()
    asked.join(10)
    assert server.request("/health")[0] == 200


def test_a_unix_socket(tmp_path: Path, start: Start) -> None:
    path = str(tmp_path / "engine.sock")
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(path)
    server = start(uds=path)
    connection = http.client.HTTPConnection("localhost")
    connection.sock = socket.socket(socket.AF_UNIX)
    connection.sock.connect(path)
    connection.request("GET", "/health")
    assert connection.getresponse().status == 200
    connection.close()
    server.close()
    assert not os.path.exists(path)


def test_tls(start: Start) -> None:
    import ssl

    certificate = Path(__file__).parent / "localhost.pem"
    server = start(ssl_certfile=str(certificate))
    assert server.url.startswith("https://")
    context = ssl.create_default_context(cafile=certificate)
    with urllib.request.urlopen(f"{server.url}/health", context=context, timeout=10) as response:
        assert response.status == 200
    with pytest.raises(ConfigError, match="which is no file"):
        ServerConfig(ssl_certfile="/nowhere")
    with pytest.raises(ConfigError, match="TLS cannot be set up"):
        ServerConfig(ssl_certfile=str(TINY / "qwen3" / "config.json")).check_tls_files()
