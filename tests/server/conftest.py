"""Fixtures of live servers; what they are stands in live_server.py."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from live_server import Live


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
