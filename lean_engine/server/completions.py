"""/v1/completions: prompts as text or token ids, continued as they are."""

from __future__ import annotations

from collections.abc import AsyncIterator

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from lean_engine.engine.messages import Increment
from lean_engine.errors import RequestError
from lean_engine.sampling.logprobs import TokenLogprobs
from lean_engine.server.answers import structured_outputs
from lean_engine.server.generation import Generation, Prompt, sampling_params
from lean_engine.server.logprobs import LogprobWriter, end_of
from lean_engine.server.model import LoadedModel
from lean_engine.server.protocol import CompletionRequest, split_prompts
from lean_engine.server.responses import Completion, CompletionChoice, CompletionLogprobs
from lean_engine.server.service import Service, json_response
from lean_engine.server.sse import EventStream

DEFAULT_MAX_TOKENS = 16


async def create_completion(service: Service, http: Request) -> Response:
    """Answer the request, whole or as a stream."""
    model = service.open_model()
    body = await service.read(http, CompletionRequest)
    body.check()
    model.check_name(body.model)
    if body.prompt_logprobs is not None and body.stream:
        raise RequestError("prompt_logprobs are not streamed; use echo with logprobs", param="prompt_logprobs")
    prompts = split_prompts(body.prompt)
    params = sampling_params(
        model,
        body,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo and body.prompt_logprobs is None else None,
        max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None and "max_tokens" not in model.defaults else None,
        structured_outputs=structured_outputs(body),
    )
    generation = Generation(service.client, model, body, *service.identify(http, "cmpl", body))
    exchange = generation.open_exchange(len(prompts), params.n, service.config.request_timeout)
    try:
        exchange.watch(http.receive)
        encoded = await service.in_thread(encode_all, model, prompts, body.add_special_tokens)
        await service.compile_grammar(params)
        interval = (body.stream_interval or service.config.stream_interval) if body.stream else 0
        submissions = generation.submissions(encoded, params, body.max_tokens is not None, interval)
        await exchange.open(submissions)
        writer = CompletionWriter(service, model, body, generation)
        if body.stream:
            return EventStream(writer.events(exchange.news()), exchange)
        answers = await exchange.whole()
    except BaseException:
        exchange.close()
        raise
    exchange.close()
    return json_response(writer.whole(answers))


def encode_all(model: LoadedModel, prompts: list[str | list[int]], add_special_tokens: bool | None) -> list[Prompt]:
    """Prompts with their ids."""
    adds = add_special_tokens is not False
    return [Prompt(model.encode(p, adds), p) if isinstance(p, str) else Prompt(p, None) for p in prompts]


class CompletionWriter:
    """Makes response bodies of increments."""

    def __init__(self, service: Service, model: LoadedModel, body: CompletionRequest, generation: Generation) -> None:
        self._model = model
        self._body = body
        self._generation = generation
        self._logprobs = LogprobWriter(model.llm.engine.tokenizer, service.writes_token_ids(body))
        self._offsets: dict[int, int] = {}  # choice → characters told

    def whole(self, answers: dict[int, Increment]) -> Completion:
        self._generation.count(answers)
        body = self._response([self._choice(choice, answers[choice]) for choice in sorted(answers)])
        body.usage = self._generation.usage()
        return body

    def events(self, news: AsyncIterator[dict[int, Increment]]) -> AsyncIterator[bytes]:
        return self._generation.events(news, self._news, self._response)

    def _news(self, number: int, increment: Increment) -> list[CompletionChoice]:
        return [] if self._says_nothing(number, increment) else [self._choice(number, increment)]

    def _says_nothing(self, number: int, increment: Increment) -> bool:
        is_first_echo = bool(self._body.echo) and number not in self._offsets
        is_asked = bool(increment.logprobs) or bool(self._body.return_token_ids)
        return not (increment.text or increment.finish_reason or is_first_echo or is_asked)

    def _response(self, choices: list[CompletionChoice]) -> Completion:
        generation = self._generation
        return Completion(id=generation.id, created=generation.created, model=generation.model_name, choices=choices)

    def _choice(self, number: int, increment: Increment) -> CompletionChoice:
        prompt = self._generation.prompts[number // self._generation.params.n]
        is_first = number not in self._offsets
        offset = self._offsets.setdefault(number, 0)
        text, ids, entries = increment.text, increment.token_ids, list[TokenLogprobs | None](increment.logprobs)
        if self._body.echo and is_first:
            text = self._prompt_text(prompt) + text
            ids = prompt.token_ids + ids
            entries = [None, *increment.prompt_logprobs, *entries]
        elif is_first:
            offset = len(self._prompt_text(prompt)) if self._body.logprobs is not None else 0
        written: CompletionLogprobs | None = None
        self._offsets[number] = offset + len(text)
        if self._body.logprobs is not None:
            written = self._logprobs.completion(ids, entries, offset)
            self._offsets[number] = end_of(written, offset)  # of the tokens: text may be held back
        made = CompletionChoice(
            index=number,
            text=text,
            logprobs=written,
            finish_reason=increment.finish_reason,
            stop_reason=increment.stop_reason,
        )
        if self._body.prompt_logprobs is not None:
            made.prompt_logprobs = self._logprobs.prompt(increment.prompt_logprobs)
        if self._body.return_token_ids:
            made.token_ids = increment.token_ids
            made.prompt_token_ids = prompt.token_ids if is_first else UNSET
        return made

    def _prompt_text(self, prompt: Prompt) -> str:
        if prompt.text is not None:
            return prompt.text
        tokenizer = self._model.llm.engine.tokenizer
        return "" if tokenizer is None else tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
