"""`lean-engine bench serve`: load on any OpenAI-compatible server, and how it bore it."""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import click

from lean_engine.bench.environment import append_result, environment
from lean_engine.bench.serving.benchmark import LoadOptions, measure, wait_until_ready
from lean_engine.bench.serving.datasets import DatasetOptions, history_of, make_conversations
from lean_engine.bench.serving.report import ServeReport
from lean_engine.bench.serving.target import ServerError, Target, check_url, first_model, make_target
from lean_engine.bench.serving.tokenizers import load_tokenizer
from lean_engine.bench.workloads import MIXES
from lean_engine.cli.bench_serve_options import (
    DATASET,
    DATASETS_HELP,
    FIGURES,
    LOAD,
    SERVER,
    BenchCommand,
    dataset_options,
    load_options,
    make,
    read_extra_body,
    read_headers,
    read_metrics,
    read_pairs,
    run_options,
)
from lean_engine.cli.bench_serve_text import block_text, notes_text
from lean_engine.cli.options import is_given
from lean_engine.cli.terminal import progress_bar
from lean_engine.errors import ConfigError
from lean_engine.text.tokenizer import Tokenizer

INTERRUPTED = 130
OUTPUT = (
    make("Output", "as_json", flag="--json", is_flag=True, help="Print the result as one JSON object instead."),
    make("Output", "save_result", is_flag=True, help="Write the result as JSON, under a name that says what was run."),
    make("Output", "save_detailed", is_flag=True, help="With values of each request in the JSON."),
    make("Output", "append_result", is_flag=True, help="With --save-result: add to the file, a line per run."),
    make("Output", "result_dir", metavar="DIR", help="Append the run to DIR/serve.jsonl; also for --save-result."),
    make("Output", "result_filename", metavar="NAME", help="Of --save-result."),
    make("Output", "label", help="Beginning of that file's name.  [default: the backend]"),
    make("Output", "metadata", multiple=True, metavar="KEY=VALUE ...", help="To be kept with the result."),
    make("Output", "disable_tqdm", is_flag=True, help="No progress on stderr."),
)
EXAMPLES = (
    "lean-engine bench serve --num-prompts 100 --random-input-len 128 --random-output-len 64 --ignore-eos",
    "lean-engine bench serve --port 8080 --request-rate 4 --goodput ttft:500 tpot:100 --result-dir results",
    "lean-engine bench serve --backend openai-chat --dataset-name multi-turn --max-concurrency 16",
)


class ServeCommand(BenchCommand):
    """Its help ends with the data sets and examples."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        mixes = {name: mix.description for name, mix in MIXES.items() if name != "random"}
        with formatter.section("Data sets"):
            formatter.write_dl([*DATASETS_HELP.items(), *mixes.items()])
        super().format_epilog(ctx, formatter)


@dataclass(frozen=True, slots=True)
class Setup:
    """A benchmark that is ready to run."""

    target: Target
    tokenizer_name: str
    tokenizer: Callable[[], Tokenizer]  # loaded when it is first needed


@click.command("serve", cls=ServeCommand, examples=EXAMPLES)
@load_options(SERVER, DATASET, LOAD, FIGURES, OUTPUT)
def command(serve: dict[str, Any]) -> int:
    """Measure a server under load.

    Sends streaming requests to any OpenAI-compatible server on a schedule made beforehand, and never waits for an
    answer before the next request unless --max-concurrency says so. Prints vLLM's block of figures; only answers that
    are complete enter an average, errors, refusals (429) and cut streams are counted. Ctrl-C prints what has been
    measured so far.
    """
    dataset, options, metrics = dataset_options(serve), run_options(serve), read_metrics(serve["percentile_metrics"])
    metadata = read_pairs(serve["metadata"], "metadata")
    refuse_unused(serve)
    try:
        setup = asyncio.run(prepare(serve))
        conversations = make_conversations(dataset, setup.tokenizer)
        history = history_of(dataset.is_chat, setup.tokenizer)
        with nullcontext() if serve["disable_tqdm"] else progress_bar("requests") as on_progress:
            run = measure(setup.target, conversations, options, history, on_progress, catches_interrupts=True)
            report, speculation = asyncio.run(run)
    except ServerError as error:
        raise click.ClickException(str(error)) from None
    result = {**described(serve, setup, options), **metadata, **figures(report, speculation, serve["save_detailed"])}
    if serve["as_json"]:
        click.echo(json.dumps(result, ensure_ascii=False))
    else:
        click.echo(block_text(report, options, metrics, speculation))
        click.echo(notes_text(report))
    save(serve, setup, options, dataset, result)
    return conclude(report)


async def prepare(serve: Mapping[str, Any]) -> Setup:
    """Wait for the server and ask what it serves.

    Raises:
        ServerError: it is not up, or does not say.
    """
    url = base_url(serve)
    check_url(url)
    headers, is_checked = read_headers(serve), not serve["insecure"]
    await wait_until_ready(url, headers, is_checked, serve["ready_check_timeout_sec"])
    name, root = serve["model"], serve["model"]
    if name is None:
        name, root = await first_model(url, headers, is_checked)
    target = make_target(
        serve["backend"],
        url,
        serve["endpoint"],
        serve["served_model_name"] or name,
        headers=headers,
        extra_body=read_extra_body(serve),
        ignore_eos=serve["ignore_eos"],
        checks_certificate=is_checked,
    )
    tokenizer_name = serve["tokenizer"] or root
    was_given = serve["tokenizer"] is not None or serve["model"] is not None
    return Setup(target, tokenizer_name, cache(lambda: load_tokenizer(tokenizer_name, was_given)))


def base_url(serve: Mapping[str, Any]) -> str:
    if serve["base_url"] is None:
        host = f"[{serve['host']}]" if ":" in serve["host"] else serve["host"]
        return f"http://{host}:{serve['port']}"
    url: str = serve["base_url"].rstrip("/")
    return url


def refuse_unused(serve: Mapping[str, Any]) -> None:
    """Refuse what would have no effect."""
    for name in ("host", "port"):
        if serve["base_url"] is not None and is_given(name):
            raise click.UsageError(f"--{name} does not go with --base-url; leave out one of them")
    for name in ("append_result", "result_filename", "label"):
        if is_given(name) and not serve["save_result"]:
            raise click.UsageError(f"--{name.replace('_', '-')} needs --save-result")
    if serve["save_detailed"] and not (serve["save_result"] or serve["result_dir"] or serve["as_json"]):
        raise click.UsageError("--save-detailed needs --save-result, --result-dir or --json")


def described(serve: Mapping[str, Any], setup: Setup, options: LoadOptions) -> dict[str, Any]:
    """vLLM's keys of what was run."""
    ramp = options.ramp
    about: dict[str, Any] = {
        "date": time.strftime("%Y%m%d-%H%M%S"),
        "backend": serve["backend"],
        "endpoint_type": serve["backend"],
        "model_id": setup.target.model,
        "tokenizer_id": setup.tokenizer_name,
        "num_prompts": serve["num_prompts"],
        "request_rate": options.request_rate if options.request_rate < math.inf else "inf",
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
    }
    if ramp is not None:
        about |= {f"ramp_up_{name}": getattr(ramp, name) for name in ("strategy", "start_rps", "end_rps")}
    return about


def figures(report: ServeReport, speculation: Mapping[str, Any], has_details: bool) -> dict[str, Any]:
    details = report.details() if has_details else {}
    return {**report.totals(), **report.latencies(), **speculation, **report.counts(), **details}


def save(
    serve: Mapping[str, Any], setup: Setup, options: LoadOptions, dataset: DatasetOptions, result: dict[str, Any]
) -> None:
    kept = {name: value for name, value in serve.items() if name not in ("api_key", "header")}
    kept["request_rate"] = result["request_rate"]  # JSON has no infinity
    configuration = {**kept, "base_url": setup.target.base_url, "endpoint": setup.target.endpoint}
    if serve["result_dir"] is not None:
        append_result(serve["result_dir"], "serve", {"configuration": configuration, **result})
    if serve["save_result"]:
        path = Path(serve["result_dir"] or ".") / (serve["result_filename"] or file_name(serve, setup, result))
        content = json.dumps({**result, "environment": environment(), "configuration": configuration})
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("a" if serve["append_result"] else "w", encoding="utf-8") as file:
                file.write(content + "\n")
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from None


def file_name(serve: Mapping[str, Any], setup: Setup, result: Mapping[str, Any]) -> str:
    """LABEL-RATEqps-concurrencyN-MODEL-DATE.json, as vLLM names it."""
    cap = serve["max_concurrency"]
    parts = [serve["label"] or serve["backend"], f"{result['request_rate']}qps"]
    parts += [] if cap is None else [f"concurrency{cap}"]
    return "-".join([*parts, setup.target.model.rsplit("/", 1)[-1], result["date"]]) + ".json"


def conclude(report: ServeReport) -> int:
    """Warnings, and the exit code: 1 where nothing succeeded, 130 after Ctrl-C."""
    for warning in report.client.warnings():
        click.echo(f"Warning: {warning}: the client may be the bottleneck", err=True)
    if report.was_interrupted:
        click.echo("Interrupted: the figures are of what had been measured", err=True)
        return INTERRUPTED
    if not report.completed:
        messages = report.counts()["failures"]["messages"]
        most = max(messages, key=messages.get, default="none was sent")
        raise click.ClickException(f"no request succeeded: {most}")
    return 0
