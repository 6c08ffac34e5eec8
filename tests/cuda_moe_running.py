"""Runs the kernels of moe.cu in the emulator, all accesses checked, and knows what they should give."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from cuda_gemm_running import ARCH, Bind
from cuda_kernel_running import Array, GuardedMemory, build_checked

from lean_engine.dtypes import numpy_dtype
from lean_engine.ir import reference
from lean_engine.runtime.cuda.emulator import EmulatedKernels
from lean_engine.runtime.cuda.moe_kernels import (
    Sizes,
    moe_experts_calls,
    moe_instances,
    moe_route_call,
    moe_workspace_bytes,
    sizes_of,
)
from lean_engine.runtime.device import LaunchArgs
from lean_engine.runtime.kernels import KERNELS


@cache
def checked_kernels() -> EmulatedKernels:
    return build_checked(moe_instances(ARCH))


def placed(memory: GuardedMemory, array: Array, dtype: str) -> Array:
    target = memory.allocate(array.shape, dtype)
    target[...] = array.astype(target.dtype)
    target.flags.writeable = False
    return target


class RouteRun:
    def __init__(self, logits: Array, top_k: int, normalize: bool, dtype: str, slots: Array | None = None) -> None:
        self.memory = GuardedMemory()
        self.logits = placed(self.memory, logits, dtype)
        self.slots = None if slots is None else placed(self.memory, slots, "int32")
        shape = (len(logits), top_k)
        self.outputs = [self.memory.allocate(shape, "float32"), self.memory.allocate(shape, "int32")]
        scalars = KERNELS["moe_route"].check(
            [self.logits], self.outputs, {"top_k": top_k, "normalize": normalize}, dtype
        )
        self.launch = LaunchArgs("moe_route", [self.logits], self.outputs, scalars, np.zeros(0, np.uint8))

    def run(self, order: int = 0, preempt: int = 0, bind: Bind | None = None) -> tuple[Array, Array]:
        weights, ids = self.outputs
        weights[...], ids[...] = np.nan, -987654321
        (bind or checked_kernels().bind)(moe_route_call(self.launch, self.slots))(order, preempt)
        self.memory.assert_guards_are_whole()
        return weights.copy(), ids.copy()


@dataclass(frozen=True)
class Case:
    num_rows: int
    top_k: int = 2
    num_experts: int = 6
    hidden: int = 40
    intermediate: int = 24
    dtype: str = "bfloat16"
    activation: str = "silu"
    num_padded: int = 0
    skew: float = 0.0  # towards the first expert


class ExpertsRun:
    def __init__(self, case: Case, arch: str = ARCH) -> None:
        self.case, self.arch, self.memory = case, arch, GuardedMemory()
        rng = np.random.default_rng([case.num_rows, case.top_k, case.num_experts])
        e, h, i = case.num_experts, case.hidden, case.intermediate
        logits = rng.standard_normal((case.num_rows, e)) + case.skew * (np.arange(e) == 0)
        weights, ids = reference.moe_route(logits, case.top_k, True)
        if case.num_padded:
            weights[-case.num_padded :], ids[-case.num_padded :] = 0, -1
        arrays = {
            "x": rng.standard_normal((case.num_rows, h)),
            "weights": weights,
            "ids": ids,
            "gate_up": rng.standard_normal((e, 2 * i, h)) * h**-0.5,
            "down": rng.standard_normal((e, h, i)) * i**-0.5,
        }
        dtypes = {"weights": "float32", "ids": "int32"}
        self.inputs = [placed(self.memory, a, dtypes.get(name, case.dtype)) for name, a in arrays.items()]
        self.out = self.memory.allocate((case.num_rows, h), case.dtype)
        scalars = KERNELS["moe_experts"].check(self.inputs, [self.out], {"activation": case.activation}, case.dtype)
        sizes = Sizes(case.num_rows, case.top_k, e, h, i)
        self.workspace = self.memory.allocate((moe_workspace_bytes(sizes, case.dtype, arch),), "uint8")
        self.launch = LaunchArgs("moe_experts", self.inputs, [self.out], scalars, self.workspace)
        self.sizes = sizes_of([array.shape for array in self.inputs])
        assert self.sizes == sizes

    def run(self, order: int = 0, preempt: int = 0, bind: Bind | None = None) -> Array:
        self.out[...] = np.nan
        self.workspace[...] = 0xFF
        for call in moe_experts_calls(self.launch, self.arch):
            (bind or checked_kernels().bind)(call)(order, preempt)
        self.memory.assert_guards_are_whole()
        return self.out.copy()

    def expected(self) -> Array:
        """With the hidden values rounded to the element type, as every device that stores them does."""
        x, weights, ids, gate_up, down = (a.astype(np.float64) for a in self.inputs)
        out = np.zeros(x.shape)
        for row, places in enumerate(ids.astype(int)):
            for weight, expert in zip(weights[row], places, strict=True):
                if expert >= 0:
                    hidden = reference.act_and_mul((gate_up[expert] @ x[row])[None], self.case.activation)[0]
                    out[row] += weight * (down[expert] @ hidden.astype(numpy_dtype(self.case.dtype)).astype(float))
        return out
