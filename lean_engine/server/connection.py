"""One connection: uvicorn's h11 protocol with limits on what a client may keep open.

A client has `timeout` seconds for each header from its first byte (or from connecting), for taking what waits to be
sent, and for reading the rest once its connection is being closed; then the connection is dropped. Bodies are timed
where they are read. What is no HTTP is answered by 400 and an error body.
"""

from __future__ import annotations

import asyncio
from typing import cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from lean_engine.server.errors import error_body

TICKS = 4  # looks at the clock per timeout


def protocol_class(timeout: float) -> type[H11Protocol]:
    """The protocol with its time limit, as uvicorn takes it. timeout: seconds."""
    return cast(type[H11Protocol], type("Connection", (Connection,), {"timeout": timeout}))


class Connection(H11Protocol):
    timeout = 60.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        now = self.loop.time()
        self._header_since: float | None = now  # waiting for a whole header; as the next two, on the loop's clock
        self._stalled_since: float | None = None  # the client takes nothing
        self._closing_since: float | None = None
        self._tick = self.loop.call_later(self.timeout / TICKS, self._look)

    def connection_lost(self, exc: Exception | None) -> None:
        self._tick.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self._is_between_requests():
            self._header_since = None
        elif self._header_since is None:
            self._header_since = self.loop.time()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stalled_since = self.loop.time()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stalled_since = None

    def _is_between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _look(self) -> None:
        """Drop the connection if the client has let one of its times pass."""
        now = self.loop.time()
        if self.transport.is_closing() and self._closing_since is None:
            self._closing_since = now
        since = (self._header_since, self._stalled_since, self._closing_since)
        if any(start is not None and now - start > self.timeout for start in since):
            self.transport.abort()
            return
        self._tick = self.loop.call_later(self.timeout / TICKS, self._look)

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):  # in the middle of an answer
            self.transport.abort()
            return
        body = error_body("this is not a valid HTTP/1.1 request, or its header is too large", 400)
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        events = (
            h11.Response(status_code=400, headers=headers, reason="Bad Request"),
            h11.Data(data=body),
            h11.EndOfMessage(),
        )
        for event in events:
            self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None and not self.cycle.response_complete:  # its body turned out to be garbage
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()
