"""The engine in a process of its own, behind the interface of EngineThread: only to be measured against it.

    python bench/server_overhead.py --variant process

Commands and reports go through pipes as pickles. The server's process loads the model too, for its tokenizer and
limits, which a server that used this would not.
"""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection
from typing import Any

from lean_engine.cli import serve
from lean_engine.engine.core import Engine
from lean_engine.engine.front import EngineLoop
from lean_engine.engine.messages import Command, Report, Stop
from lean_engine.llm import LLM
from lean_engine.server import engine_client


def drive(model: str | None, options: dict[str, Any], commands: Connection, reports: Connection) -> None:
    """The engine's process."""
    engine = LLM(model, **options).engine

    def receive(waits: bool) -> Command | None:
        if waits or commands.poll():
            command: Command = commands.recv()
            return command
        return None

    reports.send("ready")
    EngineLoop(engine, receive, reports.send).run()


class EngineProcess:
    """As EngineThread; `use` tells it what to load."""

    loaded: tuple[str | None, dict[str, Any]]

    def __init__(
        self,
        load: Callable[[], Engine],
        *,
        on_ready: Callable[[], None],
        on_report: Callable[[Report], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._load, self._on_ready, self._on_report = load, on_ready, on_report
        self._engine_commands, self._commands = multiprocessing.Pipe(duplex=False)
        self._reports, self._engine_reports = multiprocessing.Pipe(duplex=False)
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._sending = threading.Lock()

    def start(self) -> None:
        self._thread.start()

    def send(self, command: Command) -> None:
        with self._sending:
            self._commands.send(command)

    def stop(self, timeout: float) -> bool:
        self.send(Stop())
        self._process.join(timeout)
        return not self._process.is_alive()

    def seconds_without_progress(self) -> float:
        return 0.0

    def _listen(self) -> None:
        self._load()
        arguments = (*self.loaded, self._engine_commands, self._engine_reports)
        self._process = multiprocessing.get_context("spawn").Process(target=drive, args=arguments, daemon=True)
        self._process.start()
        assert self._reports.recv() == "ready"
        self._on_ready()
        while True:
            self._on_report(self._reports.recv())


def use() -> None:
    """Make the server use it."""
    load = serve.load

    def remember(model: str | None, engine: Mapping[str, Any]) -> LLM:
        EngineProcess.loaded = model, dict(engine)
        return load(model, engine)

    serve.load = remember
    engine_client.EngineThread = EngineProcess  # type: ignore[misc, assignment]
