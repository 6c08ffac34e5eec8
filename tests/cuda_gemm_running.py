"""Runs the kernels of skinny_gemm.cu in the emulator, all accesses checked, against products in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
from cuda_kernel_running import ORDERS, Array, GuardedMemory, assert_rounded, build_checked

from lean_engine.ir.reference import ACTIVATIONS
from lean_engine.runtime.cuda.emulator import EmulatedKernels
from lean_engine.runtime.cuda.gemm_kernels import Gemm, Way, gemm_instances
from lean_engine.runtime.cuda.instances import KernelCall

ARCH = "sm_90"

Bind = Callable[[KernelCall], Callable[..., None]]


@cache
def checked_kernels() -> EmulatedKernels:
    """The bfloat16 instances of ARCH, built once, others when asked for; skips where they cannot be built."""
    return build_checked(gemm_instances(ARCH, ["bfloat16"]))


@dataclass(frozen=True)
class Case:
    num_rows: int
    num_out: int
    depth: int
    dtype: str = "bfloat16"
    out_dtype: str | None = None
    has_bias: bool = False
    has_residual: bool = False
    activation: str | None = None


class GemmRun:
    """The arrays of one gemm between guards, the inputs read-only."""

    def __init__(self, case: Case, scale: float = 1.0) -> None:
        rng = np.random.default_rng([case.num_rows, case.num_out, case.depth])
        num_weights = case.num_out * (2 if case.activation else 1)
        self.memory = GuardedMemory()

        def place(*shape: int, size: float = 1.0) -> Array:
            array = self.memory.allocate(shape, case.dtype)
            array[...] = (rng.standard_normal(shape) * size).astype(array.dtype)
            array.flags.writeable = False
            return array

        x = place(case.num_rows, case.depth, size=scale)
        weight = place(num_weights, case.depth, size=case.depth**-0.5)
        bias = place(num_weights) if case.has_bias else None
        residual = place(case.num_rows, case.num_out) if case.has_residual else None
        out = self.memory.allocate((case.num_rows, case.num_out), case.out_dtype or case.dtype)
        self.gemm = Gemm(out, x, weight, bias, residual, case.activation)

    def run(self, way: Way, order: int = 0, preempt: int = 0, bind: Bind | None = None) -> Array:
        """What a way leaves in an output that held NaN. bind: to other kernels than checked_kernels."""
        self.gemm.out[...] = np.nan
        (bind or checked_kernels().bind)(way.call(self.gemm))(order, preempt)
        self.memory.assert_guards_are_whole()
        return self.gemm.out.copy()

    def expected(self) -> Array:
        g = self.gemm
        y = g.x.astype(np.float64) @ g.weight.astype(np.float64).T
        if g.bias is not None:
            y += g.bias.astype(np.float64)
        if g.activation:
            gate, partner = np.split(y, 2, axis=1)
            y = ACTIVATIONS[g.activation](gate) * partner
        return y if g.residual is None else y + g.residual.astype(np.float64)


def check(case: Case, ways: Sequence[Way], orders: Sequence[tuple[int, int]] = ORDERS) -> None:
    """Each way is right in each order of threads, and the same to the last bit."""
    run = GemmRun(case)
    expected = run.expected()
    assert ways
    for way in ways:
        first, *others = [run.run(way, *order) for order in orders]
        assert_rounded(first, expected)
        for other in others:
            assert np.array_equal(first, other), f"{way.name} depends on the order of threads"
