"""`lean-engine bench`: measurements, one file per subcommand, imported when the subcommand is named.

To add one: write cli/bench_<name>.py with a click command called `command`, and name it in SUBCOMMANDS.
"""

from __future__ import annotations

from importlib import import_module

import click

SUBCOMMANDS = {  # name → the module that holds it
    "memory": "lean_engine.cli.bench_memory",
}


class BenchGroup(click.Group):
    """Finds its subcommands in SUBCOMMANDS."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(SUBCOMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command:
        if cmd_name not in SUBCOMMANDS:
            raise click.UsageError(f"unknown benchmark {cmd_name!r}; there are: {', '.join(SUBCOMMANDS)}", ctx)
        found = import_module(SUBCOMMANDS[cmd_name]).command
        assert isinstance(found, click.Command)
        return found


@click.group("bench", cls=BenchGroup, invoke_without_command=True)
@click.pass_context
def command(ctx: click.Context) -> None:
    """Measure the engine."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
