"""How many KV blocks fit: from a block count, a number of bytes, or a share of the free memory.

The null block is paid for like any other. All sizes are bytes for all layers together, K and V.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from lean_engine.errors import ConfigError, OutOfMemory
from lean_engine.units import format_bytes


@dataclass(frozen=True, slots=True)
class PoolSize:
    """The size of the block pool, decided once at start."""

    num_blocks: int  # the null block included: what BlockPool takes
    block_size: int  # tokens
    block_bytes: int  # one block, all layers, K and V
    max_model_len: int  # tokens

    @property
    def num_usable_blocks(self) -> int:
        """Blocks that requests can hold: all but the null block."""
        return self.num_blocks - 1

    @property
    def kv_bytes(self) -> int:
        """Device memory of the KV cache, the null block included."""
        return self.num_blocks * self.block_bytes

    @property
    def num_tokens(self) -> int:
        """Tokens whose keys and values fit."""
        return self.num_usable_blocks * self.block_size

    @property
    def max_concurrency(self) -> float:
        """How many requests of max_model_len tokens fit at once."""
        return self.num_usable_blocks / num_blocks_for(self.max_model_len, self.block_size)

    def describe(self) -> str:
        """The start-up line."""
        return (
            f"KV cache: {format_bytes(self.kv_bytes)}, {self.num_usable_blocks:,} blocks of {self.block_size} tokens, "
            f"{self.num_tokens:,} tokens; {self.max_concurrency:.1f} requests of {self.max_model_len:,} tokens"
        )


def num_blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    return -(-num_tokens // block_size)


def kv_bytes_per_block(num_layers: int, num_kv_heads: int, head_dim: int, block_size: int, element_bytes: int) -> int:
    """Bytes of one block over all layers: K and V, each [K, S, D]."""
    return 2 * num_layers * num_kv_heads * block_size * head_dim * element_bytes


def size_pool(
    *,
    block_bytes: int,
    block_size: int,
    max_model_len: int,
    max_num_seqs: int,
    num_gpu_blocks_override: int | None,
    kv_cache_memory_bytes: int | None,
    available_bytes: int,
    memory_share: float,
) -> PoolSize:
    """Size the pool; the first that is given decides: block count, bytes, `available_bytes` x `memory_share`.

    `num_gpu_blocks_override` counts usable blocks and is taken as it is; the others stop at what `max_num_seqs`
    requests of `max_model_len` tokens can use.

    Raises:
        ConfigError: a count, size or share is out of range.
        OutOfMemory: not one request of `max_model_len` tokens fits; the message says what does.
    """
    num_usable, source = _num_usable_blocks(
        block_bytes, num_gpu_blocks_override, kv_cache_memory_bytes, available_bytes, memory_share
    )
    num_per_request = num_blocks_for(max_model_len, block_size)
    if num_usable < num_per_request:
        remedy = f"lower max_model_len to {num_usable * block_size}, or " if num_usable > 0 else ""
        raise OutOfMemory(
            f"one request of max_model_len={max_model_len} needs {num_per_request} KV blocks "
            f"({format_bytes((num_per_request + 1) * block_bytes)} with the null block), but {source}: "
            f"{remedy}give the KV cache more"
        )
    if num_gpu_blocks_override is None:
        num_usable = min(num_usable, max_num_seqs * num_per_request)
    return PoolSize(num_usable + 1, block_size, block_bytes, max_model_len)


def fit_max_model_len(
    *,
    block_bytes: int,
    block_size: int,
    max_model_len: int,
    num_gpu_blocks_override: int | None,
    kv_cache_memory_bytes: int | None,
    available_bytes: int,
    memory_share: float,
) -> int:
    """The longest context, at most `max_model_len`, of which `size_pool` can hold one request.

    For a user who left max_model_len open: the model's own limit goes in, the engine's one effective limit comes out.

    Raises:
        ConfigError: a count, size or share is out of range.
        OutOfMemory: not even one block fits.
    """
    num_usable, source = _num_usable_blocks(
        block_bytes, num_gpu_blocks_override, kv_cache_memory_bytes, available_bytes, memory_share
    )
    if num_usable < 1:
        raise OutOfMemory(
            f"the smallest KV cache needs {format_bytes(2 * block_bytes)} (1 block of {block_size} tokens and the "
            f"null block), but {source}: give the KV cache more, or lower block_size"
        )
    return min(max_model_len, num_usable * block_size)


def _num_usable_blocks(
    block_bytes: int,
    num_gpu_blocks_override: int | None,
    kv_cache_memory_bytes: int | None,
    available_bytes: int,
    memory_share: float,
) -> tuple[int, str]:
    """Usable blocks, and a clause that says what they come from."""
    if num_gpu_blocks_override is not None:
        if num_gpu_blocks_override < 1:
            raise ConfigError(f"num_gpu_blocks_override is {num_gpu_blocks_override}; it must be at least 1")
        return num_gpu_blocks_override, f"num_gpu_blocks_override={num_gpu_blocks_override}"
    if kv_cache_memory_bytes is not None:
        if kv_cache_memory_bytes < 1:
            raise ConfigError(f"kv_cache_memory_bytes is {kv_cache_memory_bytes}; it must be at least 1")
        given, source = kv_cache_memory_bytes, "kv_cache_memory_bytes"
    else:
        if not 0 < memory_share <= 1:
            raise ConfigError(f"the memory share of the KV cache is {memory_share}; it must be above 0 and at most 1")
        given = max(0, int(available_bytes * memory_share))
        source = f"a share of {memory_share:g} of the {format_bytes(max(0, available_bytes))} available"
    num_usable = max(0, given // block_bytes - 1)
    return num_usable, f"{source} gives {num_usable} ({format_bytes(given)})"


def available_memory_bytes(root: Path = Path("/")) -> int:
    """Host memory that can be taken without swapping: what the kernel calls available, within the cgroup's limit.

    Args:
        root: where proc/ and sys/ are found.

    Raises:
        ConfigError: the operating system tells neither free nor total memory.
    """
    available = _field(root / "proc/meminfo", "MemAvailable:", 1024)
    if available is None:
        available = _sysconf_bytes("SC_AVPHYS_PAGES", "SC_PHYS_PAGES")  # macOS knows only the second
    return max(0, min([available, *(limit - used for limit, used in _cgroup_limits(root))]))


def total_memory_bytes(root: Path = Path("/")) -> int:
    """The host's memory, or the cgroup's limit where that is lower.

    Args:
        root: where proc/ and sys/ are found.

    Raises:
        ConfigError: the operating system does not tell.
    """
    total = _field(root / "proc/meminfo", "MemTotal:", 1024)
    if total is None:
        total = _sysconf_bytes("SC_PHYS_PAGES")
    return min([total, *(limit for limit, _ in _cgroup_limits(root))])


def _sysconf_bytes(*names: str) -> int:
    for pages in names:
        if pages in getattr(os, "sysconf_names", {}):
            return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")
    raise ConfigError("this system does not tell how much memory it has; set kv_cache_memory_bytes")


def _cgroup_limits(root: Path) -> list[tuple[int, int]]:
    """Limit and irreclaimable use of each limited memory cgroup of this process, and of its parents."""
    limits = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mount, limit, usage, cache = "sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            mount, limit = "sys/fs/cgroup/memory", "memory.limit_in_bytes"
            usage, cache = "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        inner = Path(path.lstrip("/"))
        for group in (inner, *inner.parents):
            folder = root / mount / group
            max_bytes, used_bytes = _read(folder / limit).strip(), _read(folder / usage).strip()
            if max_bytes.isdigit() and used_bytes.isdigit():  # "max" is no limit
                reclaimable = _field(folder / "memory.stat", cache, 1) or 0  # file pages that are dropped on demand
                limits.append((int(max_bytes), int(used_bytes) - reclaimable))
    return limits


def _field(path: Path, name: str, unit_bytes: int) -> int | None:
    """The number after `name` in a file of lines "name number ...", in bytes."""
    for line in _read(path).splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == name:
            return int(words[1]) * unit_bytes
    return None


def _read(path: Path) -> str:
    """A small file's text; empty where there is no such file or it may not be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
