"""Compiling what strangers send: bounds, a stack that is deep enough, and a process that may be killed.

llguidance bounds most of its work, but not all: it recurses along rules and references, and a few lines of schema or
grammar can keep it busy for hours. `TrialProcess` compiles a source in a process of its own first, which a time limit
or a crash ends; only what passes is compiled in this one.

This file is also that process's program, so it imports nothing of lean-engine.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

Result = TypeVar("Result")

STACK_BYTES = 2**28  # address space, of which only what is used becomes memory
LIMITS = {
    "max_lexer_states": 50_000,  # 1 to 2 kB each
    "initial_lexer_fuel": 200_000,  # about a fifth of a second in one step
    "verbose_errors": False,
}
MAX_SECONDS = 10.0  # of a trial; usually milliseconds
MAX_BYTES = 2**32  # of a trial's address space
NUM_STEPS = 4  # tokens of an answer that are tried
MAX_REASON = 300  # characters of llguidance's reason

_starting = threading.Lock()  # the stack's size is the process's, for whichever thread starts next


def first_matcher(tokenizer: Any, source: str) -> Any:
    """llguidance's matcher at the start of an answer, on a deep stack; or why there is none, a string of one line."""
    return on_deep_stack(lambda: _first_matcher(tokenizer, source))


def _first_matcher(tokenizer: Any, source: str) -> Any:
    from llguidance import LLMatcher, LLParserLimits

    matcher = LLMatcher(tokenizer, source, limits=LLParserLimits(**LIMITS), log_level=0)  # type: ignore[arg-type]
    if not matcher.is_error():
        matcher.compute_bitmask()  # some faults show only here
    return one_line(matcher.get_error()) if matcher.is_error() else matcher


def on_deep_stack(function: Callable[[], Result]) -> Result:
    """Call a function on a thread of STACK_BYTES; what it raises is raised here."""
    with ThreadPoolExecutor(1) as pool:
        with _starting:
            before = threading.stack_size(STACK_BYTES)
            try:
                future = pool.submit(function)  # starts the thread
            finally:
                threading.stack_size(before)
        return future.result()


def one_line(message: str) -> str:
    """llguidance's message without the source and the state that it shows below."""
    lines = [line.strip() for line in message.strip().splitlines()] or [""]
    reason = " ".join([lines[0], *(line for line in lines[1:] if line.startswith("error: "))])
    if reason in ("", "NoExtension", "NoExtensionBias"):
        return "no text fits it"
    return reason if len(reason) <= MAX_REASON else f"{reason[:MAX_REASON]}…"


class TrialProcess:
    """Compiles sources in a process of its own, one after another; usable from several threads.

    The process starts with the first source and ends with `close`, or with this process.

    Args:
        vocab_size: of the model, for grammars that name ids.
        specials: spelling of the special tokens by id, for grammars that name them.
    """

    def __init__(
        self, vocab_size: int = 0, specials: Mapping[int, str] | None = None, max_seconds: float = MAX_SECONDS
    ) -> None:
        self._vocabulary = json.dumps([vocab_size, list((specials or {}).items())])
        self._max_seconds = max_seconds
        self._turn = threading.Lock()
        self._process: subprocess.Popen[str] | None = None

    def fault(self, source: str) -> str | None:
        """Why a source cannot be compiled, in one line; None where it can.

        Raises:
            TimeoutError: others' sources are being tried; nothing is known of this one.
        """
        if not self._turn.acquire(timeout=self._max_seconds):
            raise TimeoutError
        try:
            return self._ask(source)
        finally:
            self._turn.release()

    def close(self) -> None:
        """End the process; a trial that is under way fails."""
        process = self._process
        if process is not None:
            process.kill()
        with self._turn:
            self._end()

    def _ask(self, source: str) -> str | None:
        process, lines = self._running()
        assert process.stdin is not None
        assert process.stdout is not None
        timer = threading.Timer(self._max_seconds, process.kill)
        timer.start()
        try:
            process.stdin.write(lines + json.dumps(source) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        is_late = not timer.is_alive()
        timer.cancel()
        if answer:
            fault: str | None = json.loads(answer)
            return fault
        self._end()
        late = f"compiling it takes longer than {self._max_seconds:g} seconds"
        return late if is_late else "it is too deep, or takes too much memory to compile"

    def _running(self) -> tuple[subprocess.Popen[str], str]:
        """The process, and what it has to be told first."""
        if self._process is not None and self._process.poll() is None:
            return self._process, ""
        self._end()
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(math.ceil(self._max_seconds))],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            encoding="ascii",
            start_new_session=True,  # an interrupt at the terminal is for this process, which then closes its end
        )
        return self._process, self._vocabulary + "\n"

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


def try_source(tokenizer: Any, source: str) -> str | None:
    """Compile a source and take a few steps; why it cannot be, in one line."""
    matcher = first_matcher(tokenizer, source)
    if isinstance(matcher, str):
        return matcher
    for _ in range(NUM_STEPS):
        if matcher.is_stopped():
            break
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        matcher.consume_token((mask & -mask).bit_length() - 1)  # the lowest that is allowed
    return one_line(matcher.get_error()) if matcher.is_error() else None


class ByteTable:
    """The special tokens of a model, and behind its last id a token for each byte; the others are left out."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    eos_token_id = None  # llguidance adds one

    def __init__(self, vocab_size: int, specials: Sequence[tuple[int, str]]) -> None:
        self.special_token_ids = [token_id for token_id, _ in specials]
        self.tokens = [b""] * vocab_size + [bytes([byte]) for byte in range(256)]
        for token_id, text in specials:
            self.tokens[token_id] = text.encode()
        self._first_byte = vocab_size

    def __call__(self, text: str) -> list[int]:
        return [self._first_byte + byte for byte in text.encode()]


def end_after(seconds: int) -> None:
    """End this process in some seconds, 0 = never: there may be nobody left who would."""
    if sys.platform != "win32":
        signal.alarm(seconds)


def main() -> None:
    """Answer each line of standard input, a source as JSON, by its fault as JSON; the first is the vocabulary."""
    from llguidance import LLTokenizer

    max_seconds = int(sys.argv[1]) + 1
    if sys.platform != "win32":
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    table: Any = ByteTable(*json.loads(sys.stdin.readline()))
    tokenizer = LLTokenizer(table)
    for line in sys.stdin:
        end_after(max_seconds)
        print(json.dumps(try_source(tokenizer, json.loads(line))), flush=True)
        end_after(0)


if __name__ == "__main__":
    main()
