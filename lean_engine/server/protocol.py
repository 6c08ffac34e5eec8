"""Request bodies, as OpenAI and vLLM name their fields, and what of them is refused.

Types are checked while a body is decoded; ranges by SamplingParams and the engine. A field that is not known, or known
and not supported, is refused by name, unless it is null or has the value that asks for nothing. What OpenAI's clients
send for bookkeeping (user, metadata, store, …) is accepted and has no effect.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from lean_engine.errors import RequestError
from lean_engine.sampling.params import SamplingParams

MAX_CHOICES = 2048  # prompts × n of one request: each costs the engine's thread tens of microseconds to queue
MAX_STRINGS = 128  # stop strings and bad words: each is looked for in every step
MAX_REQUEST_ID = 256  # characters


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    include_usage: bool | None = None  # one more chunk at the end, with no choices
    continuous_usage_stats: bool | None = None  # usage in every chunk
    include_obfuscation: bool | None = None  # no padding is ever sent


class StructuredOutputs(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's constraint on the answer; one of the first five."""

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None
    disable_additional_properties: bool | None = None
    whitespace_pattern: str | None = None


class JsonSchemaFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    name: str
    schema: dict[str, Any] | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class GenerationRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What completions and chat have in common."""

    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    skip_reading_prefix_cache: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_interval: int | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    request_id: str | None = None
    return_tokens_as_token_ids: bool | None = None
    return_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    # bookkeeping of clients; no effect
    user: str | None = None
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    # only with the value that asks for nothing: see NEUTRAL
    best_of: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    truncate_prompt_tokens: int | None = None

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with a chunk that has the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_usage_always(self) -> bool:
        return self.wants_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def check(self) -> None:
        """RequestError where a value asks for what is not supported, or fields contradict each other."""
        for name, neutral in NEUTRAL.items():
            value = getattr(self, name, None)
            if value is not None and value not in neutral:
                raise RequestError(f"{name} is {value!r}: {UNSUPPORTED[name]}", param=name)
        if self.stream_options is not None and not self.stream:
            raise RequestError("stream_options is given without stream: true", param="stream_options")
        if self.stream_interval is not None and self.stream_interval < 1:
            raise RequestError(
                f"stream_interval is {self.stream_interval}, must be at least 1", param="stream_interval"
            )
        for name in ("stop", "bad_words"):
            strings = getattr(self, name)
            if isinstance(strings, list) and len(strings) > MAX_STRINGS:
                raise RequestError(f"{name} has {len(strings)} strings, must be at most {MAX_STRINGS}", param=name)
        if self.request_id is not None and not is_request_id(self.request_id):
            raise RequestError(
                f"request_id must be 1 to {MAX_REQUEST_ID} printable ASCII characters", param="request_id"
            )

    def sampling_values(self) -> dict[str, Any]:
        """Arguments of SamplingParams that this body gives."""
        values = {name: getattr(self, name) for name in SAMPLING_FIELDS}
        return {name: value for name, value in values.items() if value is not None}


class CompletionRequest(GenerationRequest, kw_only=True):
    """Body of /v1/completions."""

    prompt: str | list[str | int | list[int]]
    logprobs: int | None = None
    suffix: str | None = None


class ChatRequest(GenerationRequest, kw_only=True):
    """Body of /v1/chat/completions."""

    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None  # default: true, unless the final message is continued
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None  # handed to the chat template
    include_reasoning: bool = True
    modalities: list[str] | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of /tokenize: a prompt, or messages as in chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None  # default: true with a prompt, false with messages
    return_token_strs: bool = False
    add_generation_prompt: bool | None = None  # default: true, unless the final message is continued
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Body of /detokenize."""

    tokens: list[int]
    model: str | None = None


UNSUPPORTED = {  # field → why
    "best_of": "best_of is not supported; use n",
    "use_beam_search": "there is no beam search",
    "length_penalty": "there is no beam search",
    "truncate_prompt_tokens": "prompts are not cut; shorten it",
    "suffix": "models are not asked to fill in the middle",
    "modalities": "only text is supported",
    "audio": "only text is supported",
    "prediction": "predicted outputs are not supported",
    "web_search_options": "there is no web search",
    "functions": "use tools",
    "function_call": "use tool_choice",
    "prompt_embeds": "prompts are text or token ids",
    "mm_processor_kwargs": "only text is supported",
    "media_io_kwargs": "only text is supported",
    "logits_processors": "logits cannot be changed by code; use logit_bias, allowed_token_ids or structured_outputs",
    "repetition_detection": "use repetition_penalty, presence_penalty or frequency_penalty",
    "thinking_token_budget": "the length of the reasoning cannot be bounded; use max_tokens",
    "guided_json": "use structured_outputs",
    "guided_regex": "use structured_outputs",
    "guided_choice": "use structured_outputs",
    "guided_grammar": "use structured_outputs",
}
NEUTRAL: dict[str, tuple[Any, ...]] = {  # field that is not supported → values that ask for nothing
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "truncate_prompt_tokens": (),
    "suffix": ("",),
    "modalities": (["text"],),
}
_OF_SAMPLING = set(SamplingParams.__dataclass_fields__) - {"logprobs", "structured_outputs"}
SAMPLING_FIELDS = tuple(name for name in GenerationRequest.__struct_fields__ if name in _OF_SAMPLING)


def adds_generation_prompt(body: ChatRequest | TokenizeRequest) -> bool:
    """Whether the assistant's next message is begun; RequestError where the final one is to be continued as well."""
    if body.add_generation_prompt and body.continue_final_message:
        raise RequestError(
            "add_generation_prompt and continue_final_message are both true; the answer begins a message or continues "
            "the final one",
            param="continue_final_message",
        )
    return body.add_generation_prompt is not False and not body.continue_final_message


def is_request_id(text: str) -> bool:
    return 0 < len(text) <= MAX_REQUEST_ID and text.isascii() and text.isprintable()


def split_prompts(prompt: str | list[Any]) -> list[str | list[int]]:
    """The prompts of a completion: a string, token ids, or a list of either.

    Raises:
        RequestError: the list is empty, mixed, or too long.
    """
    if isinstance(prompt, str):
        return [prompt]
    kinds = {type(item) for item in prompt}
    if kinds == {int}:
        return [prompt]
    if kinds == {str} or kinds == {list}:
        if len(prompt) > MAX_CHOICES:
            raise RequestError(f"prompt has {len(prompt)} prompts, must be at most {MAX_CHOICES}", param="prompt")
        return list(prompt)
    found = "an empty list" if not prompt else "a list of several kinds"
    raise RequestError(
        f"prompt is {found}, must be a string, a list of strings, a list of token ids or a list of such lists",
        param="prompt",
    )
