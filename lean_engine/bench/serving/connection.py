"""Connections to one server, on asyncio.

A connection only stamps bytes and puts them aside. They are parsed once every socket that was ready has been read, so
parsing the bytes of one answer does not make those of another look late.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from ssl import SSLContext

from lean_engine.bench.serving.answer import AnswerReader
from lean_engine.bench.serving.record import Outcome, Record

CLOSING = 0.001  # seconds between looks at connections that are being closed
Clock = Callable[[], float]  # seconds since the run began


@dataclass(frozen=True, slots=True)
class Address:
    """Where connections go."""

    host: str
    port: int
    tls: SSLContext | None = None

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class Connection(asyncio.Protocol):
    """One socket; it carries one request at a time."""

    def __init__(self, pool: ConnectionPool) -> None:
        self.pool = pool
        self.reader: AnswerReader | None = None
        self.is_open = False

        self.arrived: list[tuple[float, bytes]] = []
        self._ended: asyncio.Future[None] | None = None
        self._transport: asyncio.Transport | None = None

    # -- what asyncio calls

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self.is_open = True
        self.pool.num_open += 1

    def data_received(self, data: bytes) -> None:
        self.arrived.append((self.pool.clock(), data))
        self.pool.parse_soon(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.parse()
        self.is_open = False
        self.pool.num_open -= 1
        if self.reader is not None:
            self.reader.close(self.pool.clock(), "connection closed" if exc is None else describe(exc))
        self._end()

    # -- what the pool calls

    def begin(self, reader: AnswerReader, request: bytes) -> asyncio.Future[None]:
        """Send a request; the future is done when its record is final."""
        assert self._transport is not None
        self.reader = reader
        self._ended = self.pool.loop.create_future()
        self._transport.write(request)
        return self._ended

    def parse(self) -> None:
        """Hand what has arrived to the reader."""
        arrived, self.arrived = self.arrived, []
        if not arrived:
            return
        if self.reader is None:  # a server that speaks unasked
            self.close()
            return
        for moment, data in arrived:
            self.reader.feed(moment, data)
        if self.reader.is_done:
            self._end()

    def close(self) -> None:
        """At once, without waiting for the other side."""
        self.is_open = False
        if self._transport is not None:
            self._transport.abort()

    def _end(self) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)


class ConnectionPool:
    """Sends requests over idle connections, or new ones; as many as there are requests at once.

    Args:
        clock: seconds since the run began.
        timeout: seconds that a request may take.
    """

    def __init__(self, address: Address, timeout: float, clock: Clock = time.perf_counter) -> None:
        self.address = address
        self.clock = clock
        self.timeout = timeout
        self.loop = asyncio.get_running_loop()
        self.num_connections = 0  # made so far
        self.num_open = 0
        self._idle: list[Connection] = []  # the latest used last
        self._busy: dict[Connection, AnswerReader] = {}
        self._unparsed: list[Connection] = []

    async def send(self, record: Record, request: bytes) -> None:
        """Send a request and read its answer into `record`; every failure ends up in there.

        A connection that the server had closed meanwhile is replaced by a new one.
        """
        record.sent_at = self.clock()
        while True:
            reader = AnswerReader(record)
            connection = self._take_idle()
            is_fresh = connection is None
            if connection is None:
                try:
                    connection = await self._connect()
                except (OSError, TimeoutError) as error:
                    reader.give_up(self.clock(), "error", f"cannot connect to {self.address}: {describe(error)}")
                    return
            await self._exchange(connection, reader, request)
            if is_fresh or not reader.was_dropped:
                return
            record.outcome, record.error, record.ended_at = "waiting", "", None

    def parse_soon(self, connection: Connection) -> None:
        if not self._unparsed:
            self.loop.call_soon(self._parse_all)
        self._unparsed.append(connection)

    def interrupt(self, outcome: Outcome, reason: str) -> None:
        """End every request under way."""
        for connection, reader in list(self._busy.items()):
            connection.parse()
            reader.give_up(self.clock(), outcome, reason)
            connection.close()

    async def close(self) -> None:
        """End whatever is under way, and wait until the sockets are closed."""
        self.interrupt("unfinished", "interrupted")
        for connection in self._idle:
            connection.close()
        self._idle.clear()
        await asyncio.sleep(0)  # in which failed handshakes close their sockets
        while self.num_open:
            await asyncio.sleep(CLOSING)

    # -- inside

    def _parse_all(self) -> None:
        unparsed, self._unparsed = self._unparsed, []
        for connection in unparsed:
            connection.parse()

    def _take_idle(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None

    async def _connect(self) -> Connection:
        address = self.address
        self.num_connections += 1
        async with asyncio.timeout(self.timeout):
            _, connection = await self.loop.create_connection(
                lambda: Connection(self), address.host, address.port, ssl=address.tls
            )
        return connection

    async def _exchange(self, connection: Connection, reader: AnswerReader, request: bytes) -> None:
        self._busy[connection] = reader
        timer = self.loop.call_later(self.timeout, self._time_out, connection, reader)
        try:
            await connection.begin(reader, request)
        finally:
            timer.cancel()
            del self._busy[connection]
            connection.reader = None
        if reader.keeps_alive and connection.is_open:
            self._idle.append(connection)
        else:
            connection.close()

    def _time_out(self, connection: Connection, reader: AnswerReader) -> None:
        reader.give_up(self.clock(), "error", f"no complete answer within {self.timeout:g} s")
        connection.close()


def describe(error: BaseException) -> str:
    """An error on one line."""
    if isinstance(error, TimeoutError) and not str(error):
        return "timed out"
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join((text or type(error).__name__).split())
