"""`lean-engine run-batch`: a file of requests in OpenAI's batch format, all answered together."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import click

from lean_engine.cli.options import Command, Option, engine_options, gather
from lean_engine.cli.serve import ENGINE, load, server_option, server_values
from lean_engine.cli.terminal import progress_bar
from lean_engine.config import EngineConfig
from lean_engine.server.config import ServerConfig

if TYPE_CHECKING:
    from lean_engine.server.batch import BatchOutput, BatchRun

EXAMPLES = (
    "lean-engine run-batch -i in.jsonl -o out.jsonl",
    "lean-engine run-batch Qwen/Qwen3-0.6B --served-model-name qwen -i in.jsonl -o out.jsonl",
    "cat in.jsonl | lean-engine run-batch -i - -o - > out.jsonl",
)
SERVER = (  # fields of ServerConfig that mean something without HTTP
    "served_model_name",
    "generation_config",
    "override_generation_config",
    "default_chat_template_kwargs",
    "trust_request_chat_template",
    "enable_auto_tool_choice",
    "tool_call_parser",
    "reasoning_parser",
    "return_tokens_as_token_ids",
)
PROGRESS_SECONDS = 10.0  # between lines, where stderr is no terminal
INTERRUPTED = 130  # exit code after Ctrl-C


def server_options(function: Any) -> Any:
    return gather("server", SERVER, [server_option(name) for name in SERVER])(function)


@click.command("run-batch", cls=Command, examples=EXAMPLES)
@click.argument("model", required=False)
@click.option(
    "-i",
    "--input-file",
    "source",
    required=True,
    cls=Option,
    section="Batch",
    help="A file of requests, one JSON object per line; - for standard input.",
)
@click.option(
    "-o",
    "--output-file",
    "target",
    required=True,
    cls=Option,
    section="Batch",
    help="Where the answers go, in the order of the requests; - for standard output.",
)
@server_options
@engine_options(*ENGINE)
def command(model: str | None, source: str, target: str, server: dict[str, Any], engine: dict[str, Any]) -> int:
    """Answer a file of requests in OpenAI's batch format.

    A line of the input is {"custom_id": "…", "method": "POST", "url": "/v1/chat/completions", "body": {…}}, or with the
    url /v1/completions; a body is what the server takes there. Each line gets one line in the output, in the same
    order: {"id", "custom_id", "response", "error"}. A line that is wrong gets an error that names its number, and the
    others are answered.

    The output file is put in place when it is whole. Ctrl-C ends the run: what was answered is kept, and the rest is
    marked batch_cancelled. Exit code 1 means that some line has an error.
    """
    config = ServerConfig(**server_values(server))
    EngineConfig.from_options(engine)
    data = read_input(source)
    if target != "-" and source != "-" and os.path.realpath(target) == os.path.realpath(source):
        raise click.UsageError(f"-o {target}: the output would replace the input")
    with open_output(target) as file:
        code, has_ended = run(model, data, source, target, file, config, engine)
    if not has_ended:  # the engine's thread loads or hangs, and would keep the process
        sys.stdout.flush()
        os._exit(code)
    return code


def read_input(source: str) -> bytes:
    if source == "-":
        if sys.stdin is None:
            raise click.UsageError("-i - reads standard input, which is closed")
        return sys.stdin.buffer.read()
    try:
        return Path(source).read_bytes()
    except OSError as error:
        raise click.UsageError(f"-i {source}: cannot be read: {error.strerror or error}") from None


@contextmanager
def open_output(target: str) -> Iterator[IO[bytes]]:
    """A file that takes the target's place at the end, unless nothing was written to it or it came to no good end."""
    if target == "-":
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    path = os.path.realpath(target)
    try:
        if os.path.exists(path) and not os.path.isfile(path):  # /dev/null, a pipe
            scratch, file = None, open(path, "wb")  # noqa: SIM115 - closed below
        else:
            descriptor, scratch = tempfile.mkstemp(prefix=f".{os.path.basename(path)}.", dir=os.path.dirname(path))
            file = os.fdopen(descriptor, "wb")
    except OSError as error:
        raise click.UsageError(f"-o {target}: cannot be written: {error.strerror or error}") from None
    try:
        with file:
            yield file
            num_bytes = file.tell() if scratch is not None else 0
        if scratch is not None and num_bytes:
            os.chmod(scratch, 0o666 & ~current_umask())
            os.replace(scratch, path)
    finally:
        if scratch is not None:
            with suppress(FileNotFoundError):
                os.unlink(scratch)


def current_umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def run(
    model: str | None,
    data: bytes,
    source: str,
    target: str,
    file: IO[bytes],
    config: ServerConfig,
    engine: Mapping[str, Any],
) -> tuple[int, bool]:
    """The exit code, and whether the engine's thread has ended."""
    import asyncio
    from dataclasses import replace

    from lean_engine.server.batch import NO_LIMIT, read_items, run_batch

    items = read_items(data)
    if not items:
        raise click.UsageError(f"-i {source}: holds no request")
    began = time.monotonic()
    with progress(len(items)) as advance:
        writer = OrderedWriter(file, advance)
        config = replace(config, max_body_bytes=NO_LIMIT)
        done = asyncio.run(run_batch(lambda: load(model, engine), config, items, writer.put))
    if done.is_loaded:
        report(done, len(items), target, time.monotonic() - began)
    if done.was_interrupted:
        return INTERRUPTED, done.has_ended
    return (1 if done.num_failed else 0), done.has_ended


class OrderedWriter:
    """Writes outputs in the order of their indices, each as soon as all before it are there.

    Args:
        advance: told how many there are.
    """

    def __init__(self, file: IO[bytes], advance: Callable[[int], None]) -> None:
        self._file = file
        self._advance = advance
        self._early: dict[int, bytes] = {}  # by index
        self._num_written = 0

    def put(self, index: int, output: BatchOutput) -> None:
        import msgspec

        self._early[index] = msgspec.json.encode(output) + b"\n"
        while self._num_written in self._early:
            self._file.write(self._early.pop(self._num_written))
            self._num_written += 1
        self._advance(self._num_written + len(self._early))


@contextmanager
def progress(num_items: int) -> Iterator[Callable[[int], None]]:
    """Shows on stderr how many are done: a bar on a terminal, else a line now and then."""
    with progress_bar("answering") as advance:
        if advance is not None:
            yield lambda num_done: advance(num_done, num_items)
            return
        next_line = time.monotonic() + PROGRESS_SECONDS

        def tell(num_done: int) -> None:
            nonlocal next_line
            if time.monotonic() >= next_line:
                next_line = time.monotonic() + PROGRESS_SECONDS
                click.echo(f"{num_done} of {num_items} done", err=True)

        yield tell


def report(done: BatchRun, num_items: int, target: str, seconds: float) -> None:
    where = "standard output" if target == "-" else target
    errors = f", {done.num_failed} with an error" if done.num_failed else ""
    ended = " (interrupted)" if done.was_interrupted else ""
    click.echo(
        f"{num_items} line{'s' if num_items != 1 else ''}{errors}, {done.num_tokens} tokens in {seconds:.1f} s "
        f"to {where}{ended}",
        err=True,
    )
