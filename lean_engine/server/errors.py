"""Errors as OpenAI's clients read them: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import msgspec
from starlette.responses import Response

from lean_engine.errors import RequestError

TYPES = {  # status → vLLM's name of the error
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    413: "PayloadTooLargeError",
    429: "RateLimitError",
    431: "HeadersTooLargeError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
    504: "RequestTimeoutError",
}
RETRY_AFTER_SECONDS = 1


class ErrorInfo(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: int  # the HTTP status


class ErrorBody(msgspec.Struct):
    """The body of every response that is not a success."""

    error: ErrorInfo


class ClientGone(Exception):  # noqa: N818 - no fault of anyone
    """The client has closed the connection; nobody reads an answer."""


def error_body(message: str, status: int, param: str | None = None) -> bytes:
    kind = TYPES.get(status, "BadRequestError" if status < 500 else "InternalServerError")
    return msgspec.json.encode(ErrorBody(ErrorInfo(message, kind, param, status)))


def error_response(error: RequestError, headers: dict[str, str] | None = None) -> Response:
    """An error as a response; one that ends the connection says so, one that is worth a retry says when."""
    headers = dict(headers or {})
    if error.status in (429, 503):
        headers["Retry-After"] = str(RETRY_AFTER_SECONDS)
    if error.status in (408, 413, 431):  # the rest of the request is not read
        headers["Connection"] = "close"
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    body = error_body(str(error), error.status, error.param)
    return Response(body, error.status, headers, media_type="application/json")
