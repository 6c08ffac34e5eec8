"""The choice between ways to compute a gemm, with a clock that is made up: ties, failures, the file, processes."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lean_engine.errors import ConfigError, LaunchError
from lean_engine.runtime.cuda import gemm_choice
from lean_engine.runtime.cuda.cublaslt import Algorithm
from lean_engine.runtime.cuda.gemm_choice import ROUNDS, Candidate, GemmChoices, candidates, fastest
from lean_engine.runtime.cuda.gemm_kernels import FewRows, Problem, TensorCores

PROBLEM = Problem(4, 4096, 1024, "bfloat16", "bfloat16")
FEW, TENSOR, BLAS = FewRows(4, 1, 8), TensorCores(32, 8), Algorithm(bytes(range(64)), 4096)
OFFERED: list[Candidate] = [FEW, TENSOR, BLAS]


class MadeUpClock:
    """Candidate → its times in turn, the last for ever; None: it cannot run."""

    def __init__(self, times: Mapping[Candidate, Sequence[float | None]], log: Path | None = None) -> None:
        self.times, self.log, self.counts = times, log, Counter[Candidate]()
        self.turns: list[Candidate] = []

    def microseconds(self, problem: Problem, candidate: Candidate) -> float:
        own = self.times[candidate]
        result = own[min(self.counts[candidate], len(own) - 1)]
        self.counts[candidate] += 1
        self.turns.append(candidate)
        if self.log is not None:
            with open(self.log, "a") as file:
                file.write(f"{candidate.name}\n")
        if result is None:
            raise LaunchError("no")
        return result


def clock(few: float, tensor: float, blas: float) -> MadeUpClock:
    return MadeUpClock({FEW: [few], TENSOR: [tensor], BLAS: [blas]})


@pytest.fixture
def choices(tmp_path: Path) -> GemmChoices:
    return GemmChoices(tmp_path / "gemm", "NVIDIA H200", 120903, clock(9.0, 7.0, 8.0))


# ---- the fastest


def test_the_fastest_is_chosen_by_its_shortest_time() -> None:
    assert fastest(clock(9, 7, 8), PROBLEM, OFFERED) == TENSOR
    assert fastest(MadeUpClock({FEW: [9, 9, 5], TENSOR: [7], BLAS: [8]}), PROBLEM, OFFERED) == FEW


def test_equal_times_go_to_the_first_candidate() -> None:
    assert fastest(clock(10.1, 10.0, 10.0), PROBLEM, OFFERED) == FEW
    assert fastest(clock(10.3, 10.1, 10.0), PROBLEM, OFFERED) == TENSOR
    assert fastest(clock(10.3, 10.1, 10.0), PROBLEM, OFFERED[::-1]) == BLAS


def test_candidates_take_turns() -> None:
    made_up = clock(10, 11, 12)
    fastest(made_up, PROBLEM, OFFERED)
    assert made_up.turns == OFFERED * ROUNDS


def test_candidates_that_are_far_behind_are_not_timed_again() -> None:
    made_up = MadeUpClock({FEW: [20], TENSOR: [13, 9], BLAS: [10]})
    assert fastest(made_up, PROBLEM, OFFERED) == TENSOR
    assert made_up.turns == [*OFFERED, *[TENSOR, BLAS] * (ROUNDS - 1)]


def test_candidate_that_cannot_run_is_left_out_and_not_tried_again() -> None:
    made_up = MadeUpClock({FEW: [1.0, None], TENSOR: [7.0], BLAS: [8.0]})
    assert fastest(made_up, PROBLEM, OFFERED) == TENSOR
    assert made_up.counts[FEW] == 2
    with pytest.raises(LaunchError, match=r"none of 3 kernels runs Problem\(num_rows=4, num_out=4096"):
        fastest(MadeUpClock({c: [None] for c in OFFERED}), PROBLEM, OFFERED)


# ---- the file


def again(choices: GemmChoices, made_up: MadeUpClock) -> GemmChoices:
    """Another process, some time later, with another clock."""
    return GemmChoices(choices.directory, choices.device, choices.library_version, made_up)


def test_what_was_measured_is_not_measured_again(choices: GemmChoices) -> None:
    assert choices.choose(PROBLEM, OFFERED) == TENSOR
    assert choices.choose(PROBLEM, OFFERED) == TENSOR
    slower = clock(1, 9, 9)
    assert again(choices, slower).choose(PROBLEM, OFFERED) == TENSOR
    assert not slower.turns
    assert len(choices.stopwatch.turns) == 3 * ROUNDS  # type: ignore[attr-defined]


def test_everything_that_decides_a_choice_is_in_its_key(choices: GemmChoices) -> None:
    choices.choose(PROBLEM, OFFERED)
    for change in (
        {"num_rows": 5},
        {"num_out": 1},
        {"depth": 8},
        {"dtype": "float16"},
        {"out_dtype": "float32"},
        {"has_bias": True},
        {"has_residual": True},
        {"activation": "silu"},
    ):
        other = clock(1, 9, 9)
        assert again(choices, other).choose(replace(PROBLEM, **change), OFFERED) == FEW, change
    for device, version in (("NVIDIA H100", 120903), ("NVIDIA H200", 130000)):
        other = clock(1, 9, 9)
        assert GemmChoices(choices.directory, device, version, other).choose(PROBLEM, OFFERED) == FEW
    fewer = clock(9, 9, 1)
    assert again(choices, fewer).choose(PROBLEM, OFFERED[::2]) == BLAS
    assert again(choices, clock(1, 1, 1)).choose(PROBLEM, OFFERED) == TENSOR  # and the first is still there


def test_changed_kernels_are_measured_anew(choices: GemmChoices, monkeypatch: pytest.MonkeyPatch) -> None:
    choices.choose(PROBLEM, OFFERED)
    source = gemm_choice.kernel_source("skinny_gemm.cu")
    monkeypatch.setattr(gemm_choice, "kernel_source", lambda name: replace(source, text=source.text + "\n"))
    assert again(choices, clock(1, 9, 9)).choose(PROBLEM, OFFERED) == FEW


@pytest.mark.parametrize("damage", ["empty", "cut", "changed", "other format"])
def test_damaged_file_is_measured_anew(choices: GemmChoices, damage: str) -> None:
    choices.choose(PROBLEM, OFFERED)
    path = choices.path("bfloat16")
    raw = path.read_bytes()
    changed = raw.replace(b"skinny 32", b"skinny 16")
    assert changed != raw
    path.write_bytes({"empty": b"", "cut": raw[:-1], "changed": changed, "other format": b"{}"}[damage])
    assert again(choices, clock(9, 7, 8)).choose(PROBLEM, OFFERED) == TENSOR
    assert path.read_bytes() == raw


def test_file_is_named_after_the_device_and_can_be_deleted(choices: GemmChoices) -> None:
    choices.choose(PROBLEM, OFFERED)
    path = choices.path("bfloat16")
    assert path.name.startswith("gemm-NVIDIA-H200-120903-bfloat16-")
    path.unlink()
    assert again(choices, clock(1, 9, 9)).choose(PROBLEM, OFFERED) == FEW


def choose_in_a_child(directory: Path) -> str:
    slow = MadeUpClock({FEW: [9.0], TENSOR: [7.0], BLAS: [8.0]}, directory / "log")
    original = slow.microseconds

    def microseconds(problem: Problem, candidate: Candidate) -> float:
        time.sleep(0.05)
        return original(problem, candidate)

    slow.microseconds = microseconds  # type: ignore[method-assign]
    return GemmChoices(directory / "gemm", "NVIDIA H200", 120903, slow).choose(PROBLEM, OFFERED).name


def test_processes_that_want_the_same_choice_measure_it_once(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert pool.map(choose_in_a_child, [tmp_path] * 2) == [TENSOR.name] * 2
    assert len((tmp_path / "log").read_text().splitlines()) == 3 * ROUNDS


def test_processes_keep_what_others_have_found(choices: GemmChoices) -> None:
    other = again(choices, clock(1, 9, 9))
    assert other.choose(PROBLEM, OFFERED) == FEW
    assert choices.choose(replace(PROBLEM, num_rows=2), OFFERED) == TENSOR
    assert other.choose(replace(PROBLEM, num_rows=1), OFFERED) == FEW
    silent = again(choices, clock(1, 1, 1))
    assert [silent.choose(replace(PROBLEM, num_rows=n), OFFERED) for n in (1, 2, 4)] == [FEW, TENSOR, FEW]
    assert not silent.stopwatch.turns  # type: ignore[attr-defined]


def test_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"gemm kernels cannot be stored in .*file/gemm: Not a directory"):
        GemmChoices(tmp_path / "file" / "gemm", "GPU", 0, clock(1, 2, 3)).choose(PROBLEM, OFFERED)


def test_failure_leaves_no_file_behind(choices: GemmChoices) -> None:
    failing = again(choices, MadeUpClock({c: [None] for c in OFFERED}))
    with pytest.raises(LaunchError):
        failing.choose(PROBLEM, OFFERED)
    assert [name for name in os.listdir(choices.directory) if not name.endswith(".lock")] == []


# ---- candidates


class Heuristic:
    """Stands where CublasLt stands."""

    def __init__(self, *found: Algorithm) -> None:
        self.found = list(found)

    def algorithms(self, problem: Problem) -> list[Algorithm]:
        return self.found


def test_skinny_kernels_compete_up_to_64_rows_and_help_out_beyond() -> None:
    blas: Any = Heuristic(BLAS)
    assert candidates(PROBLEM, "sm_90", blas)[-1] == BLAS
    assert FewRows(4, 1, 8) in candidates(PROBLEM, "sm_90", blas)
    assert candidates(replace(PROBLEM, num_rows=64), "sm_90", blas) == [TensorCores(64, 64), TensorCores(32, 64), BLAS]
    assert candidates(replace(PROBLEM, num_rows=65), "sm_90", blas) == [BLAS]
    none: Any = Heuristic()
    assert candidates(replace(PROBLEM, num_rows=65), "sm_90", none) == [TensorCores(64, 64), TensorCores(32, 64)]
    assert candidates(PROBLEM, "sm_90", None) == candidates(PROBLEM, "sm_90", none)
