"""The CPU device that the options name: compiled kernels where there is a C compiler, else NumPy's.

Compiled, weights stay as the checkpoint stores them and products are exact (float32) unless dtype or quantization say
otherwise. NumPy computes in float32 alone, so options that ask for more are refused there.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from lean_engine.checkpoint.demo_model import cache_directory
from lean_engine.config import EngineConfig
from lean_engine.errors import ConfigError
from lean_engine.ir.graph import Dims
from lean_engine.passes import Launch
from lean_engine.runtime.device import Device
from lean_engine.sampling.row_kernels import RowKernels

if TYPE_CHECKING:
    from lean_engine.checkpoint.base import Checkpoint
    from lean_engine.runtime.cpu.native.launches import Precision

log = logging.getLogger("lean_engine")


def prepare_cpu_device(config: EngineConfig) -> None:
    """Begin in a thread what make_cpu_device would wait for, if it is likely to come."""
    if config.device in ("auto", "cpu") and config.cpu_kernels != "numpy":
        from lean_engine.runtime.cpu.native.compiler import ask_ahead

        ask_ahead()


def make_cpu_device(config: EngineConfig, checkpoint: Checkpoint | None = None, progress: bool = False) -> Device:
    """A device with the kernels that cpu_kernels names; "auto" says in one line why it falls back on NumPy.

    Args:
        checkpoint: whose weights it will hold; None: nobody's, or floats.
        progress: say on stderr that kernels are being compiled, which happens once.

    Raises:
        ConfigError: "compiled" kernels cannot be had here, or NumPy's cannot compute as asked.
    """
    if config.cpu_kernels == "numpy":
        return numpy_device(config, "cpu_kernels is 'numpy'")
    try:
        library = compiled_kernels(progress)
    except ConfigError as error:
        if config.cpu_kernels == "compiled":
            raise ConfigError(f"cpu_kernels is 'compiled', but {error}") from None
        log.warning("the CPU computes with NumPy, several times slower: %s", error)
        return numpy_device(config, str(error))
    from lean_engine.runtime.cpu.native.device import NativeCpuDevice

    precision = precision_of(config)
    kv_cache_dtype = config.kv_cache_dtype
    if kv_cache_dtype == "auto":
        kv_cache_dtype = usual_kv_cache_dtype(precision, checkpoint)
    return NativeCpuDevice(library, config.threads, precision, kv_cache_dtype)


def usual_kv_cache_dtype(precision: Precision, checkpoint: Checkpoint | None) -> str:
    """As computed; but beside quantised weights float16, whose rounding theirs hides: half the memory."""
    if precision.products == "bfloat16":
        return "bfloat16"
    are_kept = precision.weights == "stored" and checkpoint is not None and checkpoint.is_quantised()
    return "float16" if precision.weights == "int8" or are_kept else "float32"


def row_kernels(device: Device) -> RowKernels | None:
    """What samples rows of logits on this device's threads; None where NumPy does."""
    from lean_engine.runtime.cpu.native.device import NativeCpuDevice
    from lean_engine.runtime.cpu.native.sampling import RowSampling

    return RowSampling(device.native) if isinstance(device, NativeCpuDevice) else None


def scratch_of(config: EngineConfig) -> tuple[int, Callable[[Launch, Dims], int]]:
    """Threads and workspace_bytes of the device that these options make; nothing is compiled."""
    from lean_engine.runtime.cpu import device as numpy_kernels
    from lean_engine.runtime.cpu.host_memory import usable_cpus
    from lean_engine.runtime.cpu.native import device as compiled

    kernels = compiled if config.cpu_kernels != "numpy" and has_compiler() else numpy_kernels
    num_threads = config.threads or usable_cpus()
    return num_threads, lambda launch, dims: kernels.workspace_bytes(launch, dims, num_threads)


def has_compiler() -> bool:
    from lean_engine.runtime.cpu.native.compiler import find_compiler

    try:
        find_compiler()
    except ConfigError:
        return False
    return True


def compiled_kernels(progress: bool) -> Path:
    """The kernels' library, compiled if it is not in the cache.

    Raises:
        ConfigError: there is no compiler, or it refuses the sources; the message says why.
    """
    from lean_engine.runtime.cpu.native.compiler import find_compiler
    from lean_engine.runtime.cpu.native.library import build_library
    from lean_engine.runtime.cpu.native.sources import kernel_sources

    def say_so() -> None:
        if progress:
            print("compiling the CPU kernels, once…", file=sys.stderr, flush=True)

    return build_library(find_compiler(), kernel_sources(), cache_directory() / "cpu", say_so)


def precision_of(config: EngineConfig) -> Precision:
    from lean_engine.runtime.cpu.native.launches import Precision

    products = "bfloat16" if config.dtype == "bfloat16" else "float32"
    weights = config.quantization or ("stored" if config.dtype == "auto" else config.dtype)
    return Precision(weights, products, config.batch_invariant)


def numpy_device(config: EngineConfig, reason: str) -> Device:
    """NumPy's device; ConfigError for an option that it cannot honour."""
    from lean_engine.runtime.cpu.device import CpuDevice

    for name, honoured in (("dtype", ("auto", "float32")), ("kv_cache_dtype", ("auto", "float32"))):
        value = getattr(config, name)
        if value not in honoured:
            raise ConfigError(f"{name} is {value!r}; the NumPy kernels compute in float32 ({reason})")
    if config.quantization is not None:
        raise ConfigError(f"quantization is {config.quantization!r}, which the NumPy kernels have not ({reason})")
    if config.batch_invariant:
        raise ConfigError(f"batch_invariant is set, which the NumPy kernels cannot promise ({reason})")
    return CpuDevice(config.threads)
