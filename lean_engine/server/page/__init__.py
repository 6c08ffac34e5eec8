"""The page at `/` and what it asks for: index.html, /v1/engine/state, /v1/engine/blocks.

The page itself holds nothing of the engine and is sent to whoever asks; its data calls need the api key like all
others. Its Content-Security-Policy allows the one script and the one style sheet in it, by their hashes, and calls to
this server.
"""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from lean_engine.errors import RequestError
from lean_engine.server.dashboard import (
    DEFAULT_CELLS,
    MAX_CELLS,
    describe_range,
    describe_request,
    state,
    take_holdings,
    take_snapshot,
)
from lean_engine.server.service import Service, json_response

PAGE = Path(__file__).with_name("index.html")
MAX_NUMBER = 2**32  # of a query
STATE_PARAMETERS = {  # of /v1/engine/state → what they mean
    "cells": f"Cells of the block map at most. Default: {DEFAULT_CELLS}.",
    "min_mapped": "Blocks that the map covers at least. Default: those in use.",
    "map_version": "The version of the map that the client has; the same one is not sent again.",
}
BLOCKS_PARAMETERS = {  # of /v1/engine/blocks
    "first": "The first block of a range.",
    "last": "The last one. Default: the first.",
    "request_id": "Instead of a range: a request whose blocks are wanted.",
}


async def page(service: Service, http: Request) -> Response:
    """The page."""
    content, policy = read_page()
    headers = {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return Response(content, headers=headers, media_type="text/html")


@cache
def read_page() -> tuple[bytes, str]:
    """The page and its Content-Security-Policy."""
    text = PAGE.read_text(encoding="utf-8")
    policy = {
        "default-src": "'none'",
        "script-src": hash_source(text, "script"),
        "style-src": hash_source(text, "style"),
        "connect-src": "'self'",
        "img-src": "data:",  # the icon
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "require-trusted-types-for": "'script'",
        "trusted-types": "'none'",
    }
    return text.encode(), "; ".join(f"{name} {value}" for name, value in policy.items())


def hash_source(text: str, tag: str) -> str:
    """What allows the one element of this tag."""
    (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


async def engine_state(service: Service, http: Request) -> Response:
    """The engine between two steps."""
    model = service.open_model()
    refuse_unknown(http, STATE_PARAMETERS)
    num_cells = number(http, "cells", DEFAULT_CELLS, 1, MAX_CELLS) or DEFAULT_CELLS
    min_mapped = number(http, "min_mapped", 0) or 0
    known_version = number(http, "map_version", None)
    snapshot = await service.client.call(take_snapshot)
    body = await service.in_thread(
        state,
        snapshot,
        num_generated_tokens=service.metrics.totals().generation_tokens,
        has_chat_template=model.chat_template is not None,
        num_cells=num_cells,
        min_mapped=min_mapped,
        known_version=known_version,
    )
    return json_response(body)


async def engine_blocks(service: Service, http: Request) -> Response:
    """Who holds the blocks of a range, or which blocks a request holds."""
    service.open_model()
    refuse_unknown(http, BLOCKS_PARAMETERS)
    first = number(http, "first", None)
    last = number(http, "last", first)
    request_id = http.query_params.get("request_id")
    if (first is None) == (request_id is None):
        raise RequestError("give either first (and last) or request_id", param="first")
    holdings = await service.client.call(take_holdings)
    if request_id is not None:
        return json_response(await service.in_thread(describe_request, holdings, request_id))
    assert first is not None
    assert last is not None
    return json_response(await service.in_thread(describe_range, holdings, first, last))


def refuse_unknown(http: Request, known: dict[str, str]) -> None:
    for name in http.query_params:
        if name not in known:
            raise RequestError(f"{name} is not a parameter here; known: {', '.join(known)}", param=name)


def number(http: Request, name: str, default: int | None, low: int = 0, high: int = MAX_NUMBER) -> int | None:
    """A parameter of the query."""
    text = http.query_params.get(name)
    if text is None:
        return default
    if not re.fullmatch(r"[0-9]{1,10}", text) or not low <= int(text) <= high:
        raise RequestError(f"{name} is {text!r}, must be an integer from {low} to {high}", param=name)
    return int(text)
