"""What the page at `/` shows of the engine: the KV block map, requests and counters, as JSON bodies.

Two halves. `take_*` run in the engine's thread between two steps: they copy memory and a few numbers per request (15 µs
for a map of 100,000 blocks, under 1 µs for a request). The rest are pure functions of what was taken and run elsewhere.
Nothing here is kept or done while nobody asks, and no text or token of a request is ever in it.

The map is a row of cells in the order of block ids; a cell stands for one block, or for 2, 4, 8, … where there are more
blocks than cells. Equal cells that follow each other are one run, so an idle pool of a million blocks is a few bytes.
"""

from __future__ import annotations

import time
import zlib
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from lean_engine.engine.core import Engine
from lean_engine.errors import RequestError
from lean_engine.memory.block_pool import NULL_BLOCK_ID
from lean_engine.scheduling.request import Request
from lean_engine.scheduling.statistics import StepStats

MAX_WAITING = 100  # waiting requests listed; all are counted
MAX_CELLS = 16_384
DEFAULT_CELLS = 4096
MIN_MAPPED = 256  # blocks: a map is not scaled to fewer
MAX_HOLDERS = 20  # listed of a range of blocks; all are counted

COUNTERS = ("num_prefill_tokens", "num_recompute_tokens", "num_preemptions", "num_finished")

Array = Any  # np.ndarray

# -- bodies


class RequestRow(msgspec.Struct, array_like=True, frozen=True):
    """One answer that runs or waits. An array in JSON, as there may be hundreds."""

    id: str  # of the engine's request: the response's id, then # and a number
    status: str  # "running", "waiting" or "preempted"
    num_prompt_tokens: int
    num_cached_tokens: int  # of the prompt, found in the prefix cache
    num_computed_tokens: int  # of prompt and output, those included
    num_output_tokens: int
    max_total_tokens: int  # prompt and output at most
    num_blocks: int
    num_preemptions: int
    age: float  # seconds since it came
    priority: int


class BlockCounts(msgspec.Struct, frozen=True):
    """Blocks by what they are; each stands once, the null block in none."""

    empty: int
    cached: int  # held by nobody, and still found by their content
    held: int  # by one request
    shared: int  # by several


class Totals(msgspec.Struct, frozen=True):
    """Counters since the start."""

    num_prefill_tokens: int  # prompt tokens computed
    num_generated_tokens: int
    num_recompute_tokens: int  # computed again after a preemption
    num_query_tokens: int  # prompt tokens looked up in the prefix cache
    num_hit_tokens: int  # of those, found
    num_preemptions: int
    num_evictions: int  # cached blocks that were needed for something else
    num_finished: int  # answers


class BlockMap(msgspec.Struct, frozen=True):
    num_blocks: int  # that the map covers, from block 0 on; those after it are empty
    blocks_per_cell: int  # the last cell may stand for fewer
    version: int  # the same as long as runs are
    runs: (
        list[tuple[int, int, int, int]] | None
    )  # (cells, and in each: cached, held, shared); None: as asked, unchanged


class State(msgspec.Struct, frozen=True):
    """Response of /v1/engine/state."""

    time: float  # seconds, on the server's clock
    step: int
    num_blocks: int  # the null block, 0, included
    block_size: int  # tokens
    max_num_seqs: int  # requests that run at once
    max_model_len: int
    num_running: int
    num_waiting: int
    has_chat_template: bool
    blocks: BlockCounts
    totals: Totals
    requests: list[RequestRow]  # all that run, and the first that wait
    map: BlockMap


class Holder(msgspec.Struct, frozen=True):
    request_id: str
    num_blocks: int  # of the range


class BlockRange(msgspec.Struct, frozen=True):
    """Response of /v1/engine/blocks for a range of blocks."""

    first: int
    last: int
    blocks: BlockCounts
    ref_count: int  # holders, a request once for each of its blocks
    num_published: int  # blocks that the prefix cache finds, held ones included
    num_holders: int  # requests
    holders: list[Holder]  # those with most blocks first


class HeldBlocks(msgspec.Struct, frozen=True):
    """Response of /v1/engine/blocks for a request."""

    request_id: str
    ranges: list[tuple[int, int]]  # (first, last), ascending


# -- in the engine's thread


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The engine between two steps."""

    time: float
    stats: StepStats
    num_blocks: int
    max_num_seqs: int
    max_model_len: int
    counters: tuple[int, ...]  # of SchedulerStats, as in COUNTERS
    ref_counts: bytes  # [N] int32
    is_published: bytes  # [N]
    requests: list[RequestRow]


@dataclass(frozen=True, slots=True)
class Holdings:
    """Who holds which blocks."""

    num_blocks: int
    ref_counts: bytes
    is_published: bytes
    tables: list[tuple[str, list[int]]]  # request id, block table


def take_snapshot(engine: Engine) -> Snapshot:
    scheduler = engine.scheduler
    now = time.monotonic()
    running, waiting = scheduler.unfinished(MAX_WAITING)
    ref_counts, is_published = scheduler.pool.occupancy()
    return Snapshot(
        time=now,
        stats=engine.stats(),
        num_blocks=scheduler.pool.num_blocks,
        max_num_seqs=scheduler.max_num_seqs,
        max_model_len=scheduler.max_model_len,
        counters=tuple(getattr(scheduler.stats, name) for name in COUNTERS),
        ref_counts=ref_counts,
        is_published=is_published,
        requests=[row(request, now) for request in (*running, *waiting)],
    )


def row(request: Request, now: float) -> RequestRow:
    num_tokens, num_prompt = len(request.token_ids), request.num_prompt_tokens
    num_computed = min(request.num_computed_tokens, num_tokens)  # a step may be planned ahead
    return RequestRow(
        request.request_id,
        request.status.value,
        num_prompt,
        min(request.num_cached_tokens, num_computed),
        num_computed,
        num_tokens - num_prompt,
        request.max_total_tokens,
        len(request.block_table),
        request.num_preemptions,
        round(now - request.arrival_time, 2),
        request.priority,
    )


def take_holdings(engine: Engine) -> Holdings:
    scheduler = engine.scheduler
    running, _ = scheduler.unfinished(0)
    ref_counts, is_published = scheduler.pool.occupancy()
    tables = [(request.request_id, list(request.block_table)) for request in running]
    return Holdings(scheduler.pool.num_blocks, ref_counts, is_published, tables)


# -- elsewhere


def state(
    snapshot: Snapshot,
    *,
    num_generated_tokens: int,
    has_chat_template: bool,
    num_cells: int,
    min_mapped: int,
    known_version: int | None,
) -> State:
    """What the page shows.

    Args:
        num_generated_tokens: since the start.
        has_chat_template: whether chat is possible, or completions only.
        num_cells: cells of the map at most.
        min_mapped: blocks that the map covers at least, so that it need not shrink while somebody looks.
        known_version: of the map that the asker has.
    """
    stats = snapshot.stats
    num_prefill, num_recompute, num_preemptions, num_finished = snapshot.counters
    ref_counts, is_published = as_arrays(snapshot)
    return State(
        time=snapshot.time,
        step=stats.step,
        num_blocks=snapshot.num_blocks,
        block_size=stats.block_size,
        max_num_seqs=snapshot.max_num_seqs,
        max_model_len=snapshot.max_model_len,
        num_running=stats.num_running,
        num_waiting=stats.num_waiting,
        has_chat_template=has_chat_template,
        blocks=count_blocks(ref_counts, is_published),
        totals=Totals(
            num_prefill_tokens=num_prefill,
            num_generated_tokens=num_generated_tokens,
            num_recompute_tokens=num_recompute,
            num_query_tokens=stats.num_query_tokens,
            num_hit_tokens=stats.num_hit_tokens,
            num_preemptions=num_preemptions,
            num_evictions=stats.num_evictions,
            num_finished=num_finished,
        ),
        requests=snapshot.requests,
        map=block_map(ref_counts, is_published, num_cells, min_mapped, known_version),
    )


def as_arrays(taken: Snapshot | Holdings) -> tuple[Array, Array]:
    """Holders [N] int32 and whether published [N] uint8."""
    return np.frombuffer(taken.ref_counts, np.int32), np.frombuffer(taken.is_published, np.uint8)


def count_blocks(ref_counts: Array, is_published: Array, first: int = 0) -> BlockCounts:
    """Blocks by kind. first: the id of the first of them, so that the null block is known."""
    num_held, num_shared = int(np.count_nonzero(ref_counts == 1)), int(np.count_nonzero(ref_counts > 1))
    num_cached = int(np.count_nonzero((ref_counts == 0) & (is_published == 1)))
    num_usable = len(ref_counts) - (first == NULL_BLOCK_ID and len(ref_counts) > 0)
    return BlockCounts(num_usable - num_held - num_shared - num_cached, num_cached, num_held, num_shared)


def block_map(
    ref_counts: Array, is_published: Array, num_cells: int, min_mapped: int, known_version: int | None
) -> BlockMap:
    """The map of the blocks in use, and of empty ones among them.

    It covers a power of two of blocks (or all), so that it changes its scale seldom.
    """
    in_use = (ref_counts > 0) | (is_published == 1)
    num_used = len(in_use) - int(np.argmax(in_use[::-1])) if in_use.any() else 1
    num_mapped = min(len(ref_counts), max(MIN_MAPPED, min_mapped, power_of_two(num_used)))
    blocks_per_cell = power_of_two(-(-num_mapped // num_cells))
    cells = count_cells(ref_counts[:num_mapped], is_published[:num_mapped], blocks_per_cell)
    starts = np.flatnonzero(np.r_[True, (cells[1:] != cells[:-1]).any(axis=1)])
    lengths = np.diff(np.r_[starts, len(cells)])
    runs = np.c_[lengths, cells[starts]].astype(np.int64)
    version = zlib.crc32(runs.tobytes(), zlib.crc32(b"%d %d" % (num_mapped, blocks_per_cell)))
    return BlockMap(num_mapped, blocks_per_cell, version, None if version == known_version else runs.tolist())


def power_of_two(count: int) -> int:
    """The smallest that is not less."""
    return 1 << max(0, count - 1).bit_length()


def count_cells(ref_counts: Array, is_published: Array, blocks_per_cell: int) -> Array:
    """Blocks that are cached, held and shared in each cell: [cells, 3] int32."""
    kinds = ((ref_counts == 0) & (is_published == 1), ref_counts == 1, ref_counts > 1)
    starts = np.arange(0, len(ref_counts), blocks_per_cell)
    return np.stack([np.add.reduceat(kind, starts, dtype=np.int32) for kind in kinds], axis=1)


def describe_range(holdings: Holdings, first: int, last: int) -> BlockRange:
    """What the blocks from first to last are, and who holds them; RequestError where there are no such blocks."""
    if not 0 <= first <= last < holdings.num_blocks:
        raise RequestError(
            f"blocks {first} to {last} are not among the pool's, 0 to {holdings.num_blocks - 1}", param="first"
        )
    ref_counts, is_published = (array[first : last + 1] for array in as_arrays(holdings))
    found = [Holder(request_id, num_between(table, first, last)) for request_id, table in holdings.tables]
    holders = sorted((holder for holder in found if holder.num_blocks), key=lambda h: (-h.num_blocks, h.request_id))
    return BlockRange(
        first=first,
        last=last,
        blocks=count_blocks(ref_counts, is_published, first),
        ref_count=int(ref_counts.sum()),
        num_published=int(is_published.sum()),
        num_holders=len(holders),
        holders=holders[:MAX_HOLDERS],
    )


def num_between(table: list[int], first: int, last: int) -> int:
    if first == last:
        return table.count(first)
    ids = np.array(table, np.int64)
    return int(np.count_nonzero((ids >= first) & (ids <= last)))


def describe_request(holdings: Holdings, request_id: str) -> HeldBlocks:
    """The blocks of a request: none where it is not running."""
    table = next((table for found, table in holdings.tables if found == request_id), [])
    ids = np.array(sorted(table), np.int64)
    breaks = np.flatnonzero(np.diff(ids) > 1) + 1
    parts = [part for part in np.split(ids, breaks) if len(part)]
    return HeldBlocks(request_id, [(int(part[0]), int(part[-1])) for part in parts])
