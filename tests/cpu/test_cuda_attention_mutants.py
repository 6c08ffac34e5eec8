"""Bugs planted in the attention kernels: each must be caught, by the emulator or by a wrong result.

All are built before the first test, side by side.
"""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import product

import pytest
from cuda_attention_running import ARCH, AttentionRun, Case, variant, variant_kernel

from lean_engine.runtime.cuda.attention import attention_instances
from lean_engine.runtime.cuda.emulator import load_emulator
from lean_engine.runtime.cuda.sources import kernel_source

# Decodes, a verify step and a chunk. In the first case units are cut between blocks, in the second blocks have several.
CASES = (
    Case(((4, 20), (30, 101), (1, 650)), num_kv_heads=2, group=3, has_wide=True),
    Case(((1, 300), (4, 170), (30, 101), (1, 0)), 2, 3, window=70, has_wide=True, num_padded_rows=2),
)
SOURCES = ("paged_attention.cu", "plan_attention.cu")
WRONG = "wrong result"
RIGHT = "right result"
RACE = "race|cp.async|uninitialised"

MUTANTS = {  # name → the text that stands in a source once, what replaces it, what must be reported
    "keys behind the last are copied": (" && key + row < unit.tile.key_end;", ";", f"out of bounds|{WRONG}"),
    "keys before the window are copied": ("key + row >= unit.tile.key_begin && ", "", f"out of bounds|{WRONG}"),
    "table entries behind the last are read": (
        "is_seen ? __ldg(table + (key >> block_bits)) : NULL_BLOCK",
        "__ldg(table + (key >> block_bits))",
        "out of bounds",
    ),
    "the next key is seen": ("key > position ||", "key > position + 1 ||", WRONG),
    "the last key is not seen": ("key > position ||", "key >= position ||", WRONG),
    "the window is too long": ("key <= position - window)", "key < position - window)", WRONG),
    "tiles at the diagonal are not masked": ("first + KEYS - 1 <= lowest", "first <= lowest", WRONG),
    "tiles at the window are not masked": ("first > unit.tile.key_end - 1 - window", "true", WRONG),
    "rows of no request are read": ("row < unit.tile.num_rows ? words", "true ? words", "out of bounds"),
    "what was summed is not rescaled": ("sum[h] *= kept;", ";", WRONG),
    "the scale is not in base 2": ("*= scale * LOG2_E", "*= scale", WRONG),
    "heads of another group": ("unit.kv_head * cache.group", "unit.kv_head", f"race|{WRONG}"),
    "places of another block size": ("key & (cache.block_size - 1)", "key & (2 * cache.block_size - 1)", WRONG),
    "a wait for one copy too few": ("wait_for_copies<STAGES - 2>();", "wait_for_copies<STAGES - 1>();", RACE),
    "copies into the buffer in use": ("fetch(t + STAGES - 1, free_buffer)", "fetch(t + STAGES - 1, buffer)", RACE),
    "no __syncwarp after the wait": ("if constexpr (IS_NARROW) __syncwarp();", "if constexpr (IS_NARROW) ;", RACE),
    "no barrier after the wait": ("else __syncthreads();", "else ;", RACE),
    "results over buffers in use": ("__syncthreads();  // all warps", "// all warps", RACE),
    "results read too early": (
        "part.stage(rows, states);\n        __syncthreads();",
        "part.stage(rows, states);",
        RACE,
    ),
    "copies over results in use": ("__syncthreads();  // before the next unit", "// before the next unit", RACE),
    "no fence before the counter": (
        "__threadfence();\n    __syncthreads();\n    if (threadIdx.x == 0) is_last",
        "__syncthreads();\n    if (threadIdx.x == 0) is_last",
        "race.*fence and atomic",
    ),
    "the counter is not set back": ("atomicInc(counter, num_parts - 1)", "atomicAdd(counter, 1)", "not set back"),
    "one part is waited for too few": (
        "shares.owner(unit.end - 1) - first_block + 1",
        "shares.owner(unit.end - 1) - first_block",
        f"race|not set back|{WRONG}",
    ),
    "the other slot": ("2 * (first_block + p) + (p == 0)", "2 * (first_block + p) + (p != 0)", f"race|{WRONG}"),
    "parts of two units in one slot": (
        "2 * block + (at == unit.begin)",
        "2 * block",
        f"race|{WRONG}",
    ),
    "the last key tile is nobody's": ("end = shares.begin(block + 1);", "end = shares.begin(block + 1) - 1;", WRONG),
    "a chunk's last row is nobody's": ("r.num_tokens * group - row);", "r.num_tokens * group - row - 1);", WRONG),
    "padded units are nobody's": ("num_key_tiles = max(1, ", "num_key_tiles = max(0, ", f"{WRONG}|cannot"),
    "rows behind the last request are nobody's": ("end - token), b", "b < num_requests ? end - token : 0), b", WRONG),
}


@cache
def build_side_by_side() -> None:
    load_emulator()
    instances = attention_instances(ARCH, ["bfloat16"], [64])
    jobs = [
        (instance, old, new)
        for (old, new, _), instance in product(MUTANTS.values(), instances)
        if old in kernel_source(instance.source).text
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda job: variant_kernel(job[0], ("-O0",), *job[1:]), jobs))


def outcome(old: str, new: str) -> str:
    """What is reported of the first case that shows anything."""
    outcomes = (outcome_of(case, old, new) for case in CASES)
    return next((text for text in outcomes if text != RIGHT), RIGHT)


def outcome_of(case: Case, old: str, new: str) -> str:
    run = AttentionRun(case)
    try:
        run.assert_right(run.run(3, order=3, times=2, bind=variant("-O0", old=old, new=new)))
    except AssertionError as error:
        return str(error) if "set back" in str(error) else WRONG
    except load_emulator().KernelError as error:
        return str(error)
    return RIGHT


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name: str) -> None:
    old, new, rule = MUTANTS[name]
    assert sum(kernel_source(source).text.count(old) for source in SOURCES) == 1
    build_side_by_side()
    assert re.search(rule, outcome(old, new))


def test_without_a_bug_nothing_is_caught() -> None:
    assert outcome("", "") == RIGHT
