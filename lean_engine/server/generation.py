"""What completions and chat do alike: sampling parameters, prompts into the engine, counts for the usage."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from lean_engine.engine.messages import Increment, Submission
from lean_engine.errors import RequestError
from lean_engine.sampling.params import SamplingParams
from lean_engine.server.engine_client import EngineClient, Exchange
from lean_engine.server.model import LoadedModel
from lean_engine.server.protocol import MAX_CHOICES, GenerationRequest
from lean_engine.server.responses import ChatChunk, Completion, Usage, usage
from lean_engine.server.sse import event

Chunk = ChatChunk | Completion
C = TypeVar("C")  # a chunk's choice


class Prompt(NamedTuple):
    token_ids: list[int]
    text: str | None  # None: it came as token ids


def sampling_params(model: LoadedModel, body: GenerationRequest, **values: Any) -> SamplingParams:
    """The parameters of a request, over the model's defaults. values: further arguments, None where not given."""
    given = body.sampling_values() | {name: value for name, value in values.items() if value is not None}
    return SamplingParams(**{"max_tokens": None, **model.defaults, **given})


class Generation:
    """One request on its way through the engine.

    Args:
        counts: filled with the tokens of prompts and answers, for the access log.

    Attributes:
        id, created, model_name: as responses carry them.
        prompts: in the request's order.
        params: of every prompt; one whose max_tokens is a default gets what the context leaves.
    """

    def __init__(
        self,
        client: EngineClient,
        model: LoadedModel,
        body: GenerationRequest,
        response_id: str,
        arrival_time: float,
        counts: dict[str, int],
    ) -> None:
        self.id = response_id
        self.created = int(time.time())
        self.model_name = body.model or model.names[0]
        self._client = client
        self._model = model
        self._body = body
        self._arrival_time = arrival_time
        self.prompts: list[Prompt] = []
        self._num_cached: dict[int, int] = {}  # by prompt
        self._counts = counts
        counts["prompt_tokens"] = counts["completion_tokens"] = 0

    def submissions(
        self, prompts: list[Prompt], params: SamplingParams, is_limit_given: bool, stream_interval: int
    ) -> list[Submission]:
        """The prompts as the engine takes them."""
        self.prompts = prompts
        self._counts["prompt_tokens"] = sum(len(prompt.token_ids) for prompt in prompts)
        self.params = params
        return [
            Submission(
                request_id=f"{self.id}#{self._client.new_serial()}",
                prompt_token_ids=prompt.token_ids,
                params=params if is_limit_given else self._fitted(params, prompt),
                arrival_time=self._arrival_time,
                priority=self._body.priority or 0,
                cache_salt=self._body.cache_salt,
                stream_interval=stream_interval,
            )
            for prompt in prompts
        ]

    def _fitted(self, params: SamplingParams, prompt: Prompt) -> SamplingParams:
        room = max(1, self._model.max_model_len - len(prompt.token_ids), params.min_tokens)
        if params.max_tokens is None or params.max_tokens <= room:
            return params
        return replace(params, max_tokens=room)

    def count(self, news: Mapping[int, Increment]) -> None:
        """Note what the usage tells."""
        for choice, increment in news.items():
            self._num_cached[choice // self.params.n] = increment.num_cached_tokens
            self._counts["completion_tokens"] += len(increment.token_ids)

    def usage(self) -> Usage:
        counts = self._counts
        return usage(counts["prompt_tokens"], counts["completion_tokens"], sum(self._num_cached.values()))

    async def events(
        self,
        news: AsyncIterator[dict[int, Increment]],
        choices_of: Callable[[int, Increment], Sequence[C]],
        chunk_of: Callable[[list[C]], Chunk],
    ) -> AsyncIterator[bytes]:
        """A stream's events, as many at a time as there are.

        Args:
            choices_of: what is new of a choice, each to be told in a chunk of its own.
            chunk_of: makes one.
        """
        body = self._body
        async for increments in news:
            self.count(increments)
            events = []
            for number in sorted(increments):
                for choice in choices_of(number, increments[number]):
                    chunk = chunk_of([choice])
                    if body.wants_usage_always:
                        chunk.usage = self.usage()
                    events.append(event(chunk))
            if events:
                yield b"".join(events)
        if body.wants_usage:
            last = chunk_of([])
            last.usage = self.usage()
            yield event(last)

    def open_exchange(self, num_prompts: int, n: int, timeout: float) -> Exchange:
        """Room for the answers; RequestError, 429 or 503, where there is none."""
        if num_prompts * n > MAX_CHOICES:
            raise RequestError(
                f"{num_prompts} prompts with n={n} ask for {num_prompts * n} answers, must be at most {MAX_CHOICES}",
                param="n",
            )
        return Exchange(self._client, num_prompts, n, timeout)
