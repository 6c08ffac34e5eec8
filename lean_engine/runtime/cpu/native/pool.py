"""Pool: the threads of cpu/pool.c, which walk a list of launches."""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from lean_engine.errors import LaunchError, OutOfMemory
from lean_engine.runtime.cpu.native.launches import NativeLaunch, address

if TYPE_CHECKING:
    from lean_engine.runtime.cpu.native.library import Library


class LaunchList:
    """Launches as the C struct `launch`, with everything they point to.

    Args:
        keeps: what the launches' arguments point into, beside what stands in their own `keeps`.

    Raises:
        LaunchError: a kernel is not in the library.
    """

    def __init__(self, library: Library, launches: Sequence[NativeLaunch], keeps: object = None) -> None:
        find, of = library.address, ctypes.addressof
        rows = [
            (find(launch.kernel), find(launch.count_of) if launch.count_of else 0, of(launch.args), launch.count)
            for launch in launches
        ]
        self._entries = np.array(rows, np.int64).reshape(-1, 4)  # [launches, (run, count_of, args, count)]
        self._keeps = (keeps, [(launch.args, launch.keeps) for launch in launches])
        self.address, self.length = address(self._entries), len(launches)


class Pool:
    """num_threads threads, the calling one among them. One run at a time.

    Raises:
        OutOfMemory: the system gives no more threads.
    """

    def __init__(self, library: Library, num_threads: int) -> None:
        self.num_threads = num_threads
        self._create = library.function("lean_pool_create", ctypes.c_void_p, ctypes.c_int64)
        self._run = library.function("lean_pool_run", ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64)
        self._destroy = library.function("lean_pool_destroy", None, ctypes.c_void_p)
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._pool = self._create(self.num_threads)
        if not self._pool:
            raise OutOfMemory(f"the system gives no {self.num_threads} threads; lower threads")
        self._end = weakref.finalize(self, end_pool, self._destroy, self._pool, self._pid)
        self._end.atexit = False  # a daemon thread may be in a run when the program exits; the system ends the threads

    def run(self, launches: LaunchList) -> None:
        """Return when all is done.

        Raises:
            LaunchError: another thread, or a task, is in the middle of a run; the pool is closed.
        """
        if not self._end.alive:
            raise LaunchError("the CPU device is closed")
        if os.getpid() != self._pid:  # a fork copies no threads: the child starts its own
            self._end.detach()
            self._start()
        if self._run(self._pool, launches.address, launches.length):
            raise LaunchError("the CPU device's threads are in the middle of another run")

    def close(self) -> None:
        """End the threads; the pool is not used again."""
        self._end()


def end_pool(destroy: ctypes._NamedFuncPointer, pool: int, pid: int) -> None:
    if os.getpid() == pid:
        destroy(pool)
