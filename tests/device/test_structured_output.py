"""Answers held to a form, from models with random weights: every one is of the form, and nobody else notices."""

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import TINY, LoadLLM

from lean_engine import LLM, RequestOutput, SamplingParams, StructuredOutputsParams
from lean_engine.errors import RequestError
from lean_engine.text.tool_calls import parse_tool_calls, plan_tools

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "kind": {"enum": ["cat", "dog", None]},
        "tags": {"type": "array", "items": {"type": "string", "pattern": "^[a-c]{1,3}$"}, "maxItems": 2},
        "place": {
            "type": "object",
            "properties": {"x": {"type": "number", "minimum": -1, "maximum": 1}, "is_known": {"type": "boolean"}},
            "required": ["x", "is_known"],
            "additionalProperties": False,
        },
    },
    "required": ["name", "age", "kind", "tags", "place"],
    "additionalProperties": False,
}
FORM = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
WILD = SamplingParams(temperature=1.5, max_tokens=200, structured_outputs=FORM)
FREE = SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True, seed=5, logprobs=2)


def prompts_of(count: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices("abcdefgh ", k=rng.randint(3, 20))) for _ in range(count)]


def assert_valid(value: Any) -> None:
    """What SCHEMA says, written out."""
    assert isinstance(value, dict)
    assert list(value) == ["name", "age", "kind", "tags", "place"]
    assert isinstance(value["name"], str)
    assert len(value["name"]) <= 8
    assert type(value["age"]) is int
    assert 0 <= value["age"] <= 150
    assert value["kind"] in ("cat", "dog", None)
    assert isinstance(value["tags"], list)
    assert len(value["tags"]) <= 2
    assert all(re.fullmatch("[a-c]{1,3}", tag) for tag in value["tags"])
    assert list(value["place"]) == ["x", "is_known"]
    assert isinstance(value["place"]["x"], int | float)
    assert not isinstance(value["place"]["x"], bool)
    assert -1 <= value["place"]["x"] <= 1
    assert isinstance(value["place"]["is_known"], bool)


def answers_of(outputs: list[RequestOutput]) -> list[Any]:
    return [answer for output in outputs for answer in output.outputs]


@pytest.mark.parametrize("model", ["llama-gqa-tied", "mistral-swa", "gemma3"])
def test_every_answer_is_of_its_schema(load_llm: LoadLLM, model: str) -> None:
    llm = load_llm(model, max_model_len=256)
    params = [replace(WILD, seed=seed, n=2) for seed in range(8)]
    finished = 0
    for answer in answers_of(llm.generate(prompts_of(8), params)):
        assert answer.error is None
        if answer.finish_reason == "length":  # a number of hundreds of digits is one too
            assert len(answer.token_ids) == 200
            continue
        assert answer.finish_reason == "stop"
        assert answer.stop_reason is None
        assert answer.token_ids[-1] in llm.engine.eos_token_ids
        assert_valid(json.loads(answer.text))
        finished += 1
    assert finished >= 13


def test_neighbours_without_a_form_do_not_notice(load_llm: LoadLLM) -> None:
    prompts = prompts_of(4)
    alone = load_llm().generate(prompts, FREE)
    llm = load_llm()
    params = [p for seed in range(4) for p in (FREE, replace(WILD, seed=seed))]
    mixed = llm.generate([p for prompt in prompts for p in (prompt, prompt)], params)
    for found, wanted in zip(mixed[::2], alone, strict=True):
        assert found.outputs[0].token_ids == wanted.outputs[0].token_ids
        assert found.outputs[0].finish_reason == "length"
    done = [held.outputs[0] for held in mixed[1::2] if held.outputs[0].finish_reason == "stop"]
    assert done  # others may be numbers of hundreds of digits, cut by max_tokens
    for answer in done:
        assert_valid(json.loads(answer.text))


def test_a_seeded_answer_does_not_depend_on_its_batch_or_on_preemption(load_llm: LoadLLM) -> None:
    prompts = prompts_of(6, seed=1)
    params = [replace(WILD, seed=seed, max_tokens=80) for seed in range(6)]
    alone = load_llm(block_size=4, max_model_len=120, max_num_seqs=1).generate(prompts, params)
    llm = load_llm(block_size=4, max_model_len=120, max_num_seqs=6, num_gpu_blocks_override=40)
    found = llm.generate(prompts, params)
    assert sum(output.metrics.num_preemptions for output in found) > 0
    assert [a.token_ids for a in answers_of(found)] == [a.token_ids for a in answers_of(alone)]
    for answer in answers_of(found):
        if answer.finish_reason == "stop":
            assert_valid(json.loads(answer.text))


def test_streaming_gives_the_same_answer(load_llm: LoadLLM) -> None:
    llm, prompt, params = load_llm(), prompts_of(1)[0], replace(WILD, seed=3)
    whole = llm.generate(prompt, params)[0].outputs[0]
    pieces = [output.outputs[0].text for output in llm.stream(prompt, params)]
    assert "".join(pieces) == whole.text
    assert len(pieces) > 5


def test_other_forms_and_a_stop_string_inside_of_one(load_llm: LoadLLM) -> None:
    llm = load_llm()
    forms = [
        {"regex": "[a-d]{3}-[0-9]+x"},
        {"choice": ["yes", "no", "pérhaps"]},
        {"grammar": 'start: "a" B\nB: /[xy]{2}/'},
    ]
    params = [SamplingParams(temperature=1.5, max_tokens=60, seed=s, structured_outputs=forms[s % 3]) for s in range(9)]
    texts = [answer.text for answer in answers_of(llm.generate(prompts_of(9), params))]
    for text, pattern in zip(texts, ["[a-d]{3}-[0-9]+x", "yes|no|pérhaps", "a[xy]{2}"] * 3, strict=True):
        assert re.fullmatch(pattern, text), text
    cut = SamplingParams(max_tokens=60, stop="-", structured_outputs={"regex": "[a-d]{3}-[0-9]+x"})
    answer = llm.generate(prompts_of(1), cut)[0].outputs[0]
    assert re.fullmatch("[a-d]{3}", answer.text)
    assert (answer.finish_reason, answer.stop_reason) == ("stop", "-")


def test_a_finished_form_ends_an_answer_that_ignores_eos(load_llm: LoadLLM) -> None:
    params = SamplingParams(max_tokens=60, ignore_eos=True, structured_outputs={"regex": "a{1,5}"}, seed=1)
    answer = load_llm().generate(prompts_of(1), params)[0].outputs[0]
    assert (answer.text, answer.finish_reason) == ("aaaaa", "stop")


def test_a_bad_form_is_refused_and_leaves_nothing_behind(load_llm: LoadLLM) -> None:
    llm = load_llm()
    with pytest.raises(RequestError, match="cannot be honoured: Invalid type: obj") as caught:
        llm.generate(prompts_of(2), [FREE, SamplingParams(structured_outputs={"json": {"type": "obj"}})])
    assert caught.value.param == "structured_outputs"
    assert not llm.engine.has_work()
    assert answers_of(llm.generate(prompts_of(1), FREE))[0].finish_reason == "length"


def test_a_fault_of_the_matcher_ends_its_answer_and_no_other(load_llm: LoadLLM) -> None:
    llm = load_llm()
    wanted = llm.generate(prompts_of(1), FREE)[0].outputs[0].token_ids
    broken = llm.engine.add("a", [5, 6, 7], WILD)
    sound = llm.engine.add("b", llm.tokenizer.encode(prompts_of(1)[0]), FREE)
    llm.engine.step()
    matcher = broken.answers[0].state.matcher
    assert matcher is not None
    matcher.accept(7)  # what no JSON object begins with
    while llm.engine.has_work():
        llm.engine.step()
    assert broken.answers[0].finish_reason == "error"
    assert "structured_outputs" in (broken.answers[0].error or "")
    assert sound.answers[0].token_ids == wanted


def chat_model(source: Path, target: Path) -> Path:
    """A tiny model with a chat template that takes tools."""
    target.mkdir()
    for file in source.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    template = (
        "{%- if tools %}{% for tool in tools %}{{ tool.function.name }}{% endfor %}<tool_call>{% endif %}"
        "{%- for message in messages %}{{ message.content }}{% endfor %}"
    )
    (target / "chat_template.jinja").write_text(template)
    return target


def test_required_tools_are_called_by_a_model_that_knows_nothing(load_llm: LoadLLM, tmp_path: Path) -> None:
    llm: LLM = load_llm(chat_model(TINY / "llama-gqa-tied", tmp_path / "model"))
    parameters = {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    tools = [{"type": "function", "function": {"name": name, "parameters": parameters}} for name in ("f", "g")]
    chat = [{"role": "user", "content": "go"}]
    text, _ = llm.encode_chat(chat, tools=tools)
    assert text == "fg<tool_call>go"
    for choice, names in (("required", {"f", "g"}), ({"type": "function", "function": {"name": "g"}}, {"g"})):
        plan = plan_tools(tools, choice, template=llm.tokenizer.chat_template, parallel_tool_calls=False)
        params = SamplingParams(
            temperature=1.5,
            seed=1,
            n=4,
            max_tokens=150,
            structured_outputs=StructuredOutputsParams(grammar=plan.grammar),
        )
        for answer in llm.chat(chat, params, tools=plan.tools)[0].outputs:
            assert answer.finish_reason == "stop"
            content, calls = parse_tool_calls(plan, answer.text)
            assert content == ""
            assert len(calls) == 1
            assert calls[0].name in names
            assert json.loads(calls[0].arguments)["a"] in (1, 2)
