"""StructuredOutputsParams: the form that an answer is held to, with vLLM's names.

Types and contradictions are checked here; whether a schema, an expression or a grammar can be honoured is said when it
is compiled (`sampling.grammar`). Frozen and hashable: equal ones share one compiled grammar. Imports no NumPy.
"""

from __future__ import annotations

import json as json_package
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lean_engine.errors import RequestError

FIELD = "structured_outputs"
FORMS = ("json", "regex", "choice", "grammar", "json_object")
JSON_OPTIONS = ("disable_any_whitespace", "disable_additional_properties", "whitespace_pattern")


@dataclass(frozen=True, init=False)
class StructuredOutputsParams:
    """Exactly one of json, regex, choice, grammar and json_object, and how it is read. All arguments are keywords.

    Raises:
        RequestError: a value has a wrong type, none or several forms are given, or a keyword is unknown; its `param` is
            "structured_outputs".
    """

    json: str | None  # a JSON schema as JSON text, its keys in the order given: properties are generated in that order
    regex: str | None  # the whole answer matches it; Rust's syntax, so no lookaround and no back-references
    choice: tuple[str, ...] | None  # the answer is one of these
    grammar: str | None  # llguidance's Lark, or llama.cpp's GBNF (a "root" rule, "::=")
    json_object: bool  # any JSON object
    disable_any_whitespace: bool  # JSON without any; otherwise up to 40 blanks wherever JSON allows some
    disable_additional_properties: bool  # objects that say nothing of further properties have none
    whitespace_pattern: str | None  # regular expression of the blanks allowed inside JSON
    reasoning_start: str | None  # see reasoning_end; needs it
    reasoning_end: str | None  # the form begins behind this token; with reasoning_start, unless the answer begins in it

    def __init__(
        self,
        *,
        json: str | Mapping[str, Any] | None = None,
        regex: str | None = None,
        choice: Sequence[str] | None = None,
        grammar: str | None = None,
        json_object: bool | None = None,
        disable_any_whitespace: bool = False,
        disable_additional_properties: bool = False,
        whitespace_pattern: str | None = None,
        reasoning_start: str | None = None,
        reasoning_end: str | None = None,
        **unknown: object,
    ) -> None:
        _refuse_unknown(unknown)
        vars(self).update(  # not by assignment: the class is frozen from here on
            json=_schema(json),
            regex=_text("regex", regex),
            choice=_choice(choice),
            grammar=_text("grammar", grammar),
            json_object=json_object is not None and _flag("json_object", json_object),
            disable_any_whitespace=_flag("disable_any_whitespace", disable_any_whitespace),
            disable_additional_properties=_flag("disable_additional_properties", disable_additional_properties),
            whitespace_pattern=_text("whitespace_pattern", whitespace_pattern),
            reasoning_start=_text("reasoning_start", reasoning_start),
            reasoning_end=_text("reasoning_end", reasoning_end),
        )
        self._refuse_contradictions()

    @property
    def form(self) -> str:
        """Which of FORMS this is."""
        return next(name for name in FORMS if getattr(self, name))

    def _refuse_contradictions(self) -> None:
        given = [name for name in FORMS if getattr(self, name)]
        if len(given) != 1:
            found = f"{' and '.join(given)}" if given else "none"
            raise RequestError(f"{FIELD} must hold exactly one of {', '.join(FORMS)}, found {found}", param=FIELD)
        for name in JSON_OPTIONS:
            if getattr(self, name) and given[0] not in ("json", "json_object"):
                raise RequestError(f"{FIELD}.{name} goes with json or json_object, found {given[0]}", param=FIELD)
        if self.whitespace_pattern is not None and self.disable_any_whitespace:
            raise RequestError(
                f"{FIELD}: whitespace_pattern and disable_any_whitespace exclude each other; leave one of them out",
                param=FIELD,
            )
        if self.reasoning_start is not None and self.reasoning_end is None:
            raise RequestError(f"{FIELD}.reasoning_start must come with reasoning_end, found none", param=FIELD)


def to_structured_outputs(value: object) -> StructuredOutputsParams | None:
    """What SamplingParams was given: None, the object, or its fields as a mapping."""
    if value is None or isinstance(value, StructuredOutputsParams):
        return value
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return StructuredOutputsParams(**value)
    raise RequestError(f"{FIELD} must be an object with one of {', '.join(FORMS)}, found {value!r:.80}", param=FIELD)


def _refuse_unknown(unknown: Mapping[str, object]) -> None:
    for name in unknown:
        known = ", ".join(StructuredOutputsParams.__dataclass_fields__)
        raise RequestError(f"{FIELD}.{name} is not supported; known: {known}", param=FIELD)


def _wrong(name: str, expected: str, value: object) -> RequestError:
    return RequestError(f"{FIELD}.{name} must be {expected}, found {reprlib.repr(value)}", param=FIELD)


def _text(name: str, value: object) -> str | None:
    if value is not None and (not isinstance(value, str) or not value):
        raise _wrong(name, "a non-empty string", value)
    return value


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _wrong(name, "true or false", value)
    return value


def _choice(value: object) -> tuple[str, ...] | None:
    if value is None:
        return None
    if not isinstance(value, list | tuple) or not value or not all(isinstance(item, str) and item for item in value):
        raise _wrong("choice", "a list of at least one non-empty string", value)
    return tuple(value)


def _schema(value: object) -> str | None:
    """A schema as JSON text; a mapping is written out, so that what it holds can change no more."""
    if value is None:
        return None
    expected = "a JSON schema, an object or its JSON text"
    if not isinstance(value, str | Mapping):
        raise _wrong("json", expected, value)
    try:
        schema = json_package.loads(value) if isinstance(value, str) else dict(value)
        text = json_package.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise _wrong("json", f"{expected} ({error})", value) from None
    except RecursionError:
        raise _wrong("json", f"{expected}, less deeply nested", value) from None
    if not isinstance(schema, dict):
        raise _wrong("json", expected, value)
    return text
