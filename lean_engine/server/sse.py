"""Server-sent events: a stream of `data:` lines that ends with `data: [DONE]`, whatever happens in between.

The stream begins with its first event: what is wrong before that is told by the response's status.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from lean_engine.errors import RequestError
from lean_engine.server.engine_client import Exchange
from lean_engine.server.errors import ClientGone, error_body

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


def event(body: msgspec.Struct) -> bytes:
    return b"data: " + _encode(body) + b"\n\n"


class EventStream(Response):
    """Sends events as they come, and closes the exchange behind them at the end.

    Args:
        events: whole events, one or several at a time.
    """

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], exchange: Exchange) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        self._events = events
        self._exchange = exchange

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            data = await anext(self._events, b"")  # an error before the first event is a response with its status
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            try:
                while data:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                    data = await anext(self._events, b"")
            except RequestError as error:
                data = b"data: " + error_body(str(error), error.status, error.param) + b"\n\n"
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": DONE})
        except ClientGone:
            pass
        finally:
            self._exchange.close()
