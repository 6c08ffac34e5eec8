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
from lean_engine.engine import cuda_device
from lean_engine.engine.core import Engine
from lean_engine.engine.cpu_device import make_cpu_device, prepare_cpu_device, row_kernels
from lean_engine.engine.cuda_device import make_cuda_device, open_driver, own_bytes, refuse_elsewhere
from lean_engine.engine.runner import Runner
from lean_engine.engine.token_choice import HostChooser, TokenChooser
from lean_engine.engine.workspace import workspace_of
from lean_engine.errors import ConfigError, OutOfMemory
from lean_engine.ir.sources import RopeTable
from lean_engine.memory.budget import PoolSize, fit_max_model_len, kv_bytes_per_block, num_blocks_for, size_pool
from lean_engine.passes import Lowered, lower, optimize, plan_memory
from lean_engine.runtime.device import Device
from lean_engine.runtime.program import Program
from lean_engine.runtime.weights import expected_shapes, load_weights, weight_bytes
from lean_engine.scheduling.setup import largest_step, make_scheduler, step_dims
from lean_engine.text.lazy_tokenizer import open_tokenizer
from lean_engine.text.tokenizer import Tokenizer
from lean_engine.units import format_bytes

if TYPE_CHECKING:
    from lean_engine.runtime.cuda.device import CudaDevice

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
    prepare_cpu_device(config)
    checkpoint = open_checkpoint(
        model, revision=config.revision, token=config.hf_token, load_format=config.load_format, progress=progress
    )
    model_config = models.configure(checkpoint.config)
    tokenizer = tokenizer_of(checkpoint, is_optional=config.load_format == "dummy")
    device = make_device(config, model_config, checkpoint, progress)
    try:
        return assemble(checkpoint, model_config, tokenizer, device, config, on_progress)
    except BaseException:
        device.close()
        raise


def make_device(
    config: EngineConfig, model_config: ModelConfig, checkpoint: Checkpoint, progress: bool = False
) -> Device:
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
            return make_cuda_device(config, model_config, driver)
    refuse_elsewhere(config)
    return make_cpu_device(config, checkpoint, progress)


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
    taken = weight_bytes(lowered.parameters, checkpoint, device)
    pool_size = size_kv_pool(model_config, device, config, limit, lowered, taken)
    if pool_size.max_model_len < limit:  # rope tables for the positions that can occur
        lowered = compile_model(model_config, device, pool_size.max_model_len)
    weights = load_weights(lowered.parameters, checkpoint, device, weight_progress(lowered, taken, on_progress))
    scheduler = make_scheduler(config, pool_size.num_blocks, pool_size.max_model_len)
    dims = {
        "T": scheduler.max_num_batched_tokens,
        "B": scheduler.max_num_running,
        "R": scheduler.max_num_logit_rows,
        "M": num_blocks_for(scheduler.max_model_len, config.block_size),
        "N": pool_size.num_blocks,
        "S": config.block_size,
    }
    program = Program(lowered, device, dims, weights)
    eos = eos_token_ids(checkpoint, model_config, tokenizer)
    runner = Runner(program, config.block_size, make_chooser(program, model_config, eos))
    runner.capture(config.cudagraph_capture_sizes or ())
    engine = Engine(
        model_config,
        tokenizer,
        scheduler,
        runner,
        eos_token_ids=eos,
        max_logprobs=config.max_logprobs,
        seed=config.seed,
        runs_ahead=runs_ahead(config, device),
    )
    log.info("%s", pool_size.describe())
    return Started(engine, checkpoint, lowered, pool_size)


def make_chooser(program: Program, model_config: ModelConfig, eos: frozenset[int]) -> TokenChooser:
    """What chooses tokens: a GPU itself, else the host."""
    if cuda := as_cuda(program.device):
        return cuda_device.make_chooser(program, cuda, model_config.vocab_size, eos)
    return HostChooser(model_config.vocab_size, program.device.read, row_kernels(program.device))


def as_cuda(device: Device) -> CudaDevice | None:
    if device.name != "cuda":
        return None
    from lean_engine.runtime.cuda.device import CudaDevice

    assert isinstance(device, CudaDevice)
    return device


def runs_ahead(config: EngineConfig, device: Device) -> bool:
    """Whether steps are launched before the results of those before them are read; see Engine."""
    return device.name == "cuda" if config.async_scheduling is None else config.async_scheduling


def has_own_head(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint whose config ties the head to the embedding holds another head; it counts then."""
    head, embedding = "lm_head.weight", "model.embed_tokens.weight"
    if not {head, embedding} <= set(checkpoint.names()):
        return False
    return not np.array_equal(checkpoint.tensor(head), checkpoint.tensor(embedding))


def compile_model(model_config: ModelConfig, device: Device, max_positions: int) -> Lowered:
    return lower(optimize(models.build(model_config, device.compute_dtype, max_positions)))


def tokenizer_of(checkpoint: Checkpoint, is_optional: bool) -> Tokenizer | None:
    """The model's tokenizer, built when it is needed; None where there is no file of one and it is optional."""
    source = checkpoint.tokenizer_source
    if is_optional and not isinstance(source, dict) and not (source / "tokenizer.json").exists():
        return None
    return open_tokenizer(source)


def max_model_len_of(model_config: ModelConfig, config: EngineConfig) -> int:
    """The context before it is fitted to the KV pool, tokens."""
    rope, known = model_config.rope, model_config.max_position_embeddings
    if rope.kind != "llama3":  # whose max_position_embeddings is the context after scaling already
        known = max(known, int(rope.factor * rope.original_max_position_embeddings))
    if config.max_model_len is not None and config.max_model_len > known:
        raise ConfigError(f"max_model_len is {config.max_model_len}, the model's context has {known} tokens")
    return config.max_model_len or known


def size_kv_pool(
    model_config: ModelConfig, device: Device, config: EngineConfig, limit: int, lowered: Lowered, taken: int
) -> PoolSize:
    """How many blocks fit beside weights of `taken` bytes; a context that the user left open shrinks to the pool."""
    free_bytes = device.memory_bytes()
    if taken > free_bytes:
        as_type = "" if device.matrix_formats else f" as {device.compute_dtype}"
        raise OutOfMemory(
            f"the weights need {format_bytes(taken)}{as_type}, {format_bytes(free_bytes)} of memory are free"
        )
    available_bytes, memory_share = free_bytes - taken, CPU_MEMORY_SHARE
    utilization = config.gpu_memory_utilization or (GPU_MEMORY_UTILIZATION if device.name == "cuda" else None)
    is_given = config.num_gpu_blocks_override is not None or config.kv_cache_memory_bytes is not None
    if utilization is not None:
        taken += workspace_bytes(lowered, device, config, model_config.vocab_size, limit)
    if utilization is not None and not is_given:
        allowed = int(device.total_memory_bytes() * utilization)
        if taken > allowed:
            raise OutOfMemory(
                f"weights and workspace need {format_bytes(taken)}; gpu_memory_utilization "
                f"{utilization:g} allows {format_bytes(allowed)} "
                f"of {format_bytes(device.total_memory_bytes())}"
            )
        available_bytes, memory_share = min(allowed, free_bytes) - taken, 1.0
    element_bytes = dtype(device.kv_cache_dtype).num_bytes
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
            f"{format_bytes(max(0, free_bytes - taken))} of memory are free beside the weights"
        )
    return pool_size


def workspace_bytes(lowered: Lowered, device: Device, config: EngineConfig, vocab_size: int, max_model_len: int) -> int:
    """What the largest step needs: activations, the scratch of kernels, rope tables, inputs; and the device itself."""
    largest = largest_step(config, max_model_len)
    dims = step_dims(largest, max_model_len, config.block_size)
    arena_bytes = plan_memory(lowered, dims, device.workspace_bytes).arena_bytes
    cuda = as_cuda(device)
    own = 0 if cuda is None else own_bytes(cuda, lowered, config, vocab_size, max_model_len)
    return workspace_of(lowered, arena_bytes, largest, max_model_len, config.block_size).num_bytes + own


def eos_token_ids(checkpoint: Checkpoint, model_config: ModelConfig, tokenizer: Tokenizer | None) -> frozenset[int]:
    """Every end-of-text id of the vocabulary that config.json, generation_config.json or the tokenizer names."""
    generation = token_ids(checkpoint.generation_config.get("eos_token_id"), "generation_config.json: eos_token_id")
    of_tokenizer = () if tokenizer is None or tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    named = (*model_config.eos_token_ids, *generation, *of_tokenizer)
    return frozenset(i for i in named if i < model_config.vocab_size)


def weight_progress(lowered: Lowered, num_bytes: int, on_progress: Progress | None) -> Callable[[int], None]:
    """What tells on_progress of each weight; num_bytes of them, and rope tables."""
    total = num_bytes + sum(p.value.type.num_bytes({}) for p in lowered.parameters if isinstance(p.source, RopeTable))
    done = 0

    def advance(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if on_progress is not None:
            on_progress(done, total)

    return advance
