"""`lean-engine bench memory`: how well KV memory and steps are used, and what the scheduling costs in Python.

No model is read and no device is touched: the scheduler, the block pool and the prefix cache are the real ones, what is
sampled is made up (bench/null_engine).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from typing import Any, TextIO

import click

from lean_engine.bench.grid import SWEPT, Point, config_at, parse_sweeps
from lean_engine.bench.memory import MemoryReport, OnStep, simulate
from lean_engine.bench.null_engine import StepRecord
from lean_engine.bench.plots import KvUsage, draw, load_figure, sweep_for_plot
from lean_engine.bench.steady import steady_state
from lean_engine.bench.trace import read_trace
from lean_engine.bench.workloads import MIXES, Workload, make_workload, trace_workload
from lean_engine.cli.bench_memory_text import describe_workload, report_text, sweep_text
from lean_engine.cli.options import Command, Option, engine_options, flag, is_given, tokens
from lean_engine.cli.terminal import progress_bar
from lean_engine.config import EngineConfig
from lean_engine.errors import ConfigError

DEFAULT_BLOCKS = 4096
MAX_BLOCKS = 100_000_000  # whose bookkeeping takes 4 GB
DEFAULT_REQUESTS = 2000
ENGINE_FIELDS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "enable_chunked_prefill",
    "block_size",
    "enable_prefix_caching",
    "prefix_caching_hash_algo",
    "long_prefill_token_threshold",
    "scheduling_policy",
)
OF_MIX = ("workload", "num_requests", "request_rate")  # what does not go with --trace
OF_RUN = (  # what does not go with --running
    *OF_MIX,
    "trace",
    "step_time",
    "plot",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "enable_chunked_prefill",
    "long_prefill_token_threshold",
    "scheduling_policy",
)
OF_TRACE = ("step_time", "scheduling_policy")  # what has no effect without --trace: no mix has priorities
Run = Callable[..., MemoryReport]  # takes on_step and on_progress
EXAMPLES = (
    "lean-engine bench memory",
    "lean-engine bench memory --workload multi-turn --num-blocks 8192 --plot memory.svg",
    "lean-engine bench memory --sweep block-size=8,16,32 --sweep prefix-caching=on,off",
    "lean-engine bench memory --running 256 --num-blocks 100000 --waiting 1000 --steps 1000 --json",
)


class BenchCommand(Command):
    """A command without a model whose help ends with the workloads and examples."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Workloads"):
            formatter.write_dl([(name, mix.description) for name, mix in MIXES.items()])
        with formatter.section("Examples"):
            for example in self.examples:
                formatter.write(f"{'':>{formatter.current_indent}}{example}\n")


def option(name: str, section: str, **settings: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return click.option(flag(name), name, cls=Option, section=section, **settings)


@click.command("memory", cls=BenchCommand, examples=EXAMPLES)
@option(
    "workload",
    "Requests",
    type=click.Choice(list(MIXES)),
    default="chat",
    show_default=True,
    help="What the requests are like; see below.",
)
@option(
    "num_requests",
    "Requests",
    type=click.IntRange(1),
    default=DEFAULT_REQUESTS,
    show_default=True,
    help="Requests in all; each turn of a conversation is one.",
)
@option(
    "request_rate",
    "Requests",
    type=float,
    help="Conversations that begin per step, on average (a Poisson process; a step is the clock); inf: all at the "
    "start.  [default: " + ", ".join(f"{name} {mix.rate:g}" for name, mix in MIXES.items()) + "]",
)
@option("seed", "Requests", type=int, default=0, show_default=True, help="The same seed gives the same requests.")
@option(
    "trace",
    "Requests",
    metavar="FILE",
    help="Take requests from a file of JSON lines instead: arrival_time, prompt_len or prompt_token_ids, output_len, "
    "prefix_id with prefix_len, priority.",
)
@option(
    "step_time",
    "Requests",
    type=float,
    default=1.0,
    show_default=True,
    help="With --trace: how long a step takes, in the unit of the arrival times; 1: they count steps.",
)
@option(
    "running",
    "Steady state",
    type=int,
    help="Time steps of so many decoding requests instead of a workload. Step limits are set so that they alone run; "
    "they are at different places in their blocks, and what they do not hold of the pool is cached.",
)
@option("waiting", "Steady state", type=int, default=0, show_default=True, help="With --running: requests behind them.")
@option("steps", "Steady state", type=int, default=1000, show_default=True, help="With --running: steps to time.")
@option(
    "num_blocks",
    "Engine",
    type=click.IntRange(1, MAX_BLOCKS),
    default=DEFAULT_BLOCKS,
    show_default=True,
    help="KV blocks that requests can hold.",
)
@option(
    "max_model_len",
    "Engine",
    type=tokens,
    help="Tokens of prompt and output, such as 4096 or 4K; longer prompts are refused, longer outputs cut.  "
    "[default: those of the longest request]",
)
@engine_options(*ENGINE_FIELDS)
@option(
    "sweep",
    "Output",
    multiple=True,
    metavar="NAME=V1,V2,...",
    help=f"Repeat with each value, and with each combination if given more than once: {', '.join(SWEPT)} (on, off for "
    "switches); with --running also running, waiting. A pool whose block size is swept keeps its tokens.",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    cls=Option,
    section="Output",
    help="Print one JSON object with all figures; for a sweep a list of them.",
)
@option(
    "plot",
    "Output",
    metavar="FILE",
    help="Draw KV use over time, waste by block size and prefix hits by pool size: FILE.png or FILE.svg. Needs "
    "matplotlib: pip install 'lean-engine[plot]'.",
)
@option(
    "step_log",
    "Output",
    metavar="FILE",
    help="Write a JSON line per step: its tokens by kind, the budget, blocks by state, decodes that it moved or did "
    "not, microseconds.",
)
def command(
    workload: str,
    num_requests: int,
    request_rate: float | None,
    seed: int,
    trace: str | None,
    step_time: float,
    running: int | None,
    waiting: int,
    steps: int,
    num_blocks: int,
    max_model_len: int | None,
    sweep: tuple[str, ...],
    as_json: bool,
    plot: str | None,
    step_log: str | None,
    engine: dict[str, Any],
) -> None:
    """Measure how KV memory and steps are used, without a model.

    The real scheduler, block pool and prefix cache serve thousands of requests; nothing is computed and what they
    generate is made up. The clock counts steps. Times are of Python alone: a step is the scheduler's plan and apply, an
    add is making and queueing a request with the keys of its blocks; garbage collection runs as it does in an engine.
    """
    check_flags(running is not None, trace is not None, bool(sweep))
    points = parse_sweeps(sweep, is_steady=running is not None)
    config = EngineConfig(**engine, num_gpu_blocks_override=num_blocks, max_model_len=max_model_len)
    configs = [config_at(config, point) for point in points]
    if plot is not None:
        load_figure(plot)  # says what is wrong before the run
    requests: Workload | None = None
    if running is not None:
        state = {"running": running, "waiting": waiting}
        own = [{name: value for name, value in point.items() if name in state} for point in points]
        runs = [
            partial(steady_state, c, **(state | values), steps=steps, seed=seed)
            for c, values in zip(configs, own, strict=True)
        ]
    else:
        if trace is not None:
            requests = trace_workload(trace, read_trace(trace), seed, step_time)
        else:
            requests = make_workload(workload, num_requests, seed, request_rate)
        runs = [partial(simulate, requests, c) for c in configs]
    usage = KvUsage()
    with observe(step_log, None if plot is None else usage) as on_step:
        reports = [run_one(run, on_step, i, len(runs)) for i, run in enumerate(runs, 1)]
    click.echo(output(points, reports, bool(sweep), as_json))
    if plot is not None and requests is not None:
        with progress_bar("plotting") as on_progress:
            draw(plot, describe_workload(requests.origin), usage, *sweep_for_plot(requests, config, on_progress))


def run_one(run: Run, on_step: OnStep | None, number: int, num_runs: int) -> MemoryReport:
    label = "running" if num_runs == 1 else f"run {number} of {num_runs}"
    with progress_bar(label) as on_progress:
        return run(on_step=on_step, on_progress=on_progress)


def output(points: Sequence[Point], reports: Sequence[MemoryReport], is_sweep: bool, as_json: bool) -> str:
    if not is_sweep:
        return json.dumps(reports[0].figures(), ensure_ascii=False) if as_json else report_text(reports[0])
    if not as_json:
        return sweep_text(points, reports)
    figures = [{"sweep": point, **report.figures()} for point, report in zip(points, reports, strict=True)]
    return json.dumps(figures, ensure_ascii=False)


def check_flags(is_steady: bool, has_trace: bool, is_sweep: bool) -> None:
    """Refuse what was given and would have no effect.

    Raises:
        click.UsageError: names both flags.
    """
    if is_steady:
        refuse_beside("--running", OF_RUN)
    else:
        refuse_without("--running", ("waiting", "steps"))
    if has_trace:
        refuse_beside("--trace", OF_MIX)
    elif not is_steady:
        refuse_without("--trace", OF_TRACE)
    if is_sweep:
        refuse_beside("--sweep", ("plot", "step_log"))


def refuse_beside(other: str, names: Sequence[str]) -> None:
    for name in names:
        if is_given(name):
            raise click.UsageError(f"{flag(name)} does not go with {other}; leave out one of them")


def refuse_without(other: str, names: Sequence[str]) -> None:
    for name in names:
        if is_given(name):
            raise click.UsageError(f"{flag(name)} needs {other}")


@contextmanager
def observe(step_log: str | None, usage: KvUsage | None) -> Iterator[OnStep | None]:
    """What is called with each step: writes the log, and notes the blocks by state.

    Raises:
        ConfigError: the log cannot be written.
    """
    with ExitStack() as stack:
        observers: list[OnStep] = []
        if usage is not None:
            observers.append(usage.add)
        if step_log is not None:
            file = stack.enter_context(written_file(step_log))
            observers.append(lambda record: print(json.dumps(log_line(record)), file=file))

        def on_step(record: StepRecord) -> None:
            for observer in observers:
                observer(record)

        yield on_step if observers else None


@contextmanager
def written_file(path: str) -> Iterator[TextIO]:
    """A text file; ConfigError names it where it cannot be opened, or not be written to the end."""
    try:
        with open(path, "w", encoding="utf-8") as file:
            yield file
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from None


def log_line(record: StepRecord) -> dict[str, Any]:
    """A step, for the log: its tokens against the budget, what it moved, how things stood after it, its time."""
    return {
        **asdict(record.stats),
        "num_tokens": record.stats.num_tokens,
        "budget": record.budget,
        "num_scheduled": record.plan.num_requests,
        "num_decoding": record.num_decoding,
        "num_decodes": len(record.plan.decodes),
        "num_stalled": record.num_stalled,
        "max_chunk_tokens": record.max_chunk_tokens,
        "num_admitted": len(record.admitted),
        "num_finished": len(record.finished),
        "num_granted_blocks": record.num_granted_blocks,
        "plan_us": round(record.plan_us, 1),
        "apply_us": round(record.apply_us, 1),
        "step_us": round(record.step_us, 1),
    }
