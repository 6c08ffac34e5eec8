"""The OpenAPI description, generated from the structs of requests and responses."""

from __future__ import annotations

from functools import cache
from typing import Any

import msgspec

from lean_engine import __version__
from lean_engine.server import protocol, responses
from lean_engine.server.errors import ErrorBody

JSON = "application/json"
REFUSALS = {
    "400": "The request is wrong; the error names the field.",
    "401": "No valid api key.",
    "404": "There is no such model.",
    "408": "The body, or the answer, did not come in time.",
    "413": "The body is too large.",
    "429": "Too many requests wait.",
    "500": "The engine has failed.",
    "503": "The server is not ready, or ends.",
    "504": "The answer was not complete in time.",
}
POSTS: dict[str, tuple[str, type[msgspec.Struct], type[msgspec.Struct]]] = {  # path → summary, request, response
    "/v1/chat/completions": ("Answer a conversation", protocol.ChatRequest, responses.ChatCompletion),
    "/v1/completions": ("Continue a prompt", protocol.CompletionRequest, responses.Completion),
    "/tokenize": ("Token ids of a text", protocol.TokenizeRequest, responses.Tokens),
    "/detokenize": ("The text of token ids", protocol.DetokenizeRequest, responses.Text),
}
STREAMS: dict[str, type[msgspec.Struct]] = {
    "/v1/chat/completions": responses.ChatChunk,
    "/v1/completions": responses.Completion,
}
GETS: dict[str, tuple[str, type[msgspec.Struct] | None]] = {
    "/v1/models": ("The models that are served", responses.ModelList),
    "/health": ("Whether requests are served", None),
    "/version": ("The version", responses.Version),
    "/metrics": ("Metrics in Prometheus' text format", None),
}


@cache
def describe() -> bytes:
    """The description as JSON."""
    structs = [kind for _, *kinds in POSTS.values() for kind in kinds]
    structs += [kind for _, kind in GETS.values() if kind is not None]
    _, schemas = msgspec.json.schema_components(
        [*structs, *STREAMS.values(), responses.ModelCard, ErrorBody], ref_template="#/components/schemas/{name}"
    )
    paths: dict[str, Any] = {path: {"post": post(path)} for path in POSTS}
    paths |= {path: {"get": operation(summary, kind)} for path, (summary, kind) in GETS.items()}
    name = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    paths["/v1/models/{model}"] = {"get": operation("One of the models", responses.ModelCard) | {"parameters": [name]}}
    paths["/reset_prefix_cache"] = {"post": operation("Forget every cached KV block", None)}
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "lean-engine", "version": __version__},
            "paths": paths,
            "components": {
                "schemas": schemas,
                "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            },
            "security": [{}, {"key": []}],
        }
    )


def post(path: str) -> dict[str, Any]:
    summary, request, response = POSTS[path]
    made = operation(summary, response)
    made["requestBody"] = {"required": True, "content": {JSON: {"schema": reference(request)}}}
    if path in STREAMS:
        made["responses"]["200"]["content"]["text/event-stream"] = {"schema": reference(STREAMS[path])}
    return made


def operation(summary: str, response: type[msgspec.Struct] | None) -> dict[str, Any]:
    success: dict[str, Any] = {"description": "Success."}
    if response is not None:
        success["content"] = {JSON: {"schema": reference(response)}}
    refusals = {
        status: {"description": text, "content": {JSON: {"schema": reference(ErrorBody)}}}
        for status, text in REFUSALS.items()
    }
    return {"summary": summary, "responses": {"200": success, **refusals}}


def reference(kind: type[msgspec.Struct]) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}
