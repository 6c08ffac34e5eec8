"""`lean-engine bench sweep`: serving benchmarks over a grid of loads and server settings, as one table."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import click

from lean_engine.bench.environment import append_result
from lean_engine.bench.plots import load_figure
from lean_engine.bench.server_process import running
from lean_engine.bench.serving.benchmark import measure
from lean_engine.bench.serving.datasets import history_of, make_conversations
from lean_engine.bench.serving.target import ServerError
from lean_engine.bench.sweep import Grid, Measured, finite, given_command, lean_engine_command, parse_grid
from lean_engine.bench.sweep_plot import PERCENTS, draw_sweep
from lean_engine.cli.bench_serve import Setup, described, figures, prepare
from lean_engine.cli.bench_serve_options import (
    DATASET,
    FIGURES,
    LOAD,
    SERVER,
    dataset_options,
    load_options,
    make,
    run_options,
    several,
)
from lean_engine.cli.options import RUNNING, Command, engine_options, flag, is_given, model_argument
from lean_engine.cli.terminal import progress_bar

START_SECONDS = 600.0
SWEEP = (
    make("Sweep", "sweep", multiple=True, metavar="NAME=V1,V2,...",
         help="What is varied: a flag of the load, such as request-rate or max-concurrency, or of lean-engine serve, "
         "such as block-size or enable-prefix-caching=on,off. Every combination, if given more than once."),
    make("Sweep", "num_runs", type=click.IntRange(1), default=1, help="Runs of each combination; medians are shown."),
    make("Sweep", "server_command", metavar="TEXT",
         help="Start this server instead; {port} and the {name} of what is swept stand for their values."),
    make("Output", "as_json", flag="--json", is_flag=True, help="Print a list of all runs instead."),
    make("Output", "result_dir", metavar="DIR", help="Append every run to DIR/sweep.jsonl."),
    make("Output", "plot", metavar="FILE",
         help="Draw it: FILE.png or FILE.svg. Needs matplotlib: pip install 'lean-engine[plot]'."),
)  # fmt: skip
OF_SERVER = [entry for entry in SERVER if entry[0] not in ("model", "host", "port", "ready_check_timeout_sec")]
OF_FIGURES = [entry for entry in FIGURES if entry[0] == "goodput"]
EXAMPLES = (
    "lean-engine bench sweep --sweep max-concurrency=1,4,16 --num-prompts 64 --input-len 128 --output-len 64",
    "lean-engine bench sweep --sweep block-size=16,32 --sweep request-rate=1,2,4 --plot sweep.svg",
    "lean-engine bench sweep --base-url http://127.0.0.1:8000 --sweep request-rate=1,2,4,8",
    "lean-engine bench sweep --server-command 'llama-server -m m.gguf --port {port} -np {np}' --sweep np=1,8",
)
COLUMNS = {  # heading → vLLM's key
    "req/s": "request_throughput",
    "out tok/s": "output_throughput",
    "TTFT p50": "p50_ttft_ms",
    "p99": "p99_ttft_ms",
    "ITL p50": "p50_itl_ms",
    "p99 ": "p99_itl_ms",
    "E2EL p50": "p50_e2el_ms",
    "p99  ": "p99_e2el_ms",
    "good/s": "request_goodput",
    "done": "completed",
    "failed": "failed",
}


class SweepCommand(Command):
    """Its flags may have several values in a row."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, several(args))


@click.command("sweep", cls=SweepCommand, examples=EXAMPLES)
@model_argument
@load_options(SWEEP, OF_SERVER, DATASET, LOAD, OF_FIGURES)
@engine_options(*RUNNING)
def command(model: str | None, serve: dict[str, Any], engine: dict[str, Any]) -> None:
    """Measure a server at many loads and settings.

    Starts `lean-engine serve MODEL` (or --server-command) once for each combination of server settings, or uses the
    server at --base-url, and runs `bench serve` at each load. Every run has prompts of its own, so that no prefix cache
    knows them. Times in the table are milliseconds. Engine flags given here go to the server.
    """
    values = {**serve, "model": None, "host": "", "port": 0, "ready_check_timeout_sec": 0.0}
    check(values, engine)
    grid = parse_grid(serve["sweep"], has_server=serve["base_url"] is None)
    values["metric_percentiles"] = ",".join(f"{percent:g}" for percent in PERCENTS)
    for load in grid.loads:
        dataset_options(at(values, load)), run_options(at(values, load))  # says what is wrong before a server starts
    if serve["plot"] is not None:
        load_figure(serve["plot"])
    flags = [word for name in engine if is_given(name) for word in words_of(name, engine[name])]
    start = starter(model, flags, values)
    try:
        with progress_bar("runs") as on_progress:
            measured = run_grid(grid, values, start, on_progress)
    except ServerError as error:
        raise click.ClickException(str(error)) from None
    if serve["as_json"]:
        click.echo(json.dumps([run for one in measured for run in one.runs], ensure_ascii=False))
    else:
        click.echo(table(measured))
    if serve["plot"] is not None:
        draw_sweep(serve["plot"], f"{measured[0].runs[0]['model_id']}, {serve['dataset_name']}", measured)


def check(values: Mapping[str, Any], engine: Mapping[str, Any]) -> None:
    """Refuse what contradicts itself."""
    if not values["sweep"]:
        raise click.UsageError("nothing to sweep; give --sweep NAME=V1,V2,...")
    if values["base_url"] is not None and values["server_command"] is not None:
        raise click.UsageError("--base-url does not go with --server-command; leave out one of them")
    other = "base_url" if values["base_url"] is not None else "server_command"
    if values[other] is not None:
        for name in ("model", *engine):
            if is_given(name):
                what = "MODEL" if name == "model" else flag(name)
                raise click.UsageError(f"{what} does not go with {flag(other)}, which has its own settings")


def at(values: Mapping[str, Any], load: Mapping[str, Any]) -> dict[str, Any]:
    """The flags' values at a point of the grid."""
    return {**values, **{name.replace("-", "_"): value for name, value in load.items()}}


def words_of(name: str, value: Any) -> list[str]:
    if isinstance(value, bool):
        return [flag(name) if value else f"--no-{name.replace('_', '-')}"]
    return [flag(name), str(value)]


Start = Callable[[Mapping[str, str]], Any]  # a server's settings → a context that yields its base URL


def starter(model: str | None, flags: Sequence[str], values: Mapping[str, Any]) -> Start:
    @contextmanager
    def start(server: Mapping[str, str]) -> Iterator[str]:
        if values["base_url"] is not None:
            yield values["base_url"]
            return
        if values["server_command"] is not None:
            words, port = given_command(values["server_command"], server)
        else:
            words, port = lean_engine_command(model, flags, server)
        with running(words, port) as process:
            process.wait_until_healthy(START_SECONDS)
            yield process.base_url

    return start


def run_grid(
    grid: Grid, values: dict[str, Any], start: Start, on_progress: Callable[[int, int], None] | None
) -> list[Measured]:
    """All points. Repetitions take turns over the loads of a server, so that a drift spreads over all of them."""
    total = len(grid.servers) * len(grid.loads) * values["num_runs"]
    measured: list[Measured] = []
    num_done = 0
    for server in grid.servers:
        runs: list[list[dict[str, Any]]] = [[] for _ in grid.loads]
        with start(server) as base_url:
            values = {**values, "base_url": base_url}
            setup = asyncio.run(prepare(values))
            for _ in range(values["num_runs"]):
                for load, into in zip(grid.loads, runs, strict=True):
                    result = run_point({**at(values, load), "seed": values["seed"] + num_done}, setup, server, load)
                    into.append(result)
                    num_done += 1
                    if on_progress is not None:
                        on_progress(num_done, total)
        measured += [Measured(server, load, done) for load, done in zip(grid.loads, runs, strict=True)]
    return measured


def run_point(
    values: Mapping[str, Any], setup: Setup, server: Mapping[str, str], load: Mapping[str, Any]
) -> dict[str, Any]:
    """One run; appended to the results where that is wanted."""
    dataset, options = dataset_options(values), run_options(values)
    conversations = make_conversations(dataset, setup.tokenizer)
    history = history_of(dataset.is_chat, setup.tokenizer)
    report, speculation = asyncio.run(measure(setup.target, conversations, options, history))
    for warning in report.client.warnings():
        click.echo(f"Warning: {warning}: the client may be the bottleneck", err=True)
    point = {name: finite(value) for name, value in {**server, **load}.items()}
    result = {"sweep": point, **described(values, setup, options), **figures(report, speculation, False)}
    if values["result_dir"] is not None:
        kept = {name: finite(value) for name, value in values.items() if name not in ("api_key", "header")}
        append_result(values["result_dir"], "sweep", {"configuration": kept, **result})
    return result


def table(measured: Sequence[Measured]) -> str:
    """A line per point, medians over its runs."""
    keys = [key for key in COLUMNS.values() if any(m.median(key) is not None for m in measured)]
    headings = [name.strip() for name, key in COLUMNS.items() if key in keys]
    rows = [[*measured[0].point, *headings]]
    rows += [[*(f"{finite(v)}" for v in m.point.values()), *(number(m.median(key)) for key in keys)] for m in measured]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(c.rjust(w) for c, w in zip(row, widths, strict=True)) for row in rows)


def number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 or float(value).is_integer() else f"{value:.4g}"
