"""The engine in a thread of its own: commands go in through a queue, one report per step comes out (see `messages`).

Nothing outside the thread touches the engine, and the thread knows nothing of HTTP. `EngineLoop` is the work itself,
over any channel; `EngineThread` runs it in a thread.

An exception from the engine ends the loop: the thread reports it once, and every later command is left unanswered.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

from lean_engine.engine.core import Engine
from lean_engine.engine.messages import (
    Abort,
    Call,
    Command,
    FinishedAnswer,
    Increment,
    Reply,
    Report,
    Stop,
    Submission,
    Submit,
    Trace,
)
from lean_engine.engine.outputs import Answer, Group
from lean_engine.errors import LeanEngineError
from lean_engine.scheduling.request import Request

# -- the loop


class EngineLoop:
    """Takes commands, runs steps while there is work, reports.

    Args:
        receive: gives the next command; waits for one if its argument is true, else returns None where there is none.
        deliver: takes each report, in this thread.
    """

    def __init__(
        self, engine: Engine, receive: Callable[[bool], Command | None], deliver: Callable[[Report], None]
    ) -> None:
        self._engine = engine
        self._receive = receive
        self._deliver = deliver
        self._followed: dict[str, _FollowedRequest] = {}  # unfinished
        self._num_steps = 0  # completed

    def run(self) -> None:
        """Work until Stop comes, then abort what is left."""
        while self._take_commands():
            if self._engine.has_work():
                self._step()
        report = self._new_report()
        self._abort(list(self._followed), report)
        self._deliver(report)

    def _new_report(self) -> Report:
        return Report(self._engine.stats())

    def _take_commands(self) -> bool:
        """Carry out all commands that are there, waiting for one if there is nothing else to do; False at Stop."""
        command = self._receive(not self._engine.has_work())
        if command is None:
            return True
        report = self._new_report()
        while command is not None:
            match command:
                case Stop():
                    self._deliver(report)
                    return False
                case Abort(request_ids):
                    self._abort(request_ids, report)
                case Submit(reply_id, submissions):
                    report.replies.append(self._submit(reply_id, submissions))
                case Call(reply_id, function):
                    report.replies.append(self._call(reply_id, function))
            command = self._receive(False)
        report.stats = self._engine.stats()
        self._deliver(report)
        return True

    def _submit(self, reply_id: int, submissions: list[Submission]) -> Reply:
        added: list[str] = []
        try:
            for one in submissions:
                group = self._engine.add(
                    one.request_id,
                    one.prompt_token_ids,
                    one.params,
                    priority=one.priority,
                    cache_salt=one.cache_salt,
                )
                self._followed[one.request_id] = _FollowedRequest(group, one)
                added.append(one.request_id)
        except LeanEngineError as error:
            for request_id in added:
                self._engine.abort(request_id)
                del self._followed[request_id]
            return Reply(reply_id, error=error)
        return Reply(reply_id)

    def _call(self, reply_id: int, function: Callable[[Engine], Any]) -> Reply:
        try:
            return Reply(reply_id, value=function(self._engine))
        except LeanEngineError as error:
            return Reply(reply_id, error=error)

    def _abort(self, request_ids: list[str], report: Report) -> None:
        for request_id in request_ids:
            group = self._engine.abort(request_id)
            if group is not None:
                self._follow(group, time.monotonic(), report)

    def _step(self) -> None:
        groups = self._engine.step()
        now = time.monotonic()
        report = self._new_report()
        report.has_stepped = report.stats.step > self._num_steps
        self._num_steps = report.stats.step
        for group in groups:
            self._follow(group, now, report)
        self._deliver(report)

    def _follow(self, group: Group, now: float, report: Report) -> None:
        followed = self._followed[group.request_id]
        followed.take(now, report)
        if group.is_finished:
            del self._followed[group.request_id]


class _FollowedRequest:
    """What of an open request has been reported."""

    __slots__ = ("answers", "group", "num_counted", "submission")

    def __init__(self, group: Group, submission: Submission) -> None:
        self.group = group
        self.submission = submission
        self.answers = [_FollowedAnswer() for _ in group.answers]
        self.num_counted = 0  # answers whose end is

    def take(self, now: float, report: Report) -> None:
        """Report what is new, and count it."""
        group = self.group
        # With log-probabilities of the prompt, nothing is reported before they are complete: they come first.
        is_due = (
            group.params.prompt_logprobs is None
            or group.is_finished
            or len(group.prompt_logprobs) >= len(group.prompt_token_ids) - 1
        )
        for answer, followed in zip(group.answers, self.answers, strict=True):
            if followed.has_ended:
                continue
            self._count(answer, followed, now, report.trace)
            if is_due and followed.is_due(answer, self.submission.stream_interval):
                report.increments.append(self._increment(answer, followed))
                followed.has_ended = answer.finish_reason is not None

    def _count(self, answer: Answer, followed: _FollowedAnswer, now: float, trace: Trace) -> None:
        num_new = len(answer.token_ids) - followed.num_counted
        if num_new:
            followed.num_counted += num_new
            trace.num_output_tokens += num_new
            if followed.last_time is None:
                trace.first_token_seconds.append(now - self.submission.arrival_time)
                if answer.index == 0:
                    trace.prompts.append((len(self.group.prompt_token_ids), self.group.first_request.num_cached_tokens))
            else:
                interval = (now - followed.last_time) / num_new
                trace.token_intervals[interval] = trace.token_intervals.get(interval, 0) + num_new
            followed.last_time = now
        if answer.finish_reason is not None and not followed.is_counted:
            followed.is_counted = True
            self.num_counted += 1
            assert answer.request is not None
            if followed.last_time is None and answer.finish_reason == "length":  # max_tokens=0: the prompt was all
                trace.prompts.append((len(self.group.prompt_token_ids), answer.request.num_cached_tokens))
            trace.finished.append(self._finished(answer, answer.request, now))

    def _finished(self, answer: Answer, request: Request, now: float) -> FinishedAnswer:
        params = answer.params
        end = now if request.finished_time is None else request.finished_time
        first, scheduled, arrival = request.first_token_time, request.first_scheduled_time, self.submission.arrival_time
        return FinishedAnswer(
            finish_reason=answer.finish_reason or "abort",
            num_prompt_tokens=len(self.group.prompt_token_ids),
            num_cached_tokens=request.num_cached_tokens,
            num_output_tokens=len(answer.token_ids),
            num_preemptions=request.num_preemptions,
            max_tokens=params.max_tokens,
            n=params.n,
            longest=max(len(a.token_ids) for a in self.group.answers) if self.num_counted == params.n else None,
            e2e=end - arrival,
            queue=None if scheduled is None else scheduled - arrival,
            prefill=None if scheduled is None or first is None else first - scheduled,
            decode=None if first is None else end - first,
            inference=None if scheduled is None else end - scheduled,
        )

    def _increment(self, answer: Answer, followed: _FollowedAnswer) -> Increment:
        since_text, since_token = followed.num_chars, followed.num_tokens
        followed.num_chars, followed.num_tokens = len(answer.text), len(answer.token_ids)
        return Increment(
            self.group.request_id,
            answer.index,
            answer.text[since_text:],
            answer.token_ids[since_token:],
            answer.logprobs[since_token:],
            answer.finish_reason,
            answer.stop_reason,
            answer.error,
            self.group.first_request.num_cached_tokens,
            self.group.prompt_logprobs,
        )


class _FollowedAnswer:
    __slots__ = ("has_ended", "is_counted", "last_time", "num_chars", "num_counted", "num_tokens")

    def __init__(self) -> None:
        self.num_chars = 0  # reported, as the next
        self.num_tokens = 0
        self.num_counted = 0  # tokens
        self.last_time: float | None = None  # of the latest token
        self.is_counted = False  # its end
        self.has_ended = False  # and its end is reported

    def is_due(self, answer: Answer, interval: int) -> bool:
        if answer.finish_reason is not None:
            return True
        num_new = len(answer.token_ids) - self.num_tokens
        return interval > 0 and num_new > 0 and (self.num_tokens == 0 or num_new >= interval)


# -- the thread


class EngineThread:
    """An engine that is made, driven and ended in a thread of its own. The callbacks are called in that thread.

    Args:
        load: makes the engine.
        on_ready: told that the engine takes commands.
        on_report: given each report.
        on_failure: given the exception that ended the thread, of `load` or of a step.
    """

    def __init__(
        self,
        load: Callable[[], Engine],
        *,
        on_ready: Callable[[], None],
        on_report: Callable[[Report], None],
        on_failure: Callable[[BaseException], None],
    ) -> None:
        self._load = load
        self._on_ready = on_ready
        self._on_report = on_report
        self._on_failure = on_failure
        self._commands: SimpleQueue[Command] = SimpleQueue()
        self._engine: Engine | None = None
        # A daemon: a step that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def send(self, command: Command) -> None:
        """Queue a command, from any thread."""
        self._commands.put(command)

    def stop(self, timeout: float) -> bool:
        """End the thread after its step; False if it is still at it after so many seconds."""
        self.send(Stop())
        if self._thread.is_alive():
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def seconds_without_progress(self) -> float:
        """How long there has been work and no step was completed."""
        return 0.0 if self._engine is None else self._engine.seconds_without_progress()

    def _receive(self, waits: bool) -> Command | None:
        try:
            return self._commands.get(block=waits)
        except Empty:
            return None

    def _run(self) -> None:
        try:
            self._engine = self._load()
            self._on_ready()
            EngineLoop(self._engine, self._receive, self._on_report).run()
        except BaseException as error:  # whatever it is, those who wait must hear of it
            self._on_failure(error)
