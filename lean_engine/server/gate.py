"""The gate that every request passes: its id, the api key, the last resort for exceptions, the access log.

The access log is one JSON object per line on the logger `lean_engine.access`. It never holds a body or a query.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import time
import uuid
from collections.abc import Callable, Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from lean_engine.errors import RequestError
from lean_engine.server.errors import ClientGone, error_response
from lean_engine.server.protocol import is_request_id

log = logging.getLogger("lean_engine")
access_log = logging.getLogger("lean_engine.access")
MAX_HEADERS = 256
OPEN_PATHS = ("/health", "/")  # without a key: the page itself holds nothing
POLLED_PATHS = ("/v1/engine/state", "/v1/engine/blocks")  # several times a second while the page is looked at
CLIENT_GONE = 499  # in the access log: nginx's number


class Gate:
    """ASGI middleware around the routes.

    Args:
        api_keys: any of them lets a request in; none lets in all.
        logs_access: whether each request leaves a line.
        is_ending: whether the server is; then each response closes its connection.
    """

    def __init__(self, app: ASGIApp, api_keys: Sequence[str], logs_access: bool, is_ending: Callable[[], bool]) -> None:
        self._app = app
        self._digests = [digest(key.encode()) for key in api_keys]
        self._logs_access = logs_access
        self._is_ending = is_ending

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if is_request_id(given) else uuid.uuid4().hex
        started = time.monotonic()
        scope["lean_engine.request_id"] = request_id
        scope["lean_engine.arrival"] = started
        scope["app"] = self  # makes the router raise what it refuses instead of answering in plain text
        status = CLIENT_GONE

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                answered = MutableHeaders(scope=message)
                answered["X-Request-Id"] = request_id
                if self._is_ending():
                    answered["Connection"] = "close"
            await send(message)

        try:
            self._check(scope, headers)
            await self._app(scope, receive, send_with_id)
        except ClientGone:
            pass
        except RequestError as error:
            await error_response(error)(scope, receive, send_with_id)
        except Exception:
            log.exception("request %s failed", request_id)
            if status != CLIENT_GONE:  # the answer has begun
                raise
            internal = RequestError("an internal error; the server's log has it under the request id", status=500)
            await error_response(internal)(scope, receive, send_with_id)
        finally:
            if self._logs_access and not (status == 200 and own_path(scope) in POLLED_PATHS):
                access_log.info("%s", access_line(scope, request_id, status, time.monotonic() - started))

    def _check(self, scope: Scope, headers: Headers) -> None:
        if len(scope["headers"]) > MAX_HEADERS:
            raise RequestError(
                f"the request has {len(scope['headers'])} headers, must be at most {MAX_HEADERS}", status=431
            )
        if self._digests and own_path(scope) not in OPEN_PATHS and not self._is_key(headers.get("authorization", "")):
            raise RequestError("the Authorization header must be: Bearer <an api key of this server>", status=401)

    def _is_key(self, authorization: str) -> bool:
        """Compares with every key, in the same time whatever is given."""
        scheme, _, token = authorization.partition(" ")
        given = digest(token.strip().encode("latin-1"))
        matches = [hmac.compare_digest(given, known) for known in self._digests]
        return scheme.lower() == "bearer" and any(matches)


def own_path(scope: Scope) -> str:
    """The path below the one under which a proxy mounts the server."""
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    return path


def digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def access_line(scope: Scope, request_id: str, status: int, seconds: float) -> str:
    client = scope.get("client")
    return json.dumps(
        {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "request_id": request_id,
            "client": f"{client[0]}:{client[1]}" if client else None,
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "seconds": round(seconds, 4),
            **scope.get("lean_engine.counts", {}),
        }
    )
