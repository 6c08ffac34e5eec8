"""Tool calls: the parsers over every cut of a text, what a request may hold, and the grammar that forces calls."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lean_engine.errors import ConfigError, RequestError
from lean_engine.text.chat import render_chat
from lean_engine.text.tool_calls import (
    ParsedText,
    ToolCallParser,
    ToolPlan,
    check_tool_call_parser,
    detect_tool_call_parser,
    parse_tool_calls,
    plan_tools,
)
from lean_engine.text.tool_parsers import HermesParser, Llama3JsonParser, ToolDelta

HERMES_TEMPLATE = (
    "{%- if tools %}Tools:{% for tool in tools %}\n{{ tool | tojson }}{% endfor %}\n"
    'Call one as <tool_call>\n{"name": <name>, "arguments": <arguments>}\n</tool_call>\n{% endif %}'
    "{%- for message in messages %}[{{ message.role }}]{{ message.content or '' }}"
    "{%- for call in message.tool_calls or [] %}<tool_call>"
    '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}</tool_call>{% endfor %}'
    "{%- endfor %}[assistant]"
)
LLAMA_TEMPLATE = (
    "{%- if not tools is defined %}{% set tools = none %}{% endif %}"
    'Respond in the format {"name": function name, "parameters": dictionary}.'
    "{%- for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
)
PLAIN_TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": f"{name}s", "parameters": schema}}


TOOLS = [
    tool("weather", city={"type": "string", "maxLength": 5}),
    tool("add", a={"type": "integer"}, b={"type": "integer"}),
]
HERMES = plan_tools(TOOLS, template=HERMES_TEMPLATE)
LLAMA = plan_tools(TOOLS, template=LLAMA_TEMPLATE)


def collect(deltas: list[ToolDelta]) -> tuple[str, list[tuple[str, str]]]:
    """Content, and (name, arguments) of each call; checks the form of the deltas."""
    content, calls, ids = "", [], []
    for delta in deltas:
        content += delta.content
        for call in delta.calls:
            is_first = call.index == len(calls)
            assert is_first == (call.id is not None) == (call.name is not None)
            assert is_first or (call.index == len(calls) - 1 and call.arguments)
            if is_first:
                ids.append(call.id)
                calls.append((call.name or "", ""))
            calls[-1] = (calls[-1][0], calls[-1][1] + call.arguments)
    assert len(set(ids)) == len(ids)
    return content, calls


def stream(plan: ToolPlan, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    parser = plan.new_parser()
    assert parser is not None
    found = collect([*map(parser.append, pieces), parser.finish()])
    assert parser.num_calls == len(found[1])
    return found


def whole(plan: ToolPlan, text: str) -> tuple[str, list[tuple[str, str]]]:
    content, calls = parse_tool_calls(plan, text)
    return content, [(call.name, call.arguments) for call in calls]


# text → content and calls, streaming and not
WELL_FORMED: list[tuple[ToolPlan, str, str, list[tuple[str, str]]]] = [
    (
        HERMES,
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
        "",
        [("add", '{"a": 1, "b": 2}')],
    ),
    (
        HERMES,
        'Hm.\n<tool_call>{"arguments":{"a":{"b":[1]}},"name":"x"}</tool_call>',
        "Hm.\n",
        [("x", '{"a":{"b":[1]}}')],
    ),
    (
        HERMES,
        '<tool_call>{"name": "x"}</tool_call>\n\n<tool_call>{"name": "y", "arguments": null}</tool_call>\nDone.',
        "\nDone.",
        [("x", "{}"), ("y", "{}")],
    ),
    (
        HERMES,
        '<tool_call>{"name": "x", "arguments": {"s": "</tool_call> \\" }{"}}\n',
        "",
        [("x", '{"s": "</tool_call> \\" }{"}')],
    ),
    (HERMES, '<tool_call>{"name": "x", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("x", '{"a": 1}')]),
    (HERMES, '<tool_call>{"name": "x", "arguments": {"s": "a\nb"}}</tool_call>', "", [("x", '{"s": "a\\nb"}')]),
    (HERMES, '<tool_call>{"name": "x", "arguments": {}, "id": 3}</tool_call>', "", [("x", "{}")]),
    (HERMES, '<tool_call>{"name": "x", "arguments": {}}}</tool_call>', "}</tool_call>", [("x", "{}")]),
    (HERMES, '<tool_call>{"name": "x"}\n</tool_', "", [("x", "{}")]),
    (HERMES, "a < b <tool", "a < b <tool", []),
    (HERMES, "<tool_call>\nnone\n</tool_call>", "<tool_call>\nnone\n</tool_call>", []),
    (
        HERMES,
        '\n<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        '\n<tool_call>{"name": 3, "arguments": {}}</tool_call>',
        [],
    ),
    (HERMES, '<tool_call><tool_call>{"name": "x"}</tool_call>', "<tool_call>", [("x", "{}")]),
    (HERMES, '<tool_call>{"name": "x", "arguments": [1]}', '<tool_call>{"name": "x", "arguments": [1]}', []),
    (HERMES, '<tool_call>{"name": "x", "other": 1}', '<tool_call>{"name": "x", "other": 1}', []),
    (HERMES, "\n\n", "\n\n", []),
    (HERMES, '<tool_call>{"na', '<tool_call>{"na', []),
    (LLAMA, '{"name": "add", "parameters": {"a": 1}}', "", [("add", '{"a": 1}')]),
    (LLAMA, '<|python_tag|>{"type": "function", "name": "add", "parameters": {}}', "", [("add", "{}")]),
    (
        LLAMA,
        ' {"name": "add", "parameters": {}}; {"name": "weather", "parameters": {"city": "x;y"}} ;',
        "",
        [("add", "{}"), ("weather", '{"city": "x;y"}')],
    ),
    (LLAMA, '{"name": "add", "parameters": {}}\n{"name": "add"}', "", [("add", "{}"), ("add", "{}")]),
    (LLAMA, '{"name": "Bob", "parameters": {}}', '{"name": "Bob", "parameters": {}}', []),
    (LLAMA, '{"answer": {"name": "add"}}', '{"answer": {"name": "add"}}', []),
    (LLAMA, 'Sure: <|python_tag|> {"name": "add"}; and', "Sure: ; and", [("add", "{}")]),
    (LLAMA, "<|python_tag|>print(1)<|python_tag|>", "<|python_tag|>print(1)<|python_tag|>", []),
    (LLAMA, 'see {"name": "add", "parameters": {}}', 'see {"name": "add", "parameters": {}}', []),
    (LLAMA, "<|pyth", "<|pyth", []),
]
# what breaks off inside the arguments: text → streaming, not streaming
BROKEN_OFF: list[tuple[ToolPlan, str, tuple[str, list[tuple[str, str]]]]] = [
    (HERMES, 'a<tool_call>{"name": "x", "arguments": {"b": "c', ("a", [("x", '{"b": "c')])),
    (HERMES, '<tool_call>{"name": "x", "arguments": {"b": 1} ?}</tool_call>', ("?}</tool_call>", [("x", '{"b": 1}')])),
    (HERMES, '<tool_call>{"name": "x", "arguments": {"b": }}</tool_call>', ("", [("x", '{"b": }')])),
    (LLAMA, '{"name": "add", "parameters": {"a": 1}', ("", [("add", '{"a": 1}')])),
]


@pytest.mark.parametrize(("plan", "text", "content", "calls"), WELL_FORMED)
def test_every_cut_of_a_text_gives_the_same_content_and_calls(
    plan: ToolPlan, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    assert whole(plan, text) == (content, calls)
    assert stream(plan, list(text)) == (content, calls)
    step = 1 + len(text) // 40
    for first, second in itertools.product(range(len(text) + 1), range(0, len(text) + 1, step)):
        pieces = [text[: min(first, second)], text[min(first, second) : max(first, second)], text[max(first, second) :]]
        assert stream(plan, pieces) == (content, calls), (first, second)


@pytest.mark.parametrize(("plan", "text", "streamed"), BROKEN_OFF)
def test_a_call_that_breaks_off_is_content_unless_it_was_shown(
    plan: ToolPlan, text: str, streamed: tuple[str, list[tuple[str, str]]]
) -> None:
    assert whole(plan, text) == (text, [])
    for cut in range(len(text) + 1):
        assert stream(plan, [text[:cut], text[cut:]]) == streamed, cut


FRAGMENTS = ["<tool_call>", "</tool_call>", "<|python_tag|>", "{", "}", '"', ":", ",", ";", " ", "\n", "\\", "x", "["]
FRAGMENTS += [
    '{"name": "add", "arguments": {"a": 1',
    '{"name": "weather"',
    '"arguments":',
    "}}",
    '"name": "add"',
    "<tool",
]


@given(
    st.lists(st.sampled_from(FRAGMENTS), max_size=12).map("".join),
    st.lists(st.integers(0, 300)),
    st.sampled_from([HERMES, LLAMA]),
)
def test_random_texts_cut_at_random_lose_nothing(text: str, cuts: list[int], plan: ToolPlan) -> None:
    places = [0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]
    content, calls = stream(plan, [text])
    assert stream(plan, [text[a:b] for a, b in itertools.pairwise(places)]) == (content, calls)
    if not calls:
        assert content == text == whole(plan, text)[0]
    for part in [content, *(arguments for _, arguments in calls if arguments != "{}")]:
        assert "x" not in text or set(part) <= {*text, "n"}
    assert all(isinstance(json.loads(arguments), dict) for _, arguments in whole(plan, text)[1])


def test_arguments_come_while_they_are_written() -> None:
    parser = HermesParser(new_id=lambda: "id")
    pieces = ['<tool_call>{"name": "x", "argu', 'ments": {"a"', ": 1", "}", "}</tool_call>"]
    deltas = [parser.append(piece).calls for piece in pieces]
    assert [[(c.index, c.id, c.name, c.arguments) for c in calls] for calls in deltas] == [
        [],
        [(0, "id", "x", '{"a"')],
        [(0, None, None, ": 1")],
        [(0, None, None, "}")],
        [],
    ]


def test_content_is_not_held_back_longer_than_a_tag_may_be_coming() -> None:
    parser = HermesParser()
    assert parser.append("a <to").content == "a "
    assert parser.append("y").content == "<toy"
    llama = Llama3JsonParser({"add"})
    assert llama.append('{"no').content == ""
    assert llama.append('": 1').content == '{"no": 1'
    assert llama.append("2}").content == "2}"


def test_calls_beyond_the_limit_are_dropped() -> None:
    plan = plan_tools(TOOLS, template=LLAMA_TEMPLATE, parallel_tool_calls=False)
    text = '{"name": "add", "parameters": {"a": 1}}; {"name": "weather", "parameters": {"city": "x"}}'
    assert stream(plan, list(text)) == whole(plan, text) == ("", [("add", '{"a": 1}')])


# -- the request


def test_the_form_is_told_from_the_template() -> None:
    assert detect_tool_call_parser(HERMES_TEMPLATE) == "hermes"
    assert detect_tool_call_parser(LLAMA_TEMPLATE) == "llama3_json"
    assert detect_tool_call_parser("<tool_call>\n<function=f>") is None
    assert detect_tool_call_parser(PLAIN_TEMPLATE) is None
    assert detect_tool_call_parser(None) is None
    forced = plan_tools(TOOLS, template=HERMES_TEMPLATE, parser="llama3_json").new_parser()
    assert isinstance(forced, Llama3JsonParser)


def test_without_tools_or_with_none_the_answer_is_all_content() -> None:
    text = '<tool_call>{"name": "add"}</tool_call>'
    for plan in (
        plan_tools(None, template=None),
        plan_tools([], "auto", template=PLAIN_TEMPLATE),
        plan_tools(TOOLS, "none", template=PLAIN_TEMPLATE),
    ):
        assert plan == ToolPlan()
        assert plan.new_parser() is None
        assert parse_tool_calls(plan, text) == ParsedText(text, [])


def test_auto_gives_the_tools_to_the_template_and_holds_the_answer_to_nothing() -> None:
    assert HERMES.tools == TOOLS
    assert HERMES.grammar is None
    assert HERMES.tags == ("<tool_call>", "</tool_call>")


@pytest.mark.parametrize(
    ("tools", "choice", "param", "message"),
    [
        ("add", None, "tools", "tools is a str; should be a list"),
        ([3], None, "tools[0]", "tools[0] is of type 'int'; only 'function'"),
        ([{"type": "web_search"}], None, "tools[0]", "tools[0] is of type 'web_search'; only 'function'"),
        ([{"type": "function"}], None, "tools[0].function", "tools[0].function is None; should be an object"),
        (
            [*TOOLS, {"function": {}}],
            None,
            "tools[2].function.name",
            "tools[2].function.name is None; should be a non-emp",
        ),
        (
            [{"function": {"name": "x", "parameters": 3}}],
            None,
            "tools[0].function.parameters",
            "is 3; should be a JSON sch",
        ),
        ([*TOOLS, TOOLS[0]], None, "tools", "tools hold the name 'weather' twice"),
        (TOOLS, "any", "tool_choice", "tool_choice is 'any'; should be"),
        (TOOLS, {"type": "function"}, "tool_choice", "tool_choice is {'type': 'function'}; should be"),
        (
            TOOLS,
            {"type": "function", "function": {"name": "y"}},
            "tool_choice",
            "'y', which is no tool; tools: weather, add",
        ),
        (None, "required", "tool_choice", "tool_choice is 'required', but there are no tools"),
        (None, {"type": "function", "function": {"name": "y"}}, "tool_choice", "'y', which is no tool; tools: none"),
    ],
)
def test_what_is_wrong_with_tools_is_named(tools: Any, choice: Any, param: str, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        plan_tools(tools, choice, template=HERMES_TEMPLATE)
    assert message in str(caught.value)
    assert caught.value.param == param


def test_a_template_that_takes_no_tools_is_refused() -> None:
    for choice in ("auto", "required"):
        for template in (PLAIN_TEMPLATE, None):
            with pytest.raises(RequestError, match="takes no tools"):
                plan_tools(TOOLS, choice, template=template)
    with pytest.raises(RequestError, match="takes no tools"):
        render_chat(PLAIN_TEMPLATE, [{"role": "user", "content": "a"}], tools=TOOLS)
    assert render_chat(PLAIN_TEMPLATE, [{"role": "user", "content": "a"}], tools=None) == "a"
    with pytest.raises(RequestError, match="start with --tool-call-parser hermes or llama3_json"):
        plan_tools(TOOLS, template="{{ tools }}")


def test_an_unknown_parser_is_refused() -> None:
    check_tool_call_parser(None)
    check_tool_call_parser("hermes")
    with pytest.raises(ConfigError, match="'mistral' is not known; known: hermes, llama3_json"):
        check_tool_call_parser("mistral")


def test_calls_and_their_results_go_through_the_template() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    bare = {"id": "d", "type": "function", "function": {"name": "add"}}
    chat = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": None, "tool_calls": [call, bare]},
        {"role": "tool", "tool_call_id": "c", "content": "2"},
    ]
    text = render_chat(HERMES_TEMPLATE, chat, tools=TOOLS)
    assert json.dumps(TOOLS[0]) in text
    first = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'
    second = '<tool_call>{"name": "add", "arguments": {}}</tool_call>'
    assert text.endswith(f"[user]1+1?[assistant]{first}{second}[tool]2[assistant]")


# -- the grammar that forces calls

CHOSEN = {"type": "function", "function": {"name": "add"}}


@pytest.mark.parametrize("template", [HERMES_TEMPLATE, LLAMA_TEMPLATE], ids=["hermes", "llama"])
@pytest.mark.parametrize(("choice", "parallel"), [("required", None), ("required", False), (CHOSEN, None)])
def test_what_the_grammar_allows_is_read_back_as_calls(template: str, choice: Any, parallel: bool | None) -> None:
    from llguidance import LLMatcher, LLTokenizer

    plan = plan_tools(TOOLS, choice, template=template, parallel_tool_calls=parallel)
    assert plan.grammar is not None
    grammar = LLMatcher.grammar_from_lark(plan.grammar)

    def accepts(text: str) -> bool:
        matcher = LLMatcher(LLTokenizer("byte"), grammar)
        return bool(matcher.try_consume_tokens(list(text.encode())) == len(text) and matcher.is_accepting())

    is_hermes = template == HERMES_TEMPLATE
    key, before, after, between = (
        ("arguments", "<tool_call>\n", "\n</tool_call>", "\n") if is_hermes else ("parameters", "", "", "; ")
    )
    add = f'{before}{{"name": "add", "{key}": {{"a": 1,\n "b": 2}}}}{after}'
    weather = f'{before}{{"name": "weather", "{key}": {{"city": "x"}}}}{after}'
    assert whole(plan, add) == ("", [("add", '{"a": 1,\n "b": 2}')])
    assert accepts(add)
    assert accepts(weather) == (choice == "required")
    assert accepts(add + between + weather) == (choice == "required" and parallel is None)
    assert not accepts("add")
    assert not accepts(add.replace('"b"', '"c"'))


def test_a_tool_without_parameters_and_with_an_odd_name_can_be_forced() -> None:
    from llguidance import LLMatcher, LLTokenizer

    odd = {"type": "function", "function": {"name": 'a"\\b é'}}
    plan = plan_tools([odd], "required", template=HERMES_TEMPLATE)
    text = f'<tool_call>\n{{"name": {json.dumps("a" + chr(34) + chr(92) + "b é")}, "arguments": {{}}}}\n</tool_call>'
    matcher = LLMatcher(LLTokenizer("byte"), LLMatcher.grammar_from_lark(plan.grammar or ""))
    assert matcher.try_consume_tokens(list(text.encode())) == len(text.encode())
    assert matcher.is_accepting()
    assert whole(plan, text) == ("", [('a"\\b é', "{}")])
    assert isinstance(plan.new_parser(), ToolCallParser)
