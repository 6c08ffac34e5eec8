"""Chat templates: what a template may do, and what a conversation must be."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from lean_engine.errors import RequestError
from lean_engine.text import Tokenizer, render_chat
from lean_engine.text.chat import compile_template

TINY = Path(__file__).parents[1] / "data" / "tiny"
CHATML = (
    "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + '</>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant>' }}{% endif %}"
)
HI = [{"role": "user", "content": "hi"}]


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


# ---- templates


def test_conversation_is_rendered_with_and_without_generation_prompt() -> None:
    messages = [*HI, {"role": "assistant", "content": "yes"}, *user("and?")]
    assert render_chat(CHATML, messages) == "<user>hi</><assistant>yes</><user>and?</><assistant>"
    assert render_chat(CHATML, HI, add_generation_prompt=False) == "<user>hi</>"


def test_template_of_a_model_directory_gives_one_bos() -> None:
    tokenizer = Tokenizer.from_directory(TINY / "gemma2")
    template = "{{ bos_token }}" + str(tokenizer.chat_template)
    prompt = render_chat(template, HI, bos_token=tokenizer.bos_token, eos_token=tokenizer.eos_token)
    assert prompt == "<|bos|><|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.encode(prompt, add_special_tokens=False)
    assert ids.count(tokenizer.bos_token_id or 0) == 1


def test_block_lines_leave_no_blank_lines() -> None:
    template = "{% for m in messages %}\n    {% if true %}\n{{ m.content }}\n    {% endif %}\n{% endfor %}\nend"
    assert render_chat(template, HI) == "hi\nend"


def test_loops_can_be_left_and_continued() -> None:
    rules = "{% if i == 1 %}{% continue %}{% endif %}{% if i == 4 %}{% break %}{% endif %}"
    template = "{% for i in range(9) %}" + rules + "{{ i }}{% endfor %}"
    assert render_chat(template, HI) == "023"


def test_tojson_escapes_neither_html_nor_unicode() -> None:
    tools = [{"name": "<f> & 'g'", "text": "é"}]
    assert render_chat("{{ tools | tojson }}", HI, tools=tools) == json.dumps(tools, ensure_ascii=False)
    assert render_chat("{{ tools | tojson(indent=2) }}", HI, tools=tools) == json.dumps(
        tools, ensure_ascii=False, indent=2
    )


def test_generation_blocks_render_their_body() -> None:
    template = "{% for m in messages %}{% generation %}[{{ m.content }}]{% endgeneration %}{% endfor %}"
    assert render_chat(template, HI) == "[hi]"


def test_strftime_now_formats_the_local_time() -> None:
    assert render_chat("{{ strftime_now('%Y') }}", HI) in {str(datetime.now().year), str(datetime.now().year - 1)}


def test_variables_reach_the_template() -> None:
    template = "{{ documents[0].title }} {{ enable_thinking }} {{ eos_token }} {{ bos_token is defined }}"
    text = render_chat(template, HI, documents=[{"title": "D"}], eos_token="</s>", enable_thinking=False)
    assert text == "D False </s> False"


def test_same_template_is_compiled_once() -> None:
    assert compile_template(CHATML) is compile_template(CHATML)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must\n alternate') }}", "chat template: roles must alternate"),
        ("{{ messages[0].nothing.more }}", "chat template: .* has no attribute 'nothing'"),
        ("{% for m in %}", "chat template: "),
        ("{{ 'a' + 1 }}", "chat template: can only concatenate str"),
        ("{{ 1 / 0 }}", "chat template: division by zero"),
        ("{{ ''.__class__.__mro__ }}", "chat template: access to attribute '__class__' .* is unsafe"),
        ("{{ messages.append(1) }}", "chat template: access to attribute 'append' .* is unsafe"),
    ],
)
def test_whatever_a_template_raises_is_a_request_error(template: str, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        render_chat(template, HI)
    assert (caught.value.param, caught.value.status) == ("messages", 400)
    assert "\n" not in str(caught.value)


def test_model_without_template_says_how_to_give_one() -> None:
    with pytest.raises(RequestError, match=r"no chat template; give one with --chat-template"):
        render_chat(None, HI)


# ---- messages


def test_text_parts_are_joined_with_a_line_break() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert render_chat("{{ messages[0].content }}", user(parts)) == "one\ntwo"


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages should be a non-empty list"),
        ("hi", "messages should be a non-empty list of messages, not 'hi'"),
        (["hi"], r"messages\[0\] is a str; should be an object"),
        ([*HI, {"content": "x"}], r"messages\[1\].role is None; should be a non-empty string"),
        ([{"role": 3, "content": "x"}], r"messages\[0\].role is 3"),
        ([{"role": "user"}], r"messages\[0\] has no content"),
        (user(None), r"messages\[0\] has no content; only a message with tool_calls may have none"),
        (user(5), r"messages\[0\].content is a int; should be a string or a list"),
        (user([{"type": "image_url", "image_url": {}}]), r"messages\[0\].content\[0\] is of type 'image_url'"),
        (user(["x"]), r"messages\[0\].content\[0\] is of type 'str'"),
        (user([{"type": "text"}]), r"messages\[0\].content\[0\].text is None"),
        ([{"role": "assistant", "tool_calls": "x"}], r"messages\[0\].tool_calls is a str; should be a list"),
        ([{"role": "assistant", "tool_calls": [{}]}], r"messages\[0\].tool_calls\[0\] has no function"),
        (
            [{"role": "assistant", "tool_calls": [{"function": {"arguments": "{"}}]}],
            r"messages\[0\].tool_calls\[0\].function.arguments is not JSON",
        ),
    ],
)
def test_message_of_a_wrong_form_is_named(messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        render_chat(CHATML, messages)
    assert caught.value.param == "messages"


def test_message_with_tool_calls_may_have_no_content_and_its_arguments_are_objects() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    template = "{{ 'content' in messages[0] }} {{ messages[0].tool_calls[0].function.arguments.x + 1 }}"
    assert render_chat(template, [message]) == "False 2"
    assert call["function"]["arguments"] == '{"x": 1}'  # the caller's message is left as it was


# ---- continuing


@pytest.mark.parametrize(
    ("content", "template", "expected"),
    [
        ("Once ", "{{ messages[0].content }}</>", "Once "),
        ("Once ", "{{ messages[0].content | trim }} </>", "Once"),  # the template trims, so the prompt does
    ],
)
def test_final_message_is_left_open(content: str, template: str, expected: str) -> None:
    messages = [{"role": "assistant", "content": content}]
    text = render_chat(template, messages, add_generation_prompt=False, continue_final_message=True)
    assert text == expected


def test_continuing_excludes_a_generation_prompt_and_needs_a_final_message_that_shows() -> None:
    with pytest.raises(RequestError, match="exclude each other"):
        render_chat(CHATML, HI, continue_final_message=True)
    with pytest.raises(RequestError, match="leaves the final message out"):
        render_chat("nothing", HI, add_generation_prompt=False, continue_final_message=True)
    call = [{"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]
    with pytest.raises(RequestError, match="no content to continue"):
        render_chat(CHATML, call, add_generation_prompt=False, continue_final_message=True)
