"""The waiting requests, in order, long prompts apart from short ones so that short ones can be found behind them."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush

from lean_engine.scheduling.request import Request, RequestStatus

Entry = tuple[int, int, Request]  # priority, arrival number, request: no two have the same number


class WaitingQueue:
    """Waiting and preempted requests in the order (priority, arrival); every operation is O(log n).

    A request that ends while it waits stays in its heap until it comes up or half of the heap has ended.

    Args:
        long_threshold: a request that has more tokens to compute is long.

    Attributes:
        num_short_tokens: what all short requests have to compute.
    """

    def __init__(self, long_threshold: int) -> None:
        self.long_threshold = long_threshold
        self.num_short_tokens = 0
        self._num_waiting = 0
        self._short: list[Entry] = []
        self._long: list[Entry] = []

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[Request]:
        """Everyone who waits, in order. O(n log n), for checks and displays."""
        return (request for _, _, request in sorted([*self._short, *self._long]) if is_waiting(request))

    def push(self, request: Request, num_tokens: int) -> None:
        """Take in a request whose status is WAITING or PREEMPTED, and which has so many tokens to compute."""
        request.num_waiting_tokens = num_tokens
        heappush(self._heap_of(request), (*request.order, request))
        self._count(request, 1)

    def first(self, with_long: bool = True) -> Request | None:
        """Whose turn it is; `with_long=False` passes over long prompts."""
        short, long = self._head(self._short), self._head(self._long) if with_long else None
        if short is None or long is None:
            return short or long
        return short if short.order < long.order else long

    def pop(self, request: Request) -> None:
        """Take out what `first` has just returned."""
        heappop(self._heap_of(request))
        self._count(request, -1)

    def discard(self, request: Request) -> None:
        """Let go of a request that ends; its status must say so."""
        self._count(request, -1)
        for heap in (self._short, self._long):
            if len(heap) > 2 * self._num_waiting + 64:
                heap[:] = [entry for entry in heap if is_waiting(entry[2])]
                heapify(heap)

    def _heap_of(self, request: Request) -> list[Entry]:
        return self._long if self.is_long(request) else self._short

    def is_long(self, request: Request) -> bool:
        """Whether a request was queued as a long one."""
        return request.num_waiting_tokens > self.long_threshold

    def _head(self, heap: list[Entry]) -> Request | None:
        while heap:
            request = heap[0][2]
            if is_waiting(request):
                return request
            heappop(heap)
        return None

    def _count(self, request: Request, change: int) -> None:
        self._num_waiting += change
        if not self.is_long(request):
            self.num_short_tokens += change * request.num_waiting_tokens


def is_waiting(request: Request) -> bool:
    return request.status is not RequestStatus.FINISHED
