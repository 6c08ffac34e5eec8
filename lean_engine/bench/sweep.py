"""Grids of serving benchmarks: settings of the load, and of the server, which is started anew for each of its own.

A name that belongs to the load (LOAD_NAMES) is set there; any other one goes to the server: as a flag of
`lean-engine serve`, or into the place {name} of a given command.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from lean_engine.bench.grid import SWITCHES, Point, number
from lean_engine.bench.server_process import HOST, LEAN_ENGINE, free_port, read_command
from lean_engine.errors import ConfigError


def positive(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise ConfigError(f"sweep {name}: {text!r} is not a number above 0")
    return value


def share(name: str, text: str) -> float:
    value = positive(name, text) if text != "0" else 0.0
    if value >= 1:
        raise ConfigError(f"sweep {name}: {text!r} is not at least 0 and below 1")
    return value


LOAD_NAMES: dict[str, Callable[[str, str], Any]] = {  # name → how a value is read
    "request-rate": positive,
    "max-concurrency": number,
    "burstiness": positive,
    "num-prompts": number,
    "input-len": number,
    "output-len": number,
    "random-prefix-len": number,
    "random-range-ratio": share,
    "prefix-repetition-num-prefixes": number,
}
AXES = ("request-rate", "max-concurrency")  # what a load is measured by, for plots


@dataclass(frozen=True, slots=True)
class Grid:
    """Every combination, the server's settings apart, since they change less often."""

    servers: Sequence[Mapping[str, str]]
    loads: Sequence[Point]


@dataclass(frozen=True, slots=True)
class Measured:
    """What repeated runs at one point have given."""

    server: Mapping[str, str]
    load: Point
    runs: Sequence[Mapping[str, Any]]  # the figures of each, by vLLM's keys

    @property
    def point(self) -> dict[str, Any]:
        return {**self.server, **self.load}

    def median(self, key: str) -> float | None:
        """Over the runs that have the figure."""
        values = [run[key] for run in self.runs if run.get(key) is not None]
        return statistics.median(values) if values else None


def parse_grid(texts: Sequence[str], has_server: bool) -> Grid:
    """NAME=V1,V2,… each; the last load setting changes fastest.

    Args:
        has_server: the server is started here, so it can have settings of its own.

    Raises:
        ConfigError: a text is malformed or given twice, a value is wrong, or a server that runs already would need it.
    """
    servers: dict[str, list[str]] = {}
    loads: dict[str, list[Any]] = {}
    for text in texts:
        name, equals, listed = text.partition("=")
        values = listed.split(",")
        if not equals or not name or not all(values):
            raise ConfigError(f"sweep {text!r}: write NAME=V1,V2,...")
        if name in servers or name in loads:
            raise ConfigError(f"sweep {name} is given twice")
        if name in LOAD_NAMES:
            loads[name] = [LOAD_NAMES[name](name, value) for value in values]
        elif has_server:
            servers[name] = values
        else:
            known = ", ".join(LOAD_NAMES)
            raise ConfigError(f"sweep {name}: a server that runs already can only be swept over: {known}")
    return Grid(combinations(servers), combinations(loads))


def combinations(values: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(values, point, strict=True)) for point in product(*values.values())]


def lean_engine_command(model: str | None, flags: Sequence[str], server: Mapping[str, str]) -> tuple[list[str], int]:
    """`lean-engine serve` with a point's settings, and the port it listens on. on and off are those of switches."""
    port = free_port()
    command = [*LEAN_ENGINE, "serve", *([] if model is None else [model]), "--host", HOST, "--port", str(port)]
    command += ["--disable-access-log", "--disable-log-stats", *flags]
    for name, value in server.items():
        if value in SWITCHES:
            command.append(f"--{name}" if SWITCHES[value] else f"--no-{name}")
        else:
            command += [f"--{name}", value]
    return command, port


def given_command(template: str, server: Mapping[str, str]) -> tuple[list[str], int]:
    """A command with a point's settings in their places.

    Raises:
        ConfigError: it has no place for one of them.
    """
    text = template
    for name, value in server.items():
        if f"{{{name}}}" not in template:
            raise ConfigError(f"sweep {name}: it is no setting of the load, and the command has no {{{name}}}")
        text = text.replace(f"{{{name}}}", value)
    return read_command(text, None)


def axis_of(measured: Sequence[Measured]) -> str | None:
    """The load setting that was swept, the first of AXES if several were; None if none was."""
    swept = [name for name in measured[0].load if len({m.load[name] for m in measured}) > 1]
    return next((name for name in (*AXES, *swept) if name in swept), None)


def finite(value: Any) -> Any:
    """JSON has no infinity."""
    return "inf" if value == math.inf else value
