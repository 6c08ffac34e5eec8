"""Prometheus metrics under vLLM's names, with the prefix `lean_engine:`; labels model_name and engine.

The numbers are plain attributes that the event loop changes, a report of the engine at a time; a scrape reads them.
Intervals: queue = arrival → first scheduled, prefill = first scheduled → first token, decode = first → last token,
inference = first scheduled → last token, e2e = arrival → end. A preemption starts none of them again. Requests are
counted by answer: n=2 is two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from lean_engine.engine.messages import FinishedAnswer, Report
from lean_engine.histogram import SECONDS, Histogram
from lean_engine.memory.block_pool import BlockPool

PREFIX = "lean_engine:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FINISH_REASONS = ("stop", "length", "abort", "error")

TTFT_SECONDS = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_SECONDS = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0),
    *(2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_SECONDS = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
ANSWERS = (1, 2, 5, 10, 20)
PREEMPTIONS = (0, 1, 2, 5, 10, 20)

HISTOGRAMS: dict[str, tuple[str, Sequence[float]]] = {  # name → help, buckets; token buckets depend on the context
    "time_to_first_token_seconds": ("Arrival to first token.", TTFT_SECONDS),
    "inter_token_latency_seconds": ("Between two tokens of an answer.", TOKEN_SECONDS),
    "request_time_per_output_token_seconds": ("Decode time per token after the first.", TOKEN_SECONDS),
    "e2e_request_latency_seconds": ("Arrival to end.", REQUEST_SECONDS),
    "request_queue_time_seconds": ("Arrival to first scheduled.", REQUEST_SECONDS),
    "request_prefill_time_seconds": ("First scheduled to first token.", REQUEST_SECONDS),
    "request_decode_time_seconds": ("First token to end.", REQUEST_SECONDS),
    "request_inference_time_seconds": ("First scheduled to end.", REQUEST_SECONDS),
    "iteration_tokens_total": ("Tokens computed in a step.", STEP_TOKENS),
    "request_prompt_tokens": ("Tokens of prompts.", ()),
    "request_generation_tokens": ("Tokens of answers.", ()),
    "request_prefill_kv_computed_tokens": ("Prompt tokens computed, those found in the cache apart.", ()),
    "request_max_num_generation_tokens": ("The longest of a request's answers, tokens.", ()),
    "request_params_max_tokens": ("The max_tokens of requests.", ()),
    "request_params_n": ("The n of requests.", ANSWERS),
    "request_num_preemptions": ("How often an answer was preempted.", PREEMPTIONS),
    "kv_block_lifetime_seconds": ("A block's grant to the loss of its content.", SECONDS),
    "kv_block_idle_before_evict_seconds": ("A cached block's last use to its eviction.", SECONDS),
}
COUNTERS = {  # name without _total → help
    "prompt_tokens": "Prompt tokens of requests whose prompt was computed.",
    "prompt_tokens_cached": "Of those, found in the prefix cache.",
    "generation_tokens": "Tokens generated.",
    "num_preemptions": "Preemptions.",
    "prefix_cache_queries": "Prompt tokens looked up in the prefix cache.",
    "prefix_cache_hits": "Of those, found.",
    "admission_rejections": "Requests refused because too many were waiting.",
}
GAUGES = {
    "num_requests_running": "Requests running.",
    "num_requests_waiting": "Requests waiting.",
    "kv_cache_usage_perc": "Share of the KV blocks that requests hold; cached free ones are free. 0 to 1.",
}


class Totals(NamedTuple):
    """Tokens since the start."""

    prompt_tokens: int
    generation_tokens: int


class Metrics:
    """Numbers since the start, and how things stand now.

    Attributes:
        num_rejected: requests that were refused because too many waited.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.num_rejected = 0
        self._labels = ("", "0")
        self._cache_config: dict[str, str] = {}
        self._counts = dict.fromkeys(COUNTERS, 0)
        self._gauges = dict.fromkeys(GAUGES, 0.0)
        self._ends = dict.fromkeys(FINISH_REASONS, 0)
        self._histograms: dict[str, Histogram] = {}

    def open(
        self, model_name: str, max_model_len: int, cache_config: Mapping[str, object], pool: BlockPool | None = None
    ) -> None:
        """Begin to show metrics, once the model is loaded.

        Args:
            model_name: the label.
            max_model_len: bounds the buckets of token counts.
            cache_config: labels of cache_config_info.
            pool: whose blocks' times are shown.
        """
        self._labels = (model_name, "0")
        self._cache_config = {name: str(value) for name, value in cache_config.items()}
        tokens = token_buckets(max_model_len)
        self._histograms = {name: Histogram(buckets or tokens) for name, (_, buckets) in HISTOGRAMS.items()}
        if (
            pool is not None
        ):  # they change in the engine's thread; a scrape may see one block more in one than the other
            self._histograms["kv_block_lifetime_seconds"] = pool.lifetime
            self._histograms["kv_block_idle_before_evict_seconds"] = pool.idle_before_evict
        self.registry.register(self)

    def totals(self) -> Totals:
        return Totals(self._counts["prompt_tokens"], self._counts["generation_tokens"])

    def exposition(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)

    # -- what the engine reports

    def take(self, report: Report) -> None:
        stats, trace, counts = report.stats, report.trace, self._counts
        self._gauges["num_requests_running"] = stats.num_running
        self._gauges["num_requests_waiting"] = stats.num_waiting
        self._gauges["kv_cache_usage_perc"] = stats.usage
        counts["prefix_cache_queries"] = stats.num_query_tokens
        counts["prefix_cache_hits"] = stats.num_hit_tokens
        if report.has_stepped:
            counts["num_preemptions"] += stats.num_preempted
            self._histograms["iteration_tokens_total"].observe(stats.num_tokens)
        counts["generation_tokens"] += trace.num_output_tokens
        for num_tokens, num_cached in trace.prompts:
            counts["prompt_tokens"] += num_tokens
            counts["prompt_tokens_cached"] += num_cached
        for seconds in trace.first_token_seconds:
            self._histograms["time_to_first_token_seconds"].observe(seconds)
        between = self._histograms["inter_token_latency_seconds"]
        for seconds, count in trace.token_intervals.items():
            between.observe(seconds, count)
        for answer in trace.finished:
            self._take_finished(answer)

    def _take_finished(self, answer: FinishedAnswer) -> None:
        self._ends[answer.finish_reason] += 1
        observed: dict[str, float | None] = {
            "e2e_request_latency_seconds": answer.e2e,
            "request_queue_time_seconds": answer.queue,
            "request_prefill_time_seconds": answer.prefill,
            "request_decode_time_seconds": answer.decode,
            "request_inference_time_seconds": answer.inference,
            "request_prompt_tokens": answer.num_prompt_tokens,
            "request_generation_tokens": answer.num_output_tokens,
            "request_prefill_kv_computed_tokens": answer.num_prompt_tokens - answer.num_cached_tokens,
            "request_num_preemptions": answer.num_preemptions,
        }
        if answer.num_output_tokens > 1 and answer.decode is not None:
            observed["request_time_per_output_token_seconds"] = answer.decode / (answer.num_output_tokens - 1)
        if answer.longest is not None:
            observed["request_params_n"] = answer.n
            observed["request_max_num_generation_tokens"] = answer.longest
            observed["request_params_max_tokens"] = answer.max_tokens
        for name, value in observed.items():
            if value is not None:
                self._histograms[name].observe(value)

    # -- a scrape

    def collect(self) -> Iterator[Metric]:
        """What prometheus-client asks a collector for."""
        labels = ("model_name", "engine")
        for name, text in GAUGES.items():
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=labels)
            gauge.add_metric(self._labels, self._gauges[name])
            yield gauge
        self._counts["admission_rejections"] = self.num_rejected
        for name, text in COUNTERS.items():
            counter = CounterMetricFamily(PREFIX + name, text, labels=labels)
            counter.add_metric(self._labels, self._counts[name])
            yield counter
        yield self._by_label("request_success", "Answers by how they ended.", "finished_reason", self._ends)
        cached, all_of = self._counts["prompt_tokens_cached"], self._counts["prompt_tokens"]
        sources = {"local_compute": all_of - cached, "local_cache_hit": cached}
        yield self._by_label("prompt_tokens_by_source", "Prompt tokens by where they came from.", "source", sources)
        for name, (text, _) in HISTOGRAMS.items():
            family = HistogramMetricFamily(PREFIX + name, text, labels=labels)
            histogram = self._histograms[name]
            family.add_metric(self._labels, cumulative(histogram), histogram.sum)
            yield family
        info = GaugeMetricFamily(
            PREFIX + "cache_config_info", "The KV cache, in labels.", labels=("engine", *self._cache_config)
        )
        info.add_metric(("0", *self._cache_config.values()), 1)
        yield info

    def _by_label(self, name: str, text: str, label: str, counts: Mapping[str, int]) -> Metric:
        counter = CounterMetricFamily(PREFIX + name, text, labels=("model_name", "engine", label))
        for value, count in counts.items():
            counter.add_metric((*self._labels, value), count)
        return counter


def cumulative(histogram: Histogram) -> list[tuple[str, float]]:
    """(upper bound, values up to it), the last bound +Inf."""
    total, buckets = 0, []
    for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
        total += count
        buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), float(total)))
    return buckets


def token_buckets(max_model_len: int) -> list[float]:
    """1, 2, 5, 10, … up to the context."""
    steps = (factor * 10**power for power in range(10) for factor in (1, 2, 5))
    return [float(step) for step in steps if step <= max_model_len]
