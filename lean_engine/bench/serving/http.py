"""HTTP/1.1 responses, parsed as their bytes come in; nothing here touches a socket.

Bodies may have a length, be chunked (cut anywhere, with extensions and trailers), or last until the connection closes.
Interim responses (1xx) are skipped. RFC 9112.
"""

from __future__ import annotations

from collections.abc import Callable

MAX_HEAD_BYTES = 64 * 1024  # of a status line and headers, or of a chunk's size line
NO_BODY = (204, 304)


class ProtocolError(Exception):
    """What came is not HTTP/1.1."""


class ResponseParser:
    """One response. Feed it bytes; it gives back those of the body.

    Attributes:
        status: 0 until the head is complete.
        headers: lower-case names; of one that is repeated, the last.
        is_complete: the whole response is there.
        keeps_alive: once it is complete, whether the connection can carry another request.
    """

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.is_complete = False
        self.keeps_alive = False
        self._buffer = b""
        self._num_left = 0  # bytes of the body or of the chunk
        self._pieces: list[bytes] = []
        self._state: Callable[[], bool] = self._head

    def feed(self, data: bytes) -> bytes:
        """The bytes of the body that `data` brings; what comes after the end is an error.

        Raises:
            ProtocolError: says what was found.
        """
        self._buffer = self._buffer + data if self._buffer else data
        while self._buffer and self._state():
            pass
        if self.is_complete and self._buffer:
            raise ProtocolError(f"{len(self._buffer)} bytes follow the end of the response")
        pieces, self._pieces = self._pieces, []
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def close(self) -> bool:
        """The connection has ended; whether the response is complete."""
        if self._state == self._until_close:
            self.is_complete = True
        return self.is_complete

    # -- states: each takes what it can from the buffer, and says whether another can go on

    def _line(self) -> bytes | None:
        line, found, rest = self._buffer.partition(b"\r\n")
        if found:
            self._buffer = rest
            return line
        if len(line) > MAX_HEAD_BYTES:
            raise ProtocolError(f"a line of more than {MAX_HEAD_BYTES} bytes")
        return None

    def _head(self) -> bool:
        head, found, rest = self._buffer.partition(b"\r\n\r\n")
        if not found:
            if len(head) > MAX_HEAD_BYTES:
                raise ProtocolError(f"headers of more than {MAX_HEAD_BYTES} bytes")
            return False
        self._buffer = rest
        first, *lines = head.decode("latin-1").split("\r\n")
        version, _, status = first.partition(" ")
        if not version.startswith("HTTP/1.") or not status[:3].isdigit():
            raise ProtocolError(f"the answer begins with {first[:60]!r}, must be an HTTP/1.1 status line")
        headers = dict(parse_header(line) for line in lines)
        if status[0] == "1":  # an interim response; the real one follows
            return True
        self.status, self.headers = int(status[:3]), headers
        wants_close = "close" in headers.get("connection", "").lower()
        is_old = version == "HTTP/1.0" and "keep-alive" not in headers.get("connection", "").lower()
        self.keeps_alive = not wants_close and not is_old
        self._state = self._body()
        if self._state == self._sized and self._num_left == 0:
            self.is_complete = True
        return True

    def _body(self) -> Callable[[], bool]:
        if self.status in NO_BODY:
            return self._sized
        if self.headers.get("transfer-encoding", "").lower().endswith("chunked"):
            return self._chunk_size
        length = self.headers.get("content-length")
        if length is not None:
            if not length.isdigit():
                raise ProtocolError(f"content-length is {length!r}, must be a number")
            self._num_left = int(length)
            return self._sized
        self.keeps_alive = False
        return self._until_close

    def _sized(self) -> bool:
        self._take()
        self.is_complete = self._num_left == 0
        return False

    def _until_close(self) -> bool:
        self._pieces.append(self._buffer)
        self._buffer = b""
        return False

    def _chunk_size(self) -> bool:
        line = self._line()
        if line is None:
            return False
        size = line.partition(b";")[0].strip()
        try:
            self._num_left = int(size, 16)
        except ValueError:
            raise ProtocolError(f"a chunk's size is {size[:20]!r}, must be hexadecimal") from None
        self._state = self._chunk if self._num_left else self._trailer
        return True

    def _chunk(self) -> bool:
        self._take()
        if self._num_left:
            return False
        self._state = self._chunk_end
        return True

    def _chunk_end(self) -> bool:
        if len(self._buffer) < 2:
            return False
        if self._buffer[:2] != b"\r\n":
            raise ProtocolError("a chunk is longer than its size says")
        self._buffer = self._buffer[2:]
        self._state = self._chunk_size
        return True

    def _trailer(self) -> bool:
        line = self._line()
        if line is None:
            return False
        self.is_complete = not line
        return bool(line)

    def _take(self) -> None:
        piece = self._buffer[: self._num_left]
        self._buffer = self._buffer[len(piece) :]
        self._num_left -= len(piece)
        self._pieces.append(piece)


def parse_header(line: str) -> tuple[str, str]:
    name, colon, value = line.partition(":")
    if not colon:
        raise ProtocolError(f"a header is {line[:60]!r}, must be NAME: VALUE")
    return name.strip().lower(), value.strip()
