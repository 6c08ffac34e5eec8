"""Structured output, tool calls and reasoning over HTTP. The tiny model writes nonsense; grammars hold it to more."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from live_server import Live

from lean_engine.server import answers

MESSAGES: Any = [{"role": "user", "content": "hi"}]
TEMPLATE = (
    "{% for tool in tools or [] %}<tool_call>{{ tool.function.name }}\n{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
)
SCHEMA = {
    "type": "object",
    "properties": {"sea": {"enum": ["red", "black"]}, "deep": {"type": "boolean"}},
    "required": ["sea", "deep"],
    "additionalProperties": False,
}
TOOL: Any = {"type": "function", "function": {"name": "look", "description": "looks", "parameters": SCHEMA}}
OTHER: Any = {"type": "function", "function": {"name": "wait"}}
ASK: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "temperature": 0, "max_tokens": 120}


@pytest.fixture(scope="module")
def server() -> Iterator[Live]:
    made = Live(chat_template=TEMPLATE)
    yield made
    made.close()


@pytest.fixture(scope="module")
def client(server: Live) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def terse(server: Live) -> dict[str, Any]:
    """The request's fields, with no blanks: the model would fill JSON with them."""
    texts = {i: server.engine.tokenizer.token_text(i) for i in range(512)}
    return {**ASK, "logit_bias": {str(i): -100 for i, text in texts.items() if any(c in text for c in " \n\r\t")}}


def test_json_schema(client: openai.OpenAI, terse: dict[str, Any]) -> None:
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "sea", "schema": SCHEMA, "strict": True}}
    got = client.chat.completions.create(response_format=wanted, **terse).choices[0]
    assert got.finish_reason == "stop"
    found = json.loads(got.message.content or "")
    assert found["sea"] in ("red", "black")
    assert isinstance(found["deep"], bool)
    chunks = client.chat.completions.create(response_format=wanted, stream=True, **terse)
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == got.message.content


def test_json_object_and_text(client: openai.OpenAI) -> None:
    got = client.chat.completions.create(response_format={"type": "json_object"}, **{**ASK, "max_tokens": 200})
    text = got.choices[0].message.content or ""
    assert text.lstrip().startswith("{")
    if got.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(text), dict)
    plain = client.chat.completions.create(response_format={"type": "text"}, **ASK).choices[0].message.content
    assert plain == client.chat.completions.create(**ASK).choices[0].message.content


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ({"choice": ["north"]}, "north"),
        ({"regex": "ab{3}c"}, "abbbc"),
        ({"grammar": 'start: "one" "two"'}, "onetwo"),
        ({"json": {"const": 7}}, "7"),
    ],
)
def test_structured_outputs_in_both_endpoints(client: openai.OpenAI, form: dict[str, Any], expected: str) -> None:
    extra = {"structured_outputs": form}
    assert client.chat.completions.create(extra_body=extra, **ASK).choices[0].message.content == expected
    fields = {name: value for name, value in ASK.items() if name != "messages"}
    assert client.completions.create(prompt="hi", extra_body=extra, **fields).choices[0].text == expected


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nothing"}}}},
            "response_format",
        ),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
        ({"tools": [{"type": "other"}]}, "tools[0]"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "no"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": "required", "response_format": {"type": "json_object"}}, "tool_choice"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "x", "parameters": {"type": "nothing"}}}],
                "tool_choice": "required",
            },
            "tools",
        ),
    ],
)
def test_what_is_wrong_with_a_form_is_named(server: Live, fields: dict[str, Any], param: str) -> None:
    status, body, _ = server.request("/v1/chat/completions", {**ASK, **fields})
    assert status == 400, body
    assert body["error"]["param"] == param
    server.wait_until_idle()


def test_forms_of_clients_are_tried_in_another_process_first(server: Live) -> None:
    body = {"prompt": "x", "max_tokens": 3, "structured_outputs": {"regex": "ab?c"}}
    assert server.request("/v1/completions", body)[0] == 200
    trial = server.engine.grammars._trial
    assert trial is not None
    assert trial._process is not None
    assert trial._process.poll() is None


def test_required_tools_are_called(client: openai.OpenAI, terse: dict[str, Any]) -> None:
    wanted: dict[str, Any] = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False, **terse}
    got = client.chat.completions.create(**wanted).choices[0]
    assert got.finish_reason == "tool_calls"
    assert got.message.content is None
    (call,) = got.message.tool_calls or []
    assert call.type == "function"
    assert call.function.name == "look"
    assert json.loads(call.function.arguments)["sea"] in ("red", "black")

    chunks = [c.choices[0] for c in client.chat.completions.create(stream=True, **wanted)]
    deltas = [delta for c in chunks for delta in c.delta.tool_calls or []]
    assert {delta.index for delta in deltas} == {0}
    assert [delta.id is not None for delta in deltas] == [True] + [False] * (len(deltas) - 1)
    assert deltas[0].function is not None
    assert deltas[0].function.name == "look"
    assert "".join(d.function.arguments or "" for d in deltas if d.function) == call.function.arguments
    assert chunks[-1].finish_reason == "tool_calls"
    assert not any(c.delta.content for c in chunks)


def test_a_named_tool_is_called(client: openai.OpenAI) -> None:
    choice: Any = {"type": "function", "function": {"name": "wait"}}
    got = client.chat.completions.create(tools=[TOOL, OTHER], tool_choice=choice, **ASK).choices[0]
    assert [c.function.name for c in got.message.tool_calls or []] == ["wait"]
    assert got.finish_reason == "stop"


def test_tools_are_for_the_model_unless_the_choice_is_none(client: openai.OpenAI) -> None:
    def num_prompt_tokens(**fields: Any) -> int:
        usage = client.chat.completions.create(**fields, **ASK).usage
        assert usage is not None
        return usage.prompt_tokens

    plain = num_prompt_tokens()
    assert num_prompt_tokens(tools=[TOOL], tool_choice="none") == plain
    assert num_prompt_tokens(tools=[TOOL]) > plain
    assert num_prompt_tokens(tools=[]) == plain


def test_choosing_freely_can_be_switched_off(start: Any) -> None:
    server = start(chat_template=TEMPLATE, enable_auto_tool_choice=False)
    status, body, _ = server.request("/v1/chat/completions", {**ASK, "tools": [TOOL]})
    assert status == 400
    assert body["error"]["param"] == "tool_choice"
    assert server.request("/v1/chat/completions", {**ASK, "tools": [TOOL], "tool_choice": "required"})[0] == 200


def test_reasoning_is_told_from_the_answer(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    make = answers.make_reasoning_parser

    def without_tags(*args: Any, **kwargs: Any) -> Any:
        """The tiny vocabulary has no token </think>: the form is that of the whole text."""
        parser = make(*args, **kwargs)
        parser.grammar_tags = {}
        return parser

    monkeypatch.setattr(answers, "make_reasoning_parser", without_tags)
    server = start(reasoning_parser="qwen3")
    said = {**ASK, "structured_outputs": {"grammar": 'start: "<think>\\nso\\n</think>\\n\\nyes"'}}
    _, body, _ = server.request("/v1/chat/completions", said)
    message = body["choices"][0]["message"]
    assert (message["reasoning"], message["content"]) == ("so", "yes")
    assert message["reasoning_content"] == "so"
    events = [json.loads(e) for e in server.events("/v1/chat/completions", said)[:-1]]
    deltas = [e["choices"][0]["delta"] for e in events]
    assert "".join(d.get("reasoning", "") for d in deltas) == "so"
    assert "".join(d.get("content", "") for d in deltas) == "yes"
    _, body, _ = server.request("/v1/chat/completions", {**said, "include_reasoning": False})
    assert "reasoning" not in body["choices"][0]["message"]
    assert body["choices"][0]["message"]["content"] == "yes"


def test_a_form_behind_reasoning_needs_its_tag_as_a_token(start: Any) -> None:
    server = start(reasoning_parser="deepseek_r1")
    body = {**ASK, "response_format": {"type": "json_object"}}
    status, answer, _ = server.request("/v1/chat/completions", body)
    assert status == 400
    assert answer["error"]["param"] == "response_format"
    assert "</think>" in answer["error"]["message"]
