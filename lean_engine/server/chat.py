"""/v1/chat/completions: a conversation through the chat template, answered by the assistant's next message."""

from __future__ import annotations

from collections.abc import AsyncIterator

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from lean_engine.engine.messages import Increment
from lean_engine.errors import RequestError
from lean_engine.sampling.params import SamplingParams
from lean_engine.server.answers import AnswerForm, AnswerReader, structured_outputs
from lean_engine.server.generation import Generation, Prompt, sampling_params
from lean_engine.server.logprobs import LogprobWriter
from lean_engine.server.model import LoadedModel
from lean_engine.server.protocol import ChatRequest, adds_generation_prompt
from lean_engine.server.responses import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    Delta,
    Message,
)
from lean_engine.server.service import Service, json_response
from lean_engine.server.sse import EventStream


async def create_chat_completion(service: Service, http: Request) -> Response:
    """Answer the request, whole or as a stream."""
    model = service.open_model()
    body = await service.read(http, ChatRequest)
    body.check()
    model.check_name(body.model)
    if body.prompt_logprobs is not None and body.stream:
        raise RequestError("prompt_logprobs are not streamed", param="prompt_logprobs")
    limit = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    try:
        has_schemas = bool(body.tools or body.response_format or body.structured_outputs)
        prepared = service.in_thread(prepare, service, model, body, limit) if has_schemas else None
        form, params = prepare(service, model, body, limit) if prepared is None else await prepared
        generation = Generation(service.client, model, body, *service.identify(http, "chatcmpl", body))
        exchange = generation.open_exchange(1, params.n, service.config.request_timeout)
        try:
            exchange.watch(http.receive)
            prompt = await service.in_thread(encode_chat, model, body, form)
            params = form.hold(params, prompt.text or "", model)
            await service.compile_grammar(params)
            interval = (body.stream_interval or service.config.stream_interval) if body.stream else 0
            await exchange.open(generation.submissions([prompt], params, limit is not None, interval))
            writer = ChatWriter(service, model, body, generation, form)
            if body.stream:
                return EventStream(writer.events(exchange.news()), exchange)
            answers = await exchange.whole()
        except BaseException:
            exchange.close()
            raise
    except RequestError as error:
        raise renamed(error, body) from None
    exchange.close()
    return json_response(writer.whole(answers))


def prepare(
    service: Service, model: LoadedModel, body: ChatRequest, limit: int | None
) -> tuple[AnswerForm, SamplingParams]:
    """The form of the answers and how they are sampled. limit: of their tokens. With schemas it may take long."""
    form = AnswerForm.of(body, model, service.config)
    return form, sampling_params(
        model, body, logprobs=num_logprobs(body), max_tokens=limit, structured_outputs=structured_outputs(body)
    )


def num_logprobs(body: ChatRequest) -> int | None:
    """Chat's logprobs and top_logprobs as SamplingParams has them."""
    if not body.logprobs:
        if body.top_logprobs:
            raise RequestError("top_logprobs is given without logprobs: true", param="top_logprobs")
        return None
    return body.top_logprobs or 0


def renamed(error: RequestError, body: ChatRequest) -> RequestError:
    """The error under the names that chat gives to fields of the engine."""
    names = {"prompt": "messages", "logprobs": "top_logprobs"}
    if body.structured_outputs is None:
        names["structured_outputs"] = "response_format" if body.response_format is not None else "tools"
    if body.max_completion_tokens is not None:
        names["max_tokens"] = "max_completion_tokens"
    return RequestError(str(error), param=names.get(error.param or "", error.param), status=error.status)


def encode_chat(model: LoadedModel, body: ChatRequest, form: AnswerForm) -> Prompt:
    """The conversation as prompt text and ids. The template writes its own special tokens, so none are added."""
    text = model.render(
        body.messages,
        chat_template=body.chat_template,
        template_kwargs=template_kwargs(body),
        add_generation_prompt=adds_generation_prompt(body),
        continue_final_message=body.continue_final_message,
        documents=body.documents,
        tools=form.tools.tools,
    )
    return Prompt(model.encode(text, body.add_special_tokens is True, param="messages"), text)


def template_kwargs(body: ChatRequest) -> dict[str, object] | None:
    if body.reasoning_effort is None:
        return body.chat_template_kwargs
    return {"reasoning_effort": body.reasoning_effort, **(body.chat_template_kwargs or {})}


class ChatWriter:
    """Makes response bodies of increments."""

    def __init__(
        self, service: Service, model: LoadedModel, body: ChatRequest, generation: Generation, form: AnswerForm
    ) -> None:
        self._body = body
        self._generation = generation
        self._form = form
        self._logprobs = LogprobWriter(model.llm.engine.tokenizer, service.writes_token_ids(body))
        self._readers: dict[int, AnswerReader] = {}  # by choice; there once its role is sent

    def whole(self, answers: dict[int, Increment]) -> ChatCompletion:
        generation, body = self._generation, self._body
        generation.count(answers)
        made = ChatCompletion(
            id=generation.id,
            created=generation.created,
            model=generation.model_name,
            choices=[self._choice(number, answers[number]) for number in sorted(answers)],
            usage=generation.usage(),
        )
        if body.prompt_logprobs is not None:
            made.prompt_logprobs = self._logprobs.prompt(answers[0].prompt_logprobs)
        if body.return_token_ids:
            made.prompt_token_ids = generation.prompts[0].token_ids
        return made

    def _choice(self, number: int, answer: Increment) -> ChatChoice:
        reader = self._new_reader(is_streaming=False)
        part = reader.read(answer.text, is_last=True)
        for call in part.calls or ():
            call.index = UNSET
        content: str | None = self._echoed() + part.content
        message = Message(content=content or (None if part.calls or part.reasoning else ""))
        if part.reasoning:
            message.reasoning = message.reasoning_content = part.reasoning
        if part.calls:
            message.tool_calls = part.calls
        return ChatChoice(
            index=number,
            message=message,
            logprobs=self._chat_logprobs(answer),
            finish_reason=self._form.finish_reason(reader, answer.finish_reason),
            stop_reason=answer.stop_reason,
            token_ids=answer.token_ids if self._body.return_token_ids else UNSET,
        )

    def _new_reader(self, is_streaming: bool) -> AnswerReader:
        return self._form.new_reader(self._generation.prompts[0].text or "", is_streaming)

    def _chat_logprobs(self, increment: Increment) -> ChatLogprobs | None:
        return self._logprobs.chat(increment.logprobs) if self._body.logprobs else None

    def _echoed(self) -> str:
        """With echo, the final message where the answer continues it."""
        if not self._body.echo or self._body.messages[-1].get("role") != "assistant":
            return ""
        content = self._body.messages[-1].get("content")
        return content if isinstance(content, str) else ""

    def events(self, news: AsyncIterator[dict[int, Increment]]) -> AsyncIterator[bytes]:
        return self._generation.events(news, self._chunks, self._chunk)

    def _chunks(self, number: int, increment: Increment) -> list[ChatChunkChoice]:
        """The role before a choice's first words, then what is new of it."""
        chunks = []
        if number not in self._readers:
            self._readers[number] = self._new_reader(is_streaming=True)
            chunks.append(ChatChunkChoice(index=number, delta=Delta(role="assistant", content=self._echoed())))
        reader = self._readers[number]
        part = reader.read(increment.text, is_last=increment.finish_reason is not None)
        delta = Delta(content=part.content or UNSET, tool_calls=part.calls or UNSET)
        delta.reasoning = delta.reasoning_content = part.reasoning or UNSET
        choice = ChatChunkChoice(
            index=number,
            delta=delta,
            logprobs=self._chat_logprobs(increment),
            finish_reason=self._form.finish_reason(reader, increment.finish_reason),
            stop_reason=increment.stop_reason,
            token_ids=increment.token_ids if self._body.return_token_ids else UNSET,
        )
        says_something = part.content or part.reasoning or part.calls or increment.finish_reason
        if says_something or increment.logprobs or self._body.return_token_ids:
            chunks.append(choice)
        return chunks

    def _chunk(self, choices: list[ChatChunkChoice]) -> ChatChunk:
        generation = self._generation
        return ChatChunk(id=generation.id, created=generation.created, model=generation.model_name, choices=choices)
