"""The loaded model as requests see it: its names, its text side, and its sampling defaults.

Everything here that takes long (templates, tokenising) is called in a worker thread; nothing touches the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any

from lean_engine.errors import ConfigError, RequestError
from lean_engine.llm import GENERATION_DEFAULTS, LLM, read_template
from lean_engine.sampling.params import SamplingParams
from lean_engine.server.config import ServerConfig
from lean_engine.text.chat import choose_template, render_chat
from lean_engine.text.tokenizer import Tokenizer

OWN_FIELDS = ("messages", "tools", "documents", "chat_template", "add_generation_prompt", "continue_final_message")
TOKENIZER_VARIABLES = ("bos_token", "eos_token", "template")
SHORT_TOKEN_BYTES = 16  # a prompt of at most so many bytes per token of the context is tokenised without a look


class LoadedModel:
    """What an LLM and the server's options make of requests.

    Attributes:
        names: those that requests may use; the first stands in responses.
        defaults: arguments of SamplingParams for what a request leaves out.
    """

    def __init__(self, llm: LLM, config: ServerConfig) -> None:
        self.llm = llm
        self.names = config.served_model_name or (llm.model,)
        self.defaults = sampling_defaults(llm, config)
        self._trusts_templates = config.trust_request_chat_template
        self._template_kwargs = config.default_chat_template_kwargs
        self._template = read_template(llm.config.chat_template)

    @property
    def max_model_len(self) -> int:
        return self.llm.max_model_len

    @property
    def tokenizer(self) -> Tokenizer:
        tokenizer = self.llm.engine.tokenizer
        if tokenizer is None:
            raise RequestError("this model has no tokenizer; give prompts as token ids", param="prompt")
        return tokenizer

    @property
    def chat_template(self) -> str | None:
        """The usual one."""
        return None if self.llm.engine.tokenizer is None else self.template_for(None, has_tools=False)

    def check_name(self, name: str | None) -> None:
        """RequestError, status 404, for a model that is not served here."""
        if name and name not in self.names:
            raise RequestError(
                f"the model {name!r} does not exist here; served: {', '.join(self.names)}", param="model", status=404
            )

    def encode(self, text: str, add_special_tokens: bool, param: str = "prompt") -> list[int]:
        """Token ids of a text; one that can never fit into the context is refused before it costs anything."""
        num_bytes = len(text) if text.isascii() else len(text.encode("utf-8", errors="replace"))
        if num_bytes > self.max_model_len * SHORT_TOKEN_BYTES and num_bytes > self.max_model_len * self._longest_token:
            raise RequestError(
                f"the prompt has {num_bytes} bytes, which are more tokens than the context of {self.max_model_len} "
                f"(the longest token has {self._longest_token} bytes)",
                param=param,
            )
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    @cached_property
    def _longest_token(self) -> int:
        """Bytes."""
        tokenizer = self.tokenizer
        return max(len(tokenizer.token_bytes(token_id)) for token_id in range(tokenizer.vocab_size))

    def template_for(self, given: str | None, has_tools: bool) -> str | None:
        """The chat template of a request. given: the one it brings, which is refused unless that is allowed."""
        if given is not None and not self._trusts_templates:
            raise RequestError(
                "chat_template: templates of requests are not run (see --trust-request-chat-template)",
                param="chat_template",
            )
        return given or self._template or choose_template(self.tokenizer.chat_templates, has_tools)

    def render(
        self,
        messages: list[dict[str, Any]],
        *,
        chat_template: str | None,
        template_kwargs: Mapping[str, Any] | None,
        tools: list[dict[str, Any]] | None = None,
        **options: Any,
    ) -> str:
        """The prompt of a conversation.

        Args:
            chat_template: one that the request brings.
            template_kwargs: variables that the request brings.
            options: add_generation_prompt, continue_final_message, documents, as render_chat takes them.
        """
        given = template_kwargs or {}
        for name in (*OWN_FIELDS, *TOKENIZER_VARIABLES):
            if name in given:
                reason = "it is a field of its own" if name in OWN_FIELDS else "the tokenizer decides it"
                raise RequestError(f"chat_template_kwargs must not hold {name}: {reason}", param="chat_template_kwargs")
        tokenizer = self.tokenizer
        return render_chat(
            self.template_for(chat_template, has_tools=bool(tools)),
            messages,
            tools=tools,
            bos_token=tokenizer.bos_token,
            eos_token=tokenizer.eos_token,
            **{**self._template_kwargs, **given, **options},
        )


def sampling_defaults(llm: LLM, config: ServerConfig) -> dict[str, Any]:
    """What a request's sampling starts from: generation_config.json and what overrides it.

    Raises:
        ConfigError: a value is none that SamplingParams takes.
    """
    values: dict[str, Any] = {}
    if config.generation_config == "auto":
        recommended = llm.default_sampling_params()
        neutral = SamplingParams()
        values = {
            n: v for n in (*GENERATION_DEFAULTS, "max_tokens") if (v := getattr(recommended, n)) != getattr(neutral, n)
        }
    for name, value in config.override_generation_config.items():
        values["max_tokens" if name == "max_new_tokens" else name] = value
    try:
        SamplingParams(**values)
    except RequestError as error:
        raise ConfigError(f"override_generation_config: {error}") from None
    return values
