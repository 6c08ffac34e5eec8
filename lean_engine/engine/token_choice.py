"""How tokens come out of a step's logits: chosen by the host (here), or on the device (device_chooser.py).

Either way a step is launched first and its results are waited for later. A step whose results the host needs before it
can prepare the next one says so; the engine then takes them before it plans on. Where the host needs them only for the
choice of the next step's tokens, that step's program is launched ahead and its choice later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from lean_engine.errors import RequestError
from lean_engine.runtime.device import Array
from lean_engine.sampling.logprobs import FloatArray, TokenLogprobs, prompt_logprobs
from lean_engine.sampling.row_kernels import RowKernels
from lean_engine.sampling.sampler import Sampler, SampleResult, SamplingState
from lean_engine.scheduling.plan import ScheduledChunk, StepPlan
from lean_engine.scheduling.request import Request

NO_ROW = -1


@dataclass(slots=True)
class StepTokens:
    """What a step brought."""

    token_ids: list[Sequence[int]]  # per decode, then per chunk of the plan: empty where none was sampled
    logprobs: dict[Request, TokenLogprobs] = field(default_factory=dict)  # of those that ask for them
    prompt_logprobs: list[tuple[Request, list[TokenLogprobs]]] = field(default_factory=list)
    errors: dict[Request, str] = field(default_factory=dict)  # requests whose logits are damaged, and how


class TokensToCome(Protocol):
    """A launched step's results."""

    @property
    def needs_host(self) -> bool:
        """Whether the next step cannot be prepared without them."""

    def launch_choice(self) -> None:
        """Launch what had to wait for the results of the step before, which have been taken; else nothing is left."""

    def wait(self) -> StepTokens:
        """Wait for the step and take its results, before a step after the next is launched; the same if asked again."""


class TokenChooser(Protocol):
    """Chooses the tokens of steps, in the order in which they are launched."""

    def prepare(self, plan: StepPlan) -> None:
        """Get ready for a step whose inputs are on the device, before its program runs."""

    def choose(self, plan: StepPlan, logits: Array, is_ahead: bool) -> TokensToCome:
        """Choose the next tokens of a step whose program was launched.

        Args:
            logits: float32 [R, V] on the device, the padded rows included; valid until the next step runs.
            is_ahead: the results of the step before are not taken yet.
        """

    def capture(self, logits: Array) -> None:
        """Get ready for steps with such logits; see `choose`. None is in flight."""

    def settle(self) -> None:
        """A launch has failed: wait until nothing reads what was written for it, so that it may be written again."""

    def release(self, request: Request) -> None:
        """Forget a request that has ended, is to be computed again, or is not known at all."""


def sampled_rows(plan: StepPlan) -> list[int]:
    """Of each decode, then of each chunk, the row of logits that its next token is sampled from, or NO_ROW."""
    rows = list(range(len(plan.decodes)))
    end = len(rows)
    for chunk in plan.chunks:
        end += chunk.num_logit_rows
        rows.append(end - 1 if chunk.samples else NO_ROW)
    return rows


def requests_of(plan: StepPlan) -> list[Request]:
    return [*plan.decodes, *(chunk.request for chunk in plan.chunks)]


def take_prompt_logprobs(plan: StepPlan, read: Callable[[int, int], FloatArray], tokens: StepTokens) -> None:
    """Log-probabilities of the prompts in a step, and the errors of damaged ones.

    Args:
        read: gives rows [start, end) of the step's logits, valid until its next call.
    """
    end = len(plan.decodes)
    for chunk in plan.chunks:
        start, end = end, end + chunk.num_logit_rows
        targets = prompt_targets(chunk)
        if targets:
            request = chunk.request
            num_top = request.payload.params.prompt_logprobs or 0
            try:
                entries = prompt_logprobs(read(start, start + len(targets)), targets, num_top)
            except RequestError as error:
                tokens.errors[request] = str(error)
            else:
                tokens.prompt_logprobs.append((request, entries))


def prompt_targets(chunk: ScheduledChunk) -> Sequence[int]:
    """The prompt's tokens that a chunk's first rows of logits predict; the row of its last token is sampled."""
    request = chunk.request
    if not request.needs_prompt_logits:
        return ()
    first = chunk.start + chunk.num_tokens - chunk.num_logit_rows
    return request.token_ids[first + 1 : min(first + 1 + chunk.num_logit_rows, request.num_prompt_tokens)]


class HostChooser:
    """The host's sampler, on logits that it reads as soon as a step was launched.

    Args:
        read: a device's array in host memory, valid until its next call.
        kernels: what does rows faster than NumPy, with the same results.
    """

    def __init__(self, vocab_size: int, read: Callable[[Array], FloatArray], kernels: RowKernels | None = None) -> None:
        self._sampler = Sampler(vocab_size, kernels)
        self._read = read

    def prepare(self, plan: StepPlan) -> None:
        pass

    def choose(self, plan: StepPlan, logits: Array, is_ahead: bool) -> TokensToCome:
        return TokensAtHand(self._sample(plan, self._read(logits[: plan.num_logit_rows])))

    def capture(self, logits: Array) -> None:
        pass

    def settle(self) -> None:
        pass

    def release(self, request: Request) -> None:
        pass

    def _sample(self, plan: StepPlan, logits: FloatArray) -> StepTokens:
        rows = sampled_rows(plan)
        tokens = StepTokens([()] * len(rows))
        take_prompt_logprobs(plan, lambda start, end: logits[start:end], tokens)
        requests = requests_of(plan)
        places = [place for place, row in enumerate(rows) if row != NO_ROW and requests[place] not in tokens.errors]
        if places:
            # The usual step samples every row, in order: no copy.
            chosen = logits if len(places) == len(logits) else logits[[rows[place] for place in places]]
            sampled = [requests[place] for place in places]
            take_samples(tokens, places, sampled, sample_on_host(self._sampler, chosen, sampled))
        return tokens


@dataclass(frozen=True, slots=True)
class TokensAtHand:
    """Results that were there when the step was launched."""

    tokens: StepTokens

    @property
    def needs_host(self) -> bool:
        return True

    def launch_choice(self) -> None:
        pass

    def wait(self) -> StepTokens:
        return self.tokens


def sample_on_host(sampler: Sampler, logits: FloatArray, requests: Sequence[Request]) -> SampleResult:
    """A row each; the state of each request is told of its token. logits may be changed."""
    states: list[SamplingState] = [request.payload.state for request in requests]
    result = sampler.sample(logits, states, [request.num_tokens for request in requests])
    for state, token_id, error in zip(states, result.token_ids, result.errors, strict=True):
        if error is None:
            state.accept(token_id)
    return result


def take_samples(tokens: StepTokens, places: Iterable[int], requests: Iterable[Request], result: SampleResult) -> None:
    """Put a sampler's rows where they belong in a step's results."""
    for i, (place, request) in enumerate(zip(places, requests, strict=True)):
        error, entry = result.errors[i], result.logprobs[i]
        if error is not None:
            tokens.errors[request] = error
            continue
        tokens.token_ids[place] = (result.token_ids[i],)
        if entry is not None:
            tokens.logprobs[request] = entry
