"""LLM: the library's front. Load a model once, then generate, chat or stream.

    from lean_engine import LLM, SamplingParams

    llm = LLM()                                     # the demo model
    for output in llm.generate(["The sea is"], SamplingParams(max_tokens=20)):
        print(output.outputs[0].text)

One thread at a time may use an LLM; no signal handlers are installed.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from lean_engine.config import EngineConfig
from lean_engine.errors import ConfigError, RequestError
from lean_engine.sampling.params import SamplingParams

if TYPE_CHECKING:
    from lean_engine.engine.outputs import Group, RequestOutput
    from lean_engine.scheduling.statistics import StepStats
    from lean_engine.text.tokenizer import Tokenizer

Prompt = str | Mapping[str, Any]  # text, or {"prompt": text}, or {"prompt_token_ids": ids}, or both: the ids count
Messages = Sequence[Mapping[str, Any]]  # one conversation: {"role": …, "content": …} each
PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
GENERATION_DEFAULTS = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")


class Encoded(NamedTuple):
    """A prompt as the engine takes it."""

    text: str | None
    token_ids: list[int]
    cache_salt: str | None = None


class LLM:
    """A model ready to generate.

    Args:
        model: a directory, a .gguf file, a Hub id, or a built-in name; None = the demo model.
        on_load: told of (bytes loaded, bytes in all) while weights load.
        show_downloads: report downloads on stderr.
        options: fields of EngineConfig.

    Raises:
        ConfigError, CheckpointError, OutOfMemory: the model cannot be served as asked.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        on_load: Callable[[int, int], None] | None = None,
        show_downloads: bool = False,
        **options: Any,
    ) -> None:
        from lean_engine.checkpoint import DEFAULT_MODEL
        from lean_engine.engine.start import start_engine

        self.model = DEFAULT_MODEL if model is None else str(model)
        self.config = EngineConfig.from_options(options)
        self._template = read_template(self.config.chat_template)
        if self._template is not None:
            check_template(self._template)
        self._started = start_engine(self.model, self.config, on_load, show_downloads)
        self.engine = self._started.engine
        self._num_requests = 0

    # -- what is loaded

    @property
    def tokenizer(self) -> Tokenizer:
        tokenizer = self.engine.tokenizer
        if tokenizer is None:
            raise ConfigError(f"{self.model} has no tokenizer; give prompts as token ids")
        return tokenizer

    @property
    def max_model_len(self) -> int:
        """Tokens of prompt and output at most."""
        return self.engine.max_model_len

    def describe_memory(self) -> str:
        """One line: how much KV cache there is and what fits into it."""
        return self._started.pool_size.describe()

    def default_sampling_params(self) -> SamplingParams:
        """What the model's generation_config.json recommends, over the defaults of SamplingParams."""
        found = self._started.checkpoint.generation_config
        values = {name: found[name] for name in GENERATION_DEFAULTS if found.get(name) is not None}
        if found.get("max_new_tokens") is not None:
            values["max_tokens"] = found["max_new_tokens"]
        return SamplingParams(**values)

    # -- generation

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        priority: Sequence[int] | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> list[RequestOutput]:
        """Answer prompts, all batched together.

        Args:
            prompts: one or several: text, {"prompt": text} or {"prompt_token_ids": ids}; with {"cache_salt": text}
                in it, a prompt shares cached blocks only with those of the same salt.
            sampling_params: for all, or one each; None = default_sampling_params().
            priority: one per prompt, lower ones first, under scheduling_policy "priority".
            on_progress: told of (requests finished, requests in all).

        Returns:
            One output per prompt, in their order.

        Raises:
            RequestError: a prompt or a value is wrong; nothing has run then.
        """
        if not isinstance(prompts, str | Mapping | list | tuple):
            raise RequestError(f"prompts is {prompts!r}, must be a prompt or a list of them", param="prompt")
        items: Sequence[Prompt] = [prompts] if isinstance(prompts, str | Mapping) else list(prompts)
        params = self._params_for(len(items), sampling_params)
        return self._run([self._encode(item) for item in items], params, priority, on_progress)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        tools: list[dict[str, Any]] | None = None,
        priority: Sequence[int] | None = None,
        cache_salt: str | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or several.

        Args:
            messages: a conversation is a list of {"role", "content"}; a list of such lists is several.
            chat_template: a Jinja template to use instead of the model's.
            chat_template_kwargs: further variables for the template.
            tools: what the model may call, as in OpenAI's chat requests; a template that takes none is refused. The
                calls in an answer's text are read by `lean_engine.text.tool_calls`.
            cache_salt: of all conversations.
            The others are as in generate.

        Raises:
            RequestError: a message is malformed, or the template refuses the conversation with its own message.
        """
        if not isinstance(messages, list | tuple):
            raise RequestError(f"messages is {messages!r}, must be a list of messages", param="messages")
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        params = self._params_for(len(conversations), sampling_params)
        options: dict[str, Any] = {
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "chat_template": chat_template,
            "tools": tools,
            **(chat_template_kwargs or {}),
        }
        encoded = [Encoded(*self.encode_chat(conversation, **options), cache_salt) for conversation in conversations]
        return self._run(encoded, params, priority, on_progress)

    def stream(
        self,
        prompt: Prompt | Messages,
        sampling_params: SamplingParams | None = None,
    ) -> Iterator[RequestOutput]:
        """Answer one prompt or conversation, yielding what is new after each step that brought something.

        Text, token_ids and logprobs of each output hold only what is new. Leaving the iteration early aborts the
        request.
        """
        encoded = self._encode(prompt) if isinstance(prompt, str | Mapping) else Encoded(*self.encode_chat(prompt))
        return self._stream(encoded, self._params_for(1, sampling_params)[0])

    def encode_chat(self, messages: Any, **options: Any) -> tuple[str, list[int]]:
        """A conversation as prompt text and token ids. options: those of render."""
        text = self.render(messages, **options)
        # The template writes its own special tokens: adding the tokenizer's would double BOS.
        return text, self.tokenizer.encode(text, add_special_tokens=False)

    def render(
        self,
        messages: Any,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template: str | None = None,
        tools: list[dict[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> str:
        """A conversation as the prompt text that chat sends."""
        from lean_engine.text.chat import choose_template, render_chat

        taken = {"template", "messages", "documents", "bos_token", "eos_token"} & set(template_kwargs)
        if taken:
            raise RequestError(f"chat_template_kwargs must not hold {min(taken)}", param="chat_template_kwargs")
        tokenizer = self.tokenizer
        return render_chat(
            read_template(chat_template)
            or self._template
            or choose_template(tokenizer.chat_templates, has_tools=bool(tools)),
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            bos_token=tokenizer.bos_token,
            eos_token=tokenizer.eos_token,
            **template_kwargs,
        )

    def stats(self) -> StepStats:
        """Requests, KV blocks and tokens after the latest step, and prefix-cache totals since the start."""
        return self.engine.stats()

    def reset_prefix_cache(self) -> None:
        """Forget every cached KV block."""
        self.engine.reset_prefix_cache()

    def close(self) -> None:
        """Give threads and memory back: weights, KV blocks, captured steps. Only what is known of the model stays."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside

    def _params_for(
        self, count: int, given: SamplingParams | Sequence[SamplingParams] | None
    ) -> Sequence[SamplingParams]:
        if given is None:
            given = self.default_sampling_params()
        if isinstance(given, SamplingParams):
            return [given] * count
        if not isinstance(given, list | tuple) or not all(isinstance(p, SamplingParams) for p in given):
            raise RequestError(
                f"sampling_params is {given!r}, must be a SamplingParams or a list of them", param="sampling_params"
            )
        if len(given) != count:
            raise RequestError(f"{len(given)} sampling_params for {count} prompts", param="sampling_params")
        return given

    def _encode(self, prompt: Prompt) -> Encoded:
        if isinstance(prompt, str):
            return Encoded(prompt, self.tokenizer.encode(prompt))
        if not isinstance(prompt, Mapping):
            raise RequestError(
                f'a prompt is {reprlib.repr(prompt)}; must be a string or {{"prompt_token_ids": ids}}', param="prompt"
            )
        for key in prompt:
            if key not in PROMPT_KEYS:
                raise RequestError(f"a prompt has the key {key!r}; known: {', '.join(PROMPT_KEYS)}", param="prompt")
        text, ids, salt = (prompt.get(key) for key in PROMPT_KEYS)
        if isinstance(text, str) and ids is None:
            return Encoded(text, self.tokenizer.encode(text), salt)
        token_ids = integers(ids)
        if token_ids is None:
            found = " ".join(reprlib.repr(dict(prompt)).split())
            raise RequestError(
                f"a prompt is {found}; must be a string, or a mapping with prompt_token_ids, a list or a "
                "one-dimensional array of integers",
                param="prompt",
            )
        return Encoded(text, token_ids, salt)

    def _add(self, prompt: Encoded, params: SamplingParams, priority: int = 0) -> Group:
        self._num_requests += 1
        request_id = str(self._num_requests - 1)
        return self.engine.add(
            request_id, prompt.token_ids, params, prompt.text, priority=priority, cache_salt=prompt.cache_salt
        )

    def _run(
        self,
        encoded: Sequence[Encoded],
        params: Sequence[SamplingParams],
        priority: Sequence[int] | None,
        on_progress: Callable[[int, int], None] | None,
    ) -> list[RequestOutput]:
        if priority is not None and not isinstance(priority, list | tuple):
            raise RequestError(
                f"priority is {priority!r}, must be a list of integers, one per prompt", param="priority"
            )
        priorities = [0] * len(encoded) if priority is None else priority
        if len(priorities) != len(encoded):
            raise RequestError(f"{len(priorities)} priorities for {len(encoded)} prompts", param="priority")
        groups: list[Group] = []
        try:
            for prompt, one, rank in zip(encoded, params, priorities, strict=True):
                groups.append(self._add(prompt, one, rank))
            while self.engine.has_work():
                ended = sum(group.is_finished for group in self.engine.step())
                if ended and on_progress is not None:
                    on_progress(sum(g.is_finished for g in groups), len(groups))
        except BaseException:  # nothing of this call is left behind, whatever ended it
            for group in groups:
                self.engine.abort(group.request_id)
            raise
        return [group.output(self.engine.tokenizer) for group in groups]

    def _stream(self, prompt: Encoded, params: SamplingParams) -> Iterator[RequestOutput]:
        from lean_engine.engine.outputs import completion

        group = self._add(prompt, params)
        shown = [(0, 0)] * len(group.answers)  # characters and tokens yielded so far
        try:
            is_last = False
            while not is_last:
                self.engine.step()
                is_last = group.is_finished  # by this step, or by one that somebody else ran meanwhile
                now = [(len(a.text), len(a.token_ids)) for a in group.answers]
                if now == shown and not is_last:
                    continue
                tokenizer = self.engine.tokenizer
                deltas = [completion(a, tokenizer, *shown[a.index]) for a in group.answers]
                shown = now
                yield group.output(tokenizer, deltas)
        finally:
            self.engine.abort(group.request_id)


def integers(values: Any) -> list[int] | None:
    """A list, a tuple or a one-dimensional array (NumPy's, or one like it) of integers as a list; None for all else."""
    if hasattr(values, "tolist") and getattr(values, "ndim", None) == 1:
        values = values.tolist()
    if not isinstance(values, list | tuple):
        return None
    is_plain = all(type(value) is int for value in values)
    if not is_plain and not all(isinstance(v, Integral) and not isinstance(v, bool) for v in values):
        return None
    return list(values) if is_plain else [int(value) for value in values]


def check_template(template: str) -> None:
    """ConfigError where a chat template is no Jinja."""
    import jinja2

    from lean_engine.text.chat import compile_template

    try:
        compile_template(template)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"chat template, line {error.lineno}: {error.message}") from None


def read_template(given: str | None) -> str | None:
    """A chat template given as text, or as the path of a file that holds one."""
    if given is None or "{" in given or "\n" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or no possible path
        raise ConfigError(f"chat template {given!r} is neither a template nor a readable file: {error}") from None
