"""Flags that hold an answer to a form: --json-schema, --regex, --choice, --grammar."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from lean_engine.cli.options import Option
from lean_engine.sampling.structured_outputs import StructuredOutputsParams

FLAGS = {  # flag → field of StructuredOutputsParams, and help
    "--json-schema": ("json", "A JSON schema that the answer follows: its text, or a file that holds it."),
    "--regex": ("regex", "A regular expression that the whole answer matches (Rust's syntax)."),
    "--choice": ("choice", "The answer is this text, or another --choice; to be repeated."),
    "--grammar": ("grammar", "A grammar that the answer follows, in Lark or GBNF: its text, or a file that holds it."),
}


def form_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The flags; the command gets what they say as `form`, a StructuredOutputsParams or None."""

    @functools.wraps(function)
    def command(**values: Any) -> Any:
        given = {name: values.pop(name) for name, _ in FLAGS.values()}
        return function(**values, form=read_form(**given))

    decorated: Callable[..., Any] = command
    for flag, (name, text) in reversed(FLAGS.items()):
        option = click.option(
            flag,
            name,
            cls=Option,
            section="Form of the answer",
            multiple=name == "choice",
            help=f"{text}  [default: none]",
        )
        decorated = option(decorated)
    return decorated


def read_form(
    json: str | None, regex: str | None, choice: tuple[str, ...], grammar: str | None
) -> StructuredOutputsParams | None:
    values: dict[str, Any] = {"json": json, "regex": regex, "choice": choice or None, "grammar": grammar}
    given = [flag for flag, (name, _) in FLAGS.items() if values[name] is not None]
    if not given:
        return None
    if len(given) > 1:
        raise click.UsageError(f"{' and '.join(given)} exclude each other; give one of them")
    if json is not None:
        values["json"] = json if json.lstrip().startswith("{") else read_file("--json-schema", json)
    if grammar is not None and ":" not in grammar:  # every grammar has one
        values["grammar"] = read_file("--grammar", grammar)
    return StructuredOutputsParams(**values)


def read_file(flag: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or no possible path
        raise click.UsageError(f"{flag} {path!r} is neither text of that form nor a readable file: {error}") from None
