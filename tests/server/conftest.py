"""Fixtures of live servers; what they are stands in live_server.py."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from live_server import Live
from server_process import Process


@pytest.fixture(scope="session")
def live() -> Iterator[Live]:
    """One server for all tests that leave it as it was."""
    server = Live()
    yield server
    server.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Live]]:
    """Starts servers that end with the test."""
    started: list[Live] = []

    def make(**options: Any) -> Live:
        started.append(Live(**options))
        return started[-1]

    yield make
    for server in started:
        server.close()


@pytest.fixture
def launch() -> Iterator[Callable[..., Process]]:
    """Starts servers in processes that end with the test."""
    launched: list[Process] = []

    def make(*flags: str, **settings: Any) -> Process:
        launched.append(Process(*flags, **settings))
        return launched[-1]

    yield make
    for process in launched:
        if process.process.poll() is None:
            process.process.kill()
            process.process.communicate()
