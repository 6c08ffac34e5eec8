"""One connection: uvicorn's h11 protocol with limits on what a client may send and keep open.

A client has `timeout` seconds for each header from its first byte (or from connecting), for taking what waits to be
sent, and for reading the rest once its connection is being closed; then the connection is dropped. Bodies are timed
where they are read. What is no HTTP is answered by 400 and an error body, a header beyond `max_header_bytes` by 431.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any, cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from lean_engine.server.errors import error_body

TICKS = 4  # looks at the clock per timeout
MAX_DISCARDED_BYTES = 2**20  # read from a client after its refusal, which it may miss if the connection ends before


def protocol_class(timeout: float, max_header_bytes: int) -> type[H11Protocol]:
    """The protocol with its limits, as uvicorn takes it. timeout: seconds."""
    limits = {"timeout": timeout, "max_header_bytes": max_header_bytes}
    return cast(type[H11Protocol], type("Connection", (Connection,), limits))


class LimitedParser(h11.Connection):
    """h11's parser, strict about the size of a header: h11 looks at it only while the end of the header is missing, and
    takes one of any size that comes in one read.

    Attributes:
        status: of the response to what was refused.
    """

    def __init__(self, max_header_bytes: int) -> None:
        super().__init__(h11.SERVER, max_header_bytes)
        self.status = 400
        self._max_header_bytes = max_header_bytes
        self._num_received = 0  # bytes, as the next
        self._begin = 0  # of the message

    def receive_data(self, data: bytes) -> None:
        self._num_received += len(data)
        super().receive_data(data)

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        try:
            event = super().next_event()
            if isinstance(event, h11.Request | h11.EndOfMessage):
                self._check_size(event)
        except h11.RemoteProtocolError as error:
            self.status = error.error_status_hint
            raise
        return event

    def _check_size(self, event: h11.Request | h11.EndOfMessage) -> None:
        end = self._num_received - len(self.trailing_data[0])
        size = end - self._begin
        if isinstance(event, h11.EndOfMessage):  # what follows the chunks of a body
            size = sum(len(name) + len(value) + 4 for name, value in event.headers)
        self._begin = end
        if size > self._max_header_bytes:
            raise h11.RemoteProtocolError(f"a header of {size} bytes", error_status_hint=431)


class Connection(H11Protocol):
    timeout = 60.0
    max_header_bytes = 2**16

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn: LimitedParser = LimitedParser(self.max_header_bytes)
        self._num_discarded: int | None = None  # bytes; None before a refusal

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
        if self._num_discarded is not None:
            self._num_discarded += len(data)
            if self._num_discarded > MAX_DISCARDED_BYTES:
                self.transport.abort()
            return
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
        status = self.conn.status
        what = "this is not a valid HTTP/1.1 request"
        if status == 431:
            what = f"the header is larger than {self.max_header_bytes} bytes (--max-header-bytes)"
        body = error_body(what, status)
        headers = [
            ("content-type", "application/json"),
            ("content-length", str(len(body))),
            ("connection", "close"),
        ]
        events = (
            h11.Response(status_code=status, headers=headers, reason=HTTPStatus(status).phrase),
            h11.Data(data=body),
            h11.EndOfMessage(),
        )
        for event in events:
            self.transport.write(self.conn.send(event) or b"")
        if self.cycle is not None and not self.cycle.response_complete:  # its body turned out to be garbage
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._end_gently()

    def _end_gently(self) -> None:
        """Say that nothing follows and let the client end the connection, for a limited time."""
        if not self.transport.can_write_eof():  # TLS
            self.transport.close()
            return
        self.conn = LimitedParser(self.max_header_bytes)  # lets go of what the other one holds
        self._num_discarded = 0
        self._closing_since = self.loop.time()
        self.transport.write_eof()
