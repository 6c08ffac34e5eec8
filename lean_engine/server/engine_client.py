"""The event loop's side of the engine's thread: requests in, increments out to the Exchange that waits for them.

Everything here runs on the event loop; the thread's callbacks hop over with one call per report.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from starlette.types import Receive

from lean_engine.engine.core import Engine
from lean_engine.engine.front import EngineThread
from lean_engine.engine.messages import Abort, Call, Increment, Reply, Report, Submission, Submit
from lean_engine.errors import RequestError
from lean_engine.sampling.constraints import RequestFault
from lean_engine.scheduling.statistics import StepStats
from lean_engine.server.errors import ClientGone
from lean_engine.units import plural

T = TypeVar("T")
LOADING, READY, DRAINING, STOPPED, FAILED = "loading", "ready", "draining", "stopped", "failed"
REFUSALS = {  # state → why no request is taken
    LOADING: "the model is being loaded",
    DRAINING: "the server is shutting down",
    STOPPED: "the server is shutting down",
    FAILED: "the engine has failed and the server ends",
}


class EngineClient:
    """The engine, as the handlers of requests use it.

    Args:
        load: makes the engine, in its thread.
        max_queued: answers that may wait beyond those that run; None = any number.
        watch: shown every report, for metrics.
        on_ready: called once the engine takes requests.
        on_failure: told of the exception that ended the engine; open requests have failed by then.

    Attributes:
        state: LOADING, READY, DRAINING (no new requests), STOPPED (none at all) or FAILED.
        stats: of the latest step, None before the engine is ready.
        num_open: answers asked for and not at their end.
        num_rejected: requests refused because the queue was full.
    """

    def __init__(
        self,
        load: Callable[[], Engine],
        *,
        max_queued: int | None,
        watch: Callable[[Report], None],
        on_ready: Callable[[], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self.state = LOADING
        self.stats: StepStats | None = None
        self.num_open = 0
        self.num_rejected = 0
        self._load = load
        self._max_queued = max_queued
        self._max_num_running = 0
        self._num_waiting = 0  # after the latest step: what came since may be admitted by the next
        self._watch = watch
        self._tell_ready = on_ready
        self._tell_failure = on_failure
        self._loop = asyncio.get_running_loop()
        self._serials = itertools.count()
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._routes: dict[str, tuple[Exchange, int]] = {}  # request id → who waits, and for which prompt
        self._thread = EngineThread(
            self._load_engine,
            on_ready=lambda: self._hop(self._become_ready),
            on_report=lambda report: self._hop(self._take, report),
            on_failure=lambda error: self._hop(self._fail, error),
        )

    def start(self) -> None:
        """Begin to load the model."""
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """End the thread after its step, waiting for it so many seconds; whether it has ended."""
        return self._thread.stop(timeout)

    def seconds_without_progress(self) -> float:
        return self._thread.seconds_without_progress()

    @property
    def is_ending(self) -> bool:
        """Whether no request will be taken any more."""
        return self.state in (DRAINING, STOPPED, FAILED)

    # -- for handlers

    def check_open(self) -> None:
        """RequestError, status 503, unless new requests are taken."""
        if self.state != READY:
            raise RequestError(REFUSALS[self.state], status=503)

    def reserve(self, num_answers: int) -> None:
        """Count answers as open, or refuse them with 429 because too many wait. Paired with `release`."""
        if self._max_queued is not None and self.num_open:
            waiting = max(self.num_open - self._max_num_running, self._num_waiting)
            will_wait = max(
                self.num_open + num_answers - self._max_num_running, waiting + num_answers if waiting else 0
            )
            if will_wait > self._max_queued:
                self.num_rejected += 1
                raise RequestError(
                    f"{plural(waiting, 'answer')} in the queue, at most {self._max_queued} may wait; try again later",
                    status=429,
                )
        self.num_open += num_answers

    def release(self, num_answers: int) -> None:
        self.num_open -= num_answers

    async def call(self, function: Callable[[Engine], T]) -> T:
        """What a function returns that is called with the engine in its thread, between two steps."""
        self.check_open()
        reply_id, reply = self._expect_reply()
        self._thread.send(Call(reply_id, function))
        result: T = await reply
        return result

    async def submit(self, exchange: Exchange, submissions: list[Submission]) -> None:
        """Queue prompts whose answers go to an exchange; RequestError if the engine refuses one of them."""
        if self.state not in (READY, DRAINING):
            raise RequestError(REFUSALS[self.state], status=503)
        for prompt, submission in enumerate(submissions):
            self._routes[submission.request_id] = exchange, prompt
        reply_id, reply = self._expect_reply()
        self._thread.send(Submit(reply_id, submissions))
        await reply

    def forget(self, request_ids: list[str], is_finished: bool) -> None:
        """No longer deliver the answers of these requests, and abort them unless they have ended."""
        for request_id in request_ids:
            self._routes.pop(request_id, None)
        if request_ids and not is_finished:
            self._thread.send(Abort(request_ids))

    def abort_all(self) -> None:
        """End every open request, and take none from now on; each gets its end with finish_reason "abort"."""
        self.state = STOPPED
        self._thread.send(Abort(list(self._routes)))

    def new_serial(self) -> int:
        return next(self._serials)

    # -- from the engine's thread

    def _load_engine(self) -> Engine:
        engine = self._load()
        self._max_num_running = engine.scheduler.max_num_running
        self.stats = engine.stats()
        return engine

    def _hop(self, function: Callable[..., None], *args: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function, *args)

    def _become_ready(self) -> None:
        if self.state == LOADING:
            self.state = READY
            self._tell_ready()

    def _take(self, report: Report) -> None:
        self.stats, num_waiting = report.stats, report.stats.num_waiting
        self._num_waiting = num_waiting if report.has_stepped else min(self._num_waiting, num_waiting)
        self._watch(report)
        for reply in report.replies:
            self._settle(reply)
        for increment in report.increments:
            route = self._routes.get(increment.request_id)
            if route is not None:
                exchange, prompt = route
                exchange.take(prompt, increment)

    def _fail(self, error: BaseException) -> None:
        self.state = FAILED
        told = RequestError(f"the engine has failed: {type(error).__name__}: {error}", status=500)
        for exchange in {exchange for exchange, _ in self._routes.values()}:
            exchange.fail(told)
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(told)
        self._replies.clear()
        self._tell_failure(error)

    def _expect_reply(self) -> tuple[int, asyncio.Future[Any]]:
        reply_id = self.new_serial()
        reply = self._replies[reply_id] = self._loop.create_future()
        return reply_id, reply

    def _settle(self, reply: Reply) -> None:
        future = self._replies.pop(reply.reply_id, None)
        if future is None or future.done():  # whoever asked has gone
            return
        if reply.error is None:
            future.set_result(reply.value)
        else:
            future.set_exception(reply.error)


class Exchange:
    """The answers to one HTTP request: n for each of its prompts, numbered through as choices.

    What comes while nobody takes it is merged, so that a slow reader holds one increment per choice.

    Attributes:
        num_open: choices that have not ended.
    """

    def __init__(self, client: EngineClient, num_prompts: int, n: int, timeout: float) -> None:
        client.check_open()
        client.reserve(num_prompts * n)
        self._client = client
        self._n = n
        self._num_reserved = num_prompts * n
        self.num_open = num_prompts * n
        self._request_ids: list[str] = []
        self._pending: dict[int, Increment] = {}  # by choice
        self._error: Exception | None = None
        self._has_begun = False  # something has been given out
        self._waiter: asyncio.Future[None] | None = None
        self._watcher: asyncio.Task[None] | None = None
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(timeout, self._time_out, timeout) if timeout else None

    async def open(self, submissions: list[Submission]) -> None:
        """Send the prompts to the engine; RequestError where one is refused."""
        self._check()
        self._request_ids = [submission.request_id for submission in submissions]
        await self._client.submit(self, submissions)

    def take(self, prompt: int, increment: Increment) -> None:
        """Note what is new, from the engine."""
        choice = prompt * self._n + increment.index
        if increment.finish_reason is not None:
            self.num_open -= 1
            self._release(1)
        earlier = self._pending.get(choice)
        if earlier is None:
            self._pending[choice] = increment
        else:
            earlier.merge(increment)
        self._wake()

    def fail(self, error: Exception) -> None:
        """Make whoever waits, or comes to wait, get this error."""
        if self._error is None:
            self._error = error
            self._wake()

    async def next(self) -> dict[int, Increment]:
        """What is new, by choice, waiting for something; {} at the end. An answer's error is raised after its last
        text, or at once where nothing has been given out.

        Raises:
            ClientGone: the connection is closed.
            RequestError: the engine has failed, an answer has, or the time is up.
        """
        while not self._pending and self._error is None and self.num_open:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        self._check()
        news, self._pending = self._pending, {}
        faults = [increment.error for increment in news.values() if increment.error is not None]
        if faults:
            self._error = RequestError(faults[0], status=400 if isinstance(faults[0], RequestFault) else 500)
            if not self._has_begun:
                raise self._error
        self._has_begun = True
        return news

    async def news(self) -> AsyncIterator[dict[int, Increment]]:
        """What is new each time there is something, to the end; raises as `next` does."""
        while news := await self.next():
            yield news

    def watch(self, receive: Receive) -> None:
        """Fail when the client closes the connection. receive: of a request whose body has been read."""
        self._watcher = asyncio.create_task(self._watch(receive))

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.fail(ClientGone())

    async def whole(self) -> dict[int, Increment]:
        """All answers, once each has ended; raises as `next` does."""
        answers: dict[int, Increment] = {}
        async for news in self.news():
            for choice, increment in news.items():
                if choice in answers:
                    answers[choice].merge(increment)
                else:
                    answers[choice] = increment
        return answers

    def close(self) -> None:
        """End what has not ended; needed whatever happened, and harmless twice."""
        for ending in (self._timer, self._watcher):
            if ending is not None:
                ending.cancel()
        self._release(self._num_reserved)
        self._client.forget(self._request_ids, is_finished=self.num_open == 0)
        self._request_ids = []

    def _release(self, num_answers: int) -> None:
        self._num_reserved -= num_answers
        self._client.release(num_answers)

    def _check(self) -> None:
        if self._error is not None:
            raise self._error

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _time_out(self, timeout: float) -> None:
        self.fail(RequestError(f"the answer was not complete within the request timeout of {timeout:g} s", status=504))
