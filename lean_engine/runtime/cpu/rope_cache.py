"""Kernels between the QKV projection and attention: head norms, RoPE, and K and V into their cache slots.

The caches are used as matrices of rows of one token and head, [N·K·S, D]. Which rows a step writes, and the rotations
of its positions, are the same in every layer and are worked out once per step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from lean_engine.runtime.cpu.rows import norm_calls
from lean_engine.runtime.cpu.scope import Call, Scope
from lean_engine.runtime.device import Array, LaunchArgs

Shapes = Sequence[tuple[int, ...]]
Scratch = Sequence[Array]


@dataclass(slots=True)
class Rotations:
    """cos and signed sin of a step's positions, shaped to multiply heads as [T, heads, 2, rotary_dim / 2]."""

    cos: Array  # [T, 1, 1, E/2]
    sin: Array  # [T, 1, 2, E/2]: minus sin for the left half, sin for the right


def rotations(scope: Scope, positions: Array, table: Array) -> Rotations:
    def make() -> tuple[Rotations, Call]:
        half = table.shape[1] // 2
        rows = np.empty((len(positions), 2, half), np.float32)
        signed = np.empty((len(positions), 2, half), np.float32)

        def refresh() -> None:
            np.take(table, positions, axis=0, out=rows.reshape(len(rows), -1), mode="clip")
            np.negative(rows[:, 1], out=signed[:, 0])
            signed[:, 1] = rows[:, 1]

        return Rotations(rows[:, None, :1], signed[:, None]), refresh

    return scope.once_per_step(("rotations", id(table), address_of(positions)), make)


def rotate_calls(x: Array, rotation: Rotations, out: Array, product: Array) -> list[Call]:
    """out = x with the first rotary_dim of each head rotated. x, out [T, heads, D]; product [T, heads, rotary_dim]."""
    half = rotation.cos.shape[-1]
    pairs, turned = as_pairs(x, half), as_pairs(out, half)
    swapped = product.reshape(*product.shape[:2], 2, half)
    calls: list[Call] = [
        partial(np.multiply, pairs[:, :, ::-1], rotation.sin, out=swapped),
        partial(np.multiply, pairs, rotation.cos, out=turned),
        partial(np.add, turned, swapped, out=turned),
    ]
    if 2 * half < x.shape[2]:
        calls.append(partial(np.copyto, out[..., 2 * half :], x[..., 2 * half :]))
    return calls


def as_pairs(x: Array, half: int) -> Array:
    """The rotated part of [T, heads, D] as a view [T, heads, 2, half], whatever the strides."""
    tokens, heads, element = x.strides
    shape = (*x.shape[:2], 2, half)
    return np.lib.stride_tricks.as_strided(x, shape, (tokens, heads, half * element, element))


@dataclass(slots=True)
class CacheRows:
    """Where a step's tokens go: tokens[i]'s K heads to the cache rows rows[i]."""

    rows: Array  # [tokens, K] into [N·K·S, D]
    tokens: Array | None  # the tokens with a slot; None = all


def address_of(array: Array) -> tuple[int, int]:
    return array.ctypes.data, array.size


def cache_rows(scope: Scope, slots: Array, cache: Array) -> CacheRows:
    _num_blocks, num_heads, block_size, _head_dim = cache.shape

    def make() -> tuple[CacheRows, Call]:
        places = CacheRows(np.empty((0, num_heads), np.int64), None)

        def refresh() -> None:
            valid = slots >= 0
            places.tokens = None if valid.all() else np.flatnonzero(valid)
            used = slots.astype(np.int64) if places.tokens is None else slots[places.tokens].astype(np.int64)
            block, offset = np.divmod(used, block_size)
            places.rows = (block[:, None] * num_heads + np.arange(num_heads)) * block_size + offset[:, None]

        return places, refresh

    return scope.once_per_step(("cache_rows", num_heads, block_size, address_of(slots)), make)


def store_call(cache: Array, heads: Array, places: CacheRows) -> Call:
    """Write heads [T, K, D] to their cache rows; tokens without a slot write nowhere."""
    matrix = cache.reshape(-1, cache.shape[3])

    def store() -> None:
        matrix[places.rows] = heads if places.tokens is None else heads[places.tokens]

    return store


def rope_scratch(shapes: Shapes) -> list[tuple[int, ...]]:
    return [shapes[0]]


def rope(scope: Scope, args: LaunchArgs, scratch: Scratch) -> list[Call]:
    x, positions, table = args.inputs
    heads = (len(x), x.shape[1] // args.scalars["head_dim"], args.scalars["head_dim"])
    product = carve(scratch[0], *heads[:2], table.shape[1])
    return rotate_calls(x.reshape(heads), rotations(scope, positions, table), args.outputs[0].reshape(heads), product)


def write_kv(scope: Scope, args: LaunchArgs, scratch: Scratch) -> list[Call]:
    k, v, slots, k_cache, v_cache = args.inputs
    places = cache_rows(scope, slots, k_cache)
    heads = (len(k), k_cache.shape[1], k_cache.shape[3])
    return [
        store_call(k_cache, k.reshape(heads), places),
        store_call(v_cache, v.reshape(heads), places),
    ]


def qk_norm_rope_write_kv_scratch(shapes: Shapes) -> list[tuple[int, ...]]:
    rows, columns = shapes[0]
    return [(rows, columns), (rows, columns), (rows, columns)]


def qk_norm_rope_write_kv(scope: Scope, args: LaunchArgs, scratch: Scratch) -> list[Call]:
    qkv, positions, slots, table, k_cache, v_cache = args.inputs[:6]
    num_q, num_kv, head_dim = (int(args.scalars[name]) for name in ("num_q_heads", "num_kv_heads", "head_dim"))
    num_rows, num_roped = len(qkv), num_q + num_kv
    heads = qkv.reshape(num_rows, num_q + 2 * num_kv, head_dim)
    roped = carve(scratch[0], num_rows, num_roped, head_dim)
    product = carve(scratch[1], num_rows, num_roped, table.shape[1])
    calls: list[Call] = []
    source = heads[:, :num_roped]
    if len(args.inputs) == 8:
        squares = carve(scratch[1], num_rows, num_roped)
        source = carve(scratch[2], num_rows, num_roped, head_dim)
        for part, weight in ((slice(0, num_q), args.inputs[6]), (slice(num_q, num_roped), args.inputs[7])):
            calls += norm_calls(scope, heads[:, part], weight, source[:, part], squares[:, part], args)
    calls += rotate_calls(source, rotations(scope, positions, table), roped, product)
    places = cache_rows(scope, slots, k_cache)
    return [
        *calls,
        partial(np.copyto, args.outputs[0].reshape(num_rows, num_q, head_dim), roped[:, :num_q]),
        store_call(k_cache, roped[:, num_q:], places),
        store_call(v_cache, heads[:, num_roped:], places),
    ]


def carve(scratch: Array, *shape: int) -> Array:
    """The head of a scratch array in another shape."""
    size = math.prod(shape)
    return scratch.reshape(-1)[:size].reshape(shape)
