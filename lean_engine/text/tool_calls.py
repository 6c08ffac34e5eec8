"""Tools of a chat request: what the template is given, what the answer is held to, and who reads the calls in it.

The forms are named as for --tool-call-parser, and told from the chat template where none is named:
  - hermes: `<tool_call>{"name": …, "arguments": {…}}</tool_call>` (Hermes, Qwen 2.5 and 3)
  - llama3_json: `{"name": …, "parameters": {…}}` (Llama 3)

tool_choice: "auto" lets the model choose, "required" holds the answer to one call or several, a named tool to one call
of it. "none" keeps the tools from the model too, so that it writes no calls that nobody reads. A template that takes no
tools would drop them in silence: such a request is refused, unless tool_choice is "none".
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from lean_engine.errors import ConfigError, RequestError
from lean_engine.text.chat import takes_tools
from lean_engine.text.tool_parsers import HermesParser, Llama3JsonParser, ToolCallDelta, ToolCallParser, ToolDelta

__all__ = [
    "TOOL_CALL_PARSERS",
    "ParsedText",
    "ToolCall",
    "ToolCallDelta",
    "ToolCallParser",
    "ToolDelta",
    "ToolPlan",
    "check_tool_call_parser",
    "detect_tool_call_parser",
    "parse_tool_calls",
    "plan_tools",
]

CHOICES = ("none", "auto", "required")
BLANKS = r"[\x20\x0A\x0D\x09]{1,40}"  # in arguments that a grammar makes


class Form(NamedTuple):
    """How a family of models writes calls."""

    parser: type[ToolCallParser]
    before: str  # of one call
    arguments_key: str
    after: str
    separator: str
    names_must_match: bool  # without a tag, only the name tells a call from other JSON


TOOL_CALL_PARSERS: dict[str, Form] = {
    "hermes": Form(HermesParser, "<tool_call>\n", "arguments", "\n</tool_call>", "\n", names_must_match=False),
    "llama3_json": Form(Llama3JsonParser, "", "parameters", "", "; ", names_must_match=True),
}


class ToolCall(NamedTuple):
    """A whole call."""

    id: str
    name: str
    arguments: str  # JSON text


class ParsedText(NamedTuple):
    """An answer's content and calls."""

    content: str
    calls: list[ToolCall]


@dataclass(frozen=True, slots=True)
class ToolPlan:
    """What becomes of a request's tools."""

    tools: list[dict[str, Any]] | None = None  # for the chat template
    grammar: str | None = None  # Lark: the answer is nothing but calls. For StructuredOutputsParams(grammar=…)
    form: Form | None = None  # None: the answer is not searched for calls
    names: frozenset[str] = frozenset()  # of the tools
    max_calls: int | None = None

    @property
    def tags(self) -> tuple[str, ...]:
        """What the parser looks for in the text: it must not be left out of it (`text.tags`)."""
        return () if self.form is None else self.form.parser.TAGS

    def new_parser(self, *, is_streaming: bool = True) -> ToolCallParser | None:
        """The parser of one answer, None where it is all content."""
        if self.form is None:
            return None
        names = self.names if self.form.names_must_match else None
        return self.form.parser(names, is_streaming=is_streaming, max_calls=self.max_calls)


def plan_tools(
    tools: Any,
    tool_choice: Any = None,
    *,
    template: str | None,
    parser: str | None = None,
    parallel_tool_calls: bool | None = None,
) -> ToolPlan:
    """Check a request's tools and decide what becomes of them.

    Args:
        tools: OpenAI's: {"type": "function", "function": {"name": …, "description": …, "parameters": schema}} each.
        tool_choice: "none", "auto", "required" or {"type": "function", "function": {"name": …}}; None = "auto".
        template: the chat template that the request uses.
        parser: one of TOOL_CALL_PARSERS; None = what the template shows.
        parallel_tool_calls: false: one call at most; None = true.

    Raises:
        RequestError: a tool or the choice is wrong, or the model's template knows no tools.
    """
    functions = [check_tool(tool, f"tools[{index}]") for index, tool in enumerate(check_list(tools))]
    names = [function["name"] for function in functions]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise RequestError(f"tools hold the name {twice!r} twice; should be different names", param="tools")
    chosen = check_choice(tool_choice, names)
    if chosen == "none" or not functions:
        return ToolPlan()
    if template is None or not takes_tools(template):
        raise RequestError(
            "the model's chat template takes no tools; leave them out, or give another one", param="tools"
        )
    form = TOOL_CALL_PARSERS.get(parser or detect_tool_call_parser(template) or "")
    if form is None:
        raise RequestError(
            "the chat template does not show in which form the model calls tools; start with --tool-call-parser "
            f"{' or '.join(TOOL_CALL_PARSERS)}",
            param="tools",
        )
    is_named = chosen not in CHOICES
    is_single = is_named or parallel_tool_calls is False
    callable_ = [function for function in functions if function["name"] == chosen] if is_named else functions
    grammar = None if chosen == "auto" else calls_grammar(form, callable_, is_single=is_single)
    return ToolPlan(list(tools), grammar, form, frozenset(names), 1 if is_single else None)


def check_tool_call_parser(name: str | None) -> None:
    """ConfigError where --tool-call-parser names none that there is."""
    if name is not None and name not in TOOL_CALL_PARSERS:
        raise ConfigError(f"tool-call parser {name!r} is not known; known: {', '.join(TOOL_CALL_PARSERS)}")


def detect_tool_call_parser(template: str | None) -> str | None:
    """The form that a chat template asks of the model; None where it shows none that is known."""
    if template is None or "<function=" in template:  # calls in XML, of Qwen3-Coder
        return None
    if HermesParser.START in template:
        return "hermes"
    is_llama = Llama3JsonParser.TAG in template or ('"parameters"' in template and "function name" in template)
    return "llama3_json" if is_llama else None


def parse_tool_calls(plan: ToolPlan, text: str) -> ParsedText:
    """A whole answer at once; what is no whole and valid call is content."""
    parser = plan.new_parser(is_streaming=False)
    if parser is None:
        return ParsedText(text, [])
    first, last = parser.append(text), parser.finish()
    calls = [ToolCall(c.id or "", c.name or "", c.arguments) for c in (*first.calls, *last.calls)]
    return ParsedText(first.content + last.content, calls)


# -- what a request holds


def check_list(tools: Any) -> list[Any]:
    if tools is None:
        return []
    if not isinstance(tools, list):
        raise RequestError(f"tools is a {type(tools).__name__}; should be a list", param="tools")
    return tools


def check_tool(tool: Any, where: str) -> dict[str, Any]:
    """The function of one tool."""
    if not isinstance(tool, Mapping) or tool.get("type", "function") != "function":
        kind = tool.get("type") if isinstance(tool, Mapping) else type(tool).__name__
        raise RequestError(f"{where} is of type {kind!r}; only 'function' is supported", param=where)
    function = tool.get("function")
    if not isinstance(function, Mapping):
        raise RequestError(f"{where}.function is {function!r:.80}; should be an object", param=f"{where}.function")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise RequestError(
            f"{where}.function.name is {name!r:.80}; should be a non-empty string", param=f"{where}.function.name"
        )
    parameters = function.get("parameters")
    if parameters is not None and not isinstance(parameters, Mapping):
        raise RequestError(
            f"{where}.function.parameters is {parameters!r:.80}; should be a JSON schema, an object",
            param=f"{where}.function.parameters",
        )
    return dict(function)


def check_choice(choice: Any, names: list[str]) -> str:
    """One of CHOICES, or the name of a tool."""
    if choice is None:
        return "auto"
    if isinstance(choice, str) and choice in CHOICES:
        if choice == "required" and not names:
            raise RequestError("tool_choice is 'required', but there are no tools", param="tool_choice")
        return choice
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise RequestError(
            f'tool_choice is {choice!r:.80}; should be "none", "auto", "required" or '
            '{"type": "function", "function": {"name": …}}',
            param="tool_choice",
        )
    if name not in names:
        found = ", ".join(names) or "none"
        raise RequestError(f"tool_choice names {name!r}, which is no tool; tools: {found}", param="tool_choice")
    return name


# -- what the answer is held to


def calls_grammar(form: Form, functions: list[dict[str, Any]], *, is_single: bool) -> str:
    """Lark: calls of these functions in the model's form, one or several."""
    more = "" if is_single else f" ({lark_string(form.separator)} call)*"
    rules = [f"start: call{more}", "call: " + " | ".join(f"call_{i}" for i in range(len(functions)))]
    for index, function in enumerate(functions):
        head = f'{form.before}{{"name": {json.dumps(function["name"])}, "{form.arguments_key}": '
        schema = argument_schema(function.get("parameters"))
        rules.append(f"call_{index}: {lark_string(head)} %json {schema} {lark_string('}' + form.after)}")
    return "\n".join(rules)


def argument_schema(parameters: Mapping[str, Any] | None) -> str:
    """The schema of a tool's arguments as JSON text; a tool without one has no arguments."""
    schema = {"properties": {}, "additionalProperties": False} if not parameters else dict(parameters)
    return json.dumps({"x-guidance": {"whitespace_pattern": BLANKS}, "type": "object", **schema}, ensure_ascii=False)


def lark_string(text: str) -> str:
    """Lark's strings are JSON's."""
    return json.dumps(text, ensure_ascii=False)
