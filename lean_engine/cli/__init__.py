"""The command line: `lean-engine COMMAND`.

One file per command, imported when the command is named; neither NumPy nor a tokenizer is loaded before a model is.
To add one: write cli/<name>.py with a click command called `command`, and name it in COMMANDS.

Whatever a user does wrong is answered by one line on stderr and no traceback. Exit codes: 0; 2 for wrong usage (flags,
configuration, a request's values); 1 for a failure (checkpoint, memory, a damaged answer, a closed pipe); 130 after
Ctrl-C.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence

import click

from lean_engine import __version__
from lean_engine.cli.lazy_group import LazyGroup
from lean_engine.errors import ConfigError, LeanEngineError, RequestError

COMMANDS = {  # name → the module that holds it
    "serve": "lean_engine.cli.serve",
    "run-batch": "lean_engine.cli.run_batch",
    "generate": "lean_engine.cli.generate",
    "chat": "lean_engine.cli.chat",
    "inspect": "lean_engine.cli.inspect",
    "plan": "lean_engine.cli.plan",
    "bench": "lean_engine.cli.bench",
    "demo": "lean_engine.cli.demo",
}
INTERRUPTED = 130  # what a shell reports for a program ended by Ctrl-C


class CommandGroup(LazyGroup):
    modules = COMMANDS


@click.group(cls=CommandGroup, invoke_without_command=True, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, "-V", "--version", message="%(prog)s %(version)s")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """An LLM serving engine without PyTorch.

    Try it: lean-engine demo
    """
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())


def run(args: Sequence[str] | None = None) -> int:
    """Run a command line (None = the program's own); return the exit code. What went wrong has been printed."""
    try:
        code = cli.main(args, prog_name="lean-engine", standalone_mode=False)
        if sys.stdout is not None:  # closed by whoever started the program
            sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except click.ClickException as error:
        print_error(usage_message(error))
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except BrokenPipeError:
        forget_stdout()
        return 1
    except (OSError, UnicodeError) as error:  # standard streams: a full disk, bytes that are no text
        reason = error.strerror if isinstance(error, OSError) and error.filename is None else None
        print_error(str(error) if reason is None else f"standard input or output: {reason}")
        forget_stdout()
        return 1
    except LeanEngineError as error:
        print_error(str(error))
        return 2 if isinstance(error, ConfigError | RequestError) else 1


def main() -> None:
    """The console script."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that is not UTF-8 shows ? and the answer goes on
    sys.exit(run())


def print_error(message: str) -> None:
    """One line on stderr, whatever line breaks the message holds."""
    click.echo(f"Error: {' '.join(message.split(chr(10)))}", err=True)


def usage_message(error: click.ClickException) -> str:
    message = error.format_message()
    if isinstance(error, click.UsageError) and error.ctx is not None:
        return f"{message.rstrip('.')} (see {error.ctx.command_path} --help)"
    return message


def forget_stdout() -> None:
    """The reader has gone: let the interpreter's last flush go nowhere instead of failing."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
