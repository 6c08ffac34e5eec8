"""`lean-engine bench`: measurements, one file per subcommand, imported when the subcommand is named.

To add one: write cli/bench_<name>.py with a click command called `command`, and name it in SUBCOMMANDS.
"""

from __future__ import annotations

import click

from lean_engine.cli.lazy_group import LazyGroup

SUBCOMMANDS = {  # name → the module that holds it
    "serve": "lean_engine.cli.bench_serve",
    "latency": "lean_engine.cli.bench_latency",
    "throughput": "lean_engine.cli.bench_throughput",
    "startup": "lean_engine.cli.bench_startup",
    "sweep": "lean_engine.cli.bench_sweep",
    "kernels": "lean_engine.cli.bench_kernels",
    "compare": "lean_engine.cli.bench_compare",
    "memory": "lean_engine.cli.bench_memory",
}


class BenchGroup(LazyGroup):
    modules = SUBCOMMANDS
    noun = "benchmark"


@click.group("bench", cls=BenchGroup, invoke_without_command=True)
@click.pass_context
def command(ctx: click.Context) -> None:
    """Measure the engine, or any server."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
