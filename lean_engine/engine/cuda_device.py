"""The CUDA device that the options name, and what it takes for itself: sampling arrays, graphs, measuring products."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from lean_engine.config import EngineConfig, ModelConfig
from lean_engine.errors import ConfigError
from lean_engine.passes import Lowered
from lean_engine.scheduling.setup import largest_step, step_dims

if TYPE_CHECKING:
    from lean_engine.engine.device_chooser import DeviceChooser
    from lean_engine.runtime.cuda.device import CudaDevice
    from lean_engine.runtime.cuda.driver import Driver
    from lean_engine.runtime.cuda.sampling import SamplingSizes
    from lean_engine.runtime.program import Program

LIST_WORDS = 4096  # of a request on the device, for biases, bad words and what ends it; see SamplingSizes
GRAPH_NODE_BYTES = 4096  # of a launch in a graph: an estimate on the safe side
MAX_SAMPLING_LAUNCHES = 6


def make_cuda_device(config: EngineConfig, model_config: ModelConfig, driver: Driver) -> CudaDevice:
    """
    Raises:
        ConfigError: it cannot compute as asked.
    """
    from lean_engine.runtime.cuda.device import CudaDevice

    refuse_on_cuda(config, model_config)
    return CudaDevice(driver, cuda_dtype(config, model_config), uses_graphs=not config.enforce_eager)


def open_driver(device: str) -> Driver:
    """The GPU, or the model of one.

    Raises:
        ConfigError: it cannot be had here; the message says why.
    """
    if device == "cuda-emulated":
        from lean_engine.runtime.cuda.emulated_driver import EmulatedDriver

        return EmulatedDriver(is_lazy=True)
    from lean_engine.runtime.cuda.cupy_module import import_cupy

    cuda = import_cupy()  # before what only a GPU needs
    from lean_engine.checkpoint.demo_model import cache_directory
    from lean_engine.runtime.cuda.cubin_cache import CubinCache
    from lean_engine.runtime.cuda.cupy_driver import CupyDriver
    from lean_engine.runtime.cuda.nvrtc import Nvrtc

    cache = cache_directory()
    return CupyDriver(CubinCache(cache / "cubin", Nvrtc()), cache / "gemm", cuda=cuda)


def refuse_on_cuda(config: EngineConfig, model_config: ModelConfig) -> None:
    """ConfigError where the CUDA kernels have no such sizes or types."""
    from lean_engine.runtime.cuda.attention import BLOCK_SIZES, HEAD_DIMS, MAX_GROUP

    if config.quantization is not None:
        raise ConfigError(f"quantization is {config.quantization!r}, which a CUDA device does not have (the CPU does)")
    if config.batch_invariant:
        raise ConfigError("batch_invariant is set, which a CUDA device cannot promise (the compiled CPU kernels do)")
    if config.kv_cache_dtype not in ("auto", element_type := cuda_dtype(config, model_config)):
        raise ConfigError(
            f"kv_cache_dtype is {config.kv_cache_dtype!r}; a CUDA device keeps keys and values as it computes, in "
            f"{element_type}"
        )
    if config.block_size not in BLOCK_SIZES:
        known = " or ".join(map(str, BLOCK_SIZES))
        raise ConfigError(f"block_size is {config.block_size}; on a CUDA device it must be {known}")
    if model_config.head_dim not in HEAD_DIMS:
        known = ", ".join(map(str, HEAD_DIMS))
        raise ConfigError(f"the model's head_dim is {model_config.head_dim}; a CUDA device has kernels for {known}")
    group = model_config.num_q_heads // model_config.num_kv_heads
    if group > MAX_GROUP:
        raise ConfigError(f"{group} query heads share a KV head; a CUDA device has kernels for up to {MAX_GROUP}")
    for size in config.cudagraph_capture_sizes or ():
        if size > config.max_num_seqs:
            raise ConfigError(f"cudagraph_capture_sizes has {size}, more than max_num_seqs ({config.max_num_seqs})")


def refuse_elsewhere(config: EngineConfig) -> None:
    """ConfigError where options ask of a device without graphs what only a CUDA device has."""
    for name in ("enforce_eager", "cudagraph_capture_sizes", "async_scheduling"):
        if getattr(config, name):
            raise ConfigError(f"{name} is {getattr(config, name)!r}, which only a CUDA device has; this is the CPU")


def cuda_dtype(config: EngineConfig, model_config: ModelConfig) -> str:
    """The checkpoint's type, or bfloat16 where that is wider than a CUDA device computes in."""
    if config.dtype != "auto":
        return config.dtype
    return "bfloat16" if model_config.dtype == "float32" else model_config.dtype


def make_chooser(program: Program, device: CudaDevice, vocab_size: int, eos: frozenset[int]) -> DeviceChooser:
    from lean_engine.engine.device_chooser import DeviceChooser

    dims = program.max_dims
    return DeviceChooser(device, sampling_sizes(vocab_size, dims), program.device_inputs, dims["S"], eos)


def sampling_sizes(vocab_size: int, dims: Mapping[str, int]) -> SamplingSizes:
    """Of the arrays that sample the largest step."""
    from lean_engine.runtime.cuda.sampling import SamplingSizes

    return SamplingSizes(vocab_size, dims["B"], dims["R"], LIST_WORDS)


def own_bytes(device: CudaDevice, lowered: Lowered, config: EngineConfig, vocab_size: int, max_model_len: int) -> int:
    """What the device takes beside weights, workspace and KV cache."""
    from lean_engine.runtime.program import MAX_CAPTURES

    dims = step_dims(largest_step(config, max_model_len), max_model_len, config.block_size)
    num_launches = len(lowered.launches) + MAX_SAMPLING_LAUNCHES
    graphs = 0 if config.enforce_eager else MAX_CAPTURES * num_launches * GRAPH_NODE_BYTES
    lists = MAX_CAPTURES * device.attention_list_bytes(lowered, dims)
    return sampling_sizes(vocab_size, dims).num_bytes() + graphs + lists + device.measuring_bytes(lowered, dims)
