"""paged_attention: keys and values gathered by the block table, softmax in float32.

Once per step the requests become work items: decodes (one query) of similar length form groups that share their calls,
a prompt chunk is cut into tiles of queries. Each item gathers its blocks into scratch with one copy, so that a product
sees one matrix per KV head. What a query must not see (later tokens, tokens outside the window, the unused end of a
block) is never read into a result, whatever the cache holds there. Items are shared out over the threads.

Decodes whose block tables begin alike, because they share a cached prefix, read it once: their queries attend to it
together, as a chunk's would, and each adds the part that is its own (the two are merged by their maxima and sums, as in
Milakov and Gimelshein 2018, "Online normalizer calculation for softmax"). One file, though long: items, groups and
scratch are one plan and make no sense apart.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from lean_engine.runtime.cpu.scope import Call, Scope
from lean_engine.runtime.device import Array, LaunchArgs

GROUP_ELEMENTS = 1 << 18  # of gathered keys per group: with the values 2 MiB, about one core's cache
TILE_ELEMENTS = 1 << 20  # of scores per tile
TILE_ROWS = 64  # queries of a tile at most
MIN_SHARED_TOKENS = 128  # gathers saved by reading a prefix once; below, the merge costs more
MIN_FILL = 0.75  # a group's shortest request has at least this share of its longest one's blocks


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes that every item of a launch shares."""

    num_kv_heads: int  # K
    group: int  # query heads per KV head, Q / K
    head_dim: int  # D
    block_size: int  # S
    window: int | None  # tokens

    @property
    def num_q_heads(self) -> int:
        return self.num_kv_heads * self.group


@dataclass(slots=True)
class Item:
    """Queries that share one gather: `requests` decodes of one row each, or one tile of a chunk."""

    rows: Array | slice  # the queries' rows in q and out
    num_requests: int
    num_rows: int  # queries per request
    blocks: Array  # rows of the cache as [N·K, S·D], [requests · K · blocks per request], in this order
    length: int  # keys per request, whole blocks
    hidden: Array  # [requests, rows, keys from hidden_from on] bool: what a query must not see
    hidden_from: int  # no key before this one is hidden
    ends: list[tuple[int, int, int]]  # (request, first, stop): keys nobody may see
    shared_blocks: Array | None = None  # rows of the cache, [K · blocks]: a prefix before `blocks`, seen by every query
    shared_length: int = 0  # its keys
    views: dict[int, Views] = field(default_factory=dict)  # by the address of the scratch; the same in every layer

    @property
    def cost(self) -> int:
        num_queries = self.num_requests * self.num_rows
        return self.num_requests * self.length * (self.num_rows + 8) + self.shared_length * (num_queries + 8)


@dataclass(slots=True)
class Schedule:
    """A step's items, one list per thread, and the rows that none of them computes."""

    shares: list[list[Item]] = field(default_factory=list)
    empty_rows: Array | None = None  # padding, and requests of length 0: their result is 0


def schedule(
    scope: Scope, geometry: Geometry, num_rows: int, tables: Array, cu_seqlens: Array, seq_lens: Array
) -> Schedule:
    def make() -> tuple[Schedule, Call]:
        result = Schedule()

        def refresh() -> None:
            items = make_items(geometry, tables, cu_seqlens, seq_lens, scope.team.num_threads)
            result.shares = share_out(items, scope.team.num_threads)
            result.empty_rows = rows_without_item(items, num_rows)

        return result, refresh

    return scope.once_per_step(("schedule", geometry), make)


def rows_without_item(items: list[Item], num_rows: int) -> Array | None:
    if sum(item.num_requests * item.num_rows for item in items) == num_rows:
        return None
    is_empty = np.ones(num_rows, bool)
    for item in items:
        is_empty[item.rows] = False
    return np.flatnonzero(is_empty)


def share_out(items: list[Item], num_threads: int) -> list[list[Item]]:
    """Largest first, each to the thread with the least work."""
    shares: list[list[Item]] = [[] for _ in range(num_threads)]
    loads = [0] * num_threads
    for item in sorted(items, key=lambda i: -i.cost):
        least = loads.index(min(loads))
        shares[least].append(item)
        loads[least] += item.cost
    return [share for share in shares if share]


def make_items(g: Geometry, tables: Array, cu_seqlens: Array, seq_lens: Array, num_threads: int) -> list[Item]:
    starts, lengths = cu_seqlens.tolist(), seq_lens.tolist()
    decodes: list[Decode] = []
    items: list[Item] = []
    for request, length in enumerate(lengths):
        num_rows = starts[request + 1] - starts[request]
        if length == 0:
            continue
        if num_rows == 1:
            first = 0 if g.window is None else max(0, length - g.window) // g.block_size
            decodes.append(Decode(-(-length // g.block_size) - first, request, first))
        elif num_rows > 1:
            items += tiles(g, tables[request], starts[request], num_rows, length)
    families = [(0, decodes)] if g.window is not None else by_shared_prefix(g, decodes, tables)
    max_blocks = blocks_per_group(g, sum(decode.blocks for _, family in families for decode in family), num_threads)
    for num_shared, family in families:
        for group in groups(g, num_shared, family, max_blocks, num_threads):
            items.append(decode_group(g, num_shared, group, tables, starts, lengths))
    return items


class Decode(NamedTuple):
    """A request with one query."""

    blocks: int  # that are gathered for it alone
    request: int
    first: int  # of these blocks, in its block table


def by_shared_prefix(g: Geometry, decodes: list[Decode], tables: Array) -> list[tuple[int, list[Decode]]]:
    """Decodes by the number of blocks with which their tables all begin; those that share too little together at 0."""
    by_first_block: dict[int, list[Decode]] = {}
    for decode in decodes:
        by_first_block.setdefault(int(tables[decode.request, 0]), []).append(decode)
    alone: list[Decode] = []
    families = [(0, alone)]
    for members in by_first_block.values():
        num_shared = num_common_blocks(tables, members) if len(members) > 1 else 0
        if num_shared * g.block_size * (len(members) - 1) < MIN_SHARED_TOKENS:
            alone += members
        else:
            own = [Decode(decode.blocks - num_shared, decode.request, num_shared) for decode in members]
            families.append((num_shared, own))
    return families


def num_common_blocks(tables: Array, members: list[Decode]) -> int:
    """How many blocks all have in common at their beginning; each keeps one at least that is its own."""
    shortest = min(decode.blocks for decode in members) - 1
    rows = tables[[decode.request for decode in members], :shortest]
    differs = (rows != rows[0]).any(axis=0)
    return int(differs.argmax()) if differs.any() else shortest


def groups(
    g: Geometry, num_shared: int, decodes: list[Decode], max_blocks: int, num_threads: int
) -> Iterator[list[Decode]]:
    """Decodes of similar length, longest first, as many together as the scratch holds."""
    max_count = len(decodes)
    if num_shared:
        fitting = max(1, TILE_ELEMENTS // (g.num_q_heads * num_shared * g.block_size))
        max_count = min(fitting, TILE_ROWS, -(-len(decodes) // num_threads))
    group: list[Decode] = []
    for decode in sorted(decodes, reverse=True):
        if group and (
            len(group) == max_count
            or (len(group) + 1) * group[0].blocks > max_blocks
            or decode.blocks < MIN_FILL * group[0].blocks - 1
        ):
            yield group
            group = []
        group.append(decode)
    if group:
        yield group


def blocks_per_group(g: Geometry, num_blocks: int, num_threads: int) -> int:
    """Blocks of a group at most: no more than fit the cache, and as many groups as keep all threads equally busy."""
    fitting = GROUP_ELEMENTS // (g.num_kv_heads * g.block_size * g.head_dim) or 1
    rounds = -(-num_blocks // (fitting * num_threads))
    return -(-num_blocks // (max(1, rounds) * num_threads))


def decode_group(
    g: Geometry, num_shared: int, group: list[Decode], tables: Array, starts: list[int], lengths: list[int]
) -> Item:
    num_blocks = group[0].blocks
    length = num_blocks * g.block_size
    block_ids = np.zeros((len(group), num_blocks), np.int64)
    keys = np.arange(length)
    hidden = np.empty((len(group), 1, length), bool)
    hidden_from = length if g.window is None else 0
    ends: list[tuple[int, int, int]] = []
    for i, (blocks, request, first) in enumerate(group):
        block_ids[i, :blocks] = tables[request, first : first + blocks]
        stop = lengths[request] - first * g.block_size
        start = 0 if g.window is None else max(0, lengths[request] - g.window - first * g.block_size)
        hidden[i, 0] = (keys < start) | (keys >= stop)
        hidden_from = min(hidden_from, stop)
        ends += [(i, a, b) for a, b in ((0, start), (stop, length)) if a < b]
    rows = np.array([starts[request] for _, request, _ in group])
    shared = tables[None, group[0].request, :num_shared].astype(np.int64)
    in_order = rows[-1] - rows[0] == len(rows) - 1 and bool((np.diff(rows) == 1).all())
    return Item(
        slice(int(rows[0]), int(rows[-1]) + 1) if in_order else rows,
        len(group),
        1,
        gather_rows(g, block_ids),
        length,
        hidden[..., hidden_from:],
        hidden_from,
        ends,
        gather_rows(g, shared) if num_shared else None,
        num_shared * g.block_size,
    )


def tiles(g: Geometry, table: Array, start_row: int, num_rows: int, length: int) -> list[Item]:
    """A chunk's queries, the last num_rows tokens of `length`, as tiles over the blocks they can see."""
    items = []
    first_position = length - num_rows
    whole_blocks = -(-length // g.block_size) * g.block_size
    tile_rows = max(1, min(TILE_ROWS, TILE_ELEMENTS // (g.num_q_heads * whole_blocks)))
    for begin in range(0, num_rows, tile_rows):
        end = min(begin + tile_rows, num_rows)
        positions = np.arange(first_position + begin, first_position + end)
        stop = first_position + end
        low = 0 if g.window is None else max(0, int(positions[0]) - g.window + 1)
        first = low // g.block_size
        blocks = -(-stop // g.block_size) - first
        keys = np.arange(blocks * g.block_size) + first * g.block_size
        hidden_from = 0 if g.window is not None else int(positions[0]) - first * g.block_size
        hidden = keys[hidden_from:] > positions[:, None]
        if g.window is not None:
            hidden |= keys[hidden_from:] <= positions[:, None] - g.window
        seen_from, seen_to = low - keys[0], stop - keys[0]
        ends = [(0, int(a), int(b)) for a, b in ((0, seen_from), (seen_to, len(keys))) if a < b]
        block_ids = table[None, first : first + blocks].astype(np.int64)
        rows = slice(start_row + begin, start_row + end)
        items.append(Item(rows, 1, end - begin, gather_rows(g, block_ids), len(keys), hidden[None], hidden_from, ends))
    return items


def gather_rows(g: Geometry, block_ids: Array) -> Array:
    """Cache rows of blocks [requests, blocks], head by head: [requests · K · blocks]."""
    heads = np.arange(g.num_kv_heads)[:, None]
    return (block_ids[:, None, :] * g.num_kv_heads + heads).reshape(-1)


def scratch_elements(g: Geometry, max_length: int) -> tuple[int, int, int]:
    """float32 elements that one item needs at most: gathered keys or values, scores, queries (as many results)."""
    kv = max(GROUP_ELEMENTS, g.num_kv_heads * g.head_dim * max_length)
    scores = max(TILE_ELEMENTS, g.group * kv // g.head_dim)
    max_rows = max(TILE_ROWS, GROUP_ELEMENTS // (g.num_kv_heads * g.head_dim * g.block_size) + 1)
    return kv, scores, max_rows * g.num_q_heads * g.head_dim


def paged_attention_scratch(
    shapes: Sequence[tuple[int, ...]], scalars: Mapping[str, Any], num_threads: int
) -> list[tuple[int, ...]]:
    g = geometry_of(shapes, scalars)
    kv, scores, queries = scratch_elements(g, shapes[3][1] * g.block_size)
    return [(num_threads, kv + scores + 2 * queries)]


def geometry_of(shapes: Sequence[tuple[int, ...]], scalars: Mapping[str, Any]) -> Geometry:
    (_rows, columns), (_blocks, num_kv_heads, block_size, head_dim) = shapes[:2]
    window = scalars["window"]
    return Geometry(
        num_kv_heads, columns // head_dim // num_kv_heads, head_dim, block_size, None if window is None else int(window)
    )


def paged_attention(scope: Scope, args: LaunchArgs, scratch: Sequence[Array]) -> list[Call]:
    q, k_cache, v_cache, tables, cu_seqlens, seq_lens = args.inputs
    g = geometry_of([a.shape for a in args.inputs], args.scalars)
    plan = schedule(scope, g, len(q), tables, cu_seqlens, seq_lens)
    out = args.outputs[0]
    rows = k_cache.shape[0] * g.num_kv_heads
    workers = [
        Worker(
            g,
            q,
            k_cache.reshape(rows, -1),
            v_cache.reshape(rows, -1),
            out,
            args.scalars["scale"],
            args.scalars["softcap"],
            part,
        )
        for part in scratch[0]
    ]

    def run() -> None:
        tasks = [partial(worker.run, share) for worker, share in zip(workers, plan.shares, strict=False)]
        if tasks:
            scope.team.run(tasks)
        if plan.empty_rows is not None:
            out[plan.empty_rows] = 0

    return [run]


class Views:
    """An item's scratch, shaped for its calls. c requests, K KV heads, g query heads each, n queries, L keys."""

    def __init__(self, item: Item, g: Geometry, scratch: Array) -> None:
        count, rows, length = item.num_requests, item.num_rows, item.length
        heads = (count, g.num_kv_heads)
        parts = carve_all(
            scratch,
            (len(item.blocks), g.block_size * g.head_dim),
            (*heads, g.group * rows, length),
            (*heads, g.group, rows, g.head_dim),
            (*heads, g.group * rows, g.head_dim),
        )
        self.gathered, self.scores, self.queries, self.result = parts
        self.kv = self.gathered.reshape(*heads, length, g.head_dim)  # [c, K, L, D]
        self.keys_t = self.kv.transpose(0, 1, 3, 2)  # [c, K, D, L]
        self.queries_flat = self.queries.reshape(*heads, g.group * rows, g.head_dim)  # [c, K, g·n, D]
        self.maskable = self.scores.reshape(*heads, g.group, rows, length)[..., item.hidden_from :]
        self.hidden = item.hidden[:, None, None]  # [c, 1, 1, n, L]
        self.maxima, self.sums = np.empty((2, *heads, g.group * rows, 1), np.float32)
        by_token = self.result.reshape(*heads, g.group, rows, g.head_dim).transpose(0, 3, 1, 2, 4)
        self.by_token = by_token[0] if count == 1 else by_token[:, 0]  # [queries, K, g, D]; one of c and n is 1
        self.ends = [self.kv[request, :, start:stop] for request, start, stop in item.ends]
        self.token_shape = (count, rows, g.num_kv_heads, g.group, g.head_dim)
        self.shared = None if item.shared_blocks is None else SharedViews(item, item.shared_blocks, g, scratch)


class SharedViews:
    """The same for the prefix that c decodes share; it uses the scratch before their own parts do."""

    def __init__(self, item: Item, blocks: Array, g: Geometry, scratch: Array) -> None:
        count, length = item.num_requests, item.shared_length
        self.blocks = blocks
        heads = g.num_kv_heads
        self.gathered, self.scores, self.queries = carve_all(
            scratch,
            (heads * length // g.block_size, g.block_size * g.head_dim),
            (heads, g.group * count, length),
            (heads, g.group, count, g.head_dim),
        )
        self.kv = self.gathered.reshape(heads, length, g.head_dim)  # [K, L, D]
        self.keys_t = self.kv.transpose(0, 2, 1)  # [K, D, L]
        self.queries_flat = self.queries.reshape(heads, g.group * count, g.head_dim)  # [K, g·c, D]
        self.maxima, self.sums = np.empty((2, heads, g.group * count, 1), np.float32)
        self.result = np.empty((heads, g.group * count, g.head_dim), np.float32)

        def by_request(values: Array) -> Array:  # [K, g·c, x] → [c, K, g, x]
            return values.reshape(heads, g.group, count, -1).transpose(2, 0, 1, 3)

        self.parts = by_request(self.maxima), by_request(self.sums), by_request(self.result)
        self.rescale, self.own_rescale = np.empty((2, count, heads, g.group, 1), np.float32)


def carve_all(scratch: Array, *shapes: tuple[int, ...]) -> list[Array]:
    parts, start = [], 0
    for shape in shapes:
        stop = start + math.prod(shape)
        parts.append(scratch[start:stop].reshape(shape))
        start = stop
    return parts


class Worker:
    """One thread's way through its items, with its own scratch."""

    def __init__(
        self,
        geometry: Geometry,
        q: Array,  # [T, Q·D]
        keys: Array,  # [N·K, S·D]
        values: Array,  # [N·K, S·D]
        out: Array,  # [T, Q·D]
        scale: np.float32,
        softcap: np.float32 | None,
        scratch: Array,  # [elements]
    ) -> None:
        self.geometry = geometry
        self.q = q.reshape(len(q), geometry.num_kv_heads, geometry.group, geometry.head_dim)
        self.out = out.reshape(self.q.shape)
        self.keys, self.values = keys, values
        self.scale, self.softcap = scale, softcap
        self.scratch = scratch
        self.address = scratch.ctypes.data

    def run(self, items: list[Item]) -> None:
        for item in items:
            views = item.views.get(self.address)
            if views is None:
                views = item.views[self.address] = Views(item, self.geometry, self.scratch)
            self.attend(item, views)

    def attend(self, item: Item, v: Views) -> None:
        queries = self.q[item.rows].reshape(v.token_shape).transpose(0, 2, 3, 1, 4)
        if v.shared is not None:
            self.attend_to_shared(item, v.shared)
        np.multiply(queries, self.scale, out=v.queries)
        self.keys.take(item.blocks, axis=0, out=v.gathered, mode="clip")
        np.matmul(v.queries_flat, v.keys_t, out=v.scores)
        self.cap(v.scores)
        np.copyto(v.maskable, -np.inf, where=v.hidden)
        softmax(v.scores, v.maxima, v.sums)
        self.values.take(item.blocks, axis=0, out=v.gathered, mode="clip")
        for end in v.ends:
            end.fill(0)
        np.matmul(v.scores, v.kv, out=v.result)
        if v.shared is not None:
            merge(v, v.shared)
        np.divide(v.result, v.sums, out=v.result)
        self.out[item.rows] = v.by_token

    def attend_to_shared(self, item: Item, s: SharedViews) -> None:
        """The part of the shared prefix, not yet divided by its sum."""
        np.multiply(self.q[item.rows].transpose(1, 2, 0, 3), self.scale, out=s.queries)
        self.keys.take(s.blocks, axis=0, out=s.gathered, mode="clip")
        np.matmul(s.queries_flat, s.keys_t, out=s.scores)
        self.cap(s.scores)
        softmax(s.scores, s.maxima, s.sums)
        self.values.take(s.blocks, axis=0, out=s.gathered, mode="clip")
        np.matmul(s.scores, s.kv, out=s.result)

    def cap(self, scores: Array) -> None:
        if self.softcap is not None:
            np.divide(scores, self.softcap, out=scores)
            np.tanh(scores, out=scores)
            np.multiply(scores, self.softcap, out=scores)


def softmax(scores: Array, maxima: Array, sums: Array) -> None:
    """Scores → exp(score - max), hidden ones (-inf) 0; their maxima, and their sums, by which results are divided."""
    np.maximum.reduce(scores, axis=-1, keepdims=True, out=maxima)
    np.subtract(scores, maxima, out=scores)
    np.exp(scores, out=scores)
    np.add.reduce(scores, axis=-1, keepdims=True, out=sums)


def merge(v: Views, s: SharedViews) -> None:
    """Add the shared part to each request's own result and sums, both rescaled to the larger maximum."""
    maxima, sums, result = s.parts
    np.maximum(maxima, v.maxima, out=s.rescale)
    np.subtract(v.maxima, s.rescale, out=s.own_rescale)
    np.exp(s.own_rescale, out=s.own_rescale)
    np.subtract(maxima, s.rescale, out=s.rescale)
    np.exp(s.rescale, out=s.rescale)
    for own, shared in ((v.result, result), (v.sums, sums)):
        np.multiply(own, s.own_rescale, out=own)
        own += shared * s.rescale
