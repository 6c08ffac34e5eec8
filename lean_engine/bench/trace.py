"""Traces of requests: a file of JSON lines, one request a line.

Keys of a line, lengths in tokens:

    arrival_time      when the request comes, at least 0, in the unit that the reader of the trace says; default 0
    prompt_len        length of the prompt, or instead of it
    prompt_token_ids  the prompt itself
    output_len        tokens it generates
    prefix_id         beside prompt_len: a name; prompts of one name begin with the same tokens, and differ behind them
    prefix_len        how many; the same wherever the name stands, at most prompt_len
    priority          an integer; lower ones go first under the policy "priority"; default 0

Empty lines are skipped. Any other key is an error, so that a misspelt one is not taken for an absent one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lean_engine.config import MAX_INTEGER, MAX_NUMBER, is_integer
from lean_engine.errors import ConfigError

KEYS = ("arrival_time", "prompt_len", "prompt_token_ids", "output_len", "prefix_id", "prefix_len", "priority")


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace."""

    arrival_time: float
    prompt_len: int  # tokens, at least 1
    output_len: int  # tokens, at least 1
    prompt_token_ids: list[int] | None  # prompt_len ids, where the trace holds them
    prefix_id: str | None
    prefix_len: int  # tokens; 0 without a prefix_id
    priority: int = 0


def read_trace(path: str | Path) -> list[TraceRequest]:
    """The requests of a trace, in the file's order.

    Raises:
        ConfigError: the file cannot be read or holds no request, or a line is wrong; the message begins "FILE:LINE:".
    """
    requests: list[TraceRequest] = []
    first_uses: dict[str, tuple[int, int]] = {}  # prefix_id → its length, the line that gave it
    try:
        with Path(path).open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                where = f"{path}:{number}"
                request = read_request(parse_line(line, where), where)
                if request.prefix_id is not None:
                    length, first = first_uses.setdefault(request.prefix_id, (request.prefix_len, number))
                    if request.prefix_len != length:
                        raise ConfigError(
                            f"{where}: prefix {request.prefix_id!r} has {request.prefix_len} tokens, "
                            f"in line {first} it has {length}"
                        )
                requests.append(request)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    if not requests:
        raise ConfigError(f"{path}: holds no request; each line must be a JSON object with prompt_len and output_len")
    return requests


def parse_line(line: bytes, where: str) -> dict[str, Any]:
    try:
        fields = json.loads(line.rstrip())
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: is not valid JSON: {error.msg} at column {error.colno}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where}: is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ConfigError(f"{where}: is not a JSON object but {type(fields).__name__}")
    return fields


def read_request(fields: Mapping[str, Any], where: str) -> TraceRequest:
    """Check one line's fields; `where` begins the errors."""
    for key in fields:
        if key not in KEYS:
            raise ConfigError(f"{where}: unknown key {key!r}; known: {', '.join(KEYS)}")
    token_ids = read_token_ids(fields, where)
    prompt_len = read_length(fields, "prompt_len", where) if token_ids is None else len(token_ids)
    prefix_id, prefix_len = read_prefix(fields, prompt_len, where)
    return TraceRequest(
        arrival_time=read_arrival_time(fields, where),
        prompt_len=prompt_len,
        output_len=read_length(fields, "output_len", where),
        prompt_token_ids=token_ids,
        prefix_id=prefix_id,
        prefix_len=prefix_len,
        priority=read_priority(fields, where),
    )


def read_priority(fields: Mapping[str, Any], where: str) -> int:
    value = fields.get("priority", 0)
    if not is_integer(value) or abs(value) > MAX_INTEGER:
        raise ConfigError(f"{where}: priority is {shown(value)}, must be an integer up to {MAX_INTEGER}")
    return int(value)


def read_length(fields: Mapping[str, Any], key: str, where: str) -> int:
    if key not in fields:
        alternative = ", and there are no prompt_token_ids" if key == "prompt_len" else ""
        raise ConfigError(f"{where}: {key} is missing{alternative}")
    value = fields[key]
    if not is_integer(value) or not 1 <= value <= MAX_INTEGER:
        raise ConfigError(f"{where}: {key} is {shown(value)}, must be an integer from 1 to {MAX_INTEGER}")
    return int(value)


def read_token_ids(fields: Mapping[str, Any], where: str) -> list[int] | None:
    if "prompt_token_ids" not in fields:
        return None
    for key in ("prompt_len", "prefix_id", "prefix_len"):
        if key in fields:
            raise ConfigError(f"{where}: has {key} beside prompt_token_ids, which say it already; leave {key} out")
    ids = fields["prompt_token_ids"]
    if not isinstance(ids, list) or not ids:
        raise ConfigError(f"{where}: prompt_token_ids is {shown(ids)}, must be a list of at least one id")
    for i in ids:
        if not is_integer(i) or not 0 <= i <= MAX_INTEGER:
            raise ConfigError(f"{where}: prompt_token_ids holds {shown(i)}, must be integers from 0 to {MAX_INTEGER}")
    return ids


def read_prefix(fields: Mapping[str, Any], prompt_len: int, where: str) -> tuple[str | None, int]:
    """prefix_id and prefix_len: both or neither."""
    if ("prefix_id" in fields) != ("prefix_len" in fields):
        given, missing = ("prefix_id", "prefix_len") if "prefix_id" in fields else ("prefix_len", "prefix_id")
        raise ConfigError(f"{where}: has {given} without {missing}; give both or neither")
    if "prefix_id" not in fields:
        return None, 0
    name = fields["prefix_id"]
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{where}: prefix_id is {shown(name)}, must be a string of at least one character")
    length = read_length(fields, "prefix_len", where)
    if length > prompt_len:
        raise ConfigError(f"{where}: prefix_len is {length}, must be at most prompt_len, {prompt_len}")
    return name, length


def read_arrival_time(fields: Mapping[str, Any], where: str) -> float:
    value = fields.get("arrival_time", 0.0)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= MAX_NUMBER:
        raise ConfigError(f"{where}: arrival_time is {shown(value)}, must be a number of at least 0")
    return float(value)


def shown(value: Any) -> str:
    """A value as an error quotes it: in JSON, and not more of it than fits a line."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}…"
