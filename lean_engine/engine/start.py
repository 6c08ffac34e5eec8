"""From a model's name to an engine that serves it: checkpoint → program → KV pool → engine.

Whatever is wrong is said before memory is taken: the architecture first, then the tokenizer, the tensors' shapes,
whether the weights fit, and how many KV blocks fit beside them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypedDict

import numpy as np

from lean_engine import models
from lean_engine.checkpoint import Checkpoint, open_checkpoint
from lean_engine.config import EngineConfig, ModelConfig, token_ids
from lean_engine.dtypes import dtype
from lean_engine.engine.core import Engine
from lean_engine.engine.runner import Runner
from lean_engine.errors import ConfigError, OutOfMemory
from lean_engine.ir.sources import RopeTable
from lean_engine.memory.budget import PoolSize, fit_max_model_len, kv_bytes_per_block, num_blocks_for, size_pool
from lean_engine.passes import Lowered, lower, optimize, plan_memory
from lean_engine.runtime.cpu.device import CpuDevice
from lean_engine.runtime.device import Device
from lean_engine.runtime.program import Program
from lean_engine.runtime.weights import expected_shapes, load_weights
from lean_engine.scheduling.setup import largest_step, make_scheduler, step_dims
from lean_engine.text.tokenizer import Tokenizer
from lean_engine.units import format_bytes

if TYPE_CHECKING:
    from lean_engine.runtime.cuda.driver import Driver

log = logging.getLogger("lean_engine")

CPU_MEMORY_SHARE = 0.4  # of the memory that is free beside the weights
GPU_MEMORY_UTILIZATION = 0.9  # of a GPU's whole memory, weights and workspace included

Progress = Callable[[int, int], None]  # bytes done, bytes in all


class PoolMemory(TypedDict):
    """What decides the number of KV blocks; see memory.budget.size_pool."""

    block_bytes: int
    block_size: int
    num_gpu_blocks_override: int | None
    kv_cache_memory_bytes: int | None
    available_bytes: int
    memory_share: float


@dataclass(frozen=True, slots=True)
class Started:
    """An engine and what is known of how it was set up."""

    engine: Engine
    checkpoint: Checkpoint
    lowered: Lowered
    pool_size: PoolSize


def start_engine(
    model: str, config: EngineConfig, on_progress: Progress | None = None, progress: bool = False
) -> Started:
    """Load a model and make an engine for it.

    Args:
        model: what checkpoint.open_checkpoint takes.
        on_progress: told of the weights loaded so far.
        progress: show downloads on stderr.

    Raises:
        ConfigError, CheckpointError, OutOfMemory: one line that says what is wrong.
    """
    checkpoint = open_checkpoint(
        model, revision=config.revision, token=config.hf_token, load_format=config.load_format, progress=progress
    )
    model_config = models.configure(checkpoint.config)
    tokenizer = load_tokenizer(checkpoint, is_optional=config.load_format == "dummy")
    device = make_device(config, model_config)
    try:
        return assemble(checkpoint, model_config, tokenizer, device, config, on_progress)
    except BaseException:
        device.close()
        raise


def make_device(config: EngineConfig, model_config: ModelConfig) -> Device:
    """The device that the options name; "auto" is a GPU where one can be used, else the CPU, and says so in one line.

    Raises:
        ConfigError: there is none of this kind here, or it cannot compute as asked.
    """
    if config.device != "cpu":
        try:
            driver = open_driver(config.device)
        except ConfigError as error:
            if config.device != "auto":
                raise
            log.info("the model runs on the CPU: %s", error)
        else:
            from lean_engine.runtime.cuda.device import CudaDevice

            refuse_on_cuda(config, model_config)
            return CudaDevice(driver, cuda_dtype(config, model_config))
    if config.dtype not in ("auto", "float32"):
        raise ConfigError(f"dtype is {config.dtype!r}; the CPU device computes in float32")
    return CpuDevice(config.threads)


def open_driver(device: str) -> Driver:
    """The GPU, or the model of one.

    Raises:
        ConfigError: it cannot be had here; the message says why.
    """
    if device == "cuda-emulated":
        from lean_engine.runtime.cuda.emulated_driver import EmulatedDriver

        return EmulatedDriver()
    from lean_engine.runtime.cuda.cupy_module import import_cupy

    cuda = import_cupy()  # before what only a GPU needs
    from lean_engine.checkpoint.demo_model import cache_directory
    from lean_engine.runtime.cuda.cubin_cache import CubinCache
    from lean_engine.runtime.cuda.cupy_driver import CupyDriver
    from lean_engine.runtime.cuda.nvrtc import Nvrtc

    cache = cache_directory()
    return CupyDriver(CubinCache(cache / "cubin", Nvrtc()), cache / "gemm", cuda=cuda)


def refuse_on_cuda(config: EngineConfig, model_config: ModelConfig) -> None:
    """ConfigError where the CUDA kernels have no such sizes."""
    from lean_engine.runtime.cuda.attention import BLOCK_SIZES, HEAD_DIMS, MAX_GROUP

    if config.block_size not in BLOCK_SIZES:
        known = " or ".join(map(str, BLOCK_SIZES))
        raise ConfigError(f"block_size is {config.block_size}; on a CUDA device it must be {known}")
    if model_config.head_dim not in HEAD_DIMS:
        known = ", ".join(map(str, HEAD_DIMS))
        raise ConfigError(f"the model's head_dim is {model_config.head_dim}; a CUDA device has kernels for {known}")
    group = model_config.num_q_heads // model_config.num_kv_heads
    if group > MAX_GROUP:
        raise ConfigError(f"{group} query heads share a KV head; a CUDA device has kernels for up to {MAX_GROUP}")


def cuda_dtype(config: EngineConfig, model_config: ModelConfig) -> str:
    """The checkpoint's type, or bfloat16 where that is wider than a CUDA device computes in."""
    if config.dtype != "auto":
        return config.dtype
    return "bfloat16" if model_config.dtype == "float32" else model_config.dtype


def assemble(
    checkpoint: Checkpoint,
    model_config: ModelConfig,
    tokenizer: Tokenizer | None,
    device: Device,
    config: EngineConfig,
    on_progress: Progress | None,
) -> Started:
    if model_config.tie_word_embeddings and has_own_head(checkpoint):
        model_config = replace(model_config, tie_word_embeddings=False)
    limit = max_model_len_of(model_config, config)
    lowered = compile_model(model_config, device, limit)
    checkpoint.expect(expected_shapes(lowered.parameters))
    pool_size = size_kv_pool(model_config, device, config, limit, lowered)
    if pool_size.max_model_len < limit:  # rope tables for the positions that can occur
        lowered = compile_model(model_config, device, pool_size.max_model_len)
    weights = load_weights(lowered.parameters, checkpoint, device, weight_progress(lowered, on_progress))
    scheduler = make_scheduler(config, pool_size.num_blocks, pool_size.max_model_len)
    dims = {
        "T": scheduler.max_num_batched_tokens,
        "B": scheduler.max_num_running,
        "R": scheduler.max_num_logit_rows,
        "M": num_blocks_for(scheduler.max_model_len, config.block_size),
        "N": pool_size.num_blocks,
        "S": config.block_size,
    }
    runner = Runner(Program(lowered, device, dims, weights), config.block_size)
    engine = Engine(
        model_config,
        tokenizer,
        scheduler,
        runner,
        eos_token_ids=eos_token_ids(checkpoint, model_config, tokenizer),
        max_logprobs=config.max_logprobs,
        seed=config.seed,
    )
    log.info("%s", pool_size.describe())
    return Started(engine, checkpoint, lowered, pool_size)


def has_own_head(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint whose config ties the head to the embedding holds another head; it counts then."""
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    if not {head, embedding} <= set(checkpoint.names()):
        return False
    return not np.array_equal(checkpoint.tensor(head), checkpoint.tensor(embedding))


def compile_model(model_config: ModelConfig, device: Device, max_positions: int) -> Lowered:
    return lower(optimize(models.build(model_config, device.compute_dtype, max_positions)))


def weight_bytes(lowered: Lowered) -> int:
    """Bytes of everything that is loaded; rope tables, which depend on the context, apart."""
    return sum(p.value.type.num_bytes({}) for p in lowered.parameters if not isinstance(p.source, RopeTable))


def load_tokenizer(checkpoint: Checkpoint, is_optional: bool) -> Tokenizer | None:
    """The model's tokenizer; None where there is no file of one and it is optional."""
    source = checkpoint.tokenizer_source
    if is_optional and not isinstance(source, dict) and not (source / "tokenizer.json").exists():
        return None
    return Tokenizer.from_gguf(source) if isinstance(source, dict) else Tokenizer.from_directory(source)


def max_model_len_of(model_config: ModelConfig, config: EngineConfig) -> int:
    """The context before it is fitted to the KV pool, tokens."""
    rope, known = model_config.rope, model_config.max_position_embeddings
    if rope.kind != "llama3":  # whose max_position_embeddings is the context after scaling already
        known = max(known, int(rope.factor * rope.original_max_position_embeddings))
    if config.max_model_len is not None and config.max_model_len > known:
        raise ConfigError(f"max_model_len is {config.max_model_len}, the model's context has {known} tokens")
    return config.max_model_len or known


def size_kv_pool(
    model_config: ModelConfig, device: Device, config: EngineConfig, limit: int, lowered: Lowered
) -> PoolSize:
    """How many blocks fit beside the weights; a context that the user left open shrinks to the pool."""
    free_bytes, taken = device.memory_bytes(), weight_bytes(lowered)
    if taken > free_bytes:
        raise OutOfMemory(
            f"the weights need {format_bytes(taken)} as {device.compute_dtype}, "
            f"{format_bytes(free_bytes)} of memory are free"
        )
    available_bytes, memory_share = free_bytes - taken, CPU_MEMORY_SHARE
    utilization = config.gpu_memory_utilization or (GPU_MEMORY_UTILIZATION if device.name == "cuda" else None)
    is_given = config.num_gpu_blocks_override is not None or config.kv_cache_memory_bytes is not None
    if utilization is not None and not is_given:
        taken += workspace_bytes(lowered, device, config, limit)
        allowed = int(device.total_memory_bytes() * utilization)
        if taken > allowed:
            raise OutOfMemory(
                f"weights and workspace need {format_bytes(taken)}; gpu_memory_utilization "
                f"{utilization:g} allows {format_bytes(allowed)} "
                f"of {format_bytes(device.total_memory_bytes())}"
            )
        available_bytes, memory_share = min(allowed, free_bytes) - taken, 1.0
    element_bytes = dtype(device.compute_dtype).num_bytes
    block_bytes = kv_bytes_per_block(
        model_config.num_layers, model_config.num_kv_heads, model_config.head_dim, config.block_size, element_bytes
    )
    memory: PoolMemory = {
        "block_bytes": block_bytes,
        "block_size": config.block_size,
        "num_gpu_blocks_override": config.num_gpu_blocks_override,
        "kv_cache_memory_bytes": config.kv_cache_memory_bytes,
        "available_bytes": available_bytes,
        "memory_share": memory_share,
    }
    if config.max_model_len is None:
        limit = fit_max_model_len(max_model_len=limit, **memory)
    if limit < 2:
        raise ConfigError(f"max_model_len is {limit}; a request needs a token of prompt and one of output")
    pool_size = size_pool(max_model_len=limit, max_num_seqs=config.max_num_seqs, **memory)
    if pool_size.kv_bytes > free_bytes - taken:
        raise OutOfMemory(
            f"{pool_size.num_blocks} KV blocks need {format_bytes(pool_size.kv_bytes)}, "
            f"{format_bytes(free_bytes - taken)} of memory are free beside the weights"
        )
    return pool_size


def workspace_bytes(lowered: Lowered, device: Device, config: EngineConfig, max_model_len: int) -> int:
    """The arena of the largest step: activations and the scratch of kernels."""
    dims = step_dims(largest_step(config, max_model_len), max_model_len, config.block_size)
    return plan_memory(lowered, dims, device.workspace_bytes).arena_bytes


def eos_token_ids(checkpoint: Checkpoint, model_config: ModelConfig, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Every end-of-text id of the vocabulary that config.json, generation_config.json or the tokenizer names."""
    generation = token_ids(checkpoint.generation_config.get("eos_token_id"), "generation_config.json: eos_token_id")
    of_tokenizer = () if tokenizer is None or tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    named = (*model_config.eos_token_ids, *generation, *of_tokenizer)
    return frozenset(i for i in named if i < model_config.vocab_size)


def weight_progress(lowered: Lowered, on_progress: Progress | None) -> Callable[[int], None]:
    total = sum(p.value.type.num_bytes({}) for p in lowered.parameters)
    done = 0

    def advance(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if on_progress is not None:
            on_progress(done, total)

    return advance
