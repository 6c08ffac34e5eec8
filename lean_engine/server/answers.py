"""What a chat request makes of its answers: the form they are held to, and their division into reasoning, content and
tool calls.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from msgspec import UNSET

from lean_engine.errors import RequestError
from lean_engine.sampling.params import SamplingParams
from lean_engine.sampling.structured_outputs import StructuredOutputsParams
from lean_engine.server.config import ServerConfig
from lean_engine.server.model import LoadedModel
from lean_engine.server.protocol import ChatRequest, GenerationRequest
from lean_engine.server.responses import FunctionCall, ToolCall
from lean_engine.text.reasoning import TAGS, ReasoningParser, make_reasoning_parser
from lean_engine.text.tags import are_special
from lean_engine.text.tool_calls import ToolCallDelta, ToolCallParser, ToolPlan, plan_tools


def structured_outputs(body: GenerationRequest) -> StructuredOutputsParams | None:
    """The form that response_format or structured_outputs asks of the answer.

    Raises:
        RequestError: both are given, or one contradicts itself.
    """
    wanted = body.response_format
    if wanted is None or wanted.type == "text":
        if body.structured_outputs is None:
            return None
        given = {name: getattr(body.structured_outputs, name) for name in body.structured_outputs.__struct_fields__}
        return StructuredOutputsParams(**{name: value for name, value in given.items() if value is not None})
    if body.structured_outputs is not None:
        raise RequestError("give either response_format or structured_outputs", param="structured_outputs")
    if wanted.type == "json_object":
        return StructuredOutputsParams(json_object=True)
    if wanted.json_schema is None or wanted.json_schema.schema is None:
        raise RequestError("response_format.json_schema.schema is missing", param="response_format")
    return StructuredOutputsParams(json=wanted.json_schema.schema)


@dataclass(slots=True)
class Part:
    """What is new of one answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[ToolCall] | None = None


@dataclass(slots=True)
class AnswerForm:
    """How the answers of one chat request are divided."""

    tools: ToolPlan
    reasoning_parser: str | None
    enable_thinking: bool
    shows_reasoning: bool
    is_call_named: bool  # by tool_choice: OpenAI's finish_reason is "stop" then

    @classmethod
    def of(cls, body: ChatRequest, model: LoadedModel, config: ServerConfig) -> AnswerForm:
        """The form of a request; RequestError where its tools cannot be served."""
        if body.tools and body.tool_choice in (None, "auto") and not config.enable_auto_tool_choice:
            raise RequestError("tool_choice 'auto' is switched off on this server", param="tool_choice")
        tools = plan_tools(
            body.tools,
            body.tool_choice,
            template=model.template_for(body.chat_template, has_tools=bool(body.tools)),
            parser=config.tool_call_parser,
            parallel_tool_calls=body.parallel_tool_calls,
        )
        if tools.grammar is not None and structured_outputs(body) is not None:
            raise RequestError(
                "tool_choice holds the answer to calls, and response_format or structured_outputs to another form",
                param="tool_choice",
            )
        variables = {**config.default_chat_template_kwargs, **(body.chat_template_kwargs or {})}
        return cls(
            tools,
            config.reasoning_parser,
            variables.get("enable_thinking") is not False,
            body.include_reasoning,
            isinstance(body.tool_choice, dict),
        )

    def hold(self, params: SamplingParams, prompt: str, model: LoadedModel) -> SamplingParams:
        """The parameters, with the grammar of calls, and with nothing left out of the text that a parser needs."""
        form = params.structured_outputs
        if self.tools.grammar is not None:
            form = StructuredOutputsParams(grammar=self.tools.grammar)
        reasoning = self._reasoning(prompt)
        if form is not None and reasoning is not None:
            tags_of_form: dict[str, Any] = dict(reasoning.grammar_tags)
            form = replace(form, **tags_of_form)
        tags = (*self.tools.tags, *(TAGS if reasoning is not None else ()))
        skips = params.skip_special_tokens and not (tags and are_special(model.tokenizer, tags))
        if form is params.structured_outputs and skips == params.skip_special_tokens:
            return params
        return replace(params, structured_outputs=form, skip_special_tokens=skips)

    def new_reader(self, prompt: str, is_streaming: bool) -> AnswerReader:
        """The reader of one answer."""
        return AnswerReader(
            self._reasoning(prompt), self.tools.new_parser(is_streaming=is_streaming), self.shows_reasoning
        )

    def _reasoning(self, prompt: str) -> ReasoningParser | None:
        if self.reasoning_parser is None:
            return None
        return make_reasoning_parser(self.reasoning_parser, prompt, enable_thinking=self.enable_thinking)

    def finish_reason(self, reader: AnswerReader, reason: str | None) -> str | None:
        """The engine's reason, or "tool_calls"."""
        is_call = reason == "stop" and reader.num_calls > 0 and not self.is_call_named
        return "tool_calls" if is_call else reason


class AnswerReader:
    """Divides one answer's text while it comes."""

    def __init__(self, reasoning: ReasoningParser | None, tools: ToolCallParser | None, shows_reasoning: bool) -> None:
        self._reasoning = reasoning
        self._tools = tools
        self._shows_reasoning = shows_reasoning

    @property
    def num_calls(self) -> int:
        return 0 if self._tools is None else self._tools.num_calls

    def read(self, text: str, is_last: bool) -> Part:
        """Take the next piece; return what is new, with what was held back if it is the last."""
        part = Part(text)
        if self._reasoning is not None:
            delta = self._reasoning.append(text)
            part.reasoning, part.content = delta
            if is_last:
                rest = self._reasoning.finish()
                part.reasoning, part.content = part.reasoning + rest.reasoning, part.content + rest.content
            if not self._shows_reasoning:
                part.reasoning = ""
        if self._tools is not None:
            found = self._tools.append(part.content)
            part.content, calls = found.content, list(found.calls)
            if is_last:
                last = self._tools.finish()
                part.content, calls = part.content + last.content, calls + last.calls
            part.calls = joined(calls) or None
        return part


def joined(deltas: list[ToolCallDelta]) -> list[ToolCall]:
    """One entry per call: clients expect each of them once in an event."""
    calls: dict[int, ToolCall] = {}
    for delta in deltas:
        call = calls.setdefault(delta.index, ToolCall(index=delta.index, function=FunctionCall(arguments="")))
        call.function.arguments += delta.arguments
        if delta.id is not None:
            call.id, call.type, call.function.name = delta.id, "function", delta.name or UNSET
    return list(calls.values())
