"""NativeCpuDevice: the kernel table in C; a captured step is one list of launches, and replaying it is one call.

Activations are float32. Weight matrices are packed once, in the type that they are stored in or another (Precision);
the KV cache may hold float32, bfloat16 or float16.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lean_engine.ir.graph import Dims
from lean_engine.ir.sources import Source
from lean_engine.passes import Launch
from lean_engine.runtime.cpu.host_memory import HostMemory, usable_cpus
from lean_engine.runtime.cpu.native import attention, gemm, matrices, moe, rope_cache, rows, sampling
from lean_engine.runtime.cpu.native.launches import NativeLaunch, Precision, Scope, known_addresses
from lean_engine.runtime.cpu.native.library import Library, Native
from lean_engine.runtime.cpu.native.pool import LaunchList
from lean_engine.runtime.device import LaunchArgs, Operand, Replay, TensorStore

MODULES = (rows, gemm, rope_cache, attention, moe)
KERNELS = {name: kernel for module in MODULES for name, kernel in module.KERNELS.items()}
ARGUMENTS = tuple(struct for module in (*MODULES, sampling) for struct in module.ARGUMENTS)
KV_CACHE_DTYPES = ("float32", "bfloat16", "float16")


def workspace_bytes(launch: Launch, dims: Dims, num_threads: int) -> int:
    """See runtime.device.Device.workspace_bytes; needs no library."""
    shapes = [v.type.concrete_shape(dims) for v in launch.inputs]
    return KERNELS[launch.kernel].workspace_bytes(shapes, launch.scalars, num_threads)


class NativeCpuDevice(HostMemory):
    """See runtime.device.Device.

    Args:
        library: what build_library has made.
        threads: of the pool, the calling one included; None = the CPUs this process may use.
        precision: of weights and products.
        kv_cache_dtype: one of KV_CACHE_DTYPES.

    Raises:
        CompilationError: the library cannot be loaded, or does not fit this code.
        OutOfMemory: the system gives no more threads.
    """

    name = "cpu"
    compute_dtype = "float32"
    matrix_formats = (*matrices.FORMATS, "mixed")  # of parts in different ones

    def __init__(
        self,
        library: Path,
        threads: int | None = None,
        precision: Precision = Precision(),  # noqa: B008 - frozen
        kv_cache_dtype: str = "float32",
    ) -> None:
        self.kv_cache_dtype = kv_cache_dtype
        self.precision = precision
        self.native = Native(Library(library, ARGUMENTS), threads or usable_cpus())
        self._constants: dict[Hashable, Any] = {}

    @property
    def num_threads(self) -> int:
        return self.native.num_threads

    def load_matrix(self, source: Source, store: TensorStore) -> Operand:
        return matrices.load_matrix(source, store, self.native, self.precision)

    def matrix_bytes(self, source: Source, store: TensorStore) -> int:
        return matrices.matrix_bytes(source, store, self.precision, self.native.library)

    def workspace_bytes(self, launch: Launch, dims: Dims) -> int:
        return workspace_bytes(launch, dims, self.num_threads)

    def capture(self, launches: Sequence[LaunchArgs]) -> Replay:
        scope = Scope(self.native.library, self.num_threads, self._constants, self.precision)
        calls: list[NativeLaunch] = []
        with known_addresses(launches):
            for args in launches:
                calls += KERNELS[args.kernel].capture(scope, args)
        launch_list = LaunchList(self.native.library, [*scope.prologue, *calls], keeps=list(launches))
        return partial(self.native.pool.run, launch_list)

    def close(self) -> None:
        self.native.close()
