"""What a serving benchmark asks: conversations of one turn or several, as token ids or as text.

A completions endpoint gets token ids, so that prompts have exactly the length that was asked for and no tokenizer on
the server is timed by accident; a chat endpoint gets text. `random`, `prefix_repetition`, `sharegpt` and `custom` are
like vLLM's data sets of these names; `trace` reads what bench/trace describes, with arrival times in seconds; the other
names are the mixes of bench/workloads, among them `multi-turn`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Any

from lean_engine.bench.serving.prompts import PromptSource
from lean_engine.bench.serving.target import Prompt
from lean_engine.bench.trace import read_trace
from lean_engine.bench.workloads import MIXES, Workload, make_workload, trace_workload
from lean_engine.errors import ConfigError
from lean_engine.text.tokenizer import Tokenizer

MEAN_DELAY = 200.0  # steps between the turns of the mix multi-turn: what --turn-delay stands for
History = Callable[[Prompt, str, Prompt], Prompt]  # prompt, its answer, what follows → the next prompt


@dataclass(frozen=True, slots=True)
class ServeTurn:
    """One request."""

    prompt: Prompt  # of a later turn: what it adds to the history
    prompt_len: int | None  # tokens; None where only the server can know
    output_len: int  # max_tokens
    delay: float = 0.0  # seconds since the previous turn's answer ended
    fields: Mapping[str, Any] = field(default_factory=dict)  # further fields of the body


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns in a row."""

    turns: Sequence[ServeTurn]
    arrival: float | None = None  # seconds since the start, where the data set says it


@dataclass(frozen=True, slots=True)
class DatasetOptions:
    """What is wanted. Lengths in tokens."""

    name: str = "random"
    path: str | None = None
    num_prompts: int = 1000
    seed: int = 0
    is_chat: bool = False
    random_input_len: int = 1024
    random_output_len: int = 128
    random_range_ratio: float = 0.0
    random_prefix_len: int = 0
    prefix_repetition_prefix_len: int = 256
    prefix_repetition_suffix_len: int = 256
    prefix_repetition_num_prefixes: int = 10
    prefix_repetition_output_len: int = 128
    sharegpt_output_len: int | None = None  # None: that of the recorded answer
    custom_output_len: int = 256
    oversamples: bool = True  # whether a file that holds too few requests is gone through again
    shuffles: bool = True
    turn_delay: float = 1.0  # seconds between turns, on average


SYNTHETIC = ("random", "prefix_repetition")
FILES = ("sharegpt", "custom", "trace")
NAMES = (*SYNTHETIC, *FILES, *(name for name in MIXES if name != "random"))


def make_conversations(options: DatasetOptions, tokenizer: Callable[[], Tokenizer]) -> list[Conversation]:
    """The conversations of a data set, num_prompts requests in all (of a trace, all of them).

    Args:
        tokenizer: called by data sets that need one.

    Raises:
        ConfigError: a name, a number or a file is wrong.
    """
    check_options(options)
    if options.name in FILES and options.path is None:
        raise ConfigError(f"the data set {options.name!r} needs --dataset-path")
    if options.name not in FILES and options.path is not None:
        raise ConfigError(f"--dataset-path does not go with the data set {options.name!r}")
    if options.name == "custom":
        from lean_engine.bench.serving.files import custom

        return custom(options, tokenizer)
    if options.name == "sharegpt":
        from lean_engine.bench.serving.files import sharegpt

        return sharegpt(options, tokenizer)
    source = PromptSource(tokenizer(), options.seed)
    if options.name == "random":
        return random(options, source)
    if options.name == "prefix_repetition":
        return prefix_repetition(options, source)
    if options.name == "trace":
        assert options.path is not None
        requests = read_trace(options.path)
        conversations = of_workload(trace_workload(options.path, requests, options.seed), options, source)
        in_order = sorted(requests, key=lambda r: r.arrival_time)
        return [
            with_own_ids(c, r.prompt_token_ids, r.arrival_time, options, source)
            for c, r in zip(conversations, in_order, strict=True)
        ]
    return of_workload(make_workload(options.name, options.num_prompts, options.seed, math.inf), options, source)


def check_options(options: DatasetOptions) -> None:
    if options.name not in NAMES:
        raise ConfigError(f"data set is {options.name!r}, must be one of: {', '.join(NAMES)}")
    minima = {"num_prompts": 1, "random_input_len": 1, "random_output_len": 1, "random_prefix_len": 0}
    minima |= {f"prefix_repetition_{name}": 1 for name in ("prefix_len", "suffix_len", "num_prefixes", "output_len")}
    minima |= {"sharegpt_output_len": 1, "custom_output_len": 1}
    for name, minimum in minima.items():
        value = getattr(options, name)
        if value is not None and value < minimum:
            raise ConfigError(f"{name} is {value}, must be at least {minimum}")
    if not 0 <= options.random_range_ratio < 1:
        raise ConfigError(f"random_range_ratio is {options.random_range_ratio:g}, must be at least 0 and below 1")
    if not 0 <= options.turn_delay < math.inf:
        raise ConfigError(f"turn_delay is {options.turn_delay:g}, must be at least 0")


def random(options: DatasetOptions, source: PromptSource) -> list[Conversation]:
    """Prompts that have nothing in common behind a prefix of random_prefix_len; lengths within random_range_ratio."""
    lengths = Random(f"lengths {options.seed}")
    ratio = options.random_range_ratio

    def near(length: int) -> int:
        return max(1, lengths.randint(math.floor(length * (1 - ratio)), math.ceil(length * (1 + ratio))))

    prefix = joined(options, source, options.random_prefix_len) if options.random_prefix_len else None
    conversations = []
    for _ in range(options.num_prompts):
        body = joined(options, source, near(options.random_input_len))
        turn = ServeTurn(*(body if prefix is None else behind(prefix, body, source)), near(options.random_output_len))
        conversations.append(Conversation((turn,)))
    return conversations


def prefix_repetition(options: DatasetOptions, source: PromptSource) -> list[Conversation]:
    """Prompts of num_prefixes groups, shuffled; those of a group begin alike."""
    count = min(options.prefix_repetition_num_prefixes, options.num_prompts)
    prefixes = [joined(options, source, options.prefix_repetition_prefix_len) for _ in range(count)]
    turns = []
    for i in range(options.num_prompts):
        suffix = joined(options, source, options.prefix_repetition_suffix_len)
        turns.append(ServeTurn(*behind(prefixes[i % count], suffix, source), options.prefix_repetition_output_len))
    if options.shuffles:
        Random(f"order {options.seed}").shuffle(turns)
    return [Conversation((turn,)) for turn in turns]


def joined(options: DatasetOptions, source: PromptSource, num_tokens: int) -> tuple[Prompt, int]:
    """A random prompt in the form that the endpoint takes, and its length."""
    return source.text(num_tokens) if options.is_chat else (source.token_ids(num_tokens), num_tokens)


def behind(prefix: tuple[Prompt, int], body: tuple[Prompt, int], source: PromptSource) -> tuple[Prompt, int]:
    if isinstance(prefix[0], str):
        text = f"{prefix[0]} {body[0]}"
        return text, len(source.tokenizer.encode(text, add_special_tokens=False))
    assert isinstance(body[0], list)
    return [*prefix[0], *body[0]], prefix[1] + body[1]


def of_workload(workload: Workload, options: DatasetOptions, source: PromptSource) -> list[Conversation]:
    """A mix or a trace in the server's vocabulary: what begins alike still does, and lengths hold."""
    make = partial(turn_prompt, source, options.is_chat)
    found = []
    for turns in workload.conversations:
        served = []
        for number, turn in enumerate(turns):
            delay = turn.delay / MEAN_DELAY * options.turn_delay if number else 0.0
            more = {"priority": turn.priority} if turn.priority else {}
            length = None if number or options.is_chat else len(turn.new_token_ids)
            served.append(ServeTurn(make(turn.new_token_ids), length, len(turn.output_token_ids), delay, more))
        found.append(Conversation(tuple(served)))
    return found


def turn_prompt(source: PromptSource, is_chat: bool, numbers: Sequence[int]) -> Prompt:
    if not is_chat:
        return source.ids_for(numbers)
    return [{"role": "user", "content": source.text_for(numbers).lstrip()}]


def with_own_ids(
    conversation: Conversation, ids: list[int] | None, arrival: float, options: DatasetOptions, source: PromptSource
) -> Conversation:
    """A trace's request at its time, with the ids that the trace holds, if any."""
    turn = conversation.turns[0]
    if ids is not None:
        content = source.tokenizer.decode(ids) if options.is_chat else ""
        prompt: Prompt = [{"role": "user", "content": content}] if options.is_chat else ids
        turn = ServeTurn(prompt, None if options.is_chat else len(ids), turn.output_len, 0.0, turn.fields)
    return Conversation((turn,), arrival)


def history_of(is_chat: bool, tokenizer: Callable[[], Tokenizer]) -> History:
    """How a conversation goes on: the whole of it and what is new."""

    def chat(prompt: Prompt, answer: str, new: Prompt) -> Prompt:
        assert isinstance(prompt, list)
        assert isinstance(new, list)
        return [*prompt, {"role": "assistant", "content": answer}, *new]

    def completion(prompt: Prompt, answer: str, new: Prompt) -> Prompt:
        assert isinstance(prompt, list)
        assert isinstance(new, list)
        return [*prompt, *tokenizer().encode(answer, add_special_tokens=False), *new]

    return chat if is_chat else completion
