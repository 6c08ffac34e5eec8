"""What the commands show while they work, and Ctrl-C during an answer."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from lean_engine.checkpoint import DEFAULT_MODEL

if TYPE_CHECKING:
    from lean_engine.llm import LLM


@contextmanager
def open_llm(model: str | None, engine: Mapping[str, Any]) -> Iterator[LLM]:
    """A loaded model, closed at the end. On a terminal, downloads and loading show how far they are."""
    from lean_engine.llm import LLM

    # Without a terminal the demo model's download is announced by one line, a Hub download by nothing.
    shows_downloads = sys.stderr.isatty() or model in (None, DEFAULT_MODEL)
    with progress_bar("loading") as on_load:
        llm = LLM(model, on_load=on_load, show_downloads=shows_downloads, **engine)
    is_whole = True
    try:
        yield llm
    except KeyboardInterrupt:  # may have cut a step in half; the process ends now, and its threads with it
        is_whole = False
        raise
    finally:
        if is_whole:
            llm.close()


@contextmanager
def progress_bar(label: str) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on stderr, fed with (done, in all); None where stderr is not a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    with ExitStack() as stack:
        bar: Any = None

        def advance(done: int, total: int) -> None:
            nonlocal bar
            if bar is None:
                bar = stack.enter_context(click.progressbar(length=total, label=label, file=sys.stderr))
            bar.update(done - bar.pos)

        yield advance


@contextmanager
def interruptible() -> Iterator[Callable[[], bool]]:
    """Within, Ctrl-C only makes the given question true, so that no step is cut in half; the third one ends all."""
    num_presses = 0

    def note(signum: int, frame: FrameType | None) -> None:
        nonlocal num_presses
        num_presses += 1
        if num_presses == 3:  # a step that hangs
            raise KeyboardInterrupt

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: num_presses > 0
    finally:
        signal.signal(signal.SIGINT, previous)


def write(text: str) -> None:
    """Put out text at once, without a line break."""
    click.echo(text, nl=False)
