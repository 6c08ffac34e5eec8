"""CpuDevice: NumPy's kernels, the BLAS's threads and a Team; every array is float32 or int32 host memory."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from lean_engine.ir.graph import Dims
from lean_engine.ir.sources import Source
from lean_engine.passes import Launch
from lean_engine.passes.plan_memory import align
from lean_engine.runtime.cpu import attention, blas, gemm, moe, rope_cache, rows
from lean_engine.runtime.cpu.faster import Faster
from lean_engine.runtime.cpu.host_memory import HostMemory, usable_cpus
from lean_engine.runtime.cpu.scope import Call, Scope, in_turn
from lean_engine.runtime.cpu.team import Team, split
from lean_engine.runtime.device import Array, LaunchArgs, Operand, Replay, TensorStore
from lean_engine.runtime.weights import array_bytes, load_array

Shape = tuple[int, ...]
Capture = Callable[[Scope, LaunchArgs, Sequence[Array]], list[Call]]
Scratch = Callable[[Sequence[Shape], Mapping[str, Any], int], list[Shape]]


MIN_SHARED_ROWS = 64  # fewer rows are not worth waking another thread for


@dataclass(frozen=True, slots=True)
class CpuKernel:
    """capture: arrays → a launch's calls. scratch: input shapes → shapes of float32 arrays that capture is given."""

    capture: Capture
    scratch: Scratch
    row_inputs: tuple[int, ...] = ()  # inputs cut by rows, as the outputs are, where threads share a launch; () = never


def kernel(
    capture: Capture,
    scratch: Callable[[Sequence[Shape]], list[Shape]] = lambda shapes: [],
    row_inputs: tuple[int, ...] = (),
) -> CpuKernel:
    return CpuKernel(capture, lambda shapes, scalars, num_threads: scratch(shapes), row_inputs)


KERNELS: dict[str, CpuKernel] = {
    "embedding": kernel(rows.embedding),
    "rms_norm": kernel(rows.rms_norm, rows.rms_norm_scratch, (0,)),
    "add_rms_norm": kernel(rows.add_rms_norm, rows.add_rms_norm_scratch, (0, 1)),
    "gemm": kernel(gemm.gemm),
    "slice_columns": kernel(rows.slice_columns),
    "rope": kernel(rope_cache.rope, rope_cache.rope_scratch),
    "write_kv": kernel(rope_cache.write_kv),
    "qk_norm_rope_write_kv": kernel(
        rope_cache.qk_norm_rope_write_kv, rope_cache.qk_norm_rope_write_kv_scratch, (0, 1, 2)
    ),
    "paged_attention": CpuKernel(attention.paged_attention, attention.paged_attention_scratch),
    "silu": kernel(rows.silu, rows.activation_scratch),
    "gelu_tanh": kernel(rows.gelu_tanh, rows.activation_scratch),
    "act_and_mul": kernel(rows.act_and_mul, row_inputs=(0,)),
    "mul": kernel(rows.mul),
    "add": kernel(rows.add),
    "softcap": kernel(rows.softcap),
    "gather_rows": kernel(rows.gather_rows),
    "moe_route": kernel(moe.moe_route, moe.moe_route_scratch),
    "moe_experts": kernel(moe.moe_experts, moe.moe_experts_scratch),
}


def rows_of(args: LaunchArgs, part: slice, row_inputs: tuple[int, ...]) -> LaunchArgs:
    """A launch over some of its rows; caches, which are outputs too, stay whole."""
    inputs = [a[part] if i in row_inputs else a for i, a in enumerate(args.inputs)]
    whole = {id(a) for i, a in enumerate(args.inputs) if i not in row_inputs}
    outputs = [a if id(a) in whole else a[part] for a in args.outputs]
    return replace(args, inputs=inputs, outputs=outputs)


def workspace_bytes(launch: Launch, dims: Dims, num_threads: int) -> int:
    """See runtime.device.Device.workspace_bytes."""
    shapes = [v.type.concrete_shape(dims) for v in launch.inputs]
    scratch = KERNELS[launch.kernel].scratch(shapes, launch.scalars, num_threads)
    return sum(align(4 * math.prod(shape)) for shape in scratch)


class CpuDevice(HostMemory):
    """See runtime.device.Device.

    Args:
        threads: of the Team; None = the CPUs this process may use. The BLAS is held to one
            thread but for steps of one row.
    """

    name = "cpu"
    compute_dtype = kv_cache_dtype = "float32"
    matrix_formats = ()

    def __init__(self, threads: int | None = None) -> None:
        self.num_threads = threads or usable_cpus()
        self.team = Team(self.num_threads)
        blas.hold()
        self._release_blas = weakref.finalize(self, blas.release)  # closed or dropped, once
        self._constants: dict[Hashable, Any] = {}

    def load_matrix(self, source: Source, store: TensorStore) -> Operand:
        return load_array(source, store, self, self.compute_dtype)

    def matrix_bytes(self, source: Source, store: TensorStore) -> int:
        return array_bytes(source, self.compute_dtype)

    def workspace_bytes(self, launch: Launch, dims: Dims) -> int:
        return workspace_bytes(launch, dims, self.num_threads)

    def capture(self, launches: Sequence[LaunchArgs]) -> Replay:
        by_team = self._capture_all(launches, Scope(self.team, self._constants))
        if self.num_threads == 1 or any(len(a.outputs[0]) > 1 for a in launches if a.kernel == "gemm"):
            return by_team
        by_blas = self._capture_all(launches, Scope(self.team, self._constants, uses_blas_threads=True))
        return Faster(partial(self._with_blas_threads, by_blas), by_team)

    def _capture_all(self, launches: Sequence[LaunchArgs], scope: Scope) -> Replay:
        calls = [call for args in launches for call in self._capture_one(scope, args)]
        run = in_turn(*scope.prologue, *calls)

        def replay() -> None:
            # exp of a large negative gate overflows to inf on the way to 0; NaN is looked for where rows are sampled.
            with np.errstate(all="ignore"):
                run()

        return replay

    def _with_blas_threads(self, replay: Replay) -> None:
        blas.set_num_threads(self.num_threads)
        try:
            replay()
        finally:
            blas.set_num_threads(1)

    def _capture_one(self, scope: Scope, args: LaunchArgs) -> list[Call]:
        entry = KERNELS[args.kernel]
        shapes = entry.scratch([a.shape for a in args.inputs], args.scalars, self.num_threads)
        scratch, start = [], 0
        for shape in shapes:
            size = 4 * math.prod(shape)
            scratch.append(args.workspace[start : start + size].view(np.float32).reshape(shape))
            start += align(size)
        count = len(args.outputs[0])
        if not entry.row_inputs or count < MIN_SHARED_ROWS or self.num_threads == 1:
            return entry.capture(scope, args, scratch)
        parts = [
            in_turn(*entry.capture(scope, rows_of(args, part, entry.row_inputs), [s[part] for s in scratch]))
            for part in split(count, self.num_threads)
        ]
        return [partial(self.team.run, parts)]

    def close(self) -> None:
        self.team.close()
        self._release_blas()
