"""The OpenAPI description is that of the routes, and requests made from it are never answered by a 5xx."""

import json
from typing import Any

import hypothesis
import pytest
from live_server import Live

from lean_engine.server.app import PAGE_ROUTES, ROUTES

NUM_EXAMPLES = 12  # per operation and mode
UNSEEN = {"/openapi.json", *(path for _, path, _ in PAGE_ROUTES)}


@pytest.fixture(scope="module")
def description(live: Live) -> dict[str, Any]:
    status, body, _ = live.request("/openapi.json")
    assert status == 200
    found: dict[str, Any] = body
    return found


def test_every_route_is_described(description: dict[str, Any]) -> None:
    described = {(method.upper(), path) for path, operations in description["paths"].items() for method in operations}
    routes = {(method, path.replace(":path", "")) for method, path, _ in ROUTES if path not in UNSEEN}
    assert described == routes


def test_references_resolve(description: dict[str, Any]) -> None:
    names = description["components"]["schemas"].keys()
    text = json.dumps(description)
    for part in text.split('"$ref": "#/components/schemas/')[1:]:
        assert part.split('"')[0] in names


def test_fields_of_vllm_are_there(description: dict[str, Any]) -> None:
    schemas = description["components"]["schemas"]
    chat = schemas["ChatRequest"]["properties"]
    fields = (
        "messages model frequency_penalty logit_bias logprobs top_logprobs max_tokens max_completion_tokens n "
        "presence_penalty response_format seed stop stream stream_options temperature top_p tools tool_choice "
        "parallel_tool_calls reasoning_effort user use_beam_search top_k min_p repetition_penalty length_penalty "
        "stop_token_ids include_stop_str_in_output ignore_eos min_tokens skip_special_tokens "
        "spaces_between_special_tokens truncate_prompt_tokens prompt_logprobs allowed_token_ids bad_words echo "
        "add_generation_prompt continue_final_message add_special_tokens documents chat_template "
        "chat_template_kwargs structured_outputs priority request_id return_tokens_as_token_ids return_token_ids "
        "cache_salt stream_interval include_reasoning"
    )
    assert set(fields.split()) <= set(chat)
    assert schemas["ChatRequest"]["additionalProperties"] is False
    assert schemas["ChatRequest"]["required"] == ["messages"]
    assert schemas["CompletionRequest"]["required"] == ["prompt"]


@pytest.mark.parametrize("mode", ["POSITIVE", "NEGATIVE"])
@pytest.mark.filterwarnings("ignore")
def test_no_request_is_answered_by_500(live: Live, mode: str) -> None:
    import schemathesis

    schema = schemathesis.openapi.from_url(f"{live.url}/openapi.json")
    operations = [result.ok() for result in schema.get_all_operations()]
    assert len(operations) >= 10
    statuses: dict[int, int] = {}
    for operation in operations:
        has_input = operation.body or operation.path_parameters
        if mode == "NEGATIVE" and not operation.body:  # a path is a string, which any is
            continue

        @hypothesis.settings(
            max_examples=NUM_EXAMPLES if has_input else 1,
            derandomize=True,
            database=None,
            deadline=None,
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(case=operation.as_strategy(schemathesis.GenerationMode[mode]))
        def check(case: Any) -> None:
            if isinstance(case.body, dict) and case.body.get("model"):
                case.body["model"] = "tiny"  # any other is a 404, and nothing more is looked at
            response = case.call(timeout=20)
            statuses[response.status_code] = statuses.get(response.status_code, 0) + 1
            assert response.status_code < 500, (case.body, response.text)
            if response.status_code >= 400 and case.method != "HEAD":
                assert response.json()["error"]["code"] == response.status_code

        check()
    assert sum(statuses.values()) > NUM_EXAMPLES
    assert mode == "NEGATIVE" or statuses.get(200, 0) > 0
    live.wait_until_idle()
