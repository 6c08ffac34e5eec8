"""Timing gemms through a driver: what is launched and when the clock is read, and whole choices on the emulated GPU."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lean_engine.errors import ConfigError, LaunchError
from lean_engine.runtime.cuda.cublaslt import Algorithm
from lean_engine.runtime.cuda.emulated_driver import EmulatedDriver
from lean_engine.runtime.cuda.gemm_choice import Candidate, GemmChoices, candidates
from lean_engine.runtime.cuda.gemm_kernels import FewRows, Gemm, Problem, TensorCores
from lean_engine.runtime.cuda.gemm_timing import GraphStopwatch, launch_gemm

PROBLEM = Problem(2, 16, 64, "bfloat16", "bfloat16")
WEIGHT_BYTES = 16 * 64 * 2
FEW = FewRows(2, 1, 8)


class Recorder:
    """Stands where a driver stands, keeps the events, and lets each product take its time."""

    def __init__(self, microseconds: float = 0.0) -> None:
        self.events: list[str] = []
        self.seconds, self.product_seconds = 0.0, microseconds * 1e-6
        self.allocated: list[tuple[int, ...]] = []
        self.weights: list[int] = []

    def allocate(self, shape: tuple[int, ...], dtype: str) -> np.ndarray[Any, Any]:
        self.allocated.append(tuple(shape))
        return np.zeros(shape, dtype if dtype == "float32" else "float16")

    def launch(self, gemm: Gemm, candidate: Candidate) -> None:
        self.events.append("product")
        self.weights.append(gemm.weight.ctypes.data)

    def capture(self, run: Callable[[], None]) -> Callable[[], None]:
        self.events.append("capture")
        count = len(self.events)
        run()
        return partial(self.replay, len(self.events) - count)

    def replay(self, num_products: int) -> None:
        self.events.append("replay")
        self.seconds += 1e-3 + num_products * self.product_seconds  # and a price per graph, to be noticed

    def synchronize(self) -> None:
        self.events.append("wait")

    def clock(self) -> float:
        self.events.append("clock")
        return self.seconds


def stopwatch(recorder: Any, rotation_bytes: int) -> GraphStopwatch:
    return GraphStopwatch(recorder, recorder.launch, recorder.clock, rotation_bytes)


def test_products_run_once_then_a_warm_graph_is_timed_between_waits() -> None:
    recorder = Recorder(7.0)
    found = stopwatch(recorder, 20 * WEIGHT_BYTES).microseconds(PROBLEM, FEW)
    assert found == pytest.approx(7.0 + 1000 / 20)
    assert [event for event, _ in itertools.groupby(recorder.events)] == [
        "product", "capture", "product", "replay", "wait", "clock", "replay", "wait", "clock",
    ]  # fmt: skip
    assert recorder.events.count("product") == 40


@pytest.mark.parametrize(("num_copies", "num_products"), [(20, 20), (3, 8), (0.1, 8), (1000, 64)])
def test_weights_come_again_only_after_the_cache_is_full_of_others(num_copies: float, num_products: int) -> None:
    recorder = Recorder()
    stopwatch(recorder, int(num_copies * WEIGHT_BYTES)).microseconds(PROBLEM, FEW)
    first = recorder.weights[:num_products]
    assert recorder.weights == first * 2
    distinct = min(64, max(1, int(num_copies)))
    assert len(set(first)) == distinct
    assert all(len(set(first[i : i + distinct])) == distinct for i in range(len(first) - distinct + 1))


def test_candidates_of_a_problem_share_its_arrays() -> None:
    recorder = Recorder()
    watch = stopwatch(recorder, WEIGHT_BYTES)
    full = Problem(2, 16, 64, "float16", "float32", has_bias=True, has_residual=True)
    gated = Problem(2, 16, 64, "float16", "float16", activation="silu")
    for candidate in (FEW, TensorCores(32, 8)):
        watch.microseconds(full, candidate)
    assert sorted(recorder.allocated) == [(2, 16), (2, 16), (2, 64), (16,), (16, 64)]
    recorder.allocated.clear()
    watch.microseconds(gated, FEW)
    assert (32, 64) in recorder.allocated


# ---- on the emulated GPU


@pytest.fixture(scope="module")
def driver() -> EmulatedDriver:
    try:
        return EmulatedDriver()
    except ConfigError as error:
        pytest.skip(str(error))


class StepClock:
    """Each reading is one step later than the last; the steps are given in turn."""

    def __init__(self, *steps: float) -> None:
        self.now, self.steps = 0.0, itertools.cycle(steps)

    def __call__(self) -> float:
        self.now += next(self.steps)
        return self.now


def test_every_skinny_kernel_is_timed_and_the_fastest_kept(driver: EmulatedDriver, tmp_path: Path) -> None:
    problem = Problem(3, 16, 64, "bfloat16", "bfloat16")
    offered = candidates(problem, driver.arch, None)
    assert len(offered) == 3
    launch = partial(launch_gemm, driver, None, 0)
    times = [0, 5e-6, 0, 2e-6, 0, 9e-6]  # before and in each of three turns
    choices = GemmChoices(tmp_path, driver.name, 0, GraphStopwatch(driver, launch, StepClock(*times), 1))
    assert choices.choose(problem, offered) == offered[1]
    silent = GemmChoices(tmp_path, driver.name, 0, GraphStopwatch(driver, launch, lambda: 1 / 0, 1))
    assert silent.choose(problem, offered) == offered[1]


def test_launch_of_a_chosen_kernel_is_the_product(driver: EmulatedDriver) -> None:
    rng = np.random.default_rng(0)
    gemm = Gemm(*(driver.allocate(shape, "float16") for shape in ((3, 16), (3, 64), (16, 64))))
    for array in (gemm.x, gemm.weight):
        array[...] = rng.integers(-3, 4, array.shape)
    for way in candidates(gemm.problem, driver.arch, None):
        gemm.out[...] = np.nan
        launch_gemm(driver, None, 0, gemm, way)
        assert np.array_equal(gemm.out, gemm.x.astype(np.float32) @ gemm.weight.astype(np.float32).T)


def test_algorithm_goes_to_cublaslt_with_the_stream(driver: EmulatedDriver) -> None:
    seen: list[Any] = []

    class Blas:
        def multiply(self, *args: Any) -> None:
            seen.append(args)
            raise LaunchError("refused")

    algorithm, blas = Algorithm(bytes(64), 0), Blas()
    gemm = Gemm(*(driver.allocate(shape, "float16") for shape in ((3, 16), (3, 64), (16, 64))))
    with pytest.raises(LaunchError, match="refused"):
        launch_gemm(driver, blas, 77, gemm, algorithm)  # type: ignore[arg-type]
    assert seen == [(gemm, algorithm, 77)]
