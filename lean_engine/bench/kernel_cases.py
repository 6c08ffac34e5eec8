"""A case for every kernel of the kernel table, in the sizes of a model: arguments, bytes moved, operations.

Bytes are those that must move: inputs that are read and outputs that are written, once each; of an embedding the rows
that are looked up, of a KV cache the tokens that requests hold or write, of experts those that are chosen. A
multiply-add counts as two operations, everything else by what it does to an element.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lean_engine.config import ModelConfig

EXPERTS, CHOSEN = 8, 2  # of a mixture, where the model has none
RANDOM = "random"
NORM = {"eps": 1e-5, "unit_offset": False}


@dataclass(frozen=True, slots=True)
class Operand:
    """An input or output: its shape, and what it holds."""

    shape: tuple[int, ...]
    kind: str = "real"  # as in the kernel table: real, kv, matrix, f32, i32
    values: NDArray[Any] | str = RANDOM
    alias: int | None = None  # an output that is this input, updated


@dataclass(frozen=True, slots=True)
class Case:
    """One launch."""

    kernel: str
    shape: str  # its sizes, in the README's letters
    inputs: Sequence[Operand]
    outputs: Sequence[Operand]
    scalars: Mapping[str, Any]
    flops: int
    partly_read: Mapping[int, float] = field(default_factory=dict)  # input → share of it that is read
    partly_written: Mapping[int, float] = field(default_factory=dict)  # output → share of it that is written


@dataclass(frozen=True, slots=True)
class Step:
    """T tokens of B requests that have a context of so many tokens once it is done."""

    num_tokens: int  # T
    num_requests: int  # B
    context: int  # tokens

    @property
    def name(self) -> str:
        return f"T={self.num_tokens} B={self.num_requests}"


class Cases:
    """All cases of one model and one step."""

    def __init__(self, config: ModelConfig, step: Step, block_size: int) -> None:
        self.config = config
        self.step = step
        self.block_size = block_size
        self.tokens = step.num_tokens
        self.q_columns = config.num_q_heads * config.head_dim
        self.kv_columns = config.num_kv_heads * config.head_dim
        self.blocks_per_request = -(-step.context // block_size)
        self.num_blocks = 1 + step.num_requests * self.blocks_per_request  # block 0 is the null block
        self.cache_shape = (self.num_blocks, config.num_kv_heads, block_size, config.head_dim)

    def all(self) -> list[Case]:
        return [*self.rows(), *self.products(), *self.attention(), *self.mixture()]

    # -- pieces

    def x(self, columns: int) -> Operand:
        return Operand((self.tokens, columns))

    def positions(self) -> Operand:
        return Operand((self.tokens,), "i32", self.at_end()[1])

    def at_end(self) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        """Of each token its request, its position and its slot: the last ones of each request's context."""
        chunk = self.tokens // self.step.num_requests
        requests = np.repeat(np.arange(self.step.num_requests, dtype=np.int32), chunk)
        positions = np.tile(
            np.arange(self.step.context - chunk, self.step.context, dtype=np.int32), len(requests) // chunk
        )
        blocks = 1 + requests * self.blocks_per_request + positions // self.block_size
        return requests, positions, (blocks * self.block_size + positions % self.block_size).astype(np.int32)

    # -- cases

    def rows(self) -> list[Case]:
        """Everything that goes over rows once."""
        c, t = self.config, self.tokens
        hidden, inner, vocab = c.hidden_size, c.intermediate_size, c.vocab_size
        ids = Operand((t,), "i32", np.arange(t, dtype=np.int32) * 7919 % vocab)
        every_other = Operand((t,), "i32", np.arange(t, dtype=np.int32)[::-1].copy())
        of_hidden, of_inner = f"T={t} H={hidden}", f"T={t} I={inner}"
        shared = {0: t / vocab}
        return [
            Case(
                "embedding", f"T={t} V={vocab} H={hidden}", [ids, Operand((vocab, hidden), "matrix")],
                [self.x(hidden)], {"scale": 1.0}, t * hidden, partly_read={1: shared[0]},
            ),
            Case("rms_norm", of_hidden, [self.x(hidden), Operand((hidden,))], [self.x(hidden)], NORM, 4 * t * hidden),
            Case(
                "add_rms_norm", of_hidden, [self.x(hidden), self.x(hidden), Operand((hidden,))],
                [self.x(hidden), self.x(hidden)], NORM, 5 * t * hidden,
            ),
            Case("silu", of_inner, [self.x(inner)], [self.x(inner)], {}, 4 * t * inner),
            Case("gelu_tanh", of_inner, [self.x(inner)], [self.x(inner)], {}, 8 * t * inner),
            Case(
                "act_and_mul", of_inner, [self.x(2 * inner)], [self.x(inner)], {"activation": c.activation},
                5 * t * inner,
            ),
            Case("mul", of_inner, [self.x(inner), self.x(inner)], [self.x(inner)], {}, t * inner),
            Case("add", of_hidden, [self.x(hidden), self.x(hidden)], [self.x(hidden)], {}, t * hidden),
            Case("softcap", of_hidden, [self.x(hidden)], [self.x(hidden)], {"cap": 30.0}, 6 * t * hidden),
            Case(
                "slice_columns", of_inner, [self.x(2 * inner)], [self.x(inner)], {"start": 0, "stop": inner}, 0,
                partly_read={0: 0.5},
            ),
            Case("gather_rows", of_hidden, [self.x(hidden), every_other], [self.x(hidden)], {}, 0),
        ]  # fmt: skip

    def products(self) -> list[Case]:
        """The matrix products of a layer, and the head's for the rows that are sampled."""
        c, t, hidden = self.config, self.tokens, self.config.hidden_size
        sizes = {
            "q, k, v": (t, hidden, self.q_columns + 2 * self.kv_columns),
            "o": (t, self.q_columns, hidden),
            "gate, up": (t, hidden, 2 * c.intermediate_size),
            "down": (t, c.intermediate_size, hidden),
            "head": (self.step.num_requests, hidden, c.vocab_size),
        }
        return [
            Case(
                "gemm", f"T={rows} C={k} O={n} ({name})", [Operand((rows, k)), Operand((n, k), "matrix")],
                [Operand((rows, n))], {}, 2 * rows * k * n,
            )
            for name, (rows, k, n) in sizes.items()
        ]  # fmt: skip

    def attention(self) -> list[Case]:
        """Rope, writing the cache, and attention over it."""
        c, t, step = self.config, self.tokens, self.step
        qkv = self.q_columns + 2 * self.kv_columns
        table = Operand((step.context, c.rope.rotary_dim), "f32")
        slots = Operand((t,), "i32", self.at_end()[2])
        caches = [Operand(self.cache_shape, "kv"), Operand(self.cache_shape, "kv")]
        written = t / (self.num_blocks * self.block_size)
        heads = {"num_q_heads": c.num_q_heads, "num_kv_heads": c.num_kv_heads, "head_dim": c.head_dim}
        about = f"T={t} Q={c.num_q_heads} K={c.num_kv_heads} D={c.head_dim}"
        kv = self.x(self.kv_columns)
        return [
            Case(
                "rope", about, [self.x(self.q_columns), self.positions(), table], [self.x(self.q_columns)],
                {"head_dim": c.head_dim}, 3 * t * self.q_columns, partly_read={2: min(1, t / step.context)},
            ),
            Case(
                "write_kv", about, [kv, kv, slots, *caches],
                [Operand(self.cache_shape, "kv", alias=3), Operand(self.cache_shape, "kv", alias=4)], {}, 0,
                partly_read={3: 0, 4: 0}, partly_written={0: written, 1: written},
            ),
            Case(
                "qk_norm_rope_write_kv", about, [self.x(qkv), self.positions(), slots, table, *caches],
                [self.x(self.q_columns), Operand(self.cache_shape, "kv", alias=4),
                 Operand(self.cache_shape, "kv", alias=5)],
                {**heads, **NORM}, 3 * t * (self.q_columns + self.kv_columns),
                partly_read={3: min(1, t / step.context), 4: 0, 5: 0}, partly_written={1: written, 2: written},
            ),
            self.paged_attention(caches),
        ]  # fmt: skip

    def paged_attention(self, caches: Sequence[Operand]) -> Case:
        c, t, step = self.config, self.tokens, self.step
        chunk, requests = t // step.num_requests, step.num_requests
        tables = 1 + np.arange(requests * self.blocks_per_request, dtype=np.int32).reshape(requests, -1)
        starts = np.arange(requests + 1, dtype=np.int32) * chunk
        lengths = np.full(requests, step.context, np.int32)
        num_pairs = requests * sum(range(step.context - chunk + 1, step.context + 1))
        share = requests * step.context / (self.num_blocks * self.block_size)
        return Case(
            "paged_attention", f"T={t} B={requests} context={step.context} Q={c.num_q_heads} D={c.head_dim}",
            [
                self.x(self.q_columns), *caches, Operand(tables.shape, "i32", tables),
                Operand(starts.shape, "i32", starts), Operand(lengths.shape, "i32", lengths),
            ],
            [self.x(self.q_columns)],
            {"head_dim": c.head_dim, "scale": c.attention_scale, "window": None, "softcap": None},
            4 * num_pairs * self.q_columns, partly_read={1: share, 2: share},
        )  # fmt: skip

    def mixture(self) -> list[Case]:
        """Experts: the model's, or a small mixture where it has none."""
        c, t, hidden = self.config, self.tokens, self.config.hidden_size
        experts, chosen = (c.num_experts, c.num_experts_per_token) if c.num_experts else (EXPERTS, CHOSEN)
        inner = c.moe_intermediate_size if c.num_experts else max(64, c.intermediate_size // 4 // 64 * 64)
        ids = (np.arange(t * chosen, dtype=np.int32) % experts).reshape(t, chosen)
        weights = np.full((t, chosen), 1 / chosen, np.float32)
        used = min(1.0, t * chosen / experts)
        about = f"T={t} E={experts} A={chosen}"
        return [
            Case(
                "moe_route", about, [self.x(experts)], [Operand((t, chosen), "f32"), Operand((t, chosen), "i32")],
                {"top_k": chosen, "normalize": True}, 5 * t * experts,
            ),
            Case(
                "moe_experts", f"{about} I={inner}",
                [
                    self.x(hidden), Operand((t, chosen), "f32", weights), Operand((t, chosen), "i32", ids),
                    Operand((experts, 2 * inner, hidden), "matrix"), Operand((experts, hidden, inner), "matrix"),
                ],
                [self.x(hidden)], {"activation": c.activation}, 6 * t * chosen * inner * hidden,
                partly_read={3: used, 4: used},
            ),
        ]  # fmt: skip
