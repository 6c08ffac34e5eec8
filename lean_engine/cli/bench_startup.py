"""`lean-engine bench startup`: from nothing to the first token, of the library or of any server."""

from __future__ import annotations

import json
import statistics
from functools import partial
from typing import Any

import click

from lean_engine.bench.serving.target import ServerError
from lean_engine.bench.startup import StartupError, StartupReport, report_of, time_library, time_server
from lean_engine.cli.bench_offline_options import chosen_model, keep, model_options, output_options
from lean_engine.cli.options import RUNNING, Command, Decorator, Option, engine_options, flag, is_given
from lean_engine.cli.terminal import progress_bar
from lean_engine.config import EngineConfig
from lean_engine.units import format_bytes

EXAMPLES = (
    "lean-engine bench startup",
    "lean-engine bench startup --command 'lean-engine serve --port {port}'",
    "lean-engine bench startup --command 'llama-server -m model.gguf --port {port}' --num-iters 3",
)
MEANING = {
    "interpreter": "Python runs",
    "import": "the engine's modules are imported",
    "load": "the model is loaded",
    "healthy": "/health is 200",
    "first token": "the first token is there",
}


def option(name: str, section: str, text: str, **settings: Any) -> Decorator:
    settings.setdefault("show_default", settings.get("default") is not None)
    return click.option(flag(name), name, cls=Option, section=section, help=text, **settings)


@click.command("startup", cls=Command, examples=EXAMPLES)
@model_options
@option("command", "Server", "Time this server instead; {port} stands for a free port.", metavar="TEXT")
@option("port", "Server", "Port of a command without {port}.", type=click.IntRange(1, 65535))
@option("timeout", "Server", "Seconds that a start may take.", type=click.FloatRange(min=1), default=600.0)
@option("num_iters", "Runs", "Starts that count.", type=click.IntRange(1), default=5)
@option("num_iters_warmup", "Runs", "Starts before, which fill the page cache.", type=click.IntRange(0), default=1)
@output_options
@engine_options(*RUNNING)
def command(
    model: str | None,
    model_flag: str | None,
    command: str | None,
    port: int | None,
    timeout: float,
    num_iters: int,
    num_iters_warmup: int,
    as_json: bool,
    output_json: str | None,
    result_dir: str | None,
    engine: dict[str, Any],
) -> None:
    """Measure how long a start takes.

    Each start is a fresh process. Without --command the library is timed: until Python runs, until the engine's modules
    are imported, until the model is loaded, and until the first token of a prompt of 16 is there. With --command a
    server is: until its /health is 200, and until the first token of a completion is there.
    """
    if command is None:
        for name in ("port", "timeout"):
            if is_given(name):
                raise click.UsageError(f"--{name} needs --command")
        EngineConfig(**engine)  # says what is wrong before anything is started
        run_once: Any = partial(time_library, chosen_model(model, model_flag), engine)
    else:
        refuse_engine(engine)
        run_once = partial(time_server, command, port, timeout)
    configuration = {name: value for name, value in click.get_current_context().params.items() if name != "engine"}
    runs = []
    try:
        with progress_bar("starts") as on_progress:
            for i in range(num_iters_warmup + num_iters):
                runs.append(run_once())
                if on_progress is not None:
                    on_progress(i + 1, num_iters_warmup + num_iters)
    except (StartupError, ServerError) as error:
        raise click.ClickException(str(error)) from None
    report = report_of(runs[num_iters_warmup:])
    figures = report.figures()
    click.echo(json.dumps(figures) if as_json else text(report))
    keep("startup", figures, {**configuration, **(engine if command is None else {})}, output_json, result_dir)


def refuse_engine(engine: dict[str, Any]) -> None:
    """A command says itself what it runs."""
    for name in ("model", "model_flag", *engine):
        if is_given(name):
            what = "MODEL" if name == "model" else "--model" if name == "model_flag" else flag(name)
            raise click.UsageError(f"{what} does not go with --command; write it into the command")


def text(report: StartupReport) -> str:
    """A line per mark: seconds since the start of the process."""
    lines = [f"{'seconds until':<38} {'median':>8} {'least':>8} {'most':>8}"]
    for name, seconds in report.marks.items():
        numbers = (statistics.median(seconds), min(seconds), max(seconds))
        lines.append(f"{MEANING[name]:<38} " + " ".join(f"{number:>8.2f}" for number in numbers))
    if report.peak_memory_bytes:
        median = format_bytes(round(statistics.median(report.peak_memory_bytes)))
        lines.append(f"{'peak memory':<38} {median}")
    return "\n".join(lines)
