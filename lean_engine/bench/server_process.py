"""A server started by a benchmark: any command that ends up answering /health, in a session of its own.

In a command {port} stands for a free port; without it the port must be named, so that it can be asked.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO

from lean_engine.bench.serving.target import ServerError, fetch
from lean_engine.errors import ConfigError

HOST = "127.0.0.1"
POLL_SECONDS = 0.005
REQUEST = "/health"
GRACE_SECONDS = 20.0  # from SIGTERM to SIGKILL
LEAN_ENGINE = (sys.executable, "-c", "from lean_engine.cli import main; main()")  # also where no script is on the PATH


class ServerProcess:
    """A running server.

    Attributes:
        started_at: time.perf_counter() when the process was made.
    """

    def __init__(self, command: Sequence[str], port: int) -> None:
        self.base_url = f"http://{HOST}:{port}"
        self.command = command
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed by stop
        self.started_at = time.perf_counter()
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, start_new_session=True
            )
        except OSError as error:
            self._log.close()
            raise ConfigError(f"{command[0]}: cannot be started: {error.strerror or error}") from None

    def wait_until_healthy(self, seconds: float) -> float:
        """Until /health is 200; time.perf_counter() then.

        Raises:
            ServerError: the process ended, or it took longer; with the last line that it printed.
        """
        while True:
            if self._process.poll() is not None:
                raise ServerError(f"the server ended with exit code {self._process.returncode}: {self.last_line()}")
            try:
                status, _ = asyncio.run(fetch(self.base_url, REQUEST, {}))
            except ServerError:
                status = 0
            now = time.perf_counter()
            if status == 200:
                return now
            if now - self.started_at > seconds:
                raise ServerError(f"no 200 of {self.base_url}{REQUEST} within {seconds:g} s: {self.last_line()}")
            time.sleep(POLL_SECONDS)

    def last_line(self) -> str:
        """Of what it printed."""
        self._log.seek(0)
        lines = self._log.read().decode("utf-8", errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")

    def peak_memory_bytes(self) -> int | None:
        """Most memory that the process itself has held so far (resident), where /proc says it."""
        try:
            with open(f"/proc/{self._process.pid}/status", encoding="utf-8") as file:
                peaks = [line.split()[1] for line in file if line.startswith("VmHWM:")]
        except OSError:
            return None
        return 1024 * int(peaks[0]) if peaks else None

    def stop(self) -> None:
        """SIGTERM to all its processes, and SIGKILL to what is left after a while."""
        self._signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE_SECONDS)
        self._signal(signal.SIGKILL)
        self._process.wait()
        self._log.close()

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)  # its session's: only what this command started


@contextmanager
def running(command: Sequence[str], port: int) -> Iterator[ServerProcess]:
    """A server process, stopped at the end."""
    process = ServerProcess(command, port)
    try:
        yield process
    finally:
        process.stop()


def read_command(text: str, port: int | None) -> tuple[list[str], int]:
    """A command line as its words, with the port it listens on.

    Raises:
        ConfigError: it is empty or ill-formed, or nothing says the port.
    """
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"command is {text!r}: {error}") from None
    if not words:
        raise ConfigError("command is empty")
    if "{port}" not in text and port is None:
        raise ConfigError(f"command is {text!r}; write {{port}} where it takes a port, or give --port")
    chosen = free_port() if port is None else port
    return [word.replace("{port}", str(chosen)) for word in words], chosen


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        number: int = probe.getsockname()[1]
        return number
