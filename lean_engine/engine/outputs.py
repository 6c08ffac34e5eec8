"""What a request gets back, in vLLM's form, and the state of each answer while it grows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lean_engine.sampling.constraints import explained
from lean_engine.sampling.logprobs import Logprob, TokenLogprobs, to_dicts
from lean_engine.sampling.params import SamplingParams
from lean_engine.sampling.sampler import SamplingState
from lean_engine.scheduling.request import Request
from lean_engine.text.detokenizer import IncrementalDetokenizer
from lean_engine.text.tokenizer import Tokenizer

LogprobDict = dict[int, Logprob]  # token id → its log-probability


@dataclass(slots=True)
class RequestMetrics:
    """Times in seconds on time.monotonic's clock; None where the request did not get so far."""

    arrival_time: float
    first_scheduled_time: float | None
    first_token_time: float | None
    finished_time: float | None
    num_preemptions: int

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token_time is None else self.first_token_time - self.arrival_time


@dataclass(slots=True)
class CompletionOutput:
    """One of a request's n answers."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None  # of the chosen tokens; None unless logprobs were asked for
    logprobs: list[LogprobDict] | None  # per token
    finish_reason: str | None  # "stop", "length", "abort", "error"; None while it grows
    stop_reason: int | str | None  # the stop token id or stop string
    error: str | None = None  # why, where finish_reason is "error"


@dataclass(slots=True)
class RequestOutput:
    """A request and its answers so far.

    While streaming, text, token_ids and logprobs of an answer hold what is new since the output before.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[LogprobDict | None] | None  # per prompt token, the first None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int  # prompt tokens found in the prefix cache
    metrics: RequestMetrics


class Answer:
    """One answer of a request: the payload of a scheduler's Request."""

    def __init__(self, index: int, params: SamplingParams, state: SamplingState, text: IncrementalDetokenizer | None):
        self.index = index
        self.params = params
        self.state = state
        self.detokenizer = text  # None: detokenize=False
        self.request: Request | None = None
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.cumulative_logprob = 0.0  # of the chosen tokens in logprobs
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.error: str | None = None

    def take(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], ends_by_token: bool = False) -> None:
        """Accept a step's tokens; a stop string cuts text, ids and log-probabilities at the same place.

        Args:
            ends_by_token: the last one is eos or a stop token: kept among the ids, and out of the text unless
                include_stop_str_in_output.
        """
        num_kept = len(token_ids)
        if self.detokenizer is not None:
            is_silent = ends_by_token and not self.params.include_stop_str_in_output
            self.text += self.detokenizer.append(token_ids[:-1] if is_silent else token_ids)
            if self.detokenizer.stopped is not None:
                num_kept = self.detokenizer.num_tokens_kept - len(self.token_ids)
                self.finish_reason, self.stop_reason = "stop", self.detokenizer.stopped
        self.token_ids += token_ids[:num_kept]
        self.logprobs += logprobs[:num_kept]
        self.cumulative_logprob += sum(float(entry.logprobs[0]) for entry in logprobs[:num_kept])

    def fail(self, error: str) -> None:
        """Note why the answer ends with finish_reason "error"."""
        self.error = explained(error, self.params)

    def finish(self, reason: str, stop_reason: int | str | None) -> None:
        """End the answer unless a stop string already has; held text comes out."""
        if self.finish_reason is not None:
            return
        self.finish_reason, self.stop_reason = reason, stop_reason
        if self.detokenizer is not None:
            self.text += self.detokenizer.finish()


@dataclass(slots=True)
class Group:
    """A request as its user sees it: one prompt, n answers."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    params: SamplingParams
    answers: list[Answer]
    arrival_time: float
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)  # of prompt positions 1, 2, …
    _prompt_dicts: list[LogprobDict | None] = field(
        default_factory=lambda: [None]
    )  # the same for the user, as asked for

    @property
    def is_finished(self) -> bool:
        return all(a.finish_reason is not None for a in self.answers)

    def output(self, tokenizer: Tokenizer | None, outputs: list[CompletionOutput] | None = None) -> RequestOutput:
        """Everything so far; a stream gives the answers' outputs, which hold only what is new."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=self._prompt_logprobs(tokenizer),
            outputs=[completion(a, tokenizer) for a in self.answers] if outputs is None else outputs,
            finished=self.is_finished,
            num_cached_tokens=self.first_request.num_cached_tokens,
            metrics=self._metrics(),
        )

    @property
    def first_request(self) -> Request:
        """The scheduler's request behind the first answer."""
        request = self.answers[0].request
        assert request is not None
        return request

    def _prompt_logprobs(self, tokenizer: Tokenizer | None) -> list[LogprobDict | None] | None:
        if self.params.prompt_logprobs is None:
            return None
        decode = tokenizer.token_text if tokenizer is not None and self.params.detokenize else None
        new = self.prompt_logprobs[len(self._prompt_dicts) - 1 :]
        self._prompt_dicts += [to_dicts(entry, decode) for entry in new]
        return list(self._prompt_dicts)

    def _metrics(self) -> RequestMetrics:
        requests = [a.request for a in self.answers if a.request is not None]
        firsts = [r.first_token_time for r in requests if r.first_token_time is not None]
        scheduled = [r.first_scheduled_time for r in requests if r.first_scheduled_time is not None]
        ends = [r.finished_time for r in requests if r.finished_time is not None]
        return RequestMetrics(
            self.arrival_time,
            min(scheduled, default=None),
            min(firsts, default=None),
            max(ends) if self.is_finished and ends else None,
            sum(r.num_preemptions for r in requests),
        )


def completion(
    answer: Answer, tokenizer: Tokenizer | None, since_text: int = 0, since_token: int = 0
) -> CompletionOutput:
    """An answer's output from a character and a token on."""
    has_logprobs = answer.params.logprobs is not None
    decode = tokenizer.token_text if tokenizer is not None and answer.params.detokenize else None
    entries = answer.logprobs[since_token:]
    return CompletionOutput(
        index=answer.index,
        text=answer.text[since_text:],
        token_ids=answer.token_ids[since_token:],
        cumulative_logprob=answer.cumulative_logprob if has_logprobs else None,
        logprobs=[to_dicts(entry, decode) for entry in entries] if has_logprobs else None,
        finish_reason=answer.finish_reason,
        stop_reason=answer.stop_reason,
        error=answer.error,
    )
