"""Times a gemm on a GPU as a model meets it: inside a graph, with weights that are in no cache.

A graph of several products, each over another copy of the weights, is replayed as a whole and the host waits once, so
that neither launching nor waiting counts. All candidates multiply the same numbers: whatever the memory held.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from lean_engine.dtypes import DTYPES
from lean_engine.runtime.cuda.cublaslt import Algorithm, CublasLt
from lean_engine.runtime.cuda.driver import Driver
from lean_engine.runtime.cuda.gemm_choice import Candidate
from lean_engine.runtime.cuda.gemm_kernels import Gemm, Problem

ROTATION_BYTES = 256 << 20  # of weights before one comes again: twice the largest L2 cache
MIN_PRODUCTS, MAX_PRODUCTS = 8, 64  # of a graph

Launch = Callable[[Gemm, Candidate], None]


def measuring_bytes(num_rows: int, depth: int, num_out: int) -> int:
    """What GraphStopwatch allocates at most for a product of two-byte elements into float32."""
    weight_bytes = 2 * num_out * depth
    num_copies = min(MAX_PRODUCTS, -(-ROTATION_BYTES // weight_bytes))
    return num_copies * weight_bytes + num_rows * (2 * depth + 4 * num_out)


def launch_gemm(driver: Driver, blas: CublasLt | None, stream: int, gemm: Gemm, candidate: Candidate) -> None:
    """Launch a gemm by a candidate, on the driver's stream; in a capture only what has run before.

    Args:
        stream: the cudaStream_t of the driver's stream.

    Raises:
        LaunchError: the candidate cannot run.
    """
    if isinstance(candidate, Algorithm):
        assert blas is not None, "an algorithm of cuBLASLt comes from a handle"
        blas.multiply(gemm, candidate, stream)
        return
    call = candidate.call(gemm)
    driver.prepare([call.instance])
    driver.launch(call)


class GraphStopwatch:
    """See gemm_choice.Stopwatch. It allocates about ROTATION_BYTES, so it comes before the KV pool takes what is free.

    Args:
        launch: a gemm by a candidate, on the driver's stream; see launch_gemm.
        clock: seconds.
    """

    def __init__(
        self,
        driver: Driver,
        launch: Launch,
        clock: Callable[[], float] = time.perf_counter,
        rotation_bytes: int = ROTATION_BYTES,
    ) -> None:
        self._driver, self._launch, self._clock = driver, launch, clock
        self._rotation_bytes = rotation_bytes
        self._last: tuple[Problem, list[Gemm]] | None = None  # the candidates of one problem share its arrays

    def microseconds(self, problem: Problem, candidate: Candidate) -> float:
        """See gemm_choice.Stopwatch.

        Raises:
            LaunchError: the candidate cannot run.
            OutOfMemory: there is no room for the weights.
        """
        gemms = self._gemms(problem)

        def run() -> None:
            for gemm in gemms:
                self._launch(gemm, candidate)

        run()
        replay = self._driver.capture(run)
        replay()
        self._driver.synchronize()
        start = self._clock()
        replay()
        self._driver.synchronize()
        return (self._clock() - start) * 1e6 / len(gemms)

    def _gemms(self, problem: Problem) -> Sequence[Gemm]:
        """Of one problem, over several copies of the weights."""
        if self._last is None or self._last[0] != problem:
            self._last = None  # gives the last one's memory back first
            self._last = (problem, self._allocate(problem))
        return self._last[1]

    def _allocate(self, p: Problem) -> list[Gemm]:
        allocate = self._driver.allocate
        num_weights = p.num_out * (2 if p.activation else 1)
        weight_bytes = num_weights * p.depth * DTYPES[p.dtype].num_bytes
        num_copies = min(MAX_PRODUCTS, -(-self._rotation_bytes // weight_bytes))
        weights = [allocate((num_weights, p.depth), p.dtype) for _ in range(num_copies)]
        x, out = allocate((p.num_rows, p.depth), p.dtype), allocate((p.num_rows, p.num_out), p.out_dtype)
        bias = allocate((num_weights,), p.dtype) if p.has_bias else None
        residual = allocate((p.num_rows, p.num_out), p.dtype) if p.has_residual else None
        return [
            Gemm(out, x, weights[i % num_copies], bias, residual, p.activation)
            for i in range(max(MIN_PRODUCTS, num_copies))
        ]
