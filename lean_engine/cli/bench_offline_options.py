"""What the benchmarks of the engine in this process share: which model, and where results go."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from lean_engine.bench.environment import append_result, environment
from lean_engine.cli.options import Option
from lean_engine.errors import ConfigError

Function = Callable[..., Any]


def model_options(function: Function) -> Function:
    """MODEL, also as --model, which is vLLM's way."""
    function = click.option("--model", "model_flag", cls=Option, section="Engine", help="MODEL.")(function)
    return click.argument("model", required=False)(function)


def chosen_model(model: str | None, model_flag: str | None) -> str | None:
    if model is not None and model_flag is not None:
        raise click.UsageError(f"MODEL is {model} and --model is {model_flag}; leave out one of them")
    return model if model is not None else model_flag


def output_options(function: Function) -> Function:
    """--json, --output-json, --result-dir."""
    for name, text in (
        ("result_dir", "Append the result to a file of the benchmark's name in this directory, as a JSON line."),
        ("output_json", "Write the result to this file as JSON."),
    ):
        metavar = "DIR" if name == "result_dir" else "FILE"
        declared = f"--{name.replace('_', '-')}"
        function = click.option(declared, name, metavar=metavar, cls=Option, section="Output", help=text)(function)
    text = "Print the result as one JSON object instead."
    return click.option("--json", "as_json", is_flag=True, cls=Option, section="Output", help=text)(function)


def keep(
    benchmark: str,
    figures: Mapping[str, Any],
    configuration: Mapping[str, Any],
    output_json: str | None,
    result_dir: str | None,
) -> None:
    """Write a result where the flags say, beside what it was made on."""
    kept = {"configuration": {k: v for k, v in configuration.items() if k != "hf_token"}, **figures}
    if result_dir is not None:
        append_result(result_dir, benchmark, kept)
    if output_json is not None:
        content = {"benchmark": benchmark, "environment": environment(), **kept}
        try:
            Path(output_json).write_text(json.dumps(content, ensure_ascii=False) + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{output_json}: cannot be written: {error.strerror or error}") from None
