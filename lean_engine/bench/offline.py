"""The engine in this process under a fixed batch (latency) and a pile of requests (throughput).

Prompts are random token ids, sampling is at temperature 1 and end-of-text is ignored, so every answer has its full
length: what vLLM's benchmarks of these names do.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from lean_engine.bench.serving.datasets import Conversation
from lean_engine.bench.summary import percentile
from lean_engine.engine.outputs import RequestOutput
from lean_engine.errors import ConfigError
from lean_engine.llm import LLM, Prompt
from lean_engine.sampling.params import SamplingParams

PERCENTS = (10, 25, 50, 75, 90, 99)
OnProgress = Callable[[int, int], None]  # done, in all


@dataclass(frozen=True, slots=True)
class OfflineRequest:
    """A prompt and the tokens it is answered with."""

    prompt: Prompt
    output_len: int


@dataclass(frozen=True, slots=True)
class LatencyReport:
    """Seconds that a batch took, one per iteration."""

    latencies: Sequence[float]
    num_output_tokens: int  # of one iteration

    def figures(self) -> dict[str, Any]:
        """vLLM's keys, and the rate of output tokens."""
        average = statistics.fmean(self.latencies)
        ordered = sorted(self.latencies)
        return {
            "avg_latency": average,
            "std_latency": statistics.pstdev(self.latencies),
            "latencies": list(self.latencies),
            "percentiles": {str(percent): percentile(ordered, percent) for percent in PERCENTS},
            "output_tokens_per_second": self.num_output_tokens / average,
        }


@dataclass(frozen=True, slots=True)
class ThroughputReport:
    """What a pile of requests took."""

    elapsed_time: float  # seconds
    num_requests: int
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int  # of the prompts, found in the prefix cache

    def figures(self) -> dict[str, Any]:
        """vLLM's keys, and the tokens by kind."""
        total = self.num_prompt_tokens + self.num_output_tokens
        return {
            "elapsed_time": self.elapsed_time,
            "num_requests": self.num_requests,
            "total_num_tokens": total,
            "requests_per_second": self.num_requests / self.elapsed_time,
            "tokens_per_second": total / self.elapsed_time,
            "output_tokens_per_second": self.num_output_tokens / self.elapsed_time,
            "total_num_prompt_tokens": self.num_prompt_tokens,
            "total_num_output_tokens": self.num_output_tokens,
            "total_num_cached_tokens": self.num_cached_tokens,
        }


def random_requests(
    llm: LLM, num_requests: int, input_len: int, output_len: int, prefix_len: int = 0, seed: int = 0
) -> list[OfflineRequest]:
    """Prompts of random ordinary token ids behind a prefix that all share. Lengths in tokens."""
    tokenizer = llm.engine.tokenizer
    special = frozenset() if tokenizer is None else tokenizer.special_ids
    ids = [i for i in range(llm.engine.model_config.vocab_size) if i not in special]
    random = Random(f"offline {seed}")
    prefix = random.choices(ids, k=prefix_len)
    return [
        OfflineRequest({"prompt_token_ids": prefix + random.choices(ids, k=input_len)}, output_len)
        for _ in range(num_requests)
    ]


def of_conversations(conversations: Sequence[Conversation]) -> list[OfflineRequest]:
    """The requests of a data set whose conversations have one turn each.

    Raises:
        ConfigError: a conversation has several.
    """
    requests = []
    for conversation in conversations:
        if len(conversation.turns) > 1:
            raise ConfigError("the data set has conversations of several turns, which need a server: bench serve")
        turn = conversation.turns[0]
        prompt: Prompt = turn.prompt if isinstance(turn.prompt, str) else {"prompt_token_ids": turn.prompt}
        requests.append(OfflineRequest(prompt, turn.output_len))
    return requests


def measure_latency(
    llm: LLM,
    requests: Sequence[OfflineRequest],
    num_iters: int,
    num_warmups: int = 0,
    on_progress: OnProgress | None = None,
    **sampling: Any,
) -> LatencyReport:
    """Answer the same batch again and again.

    Args:
        sampling: further fields of SamplingParams, such as n and detokenize.
    """
    latencies: list[float] = []
    num_tokens = 0
    for i in range(num_warmups + num_iters):
        seconds, outputs = answer(llm, requests, sampling)
        if i >= num_warmups:
            latencies.append(seconds)
            num_tokens = count_output(outputs)
        if on_progress is not None:
            on_progress(i + 1, num_warmups + num_iters)
    return LatencyReport(latencies, num_tokens)


def measure_throughput(
    llm: LLM, requests: Sequence[OfflineRequest], on_progress: OnProgress | None = None, **sampling: Any
) -> ThroughputReport:
    """Answer all requests, submitted at once. sampling: as in measure_latency."""
    seconds, outputs = answer(llm, requests, sampling, on_progress)
    return ThroughputReport(
        elapsed_time=seconds,
        num_requests=len(outputs),
        num_prompt_tokens=sum(len(output.prompt_token_ids) for output in outputs),
        num_output_tokens=count_output(outputs),
        num_cached_tokens=sum(output.num_cached_tokens for output in outputs),
    )


def answer(
    llm: LLM, requests: Sequence[OfflineRequest], sampling: dict[str, Any], on_progress: OnProgress | None = None
) -> tuple[float, list[RequestOutput]]:
    """Seconds, outputs.

    Raises:
        ConfigError: an answer failed: no figure would mean anything.
    """
    defaults: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "ignore_eos": True}
    params = [SamplingParams(**{**defaults, "max_tokens": r.output_len, **sampling}) for r in requests]
    started = time.perf_counter()
    outputs = llm.generate([r.prompt for r in requests], params, on_progress=on_progress)
    seconds = time.perf_counter() - started
    for output in outputs:
        for completion in output.outputs:
            if completion.error is not None:
                raise ConfigError(f"request {output.request_id} failed: {completion.error}")
    return seconds, outputs


def count_output(outputs: Sequence[RequestOutput]) -> int:
    return sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
