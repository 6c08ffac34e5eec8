import pickle
from typing import Any

import pytest

from lean_engine import SamplingParams, StructuredOutputsParams
from lean_engine.errors import RequestError


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "structured_outputs must hold exactly one of json, regex, choice, grammar, json_object, found none"),
        ({"json_object": False}, "found none"),
        ({"regex": "a", "json": {}}, "found json and regex"),
        ({"regex": ""}, "structured_outputs.regex must be a non-empty string, found ''"),
        ({"regex": 3}, "structured_outputs.regex must be a non-empty string, found 3"),
        ({"choice": []}, "structured_outputs.choice must be a list of at least one non-empty string, found []"),
        ({"choice": ["a", ""]}, "structured_outputs.choice must be a list"),
        ({"choice": "ab"}, "structured_outputs.choice must be a list"),
        ({"json_object": 1}, "structured_outputs.json_object must be true or false, found 1"),
        ({"json": [1]}, "structured_outputs.json must be a JSON schema, an object or its JSON text, found [1]"),
        ({"json": "[1]"}, "structured_outputs.json must be a JSON schema, an object or its JSON text, found '[1]'"),
        ({"json": "{"}, "structured_outputs.json must be a JSON schema"),
        ({"json": {"const": float("nan")}}, "structured_outputs.json must be a JSON schema"),
        ({"json": {"const": {1}}}, "structured_outputs.json must be a JSON schema"),
        ({"structural_tag": "x"}, "structured_outputs.structural_tag is not supported; known: json, regex"),
        ({"regex": "a", "disable_any_whitespace": True}, "disable_any_whitespace goes with json or json_object"),
        ({"json": {}, "disable_any_whitespace": True, "whitespace_pattern": " "}, "exclude each other"),
        ({"json": {}, "reasoning_start": "<think>"}, "reasoning_start must come with reasoning_end"),
    ],
)
def test_what_is_wrong_is_named(values: dict[str, Any], message: str) -> None:
    for make in (lambda: StructuredOutputsParams(**values), lambda: SamplingParams(structured_outputs=values)):
        with pytest.raises(RequestError) as caught:
            make()
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)
        assert caught.value.param == "structured_outputs"


def test_a_schema_that_is_too_deep_to_read_is_refused() -> None:
    with pytest.raises(RequestError, match="less deeply nested"):
        StructuredOutputsParams(json='{"a":' * 100_000 + "1" + "}" * 100_000)


def test_sampling_params_takes_the_object_or_its_fields() -> None:
    form = StructuredOutputsParams(choice=["a", "b"])
    assert SamplingParams(structured_outputs=form).structured_outputs is form
    assert SamplingParams(structured_outputs={"choice": ["a", "b"]}).structured_outputs == form
    assert SamplingParams().structured_outputs is None
    with pytest.raises(RequestError, match="must be an object with one of json"):
        SamplingParams(structured_outputs="json")  # type: ignore[arg-type]


def test_a_schema_keeps_the_order_of_its_keys_and_nothing_can_change_it() -> None:
    schema: dict[str, Any] = {"properties": {"b": {}, "a": {}}}
    form = StructuredOutputsParams(json=schema)
    schema["properties"]["c"] = {}
    assert form.json == '{"properties": {"b": {}, "a": {}}}'
    assert form == StructuredOutputsParams(json='{"properties":{"b":{},"a":{}}}')
    assert hash(form) == hash(StructuredOutputsParams(json=form.json))
    assert form != StructuredOutputsParams(json='{"properties":{"a":{},"b":{}}}')
    assert pickle.loads(pickle.dumps(form)) == form
