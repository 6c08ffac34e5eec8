"""The BLAS's own threads: held to one while any device is open, and given back when the last one is closed."""

from __future__ import annotations

from functools import cache
from typing import Any

_held: list[Any] = []  # one entry per open device; the first is the limit that is in force


@cache
def libraries() -> Any:
    """threadpoolctl's controller of the BLAS libraries in this process."""
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController().select(user_api="blas")


def hold() -> None:
    """Hold the BLAS to one thread until as many calls of `release` as of `hold` were made."""
    _held.append(None if _held else libraries().limit(limits=1))


def release() -> None:
    if len(_held) == 1:
        _held[0].restore_original_limits()
    _held.pop()


def set_num_threads(num_threads: int) -> None:
    for library in libraries().lib_controllers:
        library.set_num_threads(num_threads)
