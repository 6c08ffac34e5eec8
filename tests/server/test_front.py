"""EngineLoop, driven by hand: what is reported when."""

from collections import deque
from typing import Any

import pytest
from live_server import ENGINE, MODEL

from lean_engine import LLM, SamplingParams
from lean_engine.engine.front import EngineLoop
from lean_engine.engine.messages import Abort, Call, Command, Report, Stop, Submission, Submit
from lean_engine.errors import RequestError


@pytest.fixture(scope="module")
def engine() -> Any:
    with LLM(MODEL, **ENGINE) as llm:
        yield llm.engine


def run(engine: Any, *commands: Command | int) -> list[Report]:
    """The reports of a loop that gets these commands; a number lets so many steps pass."""
    queue, reports = deque[Command | int](commands), list[Report]()

    def receive(waits: bool) -> Command | None:
        while queue:
            if isinstance(queue[0], int):
                if waits or queue[0] == 0:  # nothing to wait for
                    queue.popleft()
                    continue
                queue[0] -= 1
                return None
            command = queue.popleft()
            assert not isinstance(command, int)
            return command
        return Stop() if waits or not engine.has_work() else None

    EngineLoop(engine, receive, reports.append).run()
    assert not engine.has_work()
    return reports


def submission(request_id: str = "a", ids: list[int] | None = None, interval: int = 1, **params: Any) -> Submission:
    values = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, **params}
    return Submission(
        request_id=request_id,
        prompt_token_ids=[5, 6, 7] if ids is None else ids,
        params=SamplingParams(**values),
        arrival_time=0.0,
        stream_interval=interval,
    )


def lengths(reports: list[Report]) -> list[int]:
    """Tokens of each increment."""
    return [len(increment.token_ids) for report in reports for increment in report.increments]


@pytest.mark.parametrize(
    ("interval", "expected"), [(1, [1] * 6), (2, [1, 2, 2, 1]), (4, [1, 4, 1]), (100, [1, 5]), (0, [6])]
)
def test_increments_come_every_so_many_tokens(engine: Any, interval: int, expected: list[int]) -> None:
    reports = run(engine, Submit(1, [submission(interval=interval)]))
    assert lengths(reports) == expected
    increments = [i for report in reports for i in report.increments]
    assert [i.finish_reason for i in increments] == [None] * (len(expected) - 1) + ["length"]
    trace_tokens = sum(report.trace.num_output_tokens for report in reports)
    assert trace_tokens == 6  # counted as they are computed, however they are reported


def test_several_prompts_are_taken_all_or_none(engine: Any) -> None:
    reports = run(engine, Submit(1, [submission("a"), submission("b", [10**6])]), 3)
    (reply,) = [reply for report in reports for reply in report.replies]
    assert isinstance(reply.error, RequestError)
    assert not any(report.increments for report in reports)


def test_an_abort_is_reported_once(engine: Any) -> None:
    long = submission("a", max_tokens=100)
    reports = run(engine, Submit(1, [long]), 3, Abort(["a", "unknown"]), Abort(["a"]))
    increments = [i for report in reports for i in report.increments]
    assert [i.finish_reason for i in increments].count("abort") == 1
    assert increments[-1].finish_reason == "abort"
    assert [f.finish_reason for report in reports for f in report.trace.finished] == ["abort"]


def test_stop_aborts_what_is_open(engine: Any) -> None:
    reports = run(engine, Submit(1, [submission("a", max_tokens=100)]), 2, Stop())
    assert reports[-1].increments[-1].finish_reason == "abort"


def test_a_call_runs_between_steps_and_its_errors_come_back(engine: Any) -> None:
    def refuse(engine: Any) -> None:
        raise RequestError("no")

    reports = run(engine, Call(1, lambda engine: engine.max_model_len), Call(2, refuse))
    first, second = (reply for report in reports for reply in report.replies)
    assert (first.reply_id, first.value) == (1, 256)
    assert (second.reply_id, str(second.error)) == (2, "no")


def test_log_probabilities_of_the_prompt_come_whole_with_the_first_increment(engine: Any) -> None:
    ids = list(range(5, 205))
    reports = run(engine, Submit(1, [submission("a", ids, prompt_logprobs=1, logprobs=1, n=2, temperature=1)]))
    increments = [i for report in reports for i in report.increments]
    assert {i.index for i in increments} == {0, 1}
    assert all(len(i.prompt_logprobs) == 199 for i in increments)
    assert all(len(i.logprobs) == len(i.token_ids) for i in increments)


def test_the_trace_of_requests(engine: Any) -> None:
    reports = run(engine, Submit(1, [submission("a", [5] * 40, n=2, temperature=1, max_tokens=5)]))
    finished = [f for report in reports for f in report.trace.finished]
    assert [f.num_output_tokens for f in finished] == [5, 5]
    assert [f.longest for f in finished] == [None, 5]
    assert all(f.queue is not None and f.prefill is not None and f.decode is not None for f in finished)
    assert sum(len(report.trace.first_token_seconds) for report in reports) == 2
    assert sum(sum(report.trace.token_intervals.values()) for report in reports) == 8
    assert [tokens for report in reports for tokens, _ in report.trace.prompts] == [40]
