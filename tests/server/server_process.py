"""`lean-engine serve` as a process, where signals and exit codes count, and requests to it."""

import json
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from typing import Any

from live_server import MODEL

SLOW = "import time; from lean_engine.engine.core import Engine; s = Engine.step; "
SLOW += "Engine.step = lambda self: (time.sleep(0.02), s(self))[1]; "
RUN = "from lean_engine.cli import main; main()"
STREAM = {"prompt": "hello", "max_tokens": 40, "ignore_eos": True, "temperature": 0, "stream": True}


class Process:
    """`lean-engine serve` with a tiny model on an ephemeral port, or a Unix socket. before: Python that runs first."""

    def __init__(self, *flags: str, before: str = "", uds: str | None = None) -> None:
        address = ["--host", "127.0.0.1", "--port", "0"] if uds is None else ["--uds", uds]
        arguments = ["serve", str(MODEL), *address, "--cpu-kernels", "numpy", *flags]
        self.process = subprocess.Popen(
            [sys.executable, "-c", before + RUN, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert " is served at " in line, self.process.communicate()
        self.url = line.split()[-1]

    def stream(self, **fields: Any) -> "Stream":
        return Stream(self.url, {**STREAM, **fields})

    def end(self, seconds: float = 10) -> tuple[int, str]:
        """Exit code and what it wrote to stderr."""
        _, errors = self.process.communicate(timeout=seconds)
        return self.process.returncode, errors


class Stream:
    """A streamed completion that is read in a thread."""

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        self.events: list[Any] = []
        self.has_begun = threading.Event()
        self._request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
        self._thread = threading.Thread(target=self._read)
        self._thread.start()
        assert self.has_begun.wait(10)

    def _read(self) -> None:
        with urllib.request.urlopen(self._request, timeout=20) as response:
            for line in response:
                if line.startswith(b"data: "):
                    data = line.removeprefix(b"data: ").strip()
                    self.events.append("DONE" if data == b"[DONE]" else json.loads(data))
                    self.has_begun.set()

    def end(self) -> list[Any]:
        self._thread.join(20)
        assert self.events[-1] == "DONE"
        return self.events[:-1]


def get(url: str) -> tuple[int, bytes]:
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return response.status, response.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read()


def post(url: str, body: Any) -> tuple[int, Any]:
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode())
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.status, json.loads(response.read())
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.loads(error.read())
