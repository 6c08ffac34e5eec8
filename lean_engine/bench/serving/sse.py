"""Server-sent events, parsed as their bytes come in (WHATWG HTML, section 9.2.6); nothing here touches a socket.

An event is there when its empty line is: only then can a reader use it. Lines end in LF, CRLF or CR; comments and
fields other than `data` are skipped.
"""

from __future__ import annotations

from lean_engine.bench.serving.http import ProtocolError

MAX_LINE_BYTES = 16 * 2**20
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class EventParser:
    """One stream. Feed it bytes; it gives back the data of each event that is complete."""

    def __init__(self) -> None:
        self._partial = b""  # a line without its end
        self._data: list[bytes] = []  # of the event that has begun
        self._skips_lf = False  # the last byte was a CR, which may be half of a CRLF
        self._is_first_line = True

    def feed(self, data: bytes) -> list[bytes]:
        """Data of the events that `data` completes; ProtocolError where a line has no end."""
        if self._skips_lf and data:
            self._skips_lf = False
            data = data.removeprefix(b"\n")
        if b"\r" in data:
            self._skips_lf = data.endswith(b"\r")
            data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        *lines, self._partial = (self._partial + data).split(b"\n")
        if len(self._partial) > MAX_LINE_BYTES:
            raise ProtocolError(f"an event's line of more than {MAX_LINE_BYTES} bytes")
        events: list[bytes] = []
        for line in lines:
            self._take(line, events)
        return events

    def _take(self, line: bytes, events: list[bytes]) -> None:
        if self._is_first_line:
            self._is_first_line = False
            line = line.removeprefix(BYTE_ORDER_MARK)
        if not line:
            if self._data:
                events.append(b"\n".join(self._data))
                self._data = []
            return
        name, _, value = line.partition(b":")  # a comment's name is empty
        if name == b"data":
            self._data.append(value.removeprefix(b" "))
