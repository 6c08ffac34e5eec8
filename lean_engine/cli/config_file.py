"""Where flags of `serve` come from beside the command line: a YAML file, and LEAN_ENGINE_ variables.

A file is refused for a key that is unknown or stands twice. A variable that is unknown is only warned of: an
environment is shared with other programs.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from lean_engine.cli.options import flag
from lean_engine.errors import ConfigError

if TYPE_CHECKING:
    import yaml

ENVIRONMENT = "LEAN_ENGINE"
OTHER_VARIABLES = ("LEAN_ENGINE_CACHE",)  # read elsewhere in the package: checkpoint.demo_model
# What Kubernetes gives every container beside a Service named lean-engine.
SERVICE_LINK = re.compile(rf"{ENVIRONMENT}_(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_\w+)?)?)")


class JsonType(click.ParamType):  # type: ignore[type-arg]  # click 8.1 has no type argument
    """A JSON value of one kind; a configuration file gives it as it is."""

    def __init__(self, kind: type[list[Any]] | type[dict[str, Any]], name: str) -> None:
        self.kind = kind
        self.name = name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str):
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                self.fail(f"{value!r} is not JSON", param, ctx)
        if isinstance(value, tuple):  # the default
            return value
        is_right = isinstance(value, self.kind) and (self.kind is dict or all(isinstance(v, str) for v in value))
        if not is_right:
            self.fail(f"{value!r} is not a JSON {self.name}", param, ctx)
        return tuple(value) if self.kind is list else value


class PortType(click.ParamType):  # type: ignore[type-arg]
    """An integer; it says where a LEAN_ENGINE_PORT such as tcp://10.0.0.1:8000 comes from."""

    name = "integer"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if isinstance(value, str) and "://" in value:
            self.fail(
                f"{value!r} is no port. Kubernetes sets LEAN_ENGINE_PORT so beside a Service named lean-engine; give "
                "--port, rename the Service, or set enableServiceLinks: false",
                param,
                ctx,
            )
        return click.INT.convert(value, param, ctx)


# -- the file


def read_config(ctx: click.Context, param: click.Parameter, path: str | None) -> None:
    """Make the values of a YAML file the defaults of the other flags."""
    if path is None:
        return
    params = {p.name: p for p in ctx.command.params if p.name not in (None, "config", "help")}
    defaults: dict[str, Any] = {}
    for key, value in load_yaml(path).items():
        name = flag_name(key)
        if name not in params:
            raise ConfigError(f"--config {path}: unknown key {key!r}; keys are the flags without their dashes")
        if value is not None:
            defaults[name] = checked_value(params[name], value, f"--config {path}: {key}")
    ctx.default_map = defaults


def flag_name(key: object) -> str:
    """max-tokens, --max-tokens → max_tokens."""
    return str(key).removeprefix("--").replace("-", "_")


def load_yaml(path: str) -> dict[Any, Any]:
    """The mapping of a YAML file.

    Raises:
        ConfigError: it cannot be read, holds something else, or a key stands twice, at any depth.
    """
    import yaml

    where = f"--config {path}"
    try:
        text = Path(path).read_text(encoding="utf-8")
        root = yaml.compose(text, Loader=yaml.SafeLoader)
        content = yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"{where}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(f"{where}: cannot be read as YAML: {error}") from None
    if not isinstance(content, dict | None):
        raise ConfigError(f"{where}: holds a {type(content).__name__}, must be a mapping of flags to values")
    if root is not None:
        refuse_twins(root, where)
    return content or {}


def refuse_twins(root: yaml.Node, where: str) -> None:
    """ConfigError for a key that stands twice in one mapping; at the top `max-x` and `max_x` are the same."""
    import yaml

    waiting, seen = [root], {id(root)}
    while waiting:
        node = waiting.pop()
        children = node.value if isinstance(node, yaml.SequenceNode) else []
        if isinstance(node, yaml.MappingNode):
            first_lines: dict[tuple[str, str], int] = {}
            for key, _ in node.value:
                line, name = key.start_mark.line + 1, (key.tag, str(key.value))
                if node is root:
                    name = ("", flag_name(key.value))
                if name in first_lines:
                    raise ConfigError(
                        f"{where}: line {line}: the key {key.value!r} stands in line {first_lines[name]} already"
                    )
                first_lines[name] = line
            children = [child for pair in node.value for child in pair]
        waiting += [child for child in children if id(child) not in seen]
        seen.update(map(id, children))


def checked_value(param: click.Parameter, value: Any, where: str) -> Any:
    """A value of the file, of the kind that the flag has; what it says is checked as on the command line."""
    if isinstance(param.type, JsonType):
        return value
    if param.multiple:
        items = value if isinstance(value, list) else [value]
        if not all(isinstance(item, str | int | float) for item in items):
            raise ConfigError(f"{where} is {value!r}, must be a string or a list of strings")
        return [str(item) for item in items]
    is_switch = isinstance(param.type, click.types.BoolParamType)
    if isinstance(value, bool) is not is_switch or not isinstance(value, bool | str | int | float):
        raise ConfigError(f"{where} is {value!r}, must be {'true or false' if is_switch else 'one value'}")
    return value


# -- the environment


def check_environment(environment: Mapping[str, str]) -> None:
    """ConfigError for a variable that would not do what whoever set it expects."""
    if environment.get(f"{ENVIRONMENT}_API_KEY") == "":  # click takes an empty variable for an unset one
        raise ConfigError("LEAN_ENGINE_API_KEY is empty, which would open the server to all; unset it or give a key")


def unknown_variables(environment: Mapping[str, str], fields: Iterable[str]) -> list[str]:
    """A line for each LEAN_ENGINE_ variable that nothing reads. fields: the names of the flags."""
    known = {*OTHER_VARIABLES, *(f"{ENVIRONMENT}_{name.upper()}" for name in fields)}
    unknown = [name for name in sorted(environment) if name.startswith(f"{ENVIRONMENT}_") and name not in known]
    return [
        f"{name} has no effect; the nearest variable is {difflib.get_close_matches(name, known, 1, 0)[0]}"
        for name in unknown
        if not SERVICE_LINK.fullmatch(name)
    ]


# -- either


def place_of(ctx: click.Context, name: str) -> str | None:
    """Where a flag's value was given, as a user knows the place; None where it is the default."""
    source = ctx.get_parameter_source(name)
    places = {
        ParameterSource.COMMANDLINE: flag(name),
        ParameterSource.ENVIRONMENT: f"{ENVIRONMENT}_{name.upper()}",
        ParameterSource.DEFAULT_MAP: f"{name} in --config",
    }
    return None if source is None else places.get(source)


def refuse_two_addresses(ctx: click.Context) -> None:
    """ConfigError for a Unix socket beside a host or a port."""
    socket = place_of(ctx, "uds")
    for name in ("host", "port"):
        place = place_of(ctx, name)
        if socket is not None and place is not None:
            raise ConfigError(f"{socket} and {place} are both given; the server listens on one of them")
