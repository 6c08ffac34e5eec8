"""A form as llguidance's grammar text."""

from __future__ import annotations

import json
import re
from typing import Any

from lean_engine.errors import RequestError
from lean_engine.sampling.structured_outputs import FIELD, StructuredOutputsParams

BLANKS = r"[\x20\x0A\x0D\x09]{1,40}"  # inside JSON: room to indent, and an end to a model that only writes newlines
MAX_CHARACTERS = {"json": 2**18, "choice": 2**18, "regex": 2**16, "grammar": 2**18}  # nested to fit STACK_BYTES
LARK = re.compile(r"(?m)^\s*(%llguidance\b|\??start\s*(\[[^\]]*\])?\s*:(?!:=))")


def check_size(form: StructuredOutputsParams) -> None:
    """RequestError where a form is longer than is compiled here."""
    for name, most in MAX_CHARACTERS.items():
        value = getattr(form, name) or ""
        size = len(value) if isinstance(value, str) else sum(map(len, value))
        if size > most:
            raise RequestError(f"{FIELD}.{name} must be at most {most} characters long, found {size}", param=FIELD)


def source_of(form: StructuredOutputsParams) -> str:
    """The text to compile; ValueError with a reason where it is of no known syntax."""
    from llguidance import LLMatcher

    source: str
    if form.regex is not None:
        source = LLMatcher.grammar_from_regex(form.regex)
    elif form.choice is not None:
        source = LLMatcher.grammar_from_lark(choice_lark(form.choice))
    elif form.grammar is not None:
        source = LLMatcher.grammar_from_lark(to_lark(form.grammar))
    else:
        source = LLMatcher.grammar_from_json_schema(*json_source(form))
    return source


def choice_lark(choice: tuple[str, ...]) -> str:
    """One terminal, whatever the number of choices; Lark's strings are JSON's."""
    return "start: CHOICE\nCHOICE: " + " | ".join(json.dumps(text, ensure_ascii=False) for text in choice)


def to_lark(grammar: str) -> str:
    """Lark as it is, GBNF converted."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if LARK.search(grammar):
        return grammar
    try:
        converted: str = gbnf_to_lark(grammar)
    except Exception as error:  # the converter raises nothing more specific
        raise ValueError(f'it is neither Lark (no "start:" rule) nor GBNF ({error})') from None
    return converted


def json_source(form: StructuredOutputsParams) -> tuple[str, Any, Any]:
    """Schema, and what its "x-guidance" key may and may not override."""
    schema = {"type": "object"} if form.json is None else json.loads(form.json)
    if form.disable_additional_properties:
        schema = without_additional_properties(schema)
    overrides: dict[str, Any] = {}
    if form.disable_any_whitespace:
        overrides = {"whitespace_flexible": False, "whitespace_pattern": None}
    elif form.whitespace_pattern is not None:
        overrides = {"whitespace_pattern": form.whitespace_pattern}
    return json.dumps(schema, ensure_ascii=False), {"whitespace_pattern": BLANKS}, overrides


def without_additional_properties(schema: Any) -> Any:
    """A schema whose objects have only the properties that it names."""
    if isinstance(schema, list):
        return [without_additional_properties(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: without_additional_properties(value) for key, value in schema.items()}
    if {"properties", "patternProperties"} & closed.keys():
        closed.setdefault("additionalProperties", False)
    return closed
