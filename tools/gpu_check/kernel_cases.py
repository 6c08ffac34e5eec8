"""Launches of the kernel table to be checked: the shapes that the emulator's tests take, the small ones of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

ROWS = 6
FUSED_SHAPES = (  # Q, K, D, E, S
    (1, 1, 8, 8, 4), (6, 2, 24, 24, 16), (8, 1, 64, 64, 32), (9, 3, 64, 32, 16), (5, 5, 80, 80, 16), (4, 2, 96, 72, 16),
    (7, 1, 128, 128, 16), (3, 1, 128, 96, 32), (4, 2, 256, 256, 16), (2, 1, 250, 250, 16),
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Case:
    """One launch: floats of `inputs` take the element type, or what the kernel table says.

    Attributes:
        in_place: output → input whose storage it takes over.
    """

    kind: str
    inputs: Sequence[Array]
    attrs: Mapping[str, Any] = field(default_factory=dict)
    in_place: Mapping[int, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.kind} {[list(a.shape) for a in self.inputs]} {dict(self.attrs)} {dict(self.in_place) or ''}"


def normal(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([*shape, seed]).standard_normal(shape)


def table_cases() -> Iterator[Case]:
    """Of every kernel of the table but gemm, attention and experts."""
    yield from gather_cases()
    yield from norm_cases()
    yield from elementwise_cases()
    yield from rope_and_cache_cases()


def gather_cases() -> Iterator[Case]:
    for columns in (1, 13, 64, 2080):
        ids = np.random.default_rng(columns).integers(0, 11, 5)
        for scale in (1.0, 48.0):
            yield Case("embedding", [ids, normal(11, columns)], {"scale": scale})
        yield Case("gather_rows", [normal(11, columns), ids])
    for columns, start, stop in ((19, 0, 5), (19, 5, 19), (24, 8, 24), (24, 4, 12), (1040, 16, 1040)):
        yield Case("slice_columns", [normal(3, columns)], {"start": start, "stop": stop})


def norm_cases() -> Iterator[Case]:
    shapes = ((1, 1), (7, 7), (256, 256), (264, 264), (577, 577), (1024, 1024), (64, 8), (39, 13), (8192, 8192),
              (8200, 8200), (16384, 16384), (8191, 8191))  # fmt: skip
    for columns, width in shapes:
        for unit_offset in (False, True):
            x = normal(3, columns) * np.exp(normal(3, 1) * 2)
            yield Case("rms_norm", [x, 1 + normal(width)], {"eps": 1e-5, "unit_offset": unit_offset})
    for columns in (37, 72, 2048, 4096):
        for in_place in ({}, {0: 0, 1: 1}, {1: 1}):
            inputs = [normal(3, columns), normal(3, columns, seed=1), normal(columns)]
            yield Case("add_rms_norm", inputs, {"eps": 1e-6, "unit_offset": columns == 72}, in_place)


def elementwise_cases() -> Iterator[Case]:
    far = np.array([[-6e4, -1e4, -200.0, -90.0, -88.5, -20.0, -0.0, 0.0, 20.0, 90.0, 200.0, 1e4, 6e4]])
    for kind in ("silu", "gelu_tanh"):
        yield Case(kind, [far])
    for shape in ((1, 1), (3, 19), (5, 24), (2, 1031)):
        for in_place in ({}, {0: 0}):
            for kind in ("silu", "gelu_tanh"):
                yield Case(kind, [normal(*shape) * 3], in_place=in_place)
            for kind in ("add", "mul"):
                yield Case(kind, [normal(*shape), normal(*shape, seed=1)], in_place=in_place)
            yield Case("softcap", [normal(*shape) * 40], {"cap": 30.0}, in_place)
    for columns in (1, 19, 40, 1032):
        for activation in ("silu", "gelu_tanh"):
            yield Case("act_and_mul", [normal(3, 2 * columns) * 2], {"activation": activation})


def rope_and_cache_cases() -> Iterator[Case]:
    for heads, head_dim, rotary_dim in ((1, 2, 2), (5, 24, 24), (2, 80, 32), (3, 64, 64), (9, 64, 62), (2, 128, 96)):
        yield Case("rope", [normal(ROWS, heads * head_dim), *rope_inputs(rotary_dim)], {"head_dim": head_dim})
    for num_kv_heads, head_dim, block_size in ((1, 10, 4), (2, 80, 16), (8, 128, 32)):
        k, v = normal(2, ROWS, num_kv_heads * head_dim)
        yield Case("write_kv", [k, v, *slots_and_caches(num_kv_heads, block_size, head_dim)])
    for shape in FUSED_SHAPES:
        for norms in ("", "norms", "unit offset"):
            yield fused_case(shape, norms)


def fused_case(shape: tuple[int, int, int, int, int], norms: str) -> Case:
    num_q, num_kv, head_dim, rotary_dim, block_size = shape
    slots, k_cache, v_cache = slots_and_caches(num_kv, block_size, head_dim)
    positions, table = rope_inputs(rotary_dim)
    qkv = normal(ROWS, (num_q + 2 * num_kv) * head_dim)
    weights = [normal(head_dim, seed=1), normal(head_dim, seed=2)] if norms else []
    sizes = {"num_q_heads": num_q, "num_kv_heads": num_kv, "head_dim": head_dim}
    attrs = {**sizes, "eps": 1e-6, "unit_offset": norms == "unit offset"}
    return Case("qk_norm_rope_write_kv", [qkv, positions, slots, table, k_cache, v_cache, *weights], attrs)


def rope_inputs(rotary_dim: int) -> tuple[Array, Array]:
    angles = np.arange(50)[:, None] * np.linspace(1, 0.01, rotary_dim // 2)
    positions = np.random.default_rng(ROWS).integers(0, 50, ROWS)
    return positions, np.concatenate([np.cos(angles), np.sin(angles)], axis=1)


def slots_and_caches(num_kv_heads: int, block_size: int, head_dim: int) -> tuple[Array, Array, Array]:
    """Distinct slots in random order, two of them -1, and two caches of NaN [N, K, S, D]."""
    num_blocks = -(-ROWS // block_size) + 2
    slots = np.random.default_rng(ROWS).permutation(np.arange(block_size, num_blocks * block_size))[:ROWS]
    slots[::5] = -1
    k_cache, v_cache = np.full((2, num_blocks, num_kv_heads, block_size, head_dim), np.nan)
    return slots, k_cache, v_cache


@dataclass(frozen=True)
class GemmCase:
    num_rows: int
    num_out: int
    depth: int
    out_dtype: str | None = None
    has_bias: bool = False
    has_residual: bool = False
    activation: str | None = None


def gemm_cases() -> Iterator[GemmCase]:
    for num_rows in (1, 2, 3, 4, 8, 13, 16, 32, 33, 64, 100):
        yield GemmCase(num_rows, 96, 256)
        yield GemmCase(num_rows, 131, 1032, has_bias=True)
        yield GemmCase(num_rows, 200, 512, out_dtype="float32")
        yield GemmCase(num_rows, 128, 520, has_residual=True)
        yield GemmCase(num_rows, 72, 264, activation="silu")
        yield GemmCase(num_rows, 40, 37)
    yield GemmCase(5, 64, 264, activation="gelu_tanh")
    yield GemmCase(1, 512, 4096)
    yield GemmCase(512, 512, 512)


@dataclass(frozen=True)
class AttentionCase:
    requests: tuple[tuple[int, int], ...]  # (queries, keys) of each; 0 keys: a padded request
    num_kv_heads: int = 2
    group: int = 1
    head_dim: int = 64
    block_size: int = 16
    window: int | None = None
    softcap: float | None = None
    num_padded_rows: int = 0


MIXED = ((1, 77), (1, 16), (40, 140), (19, 19))
GROUPS = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)
HEAD_DIMS = (64, 80, 96, 128, 256)


def attention_cases() -> Iterator[AttentionCase]:
    for head_dim, group in zip(HEAD_DIMS * 2, GROUPS, strict=True):
        yield AttentionCase(((1, 1), (1, 63), (1, 65), (1, 210)), group=group, head_dim=head_dim)
    for head_dim in HEAD_DIMS:
        for block_size in (16, 32):
            yield AttentionCase(MIXED, group=3, head_dim=head_dim, block_size=block_size)
    for num_queries in (2, 5, 8):
        yield AttentionCase(tuple((num_queries, n) for n in (num_queries, 66, 131)), group=3)
    yield AttentionCase(((1, 1500), (3, 800)), group=2)
    yield AttentionCase(((1, 6000), (1, 17), (1, 2900)), group=4, head_dim=128)
    for window in (1, 33, 100):
        yield AttentionCase(((1, 300), (4, 170), (30, 101), (1, 20)), group=3, window=window)
    yield AttentionCase(MIXED, group=3, softcap=50.0)
    yield AttentionCase(((1, 0), (1, 40), (20, 0), (2, 5), (0, 0)), group=4, num_padded_rows=21)
