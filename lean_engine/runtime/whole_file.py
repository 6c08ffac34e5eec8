"""Files of a cache that several processes share: written in one step, and read only if they are whole.

A file is the SHA-256 of its content in hexadecimal, a line break, the content.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def read_whole(path: Path) -> bytes | None:
    """The content; None if there is no such file, or not a whole one."""
    try:
        digest, _, body = path.read_bytes().partition(b"\n")
    except OSError:
        return None
    return body if hashlib.sha256(body).hexdigest().encode() == digest else None


def write_whole(path: Path, body: bytes) -> None:
    """Put a whole file in place in one step."""
    import tempfile  # most starts find their files

    descriptor, scratch = tempfile.mkstemp(prefix=".writing-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
        os.replace(scratch, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(scratch)
        raise


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock that ends with the process at the latest. Where there is no flock (Windows), nobody waits, and two
    processes may compile the same."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
