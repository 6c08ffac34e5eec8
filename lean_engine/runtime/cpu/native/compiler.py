"""The system's C compiler: found, asked what it would compile for, and run.

`-march=native` makes code for this very processor. What that means is decided by the compiler, so its predefined macros
(its version and the processor's features are among them) stand in the key under which a library is cached: a cache that
several machines share holds one library for each kind of processor.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lean_engine.errors import ConfigError
from lean_engine.runtime.cpu.native.sources import Sources

NAMES = ("cc", "gcc", "clang")
FLAGS = (
    *("-std=gnu11", "-O3", "-fPIC", "-pthread", "-fvisibility=hidden"),
    *("-fno-math-errno", "-ffp-contract=fast"),  # but not -ffast-math: NaN stays visible, and sums have our order
    *("-Wall", "-Wextra", "-Wno-psabi"),
)
_ERROR = re.compile(r"^(?P<file>.+?):(?P<line>\d+):(?:\d+:)? (?:fatal )?error: (?P<text>.*)$", re.MULTILINE)


class CompilationError(ConfigError):
    """The compiler refused a source, or could not be run."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """A command that compiles C, and for which processor.

    Args:
        command: the program with the arguments that CC may hold.
        machine: flags that choose the instructions to use.
        extra: further flags, such as -Werror in tests.
    """

    command: tuple[str, ...]
    machine: tuple[str, ...]
    extra: tuple[str, ...] = ()

    @property
    def flags(self) -> tuple[str, ...]:
        return (*FLAGS, *self.machine, *self.extra)

    def describe(self) -> str:
        """What decides the code beside the sources: every predefined macro. A process asks once, some 25 ms.

        Raises:
            CompilationError: the compiler cannot be run, or refuses the flags.
        """
        with _asking:
            if self not in _answers:
                _answers[self] = self._run(*self.flags, "-dM", "-E", "-x", "c", os.devnull)
            return _answers[self]

    def key(self, sources: Sources) -> str:
        """Another key, another library."""
        parts = (sources.digest(), *self.command, *self.flags, self.describe())
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]

    def build(self, sources: Sources, library: Path, scratch: Path) -> None:
        """Compile all files at once, as many as there are processors, and link them.

        Args:
            scratch: an empty directory for the objects.

        Raises:
            CompilationError: one line with the first error, and the source line it is about.
        """
        from concurrent.futures import ThreadPoolExecutor

        objects = [scratch / f"{path.stem}.o" for path in sources.files]
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            list(
                threads.map(
                    lambda pair: self._compile(sources.include, *pair), zip(sources.files, objects, strict=True)
                )
            )
        self._run("-shared", *self.flags, *map(str, objects), "-o", str(library), "-lm")

    def _compile(self, include: Path, source: Path, target: Path) -> None:
        self._run(*self.flags, f"-I{include}", "-c", str(source), "-o", str(target))

    def _run(self, *arguments: str) -> str:
        try:
            result = subprocess.run(
                [*self.command, *arguments], capture_output=True, text=True, check=False, env=english_environment()
            )
        except OSError as error:
            raise CompilationError(f"{self.command[0]} cannot be run: {error.strerror or error}") from None
        if result.returncode:
            raise CompilationError(f"{shlex.join(self.command)}: {first_error(result.stderr or result.stdout)}")
        return result.stdout


_asking = threading.Lock()
_answers: dict[Compiler, str] = {}


def ask_ahead() -> None:
    """Let the compiler describe itself while the caller goes on; whoever needs it then waits for what is left."""

    def ask() -> None:
        with suppress(ConfigError):  # it comes again where the answer is needed
            find_compiler().describe()

    threading.Thread(target=ask, daemon=True).start()


def english_environment() -> dict[str, str]:
    return {**os.environ, "LC_ALL": "C"}


def first_error(log: str) -> str:
    """The first error of a compiler's messages, with the text of its line; else their first line."""
    match = _ERROR.search(log)
    if match is None:
        return next(iter(log.strip().splitlines()), "it ended with an error")
    path, number = Path(match["file"]), int(match["line"])
    try:
        line = path.read_text(encoding="utf-8").splitlines()[number - 1].strip()
    except (OSError, IndexError):
        return f"{path.name}:{number}: {match['text']}"
    return f"{path.name}:{number}: {match['text']}: {line}"


def find_compiler(machine: Sequence[str] | None = None, extra: Sequence[str] = ()) -> Compiler:
    """The compiler that CC names, else the first of cc, gcc and clang.

    Raises:
        ConfigError: there is none.
    """
    flags = tuple(native_flags() if machine is None else machine)
    chosen = shlex.split(os.environ.get("CC", ""))
    if chosen:
        if shutil.which(chosen[0]) is None:
            raise ConfigError(f"CC is {os.environ['CC']!r}, but there is no such program")
        return Compiler(tuple(chosen), flags, tuple(extra))
    for name in NAMES:
        if (path := shutil.which(name)) is not None:
            return Compiler((path,), flags, tuple(extra))
    raise ConfigError(f"no C compiler is installed (looked for CC, {', '.join(NAMES)})")


def native_flags() -> tuple[str, ...]:
    """Code for the processor at hand."""
    return ("-march=native",) if platform.machine().lower() in ("x86_64", "amd64") else ("-mcpu=native",)
