"""The flags of `lean-engine bench serve`, which `bench sweep` shares, and what is made of them.

Names and defaults are those of vLLM's serving benchmark. A flag that has no effect on what was asked is refused.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import click

from lean_engine.bench.serving.arrivals import STRATEGIES, Ramp
from lean_engine.bench.serving.benchmark import LoadOptions
from lean_engine.bench.serving.datasets import FILES, NAMES, SYNTHETIC, DatasetOptions
from lean_engine.bench.serving.report import METRICS, SLO_NAMES, Slos
from lean_engine.bench.serving.target import BACKENDS
from lean_engine.cli.options import Command, Decorator, Option, flag, gather, is_given
from lean_engine.errors import ConfigError

SEVERAL = ("goodput", "metadata", "header")  # flags that vLLM lets have several values in a row


def several(args: Sequence[str], names: Sequence[str] = SEVERAL) -> list[str]:
    """`--goodput a b` → `--goodput a --goodput b`."""
    found: list[str] = []
    current: str | None = None
    is_first = False
    for arg in args:
        if arg.startswith("--"):
            current = arg if arg.removeprefix("--") in names else None
            is_first = True
        elif current is not None and not is_first:
            found.append(current)
        else:
            is_first = False
        found.append(arg)
    return found


class BenchCommand(Command):
    """A command without a MODEL argument, whose flags may have several values in a row."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, several(args))

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Examples"):
            for example in self.examples:
                formatter.write(f"{'':>{formatter.current_indent}}{example}\n")


def make(section: str, name: str, **settings: Any) -> tuple[str, Decorator]:
    declared = settings.pop("flag", flag(name))
    settings.setdefault("show_default", settings.get("default") is not None)
    return name, click.option(declared, name, cls=Option, section=section, **settings)


SERVER = (
    make("Server", "backend", type=click.Choice(list(BACKENDS)), default="openai",
         help="openai and vllm: /v1/completions with token ids as prompts; openai-chat: /v1/chat/completions."),
    make("Server", "base_url", metavar="URL", help="The server, such as https://host:8000; instead of host and port."),
    make("Server", "host", default="127.0.0.1", help="The server's host."),
    make("Server", "port", type=click.IntRange(1, 65535), default=8000, help="The server's port."),
    make("Server", "endpoint", help="Path of the API.  [default: that of the backend]"),
    make("Server", "model", help="Model as the server calls it.  [default: the first one that it lists]"),
    make("Server", "served_model_name", help="Name to send instead of --model, which then only names the tokenizer."),
    make("Server", "tokenizer", help="Model or directory whose tokenizer makes prompts.  [default: the model's]"),
    make("Server", "api_key", envvar="OPENAI_API_KEY", show_envvar=True, help="Sent as a bearer token."),
    make("Server", "header", multiple=True, metavar="KEY=VALUE", help="Further headers of every request."),
    make("Server", "insecure", is_flag=True, help="Accept any TLS certificate."),
    make("Server", "ready_check_timeout_sec", type=float, default=0.0, help="Seconds to wait until the server is up."),
)  # fmt: skip
DATASET = (
    make("Requests", "dataset_name", type=click.Choice(NAMES), default="random", help="What is asked; see below."),
    make("Requests", "dataset_path", metavar="FILE", help="Of sharegpt, custom and trace."),
    make("Requests", "num_prompts", type=click.IntRange(1), default=1000, help="Requests; of a trace all are sent."),
    make("Requests", "input_len", type=click.IntRange(1), help="Tokens of a prompt: --random-input-len."),
    make("Requests", "output_len", type=click.IntRange(1), help="Tokens of an answer, whatever the data set."),
    make("Requests", "random_input_len", type=click.IntRange(1), default=1024, help="random: tokens of a prompt."),
    make("Requests", "random_output_len", type=click.IntRange(1), default=128, help="random: tokens of an answer."),
    make("Requests", "random_range_ratio", type=float, default=0.0,
         help="random: lengths are uniform within this share around the mean, in [0, 1)."),
    make("Requests", "random_prefix_len", type=click.IntRange(0), default=0,
         help="random: tokens that all prompts begin with, on top."),
    make("Requests", "prefix_repetition_prefix_len", type=click.IntRange(1), default=256, help="Shared tokens."),
    make("Requests", "prefix_repetition_suffix_len", type=click.IntRange(1), default=256, help="Own tokens."),
    make("Requests", "prefix_repetition_num_prefixes", type=click.IntRange(1), default=10, help="Groups of prompts."),
    make("Requests", "prefix_repetition_output_len", type=click.IntRange(1), default=128, help="Tokens of an answer."),
    make("Requests", "sharegpt_output_len", type=click.IntRange(1), help="Instead of the recorded answers' lengths."),
    make("Requests", "custom_output_len", type=click.IntRange(1), default=256, help="Of lines without output_tokens."),
    make("Requests", "no_oversample", is_flag=True, help="Do not repeat a file that has fewer than --num-prompts."),
    make("Requests", "disable_shuffle", is_flag=True, help="Keep a file's order."),
    make("Requests", "turn_delay", type=float, default=1.0, help="Mean seconds between an answer and the next turn."),
    make("Requests", "seed", type=int, default=0, help="The same seed gives the same requests at the same times."),
    make("Requests", "ignore_eos", is_flag=True, help="Ask for answers of full length."),
    make("Requests", "temperature", type=float, help="Of sampling.  [default: 0]"),
    make("Requests", "top_p", type=float, help="Of sampling.  [default: the server's]"),
    make("Requests", "top_k", type=int, help="Of sampling.  [default: the server's]"),
    make("Requests", "extra_body", metavar="JSON", help="Fields of every request's body, over all others."),
)  # fmt: skip
LOAD = (
    make("Load", "request_rate", type=float, default=math.inf, help="Requests per second; inf: all at once."),
    make("Load", "burstiness", type=float, default=1.0,
         help="Shape of the gaps' gamma distribution: 1 is Poisson, less comes in bursts, more is steadier."),
    make("Load", "max_concurrency", type=click.IntRange(1), help="Requests under way at most.  [default: no cap]"),
    make("Load", "ramp_up_strategy", type=click.Choice(STRATEGIES), help="Let the rate grow during the run."),
    make("Load", "ramp_up_start_rps", type=float, help="Requests per second at the start."),
    make("Load", "ramp_up_end_rps", type=float, help="Requests per second at the end."),
    make("Load", "num_warmups", type=click.IntRange(0), default=0, help="Requests before the run, not counted."),
    make("Load", "request_timeout_sec", type=float, default=21600.0, help="Seconds until a request counts as failed."),
)  # fmt: skip
FIGURES = (
    make("Figures", "percentile_metrics", default="ttft,tpot,itl", help="Which latencies to print: of these and e2el."),
    make("Figures", "metric_percentiles", default="99", help="Percentiles, such as 25,50,99.9."),
    make("Figures", "goodput", multiple=True, metavar="NAME:MS ...",
         help="Limits of a good request by ttft, tpot, e2el: --goodput ttft:200 e2el:3000."),
)  # fmt: skip
OF_DATASET = {  # flag → the data sets that it has an effect on
    "dataset_path": FILES,
    "input_len": ("random",),
    "output_len": (*SYNTHETIC, "sharegpt", "custom"),
    "sharegpt_output_len": ("sharegpt",),
    "custom_output_len": ("custom",),
    "no_oversample": ("sharegpt", "custom"),
    "disable_shuffle": ("sharegpt", "custom", "prefix_repetition"),
    "turn_delay": ("multi-turn", "agent"),
    **{name: (name.partition("_")[0],) for name, _ in DATASET if name.startswith("random_")},
    **{name: ("prefix_repetition",) for name, _ in DATASET if name.startswith("prefix_repetition_")},
}


def load_options(*groups: Sequence[tuple[str, Decorator]]) -> Decorator:
    """Put flags on a command; it gets their values as one mapping, `serve`."""
    entries = [entry for group in groups for entry in group]
    return gather("serve", [name for name, _ in entries], [decorator for _, decorator in entries])


# -- what is made of the values


def dataset_options(values: Mapping[str, Any]) -> DatasetOptions:
    """Which requests; click.UsageError for a flag of another data set."""
    name = values["dataset_name"]
    for given, names in OF_DATASET.items():
        if is_given(given) and name not in names:
            raise click.UsageError(f"{flag(given)} does not go with --dataset-name {name}")
    taken = {field: values[field] for field in DatasetOptions.__dataclass_fields__ if field in values}
    if values["input_len"] is not None:
        taken["random_input_len"] = values["input_len"]
    if values["output_len"] is not None:
        lengths = ("random_output_len", "prefix_repetition_output_len", "sharegpt_output_len", "custom_output_len")
        taken |= dict.fromkeys(lengths, values["output_len"])
    return DatasetOptions(
        name=name,
        path=values["dataset_path"],
        is_chat=values["backend"] == "openai-chat",
        oversamples=not values["no_oversample"],
        shuffles=not values["disable_shuffle"],
        **taken,
    )


def run_options(values: Mapping[str, Any]) -> LoadOptions:
    """How they are sent, and what is reported."""
    return LoadOptions(
        request_rate=values["request_rate"],
        burstiness=values["burstiness"],
        ramp=read_ramp(values),
        max_concurrency=values["max_concurrency"],
        num_warmups=values["num_warmups"],
        seed=values["seed"],
        timeout=values["request_timeout_sec"],
        percents=read_percents(values["metric_percentiles"]),
        slos=read_goodput(values["goodput"]),
    )


def read_ramp(values: Mapping[str, Any]) -> Ramp | None:
    strategy, *rates = (values[f"ramp_up_{name}"] for name in ("strategy", "start_rps", "end_rps"))
    if strategy is None:
        if any(rate is not None for rate in rates):
            raise click.UsageError("--ramp-up-start-rps and --ramp-up-end-rps need --ramp-up-strategy")
        return None
    if any(rate is None for rate in rates):
        raise click.UsageError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps")
    return Ramp(strategy, *rates)


def read_percents(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"metric_percentiles is {text!r}, must be numbers such as 50,99") from None


def read_metrics(text: str) -> list[str]:
    """Names of METRICS, in the block's order."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in METRICS:
            raise ConfigError(f"percentile_metrics has {name!r}, must be of: {', '.join(METRICS)}")
    return [name for name in METRICS if name in names]


def read_goodput(texts: Sequence[str]) -> Slos | None:
    limits: dict[str, float] = {}
    for text in texts:
        name, _, number = text.partition(":")
        try:
            limits[name] = float(number)
        except ValueError:
            limits[name] = -1.0
        if name not in SLO_NAMES or not limits[name] >= 0:
            raise ConfigError(f"goodput is {text!r}, must be NAME:MILLISECONDS with one of: {', '.join(SLO_NAMES)}")
    return Slos(limits) if limits else None


def read_pairs(texts: Sequence[str], name: str) -> dict[str, str]:
    pairs = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise ConfigError(f"{name} is {text!r}, must be KEY=VALUE")
        pairs[key] = value
    return pairs


def read_headers(values: Mapping[str, Any]) -> dict[str, str]:
    headers = {} if values["api_key"] is None else {"Authorization": f"Bearer {values['api_key']}"}
    headers |= read_pairs(values["header"], "header")
    for name, value in headers.items():
        if any(c in name + value for c in "\r\n"):
            raise ConfigError(f"header {name!r} holds a line break")
    return headers


def read_extra_body(values: Mapping[str, Any]) -> dict[str, Any]:
    """--extra-body over the sampling flags; greedy unless a temperature is given."""
    body = {name: values[name] for name in ("temperature", "top_p", "top_k") if values[name] is not None}
    text = values["extra_body"]
    if text is None:
        return {"temperature": 0.0, **body}
    try:
        extra = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"extra_body is not valid JSON: {error}") from None
    if not isinstance(extra, dict):
        raise ConfigError(f"extra_body is {text!r}, must be a JSON object")
    return {"temperature": 0.0, **body, **extra}


DATASETS_HELP: Mapping[str, str] = {
    "random": "prompts that have nothing in common",
    "prefix_repetition": "groups of prompts that begin alike",
    "sharegpt": "a file of recorded chats, ShareGPT's JSON",
    "custom": "JSON lines: prompt or messages, output_tokens",
    "trace": "JSON lines with arrival_time in seconds, prompt_len, output_len, prefix_id, …: see bench memory --trace",
}
