"""CudaDevice: the kernel table on a GPU, a step captured as one graph.

Launches become kernel calls (instances.py, attention.py) and matrix products; capturing runs them once as they are, so
that libraries have set themselves up, and then records them. Steps are padded to a few sizes, so that few graphs
serve all: a padded row has slot -1, a padded request length 0, and kernels skip both.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from lean_engine.errors import ConfigError
from lean_engine.ir.graph import Dims
from lean_engine.ir.sources import Source
from lean_engine.passes import Launch, Lowered
from lean_engine.runtime.cuda import attention, moe_kernels
from lean_engine.runtime.cuda.cublaslt import Algorithm
from lean_engine.runtime.cuda.driver import Driver, HostArray
from lean_engine.runtime.cuda.gemm_kernels import Gemm, gemm_of
from lean_engine.runtime.cuda.gemm_timing import measuring_bytes
from lean_engine.runtime.cuda.instances import ARCHITECTURES_WITHOUT_BFLOAT16, REAL_DTYPES, KernelCall, kernel_calls
from lean_engine.runtime.device import Array, LaunchArgs, Operand, Replay, StepInputs, TensorStore
from lean_engine.runtime.weights import array_bytes, load_array

TABLES = "block_tables"
SLOTS_INPUT = {"write_kv": 2, "qk_norm_rope_write_kv": 2}  # kernel → which input is the slot mapping
INPUT_ALIGNMENT = 64  # int32 elements between the beginnings of step inputs: 256 bytes
GRAPH_SIZES = (1, 2, 4, *range(8, 257, 8), *range(320, 1025, 64))  # tokens of a padded step
COARSE = 256  # beyond them, multiples of this many tokens


@dataclass(frozen=True, slots=True, eq=False)
class LibraryGemm:
    """A product by an algorithm of the library."""

    gemm: Gemm
    algorithm: Algorithm


Command = KernelCall | LibraryGemm


class Staging:
    """Page-locked memory between the host's arrays and the device's, as large as the largest that was asked for.

    Attributes:
        is_free: waits until what was written to it is where it belongs.
    """

    def __init__(self, driver: Driver) -> None:
        self.is_free: Callable[[], None] = lambda: None
        self._driver = driver
        self._memory = driver.allocate_host((0,), "uint8")

    def as_array_like(self, array: Array) -> HostArray:
        if self._memory.nbytes < array.nbytes:
            self._memory = self._driver.allocate_host((array.nbytes,), "uint8")
        return self._memory[: array.nbytes].view(array.dtype).reshape(array.shape)


class CudaDevice:
    """See runtime.device.Device.

    Args:
        driver: the GPU.
        compute_dtype: "bfloat16" or "float16": of weights, activations and KV cache.
        graph_sizes: padded numbers of tokens, ascending.
        uses_graphs: False launches every kernel of every step by itself.

    Raises:
        ConfigError: the GPU cannot compute in this type.
    """

    name = "cuda"
    matrix_formats: Collection[str] = ()

    def __init__(
        self,
        driver: Driver,
        compute_dtype: str,
        graph_sizes: Sequence[int] = GRAPH_SIZES,
        uses_graphs: bool = True,
    ) -> None:
        if compute_dtype not in REAL_DTYPES:
            raise ConfigError(
                f"dtype is {compute_dtype!r}; a CUDA device computes in one of: {', '.join(REAL_DTYPES)} "
                "(device='cpu' computes in float32)"
            )
        if compute_dtype == "bfloat16" and driver.arch in ARCHITECTURES_WITHOUT_BFLOAT16:
            raise ConfigError(f"dtype is 'bfloat16', which {driver.name} ({driver.arch}) lacks; use float16")
        self.driver = driver
        self.uses_graphs = uses_graphs
        self.compute_dtype = self.kv_cache_dtype = compute_dtype
        self._graph_sizes = sorted(graph_sizes)
        self._staging = [Staging(driver), Staging(driver)]
        self._read_back = Staging(driver)
        self._counters: dict[int, Array] = {}  # head_dim → counters of the attention kernel
        self._first: list[KernelCall] = []  # launches that begin every step

    # -- memory

    def allocate(self, shape: Sequence[int], dtype: str) -> Array:
        return self.driver.allocate(shape, dtype)

    def fill(self, array: Array, write: Callable[[HostArray], None]) -> None:
        """In stream order, through one half of the staging memory while the other is on its way."""
        self._staging.reverse()
        half = self._staging[0]
        half.is_free()
        host = half.as_array_like(array)
        write(host)
        self.driver.upload(host, array)
        half.is_free = self.driver.mark()

    def read(self, array: Array) -> HostArray:
        host = self._read_back.as_array_like(array)
        self.driver.download(array, host)
        self.driver.synchronize()
        return host

    def load_matrix(self, source: Source, store: TensorStore) -> Operand:
        return load_array(source, store, self, self.compute_dtype)

    def matrix_bytes(self, source: Source, store: TensorStore) -> int:
        return array_bytes(source, self.compute_dtype)

    def make_inputs(self, shapes: Mapping[str, Sequence[int]]) -> StepInputs:
        """Two page-locked records with one image on the device. A step uploads one of them in two copies: all that is
        small, and of the block tables, which are as wide as the longest context, the corner in use.
        """
        starts, size = {}, 0
        for name, shape in sorted(shapes.items(), key=lambda item: item[0] == TABLES):  # the tables last
            starts[name] = size
            size += -(-math.prod(shape) // INPUT_ALIGNMENT) * INPUT_ALIGNMENT
        num_small = starts.get(TABLES, size)
        device = self.driver.allocate((size,), "int32")

        def views(whole: Array) -> dict[str, Array]:
            return {
                name: whole[starts[name] : starts[name] + math.prod(shape)].reshape(tuple(shape))
                for name, shape in shapes.items()
            }

        def written_at(host: HostArray, twin: StepInputs | None = None) -> StepInputs:
            source, target = views(host), views(device)

            def upload(num_requests: int, num_blocks: int) -> None:
                self.driver.upload(host[:num_small], device[:num_small])
                if TABLES in shapes:
                    self.driver.upload_corner(source[TABLES], target[TABLES], num_requests, num_blocks)

            return StepInputs(source, target, upload, twin)

        one, other = (self.driver.allocate_host((size,), "int32") for _ in range(2))
        return written_at(one, written_at(other))

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

    def begin_steps_with(self, call: KernelCall) -> None:
        """Let every step that is captured from now on begin with this launch; running it twice must do no harm."""
        self._first.append(call)

    def capture(self, launches: Sequence[LaunchArgs]) -> Replay:
        commands = [*self._first, *self._commands(launches)]
        self.driver.prepare(command.instance for command in commands if isinstance(command, KernelCall))
        run = partial(self._run, commands)
        if self.uses_graphs:
            run()
        return self.graph(run)

    def graph(self, run: Replay) -> Replay:
        """What `run` launches, as a graph if there are to be any; its kernels are prepared, its products have run."""
        return self.driver.capture(run) if self.uses_graphs else run

    def measuring_bytes(self, lowered: Lowered, dims: Dims) -> int:
        """Memory that choosing among ways of products takes, for steps of at most these sizes."""
        products = (launch for launch in lowered.launches if launch.kernel == "gemm")
        return max((measuring_bytes(*product_shape(launch, dims)) for launch in products), default=0)

    def attention_list_bytes(self, lowered: Lowered, dims: Dims) -> int:
        """Memory of the work lists of one capture, for steps of at most these sizes."""
        launches = [launch for launch in lowered.launches if launch.kernel == "paged_attention"]
        windows = {launch.scalars["window"] for launch in launches}
        rows = (attention.NARROW_ROWS, attention.WIDE_ROWS)
        lists = [attention.plan_words(n, dims["T"], dims["B"], attention.MAX_GROUP) for n in rows]
        return len(windows) * 4 * sum(lists)

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
                commands.append(moe_kernels.moe_route_call(launch, slots_of(launches, len(launch.inputs[0]))))
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


def product_shape(launch: Launch, dims: Dims) -> tuple[int, int, int]:
    """Rows, depth and columns of a gemm."""
    num_rows, depth = launch.inputs[0].type.concrete_shape(dims)
    return num_rows, depth, launch.outputs[0].type.concrete_shape(dims)[1]


def slots_of(launches: Sequence[LaunchArgs], num_rows: int) -> Array | None:
    """The step's slot mapping for rows of tokens, or of sampled tokens, so that padded rows are known: slot -1.

    Sampled tokens are fewer, and the i-th of them is no padding only if the i-th token is none, so its slot tells too:
    decodes come first in both, and alone can be padding before the end.
    """
    for launch in launches:
        place = SLOTS_INPUT.get(launch.kernel)
        if place is not None:
            slots: Array = launch.inputs[place][:num_rows]
            return slots
    return None
