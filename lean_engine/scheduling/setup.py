"""From the engine's options to a scheduler, the same for every device and for the benchmarks that have none."""

from __future__ import annotations

from collections.abc import Mapping

from lean_engine.config import EngineConfig
from lean_engine.memory.block_pool import BlockPool
from lean_engine.memory.budget import num_blocks_for
from lean_engine.memory.prefix_cache import BlockKeys
from lean_engine.scheduling.scheduler import Scheduler

DEFAULT_STEP_TOKENS = 512  # a CPU step of this size takes well under a second for small models
MIN_LOGIT_ROWS = 64  # rows of logits per step, for prompt logprobs


def step_limits(config: EngineConfig, max_model_len: int) -> tuple[int, int]:
    """Tokens and rows of logits in a step at most."""
    default_budget = DEFAULT_STEP_TOKENS if config.enable_chunked_prefill else max_model_len
    budget = config.max_num_batched_tokens or max(default_budget, config.max_num_seqs)
    return budget, max(config.max_num_seqs, MIN_LOGIT_ROWS)


def make_scheduler(config: EngineConfig, num_blocks: int, max_model_len: int) -> Scheduler:
    """A scheduler with a pool of its own.

    Args:
        num_blocks: the null block included.
        max_model_len: tokens; the context fitted to the pool.
    """
    budget, max_rows = step_limits(config, max_model_len)
    keys = BlockKeys(config.block_size, config.prefix_caching_hash_algo) if config.enable_prefix_caching else None
    return Scheduler(
        BlockPool(num_blocks),
        block_size=config.block_size,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=budget,
        max_num_logit_rows=max_rows,
        enable_chunked_prefill=config.enable_chunked_prefill,
        block_keys=keys,
        policy=config.scheduling_policy,
        long_prefill_token_threshold=config.long_prefill_token_threshold,
    )


def largest_step(config: EngineConfig, max_model_len: int) -> dict[str, int]:
    """T, B and R of the largest step of a scheduler with these options: what an engine plans its arena for.

    Raises:
        ConfigError: the options contradict each other.
    """
    scheduler = make_scheduler(config, 2, max_model_len)
    return {
        "T": scheduler.max_num_batched_tokens,
        "B": scheduler.max_num_running,
        "R": scheduler.max_num_logit_rows,
    }


def step_dims(step: Mapping[str, int], max_model_len: int, block_size: int) -> dict[str, int]:
    """The letters of a program of these T, B and R; KV caches, the smallest here, are no part of its arena."""
    return {**step, "M": num_blocks_for(max_model_len, block_size), "N": 2, "S": block_size}
