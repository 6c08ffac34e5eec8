"""Runs the CUDA attention in the emulator, all accesses checked, against the oracle in float64.

Everything that no row may see is poison: the null block, blocks of nobody, the unused end of a last block, and what
lies before the window are NaN; table entries that need not be read point nowhere.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cuda_kernel_running import Array, GuardedMemory, build_checked

from lean_engine.errors import ConfigError
from lean_engine.ir import reference
from lean_engine.runtime.cuda.attention import (
    NARROW_ROWS,
    WIDE_ROWS,
    AttentionPlan,
    AttentionScratch,
    attention_calls,
    attention_instances,
    num_counters,
    parts_bytes,
    plan_call,
    plan_words,
)
from lean_engine.runtime.cuda.emulator import EmulatedKernels, load_emulator
from lean_engine.runtime.cuda.instances import Instance, KernelCall
from lean_engine.runtime.cuda.sources import cuda_source_directory
from lean_engine.runtime.device import LaunchArgs
from lean_engine.runtime.kernels import KERNELS

NOWHERE = 2**24  # a block id far beyond the cache
ARCH = "sm_90"

Bind = Callable[[KernelCall], Callable[..., None]]


@cache
def checked_kernels() -> EmulatedKernels:
    """ARCH's bfloat16 instances, built once, and others when asked for; skips the test where they cannot be built."""
    return build_checked(attention_instances(ARCH, ["bfloat16"]))


@dataclass(frozen=True)
class Case:
    requests: tuple[tuple[int, int], ...]  # (queries, keys) of each; 0 keys: a padded request
    num_kv_heads: int = 1
    group: int = 1
    head_dim: int = 64
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None
    dtype: str = "bfloat16"
    num_padded_rows: int = 0
    scale: float | None = None
    has_wide: bool = False


def numbers(seed: int, *shape: int) -> Array:
    """Row i is the same in any number of rows."""
    return np.random.default_rng(seed).standard_normal(shape)


def variant(*options: str, old: str = "", new: str = "") -> Bind:
    """Binds to kernels built with further options, or from sources in which one text stands for another."""

    def bind(call: KernelCall) -> Callable[..., None]:
        kernel = variant_kernel(call.instance, options, old, new)
        kernel.max_dynamic_shared_size_bytes = call.shared_bytes
        bound: Callable[..., None] = kernel.bind(call.grid, call.block, call.args, shared_mem=call.shared_bytes)
        return bound

    return bind


@cache
def variant_kernel(instance: Instance, options: tuple[str, ...], old: str, new: str) -> Any:
    try:
        emulator = load_emulator()
    except ConfigError as error:
        pytest.skip(str(error))
    path = cuda_source_directory() / instance.source
    source = path.read_text()
    source = source.replace(old, new) if old else source
    module = emulator.HostModule(path, [instance.expression], options=options, is_checked=True, source=source)
    return module.get_function(instance.expression)


class AttentionRun:
    """A case in memory. What differs between runs is the grid and the order of threads."""

    def __init__(self, case: Case, arch: str = ARCH) -> None:
        self.case, self.arch = case, arch
        self.memory = GuardedMemory()
        lengths = [length for _, length in case.requests]
        starts = np.cumsum([0, *(count for count, _ in case.requests)])
        num_tokens = int(starts[-1]) + case.num_padded_rows
        max_blocks = max(1, *(-(-n // case.block_size) for n in lengths))
        tables = self.tables(max_blocks)
        shape = (tables.max(where=tables < NOWHERE, initial=0) + 2, case.num_kv_heads, case.block_size, case.head_dim)
        caches = [np.full(shape, np.nan), np.full(shape, np.nan)]
        self.fill(caches, tables)
        q = numbers(3, num_tokens, case.num_kv_heads * case.group * case.head_dim)
        q[starts[-1] :] = np.nan
        self.inputs = [self.place(a, case.dtype) for a in (q, *caches)]
        self.inputs += [self.place(np.asarray(a), "int32") for a in (tables, starts, lengths)]
        self.out = self.memory.allocate(q.shape, case.dtype)
        scalars = {"head_dim": case.head_dim, "scale": case.scale or case.head_dim**-0.5}
        self.scalars = {**scalars, "window": case.window, "softcap": case.softcap}
        checked = KERNELS["paged_attention"].check(self.inputs, [self.out], self.scalars, case.dtype)
        self.launch = LaunchArgs("paged_attention", self.inputs, [self.out], checked, np.zeros(0, np.uint8))
        self.plan = AttentionPlan(self.plan_array(NARROW_ROWS), self.plan_array(WIDE_ROWS) if case.has_wide else None)
        for array in self.inputs:
            array.flags.writeable = False

    def place(self, array: Array, dtype: str) -> Array:
        placed = self.memory.allocate(array.shape, dtype)
        placed[...] = array.astype(placed.dtype)
        return placed

    def plan_array(self, rows: int) -> Array:
        num_requests = len(self.case.requests)
        words = plan_words(rows, len(self.out), num_requests, self.case.group)
        array = self.memory.allocate([words], "int32")
        array[...] = -1
        return array

    def first_seen(self, num_queries: int, length: int) -> int:
        window = self.case.window
        return 0 if window is None else max(0, length - num_queries - window + 1)

    def tables(self, max_blocks: int) -> Array:
        """Blocks in a random order, each a request's own; what no row sees is nowhere."""
        size = self.case.block_size
        tables = np.full((len(self.case.requests), max_blocks), NOWHERE)
        ids = iter(np.random.default_rng(5).permutation(sum(n // size + 2 for _, n in self.case.requests)) + 1)
        for b, (num_queries, length) in enumerate(self.case.requests):
            for i in range(self.first_seen(num_queries, length) // size, -(-length // size)):
                tables[b, i] = next(ids)
        return tables

    def fill(self, caches: list[Array], tables: Array) -> None:
        for b, (num_queries, length) in enumerate(self.case.requests):
            first = self.first_seen(num_queries, length)
            keys = np.arange(first, length)
            blocks, places = tables[b, keys // self.case.block_size], keys % self.case.block_size
            for seed, array in enumerate(caches):
                rows = numbers(100 * b + seed, length, self.case.num_kv_heads, self.case.head_dim)
                array[blocks, :, places] = rows[first:] + 0.5 * seed

    def calls(self, num_sms: int) -> list[KernelCall]:
        """The plan's call, then those of a layer, with fresh scratch."""
        sizes = (self.arch, self.case.head_dim, num_sms)
        self.parts = self.memory.allocate([parts_bytes(*sizes) // 4], "float32")
        self.counters = np.zeros(num_counters(*sizes), np.uint32)
        self.parts[...] = np.nan
        scratch = AttentionScratch(self.parts, self.counters)
        layer = attention_calls(self.launch, self.plan, scratch, self.arch, num_sms)
        return [plan_call(self.launch, self.plan, self.arch), *layer]

    def run(
        self, num_sms: int = 2, order: int = 0, preempt: int = 0, times: int = 1, bind: Bind | None = None
    ) -> Array:
        """The output. times: of all launches over the same scratch."""
        calls = [(bind or checked_kernels().bind)(call) for call in self.calls(num_sms)]
        for _ in range(times):
            self.out[...] = np.nan
            for call in calls:
                call(order, preempt)
            assert not self.counters.any(), "a counter was not set back"
        self.memory.assert_guards_are_whole()
        return self.out.copy()

    def oracle(self, is_absolute: bool = False) -> Array:
        """is_absolute: weighted sums of absolute values, the scale of rounding errors."""
        arrays = [a if a.dtype == np.int32 else a.astype(np.float64) for a in self.inputs]
        if is_absolute:
            arrays[2] = np.abs(arrays[2])
        out: Array = reference.OPS["paged_attention"](*arrays, **self.scalars)
        return out

    def assert_right(self, found: Array) -> None:
        """Right but for the rounding of the weights and of the result, to nearest, and float32's arithmetic."""
        wanted, size = self.oracle(), self.oracle(is_absolute=True)
        assert np.isfinite(found.astype(np.float64)).all()
        half_ulp = 0.5 * float(ml_dtypes.finfo(found.dtype).eps)
        error = np.abs(found.astype(np.float64) - wanted) - half_ulp * (size + np.abs(wanted)) * 1.01
        assert error.max() <= 2e-5 * size.max(), f"off by {error.max()} beyond rounding"


def check(case: Case, num_sms: int = 2, order: int = 3, preempt: int = 0, arch: str = ARCH) -> Array:
    run = AttentionRun(case, arch)
    found = run.run(num_sms, order, preempt)
    run.assert_right(found)
    return found


def read_plan(words: Array) -> tuple[int, list[dict[str, Any]]]:
    """A list in words: key tiles in all, and its row tiles."""
    names = ("start", "request", "row", "num_rows", "token", "position", "key_begin", "key_end")
    num_tiles, num_key_tiles = words[:2].tolist()
    rows = words[8 : 8 * (num_tiles + 1)].reshape(num_tiles, 8).tolist()
    return num_key_tiles, [dict(zip(names, row, strict=True)) for row in rows]
