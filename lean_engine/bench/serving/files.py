"""Data sets that are files of recorded prompts: ShareGPT's JSON, and JSON lines with a prompt each."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

from lean_engine.bench.serving.datasets import Conversation, DatasetOptions, ServeTurn
from lean_engine.bench.serving.target import Prompt
from lean_engine.bench.trace import parse_line, shown
from lean_engine.config import is_integer
from lean_engine.errors import ConfigError
from lean_engine.text.tokenizer import Tokenizer

MIN_TOKENS = 4  # of a prompt and of an answer of ShareGPT; its limits are those that vLLM's benchmark sets
MAX_PROMPT_TOKENS = 1024
MAX_TOKENS = 2048  # of both


def read(options: DatasetOptions) -> bytes:
    assert options.path is not None
    try:
        return Path(options.path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{options.path}: cannot be read: {error.strerror or error}") from None


def sharegpt(options: DatasetOptions, tokenizer: Callable[[], Tokenizer]) -> list[Conversation]:
    """First questions with the lengths of their recorded answers: {"conversations": [{"from", "value"}, …]} each."""
    try:
        entries = json.loads(read(options))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{options.path}: is not valid JSON: {error}") from None
    if not isinstance(entries, list):
        raise ConfigError(f"{options.path}: is not a JSON list but {type(entries).__name__}")
    usable = [entry for entry in entries if isinstance(entry, dict) and len(entry.get("conversations") or ()) >= 2]
    random = Random(f"order {options.seed}")
    if options.shuffles:
        random.shuffle(usable)
    turns: list[ServeTurn] = []
    for entry in usable:
        if len(turns) == options.num_prompts:
            break
        turn = first_turn(entry, options, tokenizer())
        if turn is not None:
            turns.append(turn)
    return filled(turns, options)


def first_turn(entry: dict[str, Any], options: DatasetOptions, tokenizer: Tokenizer) -> ServeTurn | None:
    """None where the texts are too short or too long."""
    try:
        question, answer = (entry["conversations"][i]["value"] for i in (0, 1))
        prompt_len, answer_len = (len(tokenizer.encode(text)) for text in (question, answer))
    except (LookupError, TypeError, AttributeError):
        raise ConfigError(
            f'{options.path}: conversations must be lists of {{"from", "value"}}, found {entry}'
        ) from None
    output_len = answer_len if options.sharegpt_output_len is None else options.sharegpt_output_len
    is_long_enough = prompt_len >= MIN_TOKENS and (answer_len >= MIN_TOKENS or options.sharegpt_output_len is not None)
    if not is_long_enough or prompt_len > MAX_PROMPT_TOKENS or prompt_len + output_len > MAX_TOKENS:
        return None
    return ServeTurn(question, prompt_len, output_len)


def custom(options: DatasetOptions, tokenizer: Callable[[], Tokenizer]) -> list[Conversation]:
    """JSON lines: `prompt` (text, or token ids) or `messages`, and `output_tokens` where it is not the default.

    Other keys are not looked at.
    """
    turns: list[ServeTurn] = []
    for number, line in enumerate(read(options).split(b"\n"), 1):
        if line.strip():
            where = f"{options.path}:{number}"
            turns.append(custom_turn(parse_line(line, where), where, options, tokenizer))
    if options.shuffles:
        Random(f"order {options.seed}").shuffle(turns)
    return filled(turns[: options.num_prompts], options)


def custom_turn(
    fields: dict[str, Any], where: str, options: DatasetOptions, tokenizer: Callable[[], Tokenizer]
) -> ServeTurn:
    prompt: Prompt | None = fields.get("messages") if "messages" in fields else fields.get("prompt")
    is_ids = isinstance(prompt, list) and bool(prompt) and all(is_integer(i) for i in prompt)
    is_messages = isinstance(prompt, list) and bool(prompt) and all(isinstance(m, dict) for m in prompt)
    if not (is_messages if "messages" in fields else is_ids or (isinstance(prompt, str) and prompt)):
        found = "neither prompt nor messages" if prompt is None else shown(prompt)
        raise ConfigError(f"{where}: found {found}; must have a prompt (text or token ids) or messages")
    assert prompt is not None
    if is_messages and not options.is_chat:
        raise ConfigError(f"{where}: has messages, which need --backend openai-chat")
    if is_ids and options.is_chat:
        prompt = tokenizer().decode(prompt)  # type: ignore[arg-type]
    output_len = fields.get("output_tokens", options.custom_output_len)
    if not is_integer(output_len) or output_len < 1:
        raise ConfigError(f"{where}: output_tokens is {shown(output_len)}, must be an integer of at least 1")
    return ServeTurn(prompt, len(prompt) if is_ids and not options.is_chat else None, output_len)


def filled(turns: Sequence[ServeTurn], options: DatasetOptions) -> list[Conversation]:
    """num_prompts of them, from the start again where there are too few and that is wanted."""
    if not turns:
        raise ConfigError(f"{options.path}: holds no usable prompt")
    count = options.num_prompts if options.oversamples else min(len(turns), options.num_prompts)
    return [Conversation((turns[i % len(turns)],)) for i in range(count)]
