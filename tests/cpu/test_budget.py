"""How many blocks fit, the free memory of the host, and numbers of bytes as text."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from lean_engine.errors import ConfigError, OutOfMemory
from lean_engine.memory.budget import (
    PoolSize,
    available_memory_bytes,
    fit_max_model_len,
    kv_bytes_per_block,
    num_blocks_for,
    size_pool,
)
from lean_engine.units import format_bytes, parse_bytes

KIB, MIB, GIB = 1024, 1024**2, 1024**3


def size(**changes: Any) -> PoolSize:
    """1 KiB blocks of 16 tokens, a context of 64 tokens (4 blocks), 1 MiB available of which half may be taken."""
    arguments: dict[str, Any] = {
        "block_bytes": KIB,
        "block_size": 16,
        "max_model_len": 64,
        "max_num_seqs": 1000,
        "num_gpu_blocks_override": None,
        "kv_cache_memory_bytes": None,
        "available_bytes": MIB,
        "memory_share": 0.5,
    }
    return size_pool(**arguments | changes)


def fit(**changes: Any) -> int:
    arguments: dict[str, Any] = {
        "block_bytes": KIB,
        "block_size": 16,
        "max_model_len": 4096,
        "num_gpu_blocks_override": None,
        "kv_cache_memory_bytes": None,
        "available_bytes": MIB,
        "memory_share": 0.5,
    }
    return fit_max_model_len(**arguments | changes)


def test_block_bytes_of_known_models() -> None:
    assert kv_bytes_per_block(32, 8, 128, 16, 2) == 16 * 131072, "llama-3.1-8b: 128 KiB per token"
    assert kv_bytes_per_block(40, 40, 128, 1, 2) == 819200, "llama-2-13b: 800 KiB per token"
    assert kv_bytes_per_block(28, 8, 128, 16, 4) == 2 * kv_bytes_per_block(28, 8, 128, 16, 2)


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2), (32, 2), (33, 3)])
def test_blocks_for_tokens_round_up(tokens: int, blocks: int) -> None:
    assert num_blocks_for(tokens, 16) == blocks


def test_share_of_the_available_memory_pays_for_the_null_block_too() -> None:
    pool = size()
    assert (pool.num_blocks, pool.num_usable_blocks) == (512, 511)
    assert pool.kv_bytes == MIB // 2
    assert pool.num_tokens == 511 * 16
    assert pool.max_concurrency == 511 / 4


def test_bytes_go_before_the_share_and_a_block_count_before_both() -> None:
    assert size(kv_cache_memory_bytes=100 * KIB + 1023).num_blocks == 100
    assert size(kv_cache_memory_bytes=100 * KIB, num_gpu_blocks_override=7).num_usable_blocks == 7
    assert size(num_gpu_blocks_override=7).num_blocks == 8, "the null block comes on top"


def test_no_more_than_all_requests_at_full_length_can_use() -> None:
    assert size(max_num_seqs=3).num_usable_blocks == 3 * 4
    assert size(max_num_seqs=3, max_model_len=65).num_usable_blocks == 3 * 5
    assert size(max_num_seqs=3, num_gpu_blocks_override=50).num_usable_blocks == 50, "a block count is taken as it is"


def test_exactly_one_full_request_fits() -> None:
    assert size(kv_cache_memory_bytes=5 * KIB).max_concurrency == 1.0


def test_too_small_for_one_full_request_says_all_numbers() -> None:
    with pytest.raises(OutOfMemory) as error:
        size(kv_cache_memory_bytes=4 * KIB)
    message = str(error.value)
    assert "max_model_len=64 needs 4 KV blocks (5.00 KiB" in message
    assert "kv_cache_memory_bytes gives 3 (4.00 KiB)" in message
    assert "lower max_model_len to 48" in message
    assert "\n" not in message


def test_too_small_names_where_the_blocks_come_from() -> None:
    with pytest.raises(OutOfMemory, match="num_gpu_blocks_override=3: lower max_model_len to 48"):
        size(num_gpu_blocks_override=3)
    with pytest.raises(OutOfMemory, match=r"a share of 0\.5 of the 8\.00 KiB available gives 3 \(4\.00 KiB\)"):
        size(available_bytes=8 * KIB)


@pytest.mark.parametrize("available_bytes", [0, -5 * MIB, 1024])
def test_nothing_available_gives_no_useless_advice(available_bytes: int) -> None:
    with pytest.raises(OutOfMemory) as error:
        size(available_bytes=available_bytes)
    assert "lower max_model_len" not in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_gpu_blocks_override": 0}, "num_gpu_blocks_override is 0"),
        ({"kv_cache_memory_bytes": -1}, "kv_cache_memory_bytes is -1"),
        ({"memory_share": 0.0}, r"share of the KV cache is 0\.0"),
        ({"memory_share": 1.1}, r"share of the KV cache is 1\.1"),
        ({"memory_share": float("nan")}, "nan"),
    ],
)
def test_values_out_of_range_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        size(**change)
    with pytest.raises(ConfigError, match=message):
        fit(**change)


def test_fitted_length_is_the_longest_that_size_pool_takes() -> None:
    fitted = fit(kv_cache_memory_bytes=11 * KIB)
    assert fitted == 10 * 16
    assert size(kv_cache_memory_bytes=11 * KIB, max_model_len=fitted).max_concurrency == 1.0
    with pytest.raises(OutOfMemory):
        size(kv_cache_memory_bytes=11 * KIB, max_model_len=fitted + 1)


def test_fitted_length_never_passes_the_models_own() -> None:
    assert fit(max_model_len=100) == 100
    assert fit(num_gpu_blocks_override=3) == 48


def test_fitting_fails_when_not_even_one_block_fits() -> None:
    with pytest.raises(OutOfMemory, match=r"the smallest KV cache needs 2\.00 KiB .* gives 0 \(1\.00 KiB\)"):
        fit(kv_cache_memory_bytes=KIB)


def test_start_up_line() -> None:
    assert PoolSize(num_blocks=2049, block_size=16, block_bytes=2 * MIB, max_model_len=8192).describe() == (
        "KV cache: 4.00 GiB, 2,048 blocks of 16 tokens, 32,768 tokens; 4.0 requests of 8,192 tokens"
    )


def write(root: Path, name: str, text: str) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_text(text)


def test_available_memory_is_what_meminfo_says(tmp_path: Path) -> None:
    write(tmp_path, "proc/meminfo", "MemTotal:  900 kB\nMemFree:  100 kB\nMemAvailable:  600 kB\n")
    assert available_memory_bytes(tmp_path) == 600 * KIB


def test_cgroup_v2_limit_holds_for_parents_too(tmp_path: Path) -> None:
    write(tmp_path, "proc/meminfo", "MemAvailable:  600 kB\n")
    write(tmp_path, "proc/self/cgroup", "0::/app/worker\n")
    write(tmp_path, "sys/fs/cgroup/app/worker/memory.max", "max\n")
    write(tmp_path, "sys/fs/cgroup/app/worker/memory.current", "1024\n")
    assert available_memory_bytes(tmp_path) == 600 * KIB, "max is no limit"
    write(tmp_path, "sys/fs/cgroup/app/memory.max", f"{300 * KIB}\n")
    write(tmp_path, "sys/fs/cgroup/app/memory.current", f"{250 * KIB}\n")
    assert available_memory_bytes(tmp_path) == 50 * KIB
    write(tmp_path, "sys/fs/cgroup/app/memory.stat", f"active_file 1\ninactive_file {20 * KIB}\n")
    assert available_memory_bytes(tmp_path) == 70 * KIB, "file pages are dropped on demand"


def test_cgroup_v1_limit_holds(tmp_path: Path) -> None:
    write(tmp_path, "proc/meminfo", "MemAvailable:  600 kB\n")
    write(tmp_path, "proc/self/cgroup", "5:cpu,cpuacct:/\n4:memory:/job\n")
    write(tmp_path, "sys/fs/cgroup/memory/job/memory.limit_in_bytes", f"{200 * KIB}")
    write(tmp_path, "sys/fs/cgroup/memory/job/memory.usage_in_bytes", f"{150 * KIB}")
    write(tmp_path, "sys/fs/cgroup/memory/job/memory.stat", f"total_inactive_file {10 * KIB}\n")
    assert available_memory_bytes(tmp_path) == 60 * KIB


def test_usage_above_the_limit_leaves_nothing(tmp_path: Path) -> None:
    write(tmp_path, "proc/meminfo", "MemAvailable:  600 kB\n")
    write(tmp_path, "proc/self/cgroup", "0::/\n")
    write(tmp_path, "sys/fs/cgroup/memory.max", "1000")
    write(tmp_path, "sys/fs/cgroup/memory.current", "2000")
    assert available_memory_bytes(tmp_path) == 0


def test_without_proc_the_system_configuration_is_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"SC_PHYS_PAGES": 1000, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(os, "sysconf_names", dict.fromkeys(values, 0))
    monkeypatch.setattr(os, "sysconf", values.__getitem__)
    assert available_memory_bytes(tmp_path) == 1000 * 4096
    monkeypatch.setattr(os, "sysconf_names", {})
    with pytest.raises(ConfigError, match="set kv_cache_memory_bytes"):
        available_memory_bytes(tmp_path)


def test_this_machine_has_some_memory() -> None:
    assert MIB < available_memory_bytes() < 2**50


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        (0, 0),
        (1073741824, GIB),
        ("1073741824", GIB),
        ("17B", 17),
        ("4GiB", 4 * GIB),
        ("4gib", 4 * GIB),
        (" 512 MiB ", 512 * MIB),
        ("1.5KiB", 1536),
        ("1.5GB", 1_500_000_000),
        ("2TB", 2 * 10**12),
        ("4G", 4 * GIB),
        ("4g", 4 * 10**9),
        ("9007199254740993KiB", 9007199254740993 * 1024),
    ],
)
def test_parse_bytes(text: str | int, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1", -1, "4 GiB/s", "1e9", "4XiB", "1.GiB", ".5GiB", "0x10", "4Gi", "٣"])
def test_parse_bytes_refuses_everything_else(text: str | int) -> None:
    with pytest.raises(ConfigError, match=r"is not a number of bytes; write for example 4GiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (1536, "1.50 KiB"),
        (MIB - 1, "1.00 MiB"),
        (MIB, "1.00 MiB"),
        (80 * GIB, "80.00 GiB"),
        (3 * 1024 * GIB, "3.00 TiB"),
        (5000 * 1024 * GIB, "5000.00 TiB"),
    ],
)
def test_format_bytes(num_bytes: int, text: str) -> None:
    assert format_bytes(num_bytes) == text
    if text.endswith(".00 GiB"):
        assert parse_bytes(text) == num_bytes
