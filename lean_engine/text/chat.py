"""Chat messages → prompt text, by the model's own Jinja template.

A template is a program that came with the model, so it runs in Jinja's immutable sandbox, set up as templates expect it
(transformers' conventions): block lines leave no blank lines, `break` and `continue` work, `tojson` escapes no HTML,
`raise_exception(text)` and `strftime_now(format)` exist, and `{% generation %}` only marks its body.

A rendered prompt holds its own BOS where the model wants one: encode it with `add_special_tokens=False`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

from lean_engine.errors import RequestError

if TYPE_CHECKING:
    import jinja2

MAX_COMPILED_TEMPLATES = 32
CONTINUE_HERE = "\ue000continue here\ue000"  # private-use characters: no message and no template has them
BLANK = " \t "  # after the mark; gone where the template trims content


def render_chat(
    template: str | None,
    messages: Sequence[dict[str, Any]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: list[dict[str, Any]] | None = None,
    documents: list[dict[str, Any]] | None = None,
    bos_token: str | None = None,
    eos_token: str | None = None,
    **template_kwargs: Any,
) -> str:
    """The prompt text of a conversation.

    Args:
        template: the model's chat template; None where it has none.
        messages: each a dict with "role" and "content". Content is a string, or a list of {"type": "text", "text": …}
            parts, whose texts are joined with a line break, or None in a message with tool calls. What else a message
            has is passed on; `arguments` of tool calls may be a JSON string.
        add_generation_prompt: end with the beginning of an assistant message.
        continue_final_message: end inside the final message instead, so that the model goes on with it.
        tools, documents, bos_token, eos_token, template_kwargs: the template's variables of those names.

    Raises:
        RequestError: no template, a message of a wrong form (it is named), or an error raised by the template.
    """
    if template is None:
        raise RequestError(
            "the model has no chat template; give one with --chat-template, or use completions with a plain prompt",
            param="messages",
        )
    if continue_final_message and add_generation_prompt:
        raise RequestError(
            "continue_final_message and add_generation_prompt exclude each other; set one of them to false",
            param="continue_final_message",
        )
    if tools and not takes_tools(template):
        raise RequestError("the chat template takes no tools; leave them out, or give another one", param="tools")
    chat = check_messages(messages)
    if continue_final_message:
        chat[-1] = mark_end(chat[-1])
    tokens = {"bos_token": bos_token, "eos_token": eos_token}
    variables: dict[str, Any] = {name: token for name, token in tokens.items() if token is not None}
    variables |= {"messages": chat, "tools": tools, "documents": documents}
    text = run_template(template, variables | {"add_generation_prompt": add_generation_prompt} | template_kwargs)
    return cut_at_mark(text) if continue_final_message else text


def check_messages(messages: Any) -> list[dict[str, Any]]:
    """The messages in the form that templates read; RequestError names the one that is wrong."""
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise RequestError(f"messages should be a non-empty list of messages, not {messages!r:.80}", param="messages")
    return [check_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def check_message(message: Any, where: str) -> dict[str, Any]:
    """One message: content as one string, tool call arguments as objects, nothing that is None."""
    if not isinstance(message, dict):
        raise RequestError(f"{where} is a {type(message).__name__}; should be an object", param="messages")
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise RequestError(f"{where}.role is {role!r}; should be a non-empty string", param="messages")
    # Templates tell a missing key from a present one, and would print a None.
    checked = {key: value for key, value in message.items() if value is not None}
    if "content" in checked:
        checked["content"] = flatten_content(checked["content"], f"{where}.content")
    elif not checked.get("tool_calls"):
        raise RequestError(f"{where} has no content; only a message with tool_calls may have none", param="messages")
    if "tool_calls" in checked:
        checked["tool_calls"] = check_tool_calls(checked["tool_calls"], f"{where}.tool_calls")
    return checked


def flatten_content(content: Any, where: str) -> str:
    """Content as one string; the texts of several parts are joined with a line break."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(
            f"{where} is a {type(content).__name__}; should be a string or a list of text parts", param="messages"
        )
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind != "text":
            raise RequestError(f"{where}[{index}] is of type {kind!r}; only 'text' parts are read", param="messages")
        if not isinstance(part.get("text"), str):
            raise RequestError(f"{where}[{index}].text is {part.get('text')!r}; should be a string", param="messages")
        texts.append(part["text"])
    return "\n".join(texts)


def check_tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Tool calls with their arguments as objects: clients send JSON text, templates print objects with `tojson`."""
    if not isinstance(calls, list):
        raise RequestError(f"{where} is a {type(calls).__name__}; should be a list", param="messages")
    checked = []
    for index, call in enumerate(calls):
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict):
            raise RequestError(f"{where}[{index}] has no function; should be an object with one", param="messages")
        arguments = function.get("arguments")
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments or "{}")
            except ValueError as error:
                raise RequestError(
                    f"{where}[{index}].function.arguments is not JSON: {error}", param="messages"
                ) from None
        elif arguments is None:
            arguments = {}
        checked.append(call | {"function": function | {"arguments": arguments}})
    return checked


def mark_end(message: dict[str, Any]) -> dict[str, Any]:
    """The final message with a mark after its content."""
    if "content" not in message:
        raise RequestError("the final message has no content to continue", param="continue_final_message")
    return message | {"content": message["content"] + CONTINUE_HERE + BLANK}


def cut_at_mark(text: str) -> str:
    """The text up to the mark, with the spaces before it trimmed where the template trims content."""
    before, mark, after = text.rpartition(CONTINUE_HERE)
    if not mark:
        raise RequestError(
            "continue_final_message: the chat template leaves the final message out", param="continue_final_message"
        )
    return before if after.startswith(BLANK) else before.rstrip()


def run_template(template: str, variables: dict[str, Any]) -> str:
    """Render a template; whatever it raises becomes a RequestError with its message."""
    try:
        return compile_template(template).render(variables)
    except Exception as error:  # a template is a program: it can raise anything
        reason = " ".join(str(error).split()) or type(error).__name__
        raise RequestError(f"chat template: {reason}", param="messages") from None


@lru_cache(MAX_COMPILED_TEMPLATES)
def compile_template(template: str) -> jinja2.Template:
    """A template compiled in the sandbox; jinja2.TemplateSyntaxError where it is none."""
    return environment().from_string(template)


@lru_cache(MAX_COMPILED_TEMPLATES)
def takes_tools(template: str) -> bool:
    """Whether a template reads the variable `tools`. One that is no template does not."""
    import jinja2
    from jinja2.nodes import Name

    try:
        names = environment().parse(template).find_all(Name)
    except jinja2.TemplateSyntaxError:
        return False
    return any(name.name == "tools" and name.ctx == "load" for name in names)


def choose_template(templates: Mapping[str, str], has_tools: bool) -> str | None:
    """Of a model's templates by name: the one for tools where there are some and it has one, else the usual one."""
    usual = templates.get("default")
    return templates.get("tool_use", usual) if has_tools else usual


@cache
def environment() -> jinja2.Environment:
    """The sandbox of all templates (see the head)."""
    from jinja2.ext import Extension, loopcontrols
    from jinja2.nodes import Node, Scope
    from jinja2.parser import Parser
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}…{% endgeneration %}` marks the assistant's tokens for training; here it is its body."""

        tags = {"generation"}  # noqa: RUF012 - Jinja's own attribute

        def parse(self, parser: Parser) -> Node:
            line = next(parser.stream).lineno
            return Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    sandbox.filters["tojson"] = to_json
    sandbox.globals["raise_exception"] = raise_exception
    sandbox.globals["strftime_now"] = strftime_now
    return sandbox


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """The template filter `tojson`: plain JSON, where Jinja's own escapes <, >, & and '."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def raise_exception(message: str) -> None:
    """The template function that refuses a conversation."""
    import jinja2

    raise jinja2.TemplateError(message)


def strftime_now(format: str) -> str:
    """The template function that formats the local time."""
    return datetime.now().strftime(format)
