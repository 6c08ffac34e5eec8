"""Which way each gemm takes on a GPU: all ways are timed once, and what was found is kept on disk.

Skinny kernels and cuBLASLt's algorithms compete for each problem (columns, depth, padded number of rows, types,
epilogue). A choice holds for one device, one version of cuBLASLt, one source of the skinny kernels and one set of
candidates; with another of these it is measured anew, and so it is where the file is damaged. Processes that share a
directory measure one after the other, and what one has measured the others read.

Choosing launches kernels, so it comes before any capture; it also runs each chosen algorithm once, as cuBLASLt demands.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from lean_engine.errors import ConfigError, LaunchError
from lean_engine.runtime.cuda import gemm_kernels
from lean_engine.runtime.cuda.cublaslt import Algorithm, CublasLt
from lean_engine.runtime.cuda.gemm_kernels import Problem, Way, skinny_ways
from lean_engine.runtime.cuda.sources import kernel_source
from lean_engine.runtime.whole_file import locked, read_whole, write_whole

FORMAT = 1  # of the files; another number, another file
ROUNDS = 3  # each candidate's time is the shortest of so many at most
HOPELESS = 1.5  # times the shortest time: what takes longer is not timed again
TIE = 1.02  # times that differ by less are equal: the first candidate is taken
MAX_SKINNY_ROWS = max(gemm_kernels.TENSOR_WEIGHTS)  # beyond, skinny kernels are for what cuBLASLt lacks

Candidate = Way | Algorithm


class Stopwatch(Protocol):
    """What times a gemm on the device at hand."""

    def microseconds(self, problem: Problem, candidate: Candidate) -> float:
        """The time of one product whose weights are in no cache, as in a model.

        Raises:
            LaunchError: the candidate cannot run; it is left out.
        """


def candidates(problem: Problem, arch: str, blas: CublasLt | None) -> list[Candidate]:
    """The ways to be timed; with equal times the first is taken. Never empty.

    Raises:
        LaunchError: there are no kernels for these types.
    """
    algorithms = [] if blas is None else blas.algorithms(problem)
    if algorithms and problem.num_rows > MAX_SKINNY_ROWS:
        return list(algorithms)
    return [*skinny_ways(problem, arch), *algorithms]


class GemmChoices:
    """The choices of one device.

    Args:
        directory: made when it is first written to. Everything in it can be deleted at any time.
        device: the GPU's name, as the driver gives it.
        library_version: of cuBLASLt; 0 without.
    """

    def __init__(self, directory: Path, device: str, library_version: int, stopwatch: Stopwatch) -> None:
        self.directory, self.device, self.library_version = directory, device, library_version
        self.stopwatch = stopwatch
        self._known: dict[Path, dict[str, str]] = {}  # file → what it held: key of a choice → candidate's name

    def choose(self, problem: Problem, offered: Sequence[Candidate]) -> Candidate:
        """The fastest candidate, from the file or measured now.

        Raises:
            LaunchError: none can run.
            ConfigError: the directory cannot be written.
        """
        path, key = self.path(problem.dtype), choice_key(problem, offered)
        by_name = {candidate.name: candidate for candidate in offered}
        if path not in self._known:
            self._known[path] = read_choices(path)
        if (name := self._known[path].get(key)) in by_name:
            return by_name[name]
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with locked(path.with_suffix(".lock")):
                known = self._known[path] = read_choices(path)
                if (name := known.get(key)) in by_name:  # another process has measured it meanwhile
                    return by_name[name]
                known[key] = fastest(self.stopwatch, problem, offered).name
                write_choices(path, known)
                return by_name[known[key]]
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(f"choices of gemm kernels cannot be stored in {self.directory}: {reason}") from None

    def path(self, dtype: str) -> Path:
        """The file of an element type's choices."""
        readable = re.sub(r"[^A-Za-z0-9]+", "-", self.device).strip("-")
        key = [FORMAT, self.device, self.library_version, dtype, kernel_source(gemm_kernels.SOURCE).digest]
        return self.directory / f"gemm-{readable}-{self.library_version}-{dtype}-{digest_of(key)}.json"


def fastest(stopwatch: Stopwatch, problem: Problem, offered: Sequence[Candidate]) -> Candidate:
    """The first candidate whose time is within TIE of the shortest.

    Candidates take turns, so that a clock that changes meanwhile is nobody's advantage.
    """
    times = dict.fromkeys(range(len(offered)), math.inf)  # place → time, of those that can run
    for _ in range(ROUNDS):
        limit = HOPELESS * min(times.values(), default=0.0)
        for i in [i for i, us in times.items() if us <= limit]:
            try:
                times[i] = min(times[i], stopwatch.microseconds(problem, offered[i]))
            except LaunchError:
                del times[i]
    if not times:
        raise LaunchError(f"none of {len(offered)} kernels runs {problem}")
    limit = TIE * min(times.values())
    return offered[next(i for i, us in times.items() if us <= limit)]


# ---- the file


def choice_key(problem: Problem, offered: Sequence[Candidate]) -> str:
    """Everything that decides a choice within a file."""
    names = digest_of([candidate.name for candidate in offered])
    return f"{json.dumps(dataclasses.astuple(problem))} of {names}"


def digest_of(value: object) -> str:
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:16]


def read_choices(path: Path) -> dict[str, str]:
    """Empty if there is no such file, or not a whole one."""
    body = read_whole(path)
    return {} if body is None else {str(key): str(name) for key, name in json.loads(body).items()}


def write_choices(path: Path, choices: dict[str, str]) -> None:
    write_whole(path, json.dumps(choices, indent=0, sort_keys=True).encode())
