"""`lean-engine bench latency`: how long one batch takes."""

from __future__ import annotations

import json
from typing import Any

import click

from lean_engine.cli.bench_offline_options import chosen_model, keep, model_options, output_options
from lean_engine.cli.options import RUNNING, Command, Decorator, Option, engine_options, flag, is_given
from lean_engine.cli.terminal import open_llm, progress_bar
from lean_engine.config import EngineConfig

EXAMPLES = (
    "lean-engine bench latency --input-len 128 --output-len 64 --batch-size 1",
    "lean-engine bench latency ./model --batch-size 16 --num-iters 10 --result-dir results",
)
POSITIVE = click.IntRange(1)


def option(name: str, default: int, text: str, kind: click.IntRange = POSITIVE) -> Decorator:
    return click.option(
        flag(name), name, type=kind, default=default, show_default=True, cls=Option, section="Batch", help=text
    )


@click.command("latency", cls=Command, examples=EXAMPLES)
@model_options
@option("input_len", 32, "Tokens of each prompt.")
@option("output_len", 128, "Tokens of each answer.")
@option("batch_size", 8, "Prompts in the batch.")
@option("n", 1, "Answers per prompt.")
@option("num_iters_warmup", 10, "Iterations before those that count.", click.IntRange(0))
@option("num_iters", 30, "Iterations.")
@option("seed", 0, "The same seed gives the same prompts.", click.IntRange())
@click.option("--disable-detokenize", is_flag=True, cls=Option, section="Batch", help="Make no text of the tokens.")
@output_options
@engine_options(*RUNNING)
def command(
    model: str | None,
    model_flag: str | None,
    input_len: int,
    output_len: int,
    batch_size: int,
    n: int,
    num_iters_warmup: int,
    num_iters: int,
    seed: int,
    disable_detokenize: bool,
    as_json: bool,
    output_json: str | None,
    result_dir: str | None,
    engine: dict[str, Any],
) -> None:
    """Measure how long a batch of random prompts takes, in this process.

    The same batch is answered again and again, each answer at full length. Unless --enable-prefix-caching is given the
    prefix cache is off, and unless --max-num-seqs is given the whole batch runs at once.
    """
    engine = for_batch(engine, batch_size * n)
    configuration = {name: value for name, value in click.get_current_context().params.items() if name != "engine"}
    EngineConfig(**engine)  # says what is wrong before anything is loaded
    with open_llm(chosen_model(model, model_flag), engine) as llm:
        from lean_engine.bench.offline import measure_latency, random_requests

        requests = random_requests(llm, batch_size, input_len, output_len, seed=seed)
        with progress_bar("iterations") as on_progress:
            report = measure_latency(
                llm, requests, num_iters, num_iters_warmup, on_progress, n=n, detokenize=not disable_detokenize
            )
        name = llm.model
    figures = report.figures()
    click.echo(json.dumps(figures) if as_json else text(figures))
    keep("latency", figures, {**configuration, **engine, "model": name}, output_json, result_dir)


def for_batch(engine: dict[str, Any], num_seqs: int) -> dict[str, Any]:
    """The engine's options as they are measured."""
    changed = dict(engine)
    if not is_given("enable_prefix_caching"):
        changed["enable_prefix_caching"] = False
    if not is_given("max_num_seqs"):
        changed["max_num_seqs"] = max(num_seqs, engine["max_num_seqs"])
    return changed


def text(figures: dict[str, Any]) -> str:
    """As vLLM prints it."""
    lines = [f"Avg latency: {figures['avg_latency']} seconds", f"Std latency: {figures['std_latency']} seconds"]
    lines += [f"{percent}% percentile latency: {value} seconds" for percent, value in figures["percentiles"].items()]
    return "\n".join(lines)
