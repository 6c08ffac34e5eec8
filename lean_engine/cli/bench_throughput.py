"""`lean-engine bench throughput`: how many requests and tokens per second, all submitted at once."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from lean_engine.cli.bench_offline_options import chosen_model, keep, model_options, output_options
from lean_engine.cli.options import RUNNING, Command, Decorator, Option, engine_options, flag, is_given
from lean_engine.cli.terminal import open_llm, progress_bar
from lean_engine.config import EngineConfig

if TYPE_CHECKING:
    from lean_engine.bench.offline import OfflineRequest
    from lean_engine.llm import LLM

DATASETS = ("random", "prefix_repetition", "sharegpt", "custom", "chat", "shared-prefix", "rag")
DEFAULT_INPUT, DEFAULT_OUTPUT = 1024, 128  # tokens
EXAMPLES = (
    "lean-engine bench throughput --num-prompts 32 --input-len 128 --output-len 64",
    "lean-engine bench throughput ./model --dataset-name sharegpt --dataset-path chats.json --num-prompts 100",
)
OF_DATASET = {  # flag → the data sets that it has an effect on
    "input_len": ("random",),
    "prefix_len": ("random",),
    "output_len": ("random", "prefix_repetition", "sharegpt", "custom"),
    "dataset_path": ("sharegpt", "custom"),
}


def option(name: str, text: str, **settings: Any) -> Decorator:
    settings.setdefault("show_default", settings.get("default") is not None)
    return click.option(flag(name), name, cls=Option, section="Requests", help=text, **settings)


@click.command("throughput", cls=Command, examples=EXAMPLES)
@model_options
@option("dataset_name", "What is asked; see bench serve --help.", type=click.Choice(DATASETS), default="random")
@option("dataset_path", "Of sharegpt and custom.", metavar="FILE")
@option("num_prompts", "Requests.", type=click.IntRange(1), default=1000)
@option("input_len", f"Tokens of a random prompt.  [default: {DEFAULT_INPUT}]", type=click.IntRange(1))
@option("output_len", f"Tokens of an answer.  [default: {DEFAULT_OUTPUT}]", type=click.IntRange(1))
@option("prefix_len", "Tokens that all random prompts begin with, on top.", type=click.IntRange(0), default=0)
@option("n", "Answers per prompt.", type=click.IntRange(1), default=1)
@option("seed", "The same seed gives the same requests.", type=int, default=0)
@option("disable_detokenize", "Make no text of the tokens.", is_flag=True, show_default=False)
@output_options
@engine_options(*RUNNING)
def command(
    model: str | None,
    model_flag: str | None,
    dataset_name: str,
    dataset_path: str | None,
    num_prompts: int,
    input_len: int | None,
    output_len: int | None,
    prefix_len: int,
    n: int,
    seed: int,
    disable_detokenize: bool,
    as_json: bool,
    output_json: str | None,
    result_dir: str | None,
    engine: dict[str, Any],
) -> None:
    """Measure requests and tokens per second, in this process.

    All requests are submitted at once and answered at full length.
    """
    for name, names in OF_DATASET.items():
        if is_given(name) and dataset_name not in names:
            raise click.UsageError(f"{flag(name)} does not go with --dataset-name {dataset_name}")
    configuration = {name: value for name, value in click.get_current_context().params.items() if name != "engine"}
    EngineConfig(**engine)  # says what is wrong before anything is loaded
    with open_llm(chosen_model(model, model_flag), engine) as llm:
        from lean_engine.bench.offline import measure_throughput

        requests = make_requests(llm, configuration)
        with progress_bar("requests") as on_progress:
            report = measure_throughput(llm, requests, on_progress, n=n, detokenize=not disable_detokenize)
        configuration["model"] = llm.model
    figures = report.figures()
    click.echo(json.dumps(figures) if as_json else text(figures))
    keep("throughput", figures, {**configuration, **engine}, output_json, result_dir)


def make_requests(llm: LLM, wanted: dict[str, Any]) -> list[OfflineRequest]:
    from lean_engine.bench.offline import of_conversations, random_requests
    from lean_engine.bench.serving.datasets import DatasetOptions, make_conversations

    name, num_prompts, seed, output_len = (wanted[k] for k in ("dataset_name", "num_prompts", "seed", "output_len"))
    if name == "random":
        input_len = wanted["input_len"] or DEFAULT_INPUT
        return random_requests(llm, num_prompts, input_len, output_len or DEFAULT_OUTPUT, wanted["prefix_len"], seed)
    lengths = ("prefix_repetition_output_len", "sharegpt_output_len", "custom_output_len")
    changes = {} if output_len is None else dict.fromkeys(lengths, output_len)
    options = DatasetOptions(name=name, path=wanted["dataset_path"], num_prompts=num_prompts, seed=seed, **changes)
    return of_conversations(make_conversations(options, lambda: llm.tokenizer))


def text(figures: dict[str, Any]) -> str:
    """As vLLM prints it."""
    rates = [figures[name] for name in ("requests_per_second", "tokens_per_second", "output_tokens_per_second")]
    return "\n".join(
        [
            "Throughput: {:.2f} requests/s, {:.2f} total tokens/s, {:.2f} output tokens/s".format(*rates),
            f"Total num prompt tokens:  {figures['total_num_prompt_tokens']}",
            f"Total num output tokens:  {figures['total_num_output_tokens']}",
        ]
    )
