"""Live servers: each runs in a thread of its own on an ephemeral port, with a tiny model."""

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lean_engine import LLM
from lean_engine.server.config import ServerConfig
from lean_engine.server.run import HttpServer

TINY = Path(__file__).parent / "data" / "tiny"
MODEL = TINY / "llama-gqa-tied"
ENGINE: dict[str, Any] = {"cpu_kernels": "numpy", "threads": 1, "kv_cache_memory_bytes": 8 * 2**20}  # starts at once
SERVER_FIELDS = set(ServerConfig.__dataclass_fields__)


class Live:
    """A running server, and requests to it.

    Attributes:
        http: the HttpServer.
        exit_code: once it has ended.
    """

    def __init__(self, model: Path = MODEL, waits: bool = True, **options: Any) -> None:
        """options: of the server and of the engine."""
        server = {name: options.pop(name) for name in SERVER_FIELDS & set(options)}
        engine = {**ENGINE, **options}
        defaults = {"host": "127.0.0.1", "port": 0, "disable_access_log": True, "served_model_name": ("tiny",)}
        config = ServerConfig(**{**defaults, **server})
        self.http = HttpServer(lambda: LLM(model, **engine), config)
        self.exit_code: int | None = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()
        if waits:
            assert self.http.is_ready.wait(60)
            assert self.error is None

    def _serve(self) -> None:
        try:
            self.exit_code = self.http.serve()
        except BaseException as error:
            self.error = error

    @property
    def url(self) -> str:
        return self.http.url

    @property
    def address(self) -> tuple[str, int]:
        host, port = self.url.removeprefix("http://").split(":")
        return host, int(port)

    @property
    def engine(self) -> Any:
        assert self.http.service.model is not None
        return self.http.service.model.llm.engine

    def request(
        self, path: str, body: Any = None, headers: dict[str, str] | None = None, method: str | None = None
    ) -> tuple[int, Any, dict[str, str]]:
        """Status, body (JSON where it is) and headers of a response; a body makes it a POST."""
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers or {}, method=method)
        request.add_header("Content-Type", "application/json")
        try:
            response = urllib.request.urlopen(request, timeout=30)
        except urllib.error.HTTPError as error:
            response = error
        with response:
            text = response.read().decode()
            names = {name.lower(): value for name, value in response.headers.items()}
            is_json = names.get("content-type", "").startswith("application/json")
            return response.status, json.loads(text) if is_json else text, names

    def complete(self, prompt: Any = "hello", **fields: Any) -> tuple[int, Any]:
        """Status and body of a greedy completion."""
        status, body, _ = self.request("/v1/completions", {"prompt": prompt, "temperature": 0, **fields})
        return status, body

    def events(self, path: str, body: dict[str, Any]) -> list[str]:
        """The data of a stream's events."""
        data = json.dumps({**body, "stream": True}).encode()
        with urllib.request.urlopen(urllib.request.Request(self.url + path, data), timeout=30) as response:
            assert response.headers["Content-Type"].startswith("text/event-stream")
            text = response.read().decode()
        assert text.endswith("\n\n")
        lines = text.removesuffix("\n\n").split("\n\n")
        assert all(line.startswith("data: ") and "\n" not in line for line in lines)
        return [line.removeprefix("data: ") for line in lines]

    def wait_until(self, condition: Callable[[], bool], seconds: float = 20.0) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "it did not happen in time"
            time.sleep(0.005)

    def wait_until_idle(self) -> None:
        """Every request is gone and every block is free."""
        pool = self.engine.scheduler.pool
        client = self.http.service.client
        busy = (client._routes, client._replies)  # a page that is open asks now and then
        self.wait_until(lambda: not self.engine.has_work() and not client.num_open and not any(busy))
        assert pool.num_free == pool.num_usable
        assert not self.engine._groups

    def join(self, seconds: float = 20.0) -> None:
        self._thread.join(seconds)
        assert not self._thread.is_alive()

    def close(self) -> None:
        self.http.request_exit()
        self.join()
