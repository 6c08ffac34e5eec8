"""Traces: what a line may hold, and one error with the line's number for everything else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lean_engine.bench.trace import TraceRequest, read_trace
from lean_engine.errors import ConfigError

PLAIN = {"prompt_len": 5, "output_len": 3}


def write(path: Path, *lines: dict[str, Any] | str) -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8")
    return path


def test_lines_become_requests_in_the_file_s_order(tmp_path: Path) -> None:
    path = write(
        tmp_path / "t.jsonl",
        {"arrival_time": 2.5, **PLAIN},
        "",
        {"prompt_token_ids": [7, 0, 7], "output_len": 1, "arrival_time": 1},
        {**PLAIN, "prefix_id": "système", "prefix_len": 4},
        {**PLAIN, "prefix_id": "système", "prefix_len": 4},
    )
    shared = TraceRequest(0.0, 5, 3, None, "système", 4)
    assert read_trace(path) == [
        TraceRequest(2.5, 5, 3, None, None, 0),
        TraceRequest(1.0, 3, 1, [7, 0, 7], None, 0),
        shared,
        shared,
    ]


def test_the_last_line_needs_no_line_break(tmp_path: Path) -> None:
    (tmp_path / "t").write_text('{"prompt_len": 5, "output_len": 3}\r\n{"prompt_len": 6, "output_len": 3}')
    assert [r.prompt_len for r in read_trace(str(tmp_path / "t"))] == [5, 6]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("{", "is not valid JSON: Expecting property name enclosed in double quotes at column 2"),
        ("[" * 100_000, "is not valid JSON"),
        ("[1]", "is not a JSON object but list"),
        ({"output_len": 3}, "prompt_len is missing, and there are no prompt_token_ids"),
        ({"prompt_len": 5}, "output_len is missing"),
        (PLAIN | {"prompt_len": 0}, "prompt_len is 0, must be an integer from 1 to 2147483647"),
        (PLAIN | {"prompt_len": 5.0}, "prompt_len is 5.0, must be an integer"),
        (PLAIN | {"prompt_len": True}, "prompt_len is true, must be an integer"),
        (PLAIN | {"output_len": "3"}, 'output_len is "3", must be an integer'),
        (PLAIN | {"output_len": None}, "output_len is null, must be an integer"),
        (PLAIN | {"output_len": 2**31}, "output_len is 2147483648, must be an integer from 1 to 2147483647"),
        (
            PLAIN | {"prompt_length": 5},
            "unknown key 'prompt_length'; known: arrival_time, prompt_len, prompt_token_ids",
        ),
        (PLAIN | {"prompt_token_ids": [1]}, "has prompt_len beside prompt_token_ids"),
        ({"prompt_token_ids": [], "output_len": 3}, "prompt_token_ids is [], must be a list of at least one id"),
        ({"prompt_token_ids": "ab", "output_len": 3}, 'prompt_token_ids is "ab", must be a list'),
        ({"prompt_token_ids": [1, -1], "output_len": 3}, "prompt_token_ids holds -1, must be integers from 0"),
        (
            {"prompt_token_ids": [1, 2], "output_len": 3, "prefix_id": "a", "prefix_len": 1},
            "has prefix_id beside prompt_token_ids",
        ),
        (
            {"prompt_token_ids": [1, 2], "output_len": 3, "prefix_len": 1},
            "has prefix_len beside prompt_token_ids, which say it already",
        ),
        (PLAIN | {"arrival_time": -1}, "arrival_time is -1, must be a number of at least 0"),
        (PLAIN | {"arrival_time": "now"}, 'arrival_time is "now", must be a number'),
        ('{"prompt_len": 5, "output_len": 3, "arrival_time": NaN}', "arrival_time is NaN, must be a number"),
        ('{"prompt_len": 5, "output_len": 3, "arrival_time": 1e999}', "arrival_time is Infinity, must be a number"),
        (PLAIN | {"prefix_id": "a"}, "has prefix_id without prefix_len"),
        (PLAIN | {"prefix_len": 2}, "has prefix_len without prefix_id"),
        (PLAIN | {"prefix_id": 1, "prefix_len": 2}, "prefix_id is 1, must be a string"),
        (PLAIN | {"prefix_id": "", "prefix_len": 2}, 'prefix_id is "", must be a string of at least one character'),
        (PLAIN | {"prefix_id": "a", "prefix_len": 6}, "prefix_len is 6, must be at most prompt_len, 5"),
        (PLAIN | {"prefix_id": "first", "prefix_len": 3}, "prefix 'first' has 3 tokens, in line 1 it has 2"),
        (PLAIN | {"prompt_len": "x" * 1000}, "…, must be an integer"),
    ],
)
def test_a_wrong_line_is_named_with_its_number(line: dict[str, Any] | str, expected: str, tmp_path: Path) -> None:
    path = write(tmp_path / "t.jsonl", PLAIN | {"prefix_id": "first", "prefix_len": 2}, "", line, PLAIN)
    with pytest.raises(ConfigError) as caught:
        read_trace(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:3: ")
    assert expected in message
    assert "\n" not in message
    assert len(message) < 300


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "t").write_bytes(b'{"prompt_len": 5, "output_len": 3}\n{"\xff\xfe": 1}\n')
    with pytest.raises(ConfigError, match=r"t:2: is not valid JSON: "):
        read_trace(tmp_path / "t")


def test_a_file_without_requests_or_none_at_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"empty: holds no request; each line must be a JSON object"):
        read_trace(write(tmp_path / "empty", "", "  "))
    with pytest.raises(ConfigError, match=r"missing: cannot be read: No such file"):
        read_trace(tmp_path / "missing")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_trace(tmp_path)
