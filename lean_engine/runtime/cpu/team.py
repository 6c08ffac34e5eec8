"""Team: a few threads that run one call each and meet again.

NumPy releases the interpreter lock inside its loops and BLAS calls, so the calls really run side by side. Workers wait
on a lock and never spin: another busy process slows a step down in proportion and no more.
"""

from __future__ import annotations

import _thread
import threading
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

Task = Callable[[], object]


class Worker:
    """A daemon thread that runs the task it is given and reports back."""

    def __init__(self, name: str) -> None:
        self._task: Task | None = None
        self._error: BaseException | None = None
        self._start = _thread.allocate_lock()
        self._done = _thread.allocate_lock()
        self._start.acquire()
        self._done.acquire()
        threading.Thread(target=self._loop, name=name, daemon=True).start()

    def give(self, task: Task | None) -> None:
        """Start a task; None ends the thread."""
        self._task = task
        self._start.release()

    def wait(self) -> None:
        """Wait for the task; raise what it raised."""
        self._done.acquire()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _loop(self) -> None:
        with np.errstate(all="ignore"):  # as in the calling thread; NumPy keeps this setting per thread
            while True:
                self._start.acquire()
                if self._task is None:
                    return
                try:
                    self._task()
                except BaseException as error:
                    self._error = error  # raised again by wait, in the caller's thread
                self._done.release()


class Team:
    """num_threads callers of one task each: the calling thread and num_threads - 1 workers."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._workers = [Worker(f"lean-engine-{i}") for i in range(1, num_threads)]

    def run(self, tasks: Sequence[Task]) -> None:
        """Run up to num_threads tasks at once; return when all are done. A task's exception is raised here."""
        workers = self._workers[: len(tasks) - 1]
        for worker, task in zip(workers, tasks[1:], strict=True):
            worker.give(task)
        try:
            tasks[0]()
        finally:
            for worker in workers:
                worker.wait()

    def close(self) -> None:
        """End the workers' threads."""
        for worker in self._workers:
            worker.give(None)
        self._workers = []


def split(count: int, parts: int) -> list[slice]:
    """count items in at most `parts` consecutive, nearly equal slices, none of them empty."""
    parts = min(parts, count)
    bounds = [count * i // parts for i in range(parts + 1)] if parts else []
    return [slice(a, b) for a, b in pairwise(bounds)]
