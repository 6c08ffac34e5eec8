"""CudaDevice: the kernel table on a GPU, a step captured as one graph.

Launches become kernel calls (instances.py, attention.py) and matrix products; capturing runs them once as they are, so
that libraries have set themselves up, and then records them. Steps are padded to a few sizes, so that few graphs
serve all: a padded row has slot -1, a padded request length 0, and kernels skip both.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from lean_engine.errors import ConfigError
from lean_engine.ir.graph import Dims
from lean_engine.passes import Launch
from lean_engine.runtime.cuda import attention, moe_kernels
from lean_engine.runtime.cuda.cublaslt import Algorithm
from lean_engine.runtime.cuda.driver import Driver, HostArray
from lean_engine.runtime.cuda.gemm_kernels import Gemm, gemm_of
from lean_engine.runtime.cuda.instances import ARCHITECTURES_WITHOUT_BFLOAT16, REAL_DTYPES, KernelCall, kernel_calls
from lean_engine.runtime.device import Array, LaunchArgs, Replay, StepInputs

INPUT_ALIGNMENT = 64  # int32 elements between the beginnings of step inputs: 256 bytes
GRAPH_SIZES = (1, 2, 4, *range(8, 257, 8), *range(320, 1025, 64))  # tokens of a padded step
COARSE = 256  # beyond them, multiples of this many tokens


@dataclass(frozen=True, slots=True, eq=False)
class LibraryGemm:
    """A product by an algorithm of the library."""

    gemm: Gemm
    algorithm: Algorithm


Command = KernelCall | LibraryGemm


class CudaDevice:
    """See runtime.device.Device.

    Args:
        driver: the GPU.
        compute_dtype: "bfloat16" or "float16": of weights, activations and KV cache.
        graph_sizes: padded numbers of tokens, ascending.

    Raises:
        ConfigError: the GPU cannot compute in this type.
    """

    name = "cuda"

    def __init__(self, driver: Driver, compute_dtype: str, graph_sizes: Sequence[int] = GRAPH_SIZES) -> None:
        if compute_dtype not in REAL_DTYPES:
            raise ConfigError(
                f"dtype is {compute_dtype!r}; a CUDA device computes in one of: {', '.join(REAL_DTYPES)} "
                "(device='cpu' computes in float32)"
            )
        if compute_dtype == "bfloat16" and driver.arch in ARCHITECTURES_WITHOUT_BFLOAT16:
            raise ConfigError(f"dtype is 'bfloat16', which {driver.name} ({driver.arch}) lacks; use float16")
        self.driver = driver
        self.compute_dtype = compute_dtype
        self._graph_sizes = sorted(graph_sizes)
        self._staging = driver.allocate_host((0,), "uint8")
        self._counters: dict[int, Array] = {}  # head_dim → counters of the attention kernel

    # -- memory

    def allocate(self, shape: Sequence[int], dtype: str) -> Array:
        return self.driver.allocate(shape, dtype)

    def fill(self, array: Array, write: Callable[[HostArray], None]) -> None:
        host = self._stage(array)
        write(host)
        self.driver.upload(host, array)
        self.driver.synchronize()

    def read(self, array: Array) -> HostArray:
        host = self._stage(array)
        self.driver.download(array, host)
        self.driver.synchronize()
        return host

    def _stage(self, array: Array) -> HostArray:
        """Page-locked memory in the form of an array, the same for all."""
        if self._staging.nbytes < array.nbytes:
            self._staging = self.driver.allocate_host((array.nbytes,), "uint8")
        return self._staging[: array.nbytes].view(array.dtype).reshape(array.shape)

    def make_inputs(self, shapes: Mapping[str, Sequence[int]]) -> StepInputs:
        """One page-locked record and its image on the device, so that a step uploads once."""
        starts, size = {}, 0
        for name, shape in shapes.items():
            starts[name] = size
            size += -(-math.prod(shape) // INPUT_ALIGNMENT) * INPUT_ALIGNMENT
        host, device = self.driver.allocate_host((size,), "int32"), self.driver.allocate((size,), "int32")

        def views(whole: Array) -> dict[str, Array]:
            return {
                name: whole[starts[name] : starts[name] + math.prod(shape)].reshape(tuple(shape))
                for name, shape in shapes.items()
            }

        return StepInputs(views(host), views(device), partial(self.driver.upload, host, device))

    def memory_bytes(self) -> int:
        return self.driver.memory_bytes()[0]

    def total_memory_bytes(self) -> int:
        return self.driver.memory_bytes()[1]

    def close(self) -> None:
        self.driver.close()

    # -- steps

    def padded(self, num_tokens: int, num_requests: int, num_rows: int, limits: Dims) -> tuple[int, int, int]:
        if num_tokens == num_requests:  # decodes alone
            size = self._graph_size(num_tokens, limits["B"])
            return size, size, min(size, limits["R"])
        return self._graph_size(num_tokens, limits["T"]), limits["B"], self._graph_size(num_rows, limits["R"])

    def _graph_size(self, count: int, limit: int) -> int:
        place = bisect_left(self._graph_sizes, count)
        size = self._graph_sizes[place] if place < len(self._graph_sizes) else -(-count // COARSE) * COARSE
        return min(size, limit)

    def workspace_bytes(self, launch: Launch, dims: Dims) -> int:
        if launch.kernel == "paged_attention":
            _, _, _, head_dim = launch.inputs[1].type.concrete_shape(dims)
            return attention.parts_bytes(self.driver.arch, head_dim, self.driver.num_sms)
        if launch.kernel == "moe_experts":
            sizes = moe_kernels.sizes_of([value.type.concrete_shape(dims) for value in launch.inputs])
            return moe_kernels.moe_workspace_bytes(sizes, self.compute_dtype, self.driver.arch)
        return 0

    def capture(self, launches: Sequence[LaunchArgs]) -> Replay:
        commands = self._commands(launches)
        self.driver.prepare(command.instance for command in commands if isinstance(command, KernelCall))
        run = partial(self._run, commands)
        run()
        return self.driver.capture(run)

    def _run(self, commands: Sequence[Command]) -> None:
        for command in commands:
            if isinstance(command, KernelCall):
                self.driver.launch(command)
            else:
                self.driver.multiply(command.gemm, command.algorithm)

    def _commands(self, launches: Sequence[LaunchArgs]) -> list[Command]:
        commands: list[Command] = []
        plans: dict[int, attention.AttentionPlan] = {}  # window → its lists in this step
        for launch in launches:
            if launch.kernel == "gemm":
                commands.append(self._gemm(gemm_of(launch)))
            elif launch.kernel == "moe_route":
                commands.append(moe_kernels.moe_route_call(launch))
            elif launch.kernel == "moe_experts":
                commands += moe_kernels.moe_experts_calls(launch, self.driver.arch)
            elif launch.kernel == "paged_attention":
                commands += self._attention(launch, plans)
            else:
                commands += kernel_calls(launch)
        return commands

    def _gemm(self, gemm: Gemm) -> Command:
        way = self.driver.choose_gemm(gemm.problem)
        return LibraryGemm(gemm, way) if isinstance(way, Algorithm) else way.call(gemm)

    def _attention(self, launch: LaunchArgs, plans: dict[int, attention.AttentionPlan]) -> list[KernelCall]:
        g = attention.geometry(launch)
        calls = []
        plan = plans.get(g.window)
        if plan is None:
            plan = plans[g.window] = self._attention_plan(launch, g)
            calls.append(attention.plan_call(launch, plan, self.driver.arch))
        scratch = attention.AttentionScratch(launch.workspace.view(np.float32), self._counters_for(g.head_dim))
        return calls + attention.attention_calls(launch, plan, scratch, self.driver.arch, self.driver.num_sms)

    def _attention_plan(self, launch: LaunchArgs, g: attention.Geometry) -> attention.AttentionPlan:
        """Lists for the tiles of a step of this size; wide ones where it can have chunks of prompts."""
        num_tokens, num_requests = len(launch.inputs[0]), len(launch.inputs[3])

        def words(rows: int) -> Array:
            return self.allocate((attention.plan_words(rows, num_tokens, num_requests, g.group),), "int32")

        wide = attention.tile_shape(self.driver.arch, g.head_dim, attention.WIDE_ROWS)
        has_chunks = num_tokens != num_requests and wide is not None
        return attention.AttentionPlan(words(attention.NARROW_ROWS), words(attention.WIDE_ROWS) if has_chunks else None)

    def _counters_for(self, head_dim: int) -> Array:
        if head_dim not in self._counters:
            num = attention.num_counters(self.driver.arch, head_dim, self.driver.num_sms)
            counters = self.allocate((num,), "int32").view(np.uint32)
            self.fill(counters, lambda host: host.fill(0))
            self._counters[head_dim] = counters
        return self._counters[head_dim]
