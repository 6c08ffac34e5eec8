"""What a serving engine is asked for: seeded synthetic mixes of conversations, and those of a trace.

A workload is a list of conversations. Each turn's prompt is the whole history (the previous prompt, what was really
generated) and new tokens; it is sent when the previous turn has ended and its delay has passed. So a mix with several
turns reacts to the engine: a slow one gets its next turns later. What a turn generates is part of the workload, so it
depends neither on the engine's limits nor on its batches.

Time is counted in steps of the engine. The same name, number, seed and rate give the same workload everywhere.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from random import Random
from typing import Any

from lean_engine.bench.trace import TraceRequest
from lean_engine.errors import ConfigError

NUM_COMMON_IDS = 65536  # ids below occur anywhere; each one from here on occurs once in a workload
MAX_STEP = 2**53  # of an arrival: beyond it a step more is no other number
MAX_TRACE_TOKENS = 2**24  # of one request: beyond any context, and a slip of the pen must not fill the memory


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a conversation."""

    new_token_ids: array[int]  # what the prompt has beyond the history
    output_token_ids: array[int]
    delay: float  # steps since the previous turn ended; of a first turn, since the start
    priority: int = 0  # lower ones first, where the scheduler's policy heeds it


Conversation = tuple[Turn, ...]
Lengths = tuple[float, float, int, int]  # mean, sigma, low, high


@dataclass(frozen=True, slots=True)
class Workload:
    """Conversations, by the time they begin."""

    conversations: Sequence[Conversation]
    origin: Mapping[str, Any]  # what it was made from, for reports; "workload" names it

    @property
    def num_requests(self) -> int:
        return sum(map(len, self.conversations))

    @property
    def max_num_tokens(self) -> int:
        """Prompt and output of the longest request."""
        return max(sum(len(t.new_token_ids) + len(t.output_token_ids) for t in turns) for turns in self.conversations)


class Source:
    """Random lengths and token ids, reproducible from a seed."""

    def __init__(self, seed: str) -> None:
        self.random = Random(seed)
        self._num_unique = 0

    def length(self, mean: float, sigma: float, low: int, high: int) -> int:
        """Lognormal with this mean before it is cut to [low, high]; sigma is that of the logarithm."""
        number = self.random.lognormvariate(math.log(mean) - sigma * sigma / 2, sigma)
        return min(high, max(low, round(number)))

    def tokens(self, num_tokens: int) -> array[int]:
        return array("I", array("H", self.random.randbytes(2 * num_tokens)))

    def unique_tokens(self, num_tokens: int) -> array[int]:
        """Tokens of which the first occurs nowhere else, so that nothing that begins with them is ever found again."""
        ids = self.tokens(num_tokens)
        ids[0] = NUM_COMMON_IDS + self._num_unique
        self._num_unique += 1
        return ids

    def delay(self, mean: float) -> float:
        """Exponential, steps."""
        return self.random.expovariate(1 / mean)


class Popular:
    """A choice among texts of which few are wanted often: the n-th has the weight 1 / n (Zipf)."""

    def __init__(self, texts: Sequence[array[int]]) -> None:
        self.texts = texts
        self.cumulative = list(accumulate(1 / n for n in range(1, len(texts) + 1)))

    def one(self, random: Random) -> array[int]:
        return self.texts[self._index(random)]

    def several(self, random: Random, count: int) -> list[array[int]]:
        """Different ones, the popular first."""
        chosen: set[int] = set()
        while len(chosen) < count:
            chosen.add(self._index(random))
        return [self.texts[i] for i in sorted(chosen)]

    def _index(self, random: Random) -> int:
        return random.choices(range(len(self.texts)), cum_weights=self.cumulative)[0]


# -- the mixes: endless conversations, of which a workload takes as many as it needs


def chat(source: Source) -> Iterator[Conversation]:
    """Means of prompt and output are those of ShareGPT in Kwon et al. 2023 (PagedAttention), table of datasets."""
    systems = Popular([source.tokens(source.length(150, 0.6, 30, 600)) for _ in range(8)])
    while True:
        prompt = systems.one(source.random) + source.unique_tokens(source.length(161, 1.0, 4, 2048))
        yield (Turn(prompt, source.tokens(source.length(338, 0.9, 2, 2048)), 0.0),)


def shared_prefix(source: Source) -> Iterator[Conversation]:
    prefixes = [source.tokens(source.random.randint(512, 1536)) for _ in range(16)]
    while True:
        prompt = source.random.choice(prefixes) + source.unique_tokens(source.length(64, 0.8, 4, 512))
        yield (Turn(prompt, source.tokens(source.length(128, 0.8, 2, 1024)), 0.0),)


def multi_turn(source: Source) -> Iterator[Conversation]:
    systems = Popular([source.tokens(source.length(150, 0.6, 30, 600)) for _ in range(8)])
    while True:
        start = systems.one(source.random) + source.unique_tokens(source.length(60, 1.0, 4, 1024))
        yield conversation(source, start, (200, 0.8, 2, 1024), (60, 1.0, 4, 1024), more=(1, 9), delay=200)


def conversation(
    source: Source, start: array[int], output: Lengths, message: Lengths, more: tuple[int, int], delay: float
) -> Conversation:
    """A first turn and from `more[0]` to `more[1]` others; output, message: as Source.length takes them."""
    turns = [Turn(start, source.tokens(source.length(*output)), 0.0)]
    for _ in range(source.random.randint(*more)):
        text = source.tokens(source.length(*message))
        turns.append(Turn(text, source.tokens(source.length(*output)), source.delay(delay)))
    return tuple(turns)


def rag(source: Source) -> Iterator[Conversation]:
    system = source.tokens(200)
    documents = Popular([source.tokens(source.length(400, 0.4, 100, 1000)) for _ in range(200)])
    while True:
        prompt = array("I", system)
        for document in documents.several(source.random, 4):
            prompt += document
        prompt += source.unique_tokens(source.length(30, 0.6, 4, 200))
        yield (Turn(prompt, source.tokens(source.length(150, 0.7, 2, 1024)), 0.0),)


def agent(source: Source) -> Iterator[Conversation]:
    tools = Popular([source.tokens(source.random.randint(1500, 3500)) for _ in range(3)])
    while True:
        start = tools.one(source.random) + source.unique_tokens(source.length(150, 0.8, 8, 1024))
        yield conversation(source, start, (60, 0.6, 4, 400), (200, 0.9, 4, 2000), more=(5, 19), delay=10)


def unrelated(source: Source) -> Iterator[Conversation]:
    while True:
        prompt = source.unique_tokens(source.length(400, 0.8, 4, 4096))
        yield (Turn(prompt, source.tokens(source.length(200, 0.8, 2, 1024)), 0.0),)


@dataclass(frozen=True, slots=True)
class Mix:
    """A kind of workload."""

    conversations: Callable[[Source], Iterator[Conversation]]
    rate: float  # conversations that begin per step unless said; keeps the default engine busy without drowning it
    description: str


MIXES = {
    "chat": Mix(chat, 0.33, "unrelated chats behind 8 shared system prompts; lognormal lengths, means as in ShareGPT"),
    "shared-prefix": Mix(shared_prefix, 0.8, "16 groups, each with a prefix of 512 to 1536 tokens, and short tails"),
    "multi-turn": Mix(multi_turn, 0.03, "chats of 2 to 10 turns; each prompt is the whole history so far"),
    "rag": Mix(rag, 0.22, "a system prompt, 4 of 200 documents (few are popular, Zipf) in a fixed order, a question"),
    "agent": Mix(agent, 0.025, "a long prompt of tools, then 6 to 20 short turns that grow one context"),
    "random": Mix(unrelated, 0.4, "prompts that have nothing in common"),
}


def make_workload(name: str, num_requests: int, seed: int, rate: float | None = None) -> Workload:
    """A mix of `num_requests` requests; the last conversation is cut where they are complete.

    Args:
        name: one of MIXES.
        rate: conversations that begin per step, as a Poisson process; infinity: all at the start; None: the mix's own.

    Raises:
        ConfigError: there is no such mix, or a number is out of range.
    """
    if name not in MIXES:
        raise ConfigError(f"workload is {name!r}, must be one of: {', '.join(MIXES)}")
    if num_requests < 1:
        raise ConfigError(f"num_requests is {num_requests}, must be at least 1")
    rate = MIXES[name].rate if rate is None else rate
    if not rate > 0:
        raise ConfigError(f"request_rate is {rate:g}, must be above 0 (inf: all requests at the start)")
    arrivals = Random(f"arrivals {name} {seed}")
    conversations: list[Conversation] = []
    time, num_left = 0.0, num_requests
    for turns in MIXES[name].conversations(Source(f"{name} {seed}")):
        conversations.append((replace(turns[0], delay=time), *turns[1:num_left]))
        num_left -= len(turns)
        if num_left <= 0:
            break
        time += arrivals.expovariate(rate) if rate < math.inf else 0.0
    shown_rate = rate if rate < math.inf else "inf"  # JSON has no infinity
    if time > MAX_STEP:
        raise ConfigError(f"request_rate is {rate:g}, at which the last request would come after step {MAX_STEP:,}")
    origin = {"workload": name, "num_requests": num_requests, "seed": seed, "request_rate": shown_rate}
    return Workload(conversations, origin)


def trace_workload(name: str, requests: Sequence[TraceRequest], seed: int, step_time: float = 1.0) -> Workload:
    """The requests of a trace, each a conversation of one turn; tokens that it does not hold are made up.

    Args:
        name: of the file.
        step_time: how long a step takes, in the unit of the trace's arrival times.

    Raises:
        ConfigError: a step takes no time, or a request is longer than any context.
    """
    if not 0 < step_time < math.inf:
        raise ConfigError(f"step_time is {step_time:g}, must be above 0")
    longest = max(r.prompt_len + r.output_len for r in requests)
    if longest > MAX_TRACE_TOKENS:
        raise ConfigError(f"{name}: a request has {longest} tokens, must be at most {MAX_TRACE_TOKENS}")
    source = Source(f"trace {seed}")
    prefixes: dict[str, array[int]] = {}
    conversations: list[Conversation] = []
    for request in sorted(requests, key=lambda r: r.arrival_time):
        prompt = trace_prompt(request, source, prefixes)
        delay = request.arrival_time / step_time
        if delay > MAX_STEP:
            raise ConfigError(
                f"{name}: arrival_time {request.arrival_time:g} at step_time {step_time:g} is after step {MAX_STEP:,}"
            )
        conversations.append((Turn(prompt, source.tokens(request.output_len), delay, request.priority),))
    origin = {"workload": name, "num_requests": len(requests), "seed": seed, "step_time": step_time}
    return Workload(conversations, origin)


def trace_prompt(request: TraceRequest, source: Source, prefixes: dict[str, array[int]]) -> array[int]:
    """Its own ids; else the tokens of its prefix, made once, and a tail that begins like no other."""
    if request.prompt_token_ids is not None:
        return array("I", request.prompt_token_ids)
    prompt = array("I")
    if request.prefix_id is not None:
        if request.prefix_id not in prefixes:
            prefixes[request.prefix_id] = source.unique_tokens(request.prefix_len)
        prompt += prefixes[request.prefix_id]
    num_own = request.prompt_len - len(prompt)
    return prompt + source.unique_tokens(num_own) if num_own else prompt
