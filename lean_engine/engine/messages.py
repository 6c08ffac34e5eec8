"""What the engine's thread is told and what it tells: commands in, one report per step out.

Plain data that can be pickled, the function of a Call apart: a channel can be a pipe to another process too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lean_engine.engine.core import Engine
from lean_engine.errors import LeanEngineError
from lean_engine.sampling.logprobs import TokenLogprobs
from lean_engine.sampling.params import SamplingParams
from lean_engine.scheduling.statistics import StepStats

# -- commands


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """One prompt for the engine."""

    request_id: str  # unique among those that are open
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_time: float  # seconds on time.monotonic's clock: when the client's request came
    priority: int = 0
    cache_salt: str | None = None
    stream_interval: int = 1  # report an answer every so many tokens, its first and its end apart; 0: only its end


@dataclass(frozen=True, slots=True)
class Submit:
    """Queue prompts, all or none; replied to with the RequestError of the first that is refused."""

    reply_id: int
    submissions: list[Submission]


@dataclass(frozen=True, slots=True)
class Abort:
    """End requests; those that have ended are passed over. Each answer's end is reported."""

    request_ids: list[str]


@dataclass(frozen=True, slots=True)
class Call:
    """Call a function with the engine between two steps; replied to with what it returns or raises."""

    reply_id: int
    function: Callable[[Engine], Any]


@dataclass(frozen=True, slots=True)
class Stop:
    """End the loop after the commands before it."""


Command = Submit | Abort | Call | Stop

# -- reports


@dataclass(frozen=True, slots=True)
class Reply:
    reply_id: int
    value: Any = None
    error: LeanEngineError | None = None


@dataclass(slots=True)
class Increment:
    """What is new of one answer."""

    request_id: str
    index: int  # of the request's n answers
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs]  # of the new tokens, where the request asks for them
    finish_reason: str | None
    stop_reason: int | str | None
    error: str | None  # why, where finish_reason is "error"
    num_cached_tokens: int  # of the prompt
    prompt_logprobs: list[TokenLogprobs]  # of prompt positions 1, 2, …; whole in every increment

    def merge(self, later: Increment) -> None:
        """Take in what came after this."""
        self.text += later.text
        self.token_ids += later.token_ids
        self.logprobs += later.logprobs
        self.finish_reason, self.stop_reason, self.error = later.finish_reason, later.stop_reason, later.error
        self.num_cached_tokens, self.prompt_logprobs = later.num_cached_tokens, later.prompt_logprobs


@dataclass(frozen=True, slots=True)
class FinishedAnswer:
    """One ended answer, for statistics. Seconds; None where it did not get so far."""

    finish_reason: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    num_preemptions: int
    max_tokens: int | None
    n: int
    longest: int | None  # tokens of the request's longest answer; None unless this is the last of them to end
    e2e: float  # arrival → end
    queue: float | None  # arrival → first scheduled
    prefill: float | None  # first scheduled → first token
    decode: float | None  # first token → end
    inference: float | None  # first scheduled → end


@dataclass(slots=True)
class Trace:
    """What a step was worth, for statistics."""

    num_output_tokens: int = 0
    first_token_seconds: list[float] = field(default_factory=list)  # arrival → first token
    token_intervals: dict[float, int] = field(default_factory=dict)  # seconds between tokens of an answer → how many
    prompts: list[tuple[int, int]] = field(default_factory=list)  # (tokens, of them cached) of each computed prompt
    finished: list[FinishedAnswer] = field(default_factory=list)


@dataclass(slots=True)
class Report:
    """What happened since the report before."""

    stats: StepStats
    replies: list[Reply] = field(default_factory=list)
    increments: list[Increment] = field(default_factory=list)
    trace: Trace = field(default_factory=Trace)
    has_stepped: bool = False  # a step was completed
