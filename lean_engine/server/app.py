"""The routes. To add one: write a handler `async (service, request) -> Response` and name it in ROUTES."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.middleware.exceptions import ExceptionMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route, Router
from starlette.types import ASGIApp

from lean_engine import __version__
from lean_engine.errors import RequestError
from lean_engine.server import responses
from lean_engine.server.chat import create_chat_completion
from lean_engine.server.completions import create_completion
from lean_engine.server.engine_client import DRAINING, READY
from lean_engine.server.errors import error_response
from lean_engine.server.gate import Gate
from lean_engine.server.metrics import CONTENT_TYPE
from lean_engine.server.openapi import describe
from lean_engine.server.page import engine_blocks, engine_state, page
from lean_engine.server.service import Service, json_response
from lean_engine.server.tokens import detokenize, tokenize
from lean_engine.units import plural

Handler = Callable[[Service, Request], Awaitable[Response]]


async def health(service: Service, http: Request) -> Response:
    """200 while requests are served; 503 while the model loads, when no step completes, and at the end."""
    client = service.client
    stuck = client.seconds_without_progress()
    if client.state != READY:
        rest = f", {plural(client.num_open, 'answer')} to end first" if client.state == DRAINING else ""
        raise RequestError(f"not ready: {client.state}{rest}", status=503)
    if stuck > service.config.watchdog_timeout:
        raise RequestError(f"no step was completed for {stuck:.0f} s", status=503)
    return Response()


async def version(service: Service, http: Request) -> Response:
    """The version of lean-engine."""
    return json_response(responses.Version(__version__))


async def metrics(service: Service, http: Request) -> Response:
    """Metrics in Prometheus' text format."""
    service.metrics.num_rejected = service.client.num_rejected
    return Response(service.metrics.exposition(), media_type=CONTENT_TYPE)


async def list_models(service: Service, http: Request) -> Response:
    """The models, which are the names of one."""
    return json_response(responses.ModelList(data=[card(service, name) for name in service.open_model().names]))


async def get_model(service: Service, http: Request) -> Response:
    """One of the models."""
    name = http.path_params["model"]
    service.open_model().check_name(name)
    return json_response(card(service, name))


def card(service: Service, name: str) -> responses.ModelCard:
    model = service.open_model()
    return responses.ModelCard(
        id=name, created=service.loaded_time, root=model.llm.model, max_model_len=model.max_model_len
    )


async def reset_prefix_cache(service: Service, http: Request) -> Response:
    """Forget every cached KV block."""
    await service.client.call(lambda engine: engine.reset_prefix_cache())
    return Response()


async def openapi(service: Service, http: Request) -> Response:
    """This description."""
    return Response(describe(), media_type="application/json")


ROUTES: list[tuple[str, str, Handler]] = [
    ("POST", "/v1/chat/completions", create_chat_completion),
    ("POST", "/v1/completions", create_completion),
    ("GET", "/v1/models", list_models),
    ("GET", "/v1/models/{model:path}", get_model),
    ("POST", "/tokenize", tokenize),
    ("POST", "/detokenize", detokenize),
    ("GET", "/health", health),
    ("GET", "/version", version),
    ("GET", "/metrics", metrics),
    ("POST", "/reset_prefix_cache", reset_prefix_cache),
    ("GET", "/openapi.json", openapi),
]
PAGE_ROUTES: list[tuple[str, str, Handler]] = [  # unless disable_ui
    ("GET", "/", page),
    ("GET", "/v1/engine/state", engine_state),
    ("GET", "/v1/engine/blocks", engine_blocks),
]


def make_app(service: Service) -> ASGIApp:
    """The ASGI application: CORS, the gate, the routes."""
    config = service.config
    served = ROUTES if config.disable_ui else [*ROUTES, *PAGE_ROUTES]
    routes = [Route(path, bound(handler, service), methods=[method]) for method, path, handler in served]
    app: ASGIApp = ExceptionMiddleware(
        Router(routes, redirect_slashes=False), handlers={HTTPException: wrong_address, RequestError: refused}
    )
    return CORSMiddleware(
        Gate(
            app, config.api_key, logs_access=not config.disable_access_log, is_ending=lambda: service.client.is_ending
        ),
        allow_origins=config.allowed_origins,
        allow_methods=config.allowed_methods,
        allow_headers=config.allowed_headers,
        allow_credentials=config.allow_credentials,
        expose_headers=("X-Request-Id",),
    )


def bound(handler: Handler, service: Service) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        return await handler(service, request)

    return endpoint


async def refused(request: Request, error: Any) -> Response:
    return error_response(error)


async def wrong_address(request: Request, error: Any) -> Response:
    """404 and 405 with the body of every other error."""
    what = f"{request.method} {request.url.path}"
    message = f"{what}: there is no such endpoint" if error.status_code == 404 else f"{what}: {error.detail}"
    return error_response(RequestError(message, status=error.status_code), error.headers)
