"""Team: a few threads that run one call each and meet again.

NumPy releases the interpreter lock inside its loops and BLAS calls, so the calls really run side by side. Workers wait
on a queue and never spin: another busy process slows a step down in proportion and no more.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from itertools import pairwise
from queue import SimpleQueue

import numpy as np

Task = Callable[[], object]


class Worker:
    """A daemon thread that runs tasks in the order they are given."""

    def __init__(self, name: str) -> None:
        self._inbox: SimpleQueue[Task | object] = SimpleQueue()
        self._outbox: SimpleQueue[object] = SimpleQueue()
        self._error: BaseException | None = None
        threading.Thread(target=self._loop, name=name, daemon=True).start()

    def give(self, task: Task) -> None:
        self._inbox.put(task)

    def wait(self) -> BaseException | None:
        """Return when everything given is done: what a task raised, or a Ctrl-C that came meanwhile.

        A marker comes back behind the tasks. An interrupted wait sends another: nothing is ever left running.
        """
        while True:
            try:
                marker = object()
                self._inbox.put(marker)
                while self._outbox.get() is not marker:
                    continue  # one of an interrupted wait
                break
            except KeyboardInterrupt as interrupt:
                self._error = interrupt
        raised, self._error = self._error, None
        return raised

    def stop(self) -> None:
        """End the thread once it has done what it was given."""
        self._inbox.put(None)

    def _loop(self) -> None:
        with np.errstate(all="ignore"):  # as in the calling thread; NumPy keeps this setting per thread
            while (task := self._inbox.get()) is not None:
                if not callable(task):
                    self._outbox.put(task)
                    continue
                try:
                    task()
                except BaseException as error:
                    self._error = error  # raised again by Team.run, in the caller's thread


class Team:
    """num_threads callers of one task each: the calling thread and num_threads - 1 workers."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._workers = [Worker(f"lean-engine-{i}") for i in range(1, self.num_threads)]
        self._stop = weakref.finalize(self, stop_all, self._workers)  # a team that is dropped ends its threads too

    def run(self, tasks: Sequence[Task]) -> None:
        """Run up to num_threads tasks at once; return when all are done. A task's exception is raised here."""
        if os.getpid() != self._pid:  # a fork copies no threads: the child starts its own
            self._stop.detach()
            self._start()
        workers = self._workers[: len(tasks) - 1]
        try:
            for worker, task in zip(workers, tasks[1:], strict=True):
                worker.give(task)
            tasks[0]()
        finally:
            errors = [error for worker in workers if (error := worker.wait()) is not None]
        if errors:
            raise errors[0]

    def close(self) -> None:
        """End the workers' threads; the team is not used again."""
        self._stop()


def stop_all(workers: Sequence[Worker]) -> None:
    for worker in workers:
        worker.stop()


def split(count: int, parts: int) -> list[slice]:
    """count items in at most `parts` consecutive, nearly equal slices, none of them empty."""
    parts = min(parts, count)
    bounds = [count * i // parts for i in range(parts + 1)] if parts else []
    return [slice(a, b) for a, b in pairwise(bounds)]
