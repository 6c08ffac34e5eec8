"""fuse_qk_norm_rope_write_kv: head norms, RoPE and cache writes over the merged projection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
from graph_writing import GraphWriter, lines, printed_ops
from meaning import assert_same_meaning

from lean_engine.ir.graph import Graph, Value
from lean_engine.ir.verify import verify
from lean_engine.passes.fuse_qk_norm_rope_write_kv import fuse_qk_norm_rope_write_kv

Q, K, D = 3, 1, 4  # 3 query heads, 1 KV head, 4 columns each


@dataclass
class Layer:
    """An attention layer over qkv [T, 20]: what the pass looks for, with one part replaced where a test says so."""

    q_columns: tuple[int, int] = (0, 12)
    k_columns: tuple[int, int] = (12, 16)
    v_columns: tuple[int, int] = (16, 20)
    q_norm: tuple[int, float] | None = None  # width, eps
    k_norm: tuple[int, float] | None = None
    k_source: str = "qkv"
    k_table: str = "rope_table"
    between: Callable[[GraphWriter, Value], Value] | None = None  # an op between k's rope and the write
    extra: str | None = None  # a value that an op outside reads as well
    is_output: bool = False  # … or that is an output

    def graph(self) -> Graph:
        w = GraphWriter()
        qkv = w.x("qkv", 20)
        values = {
            "q": w.slice("q", qkv, *self.q_columns),
            "k": w.slice("k", w.x(self.k_source, 20), *self.k_columns),
            "v": w.slice("v", qkv, *self.v_columns),
        }
        q, k = values["q"], values["k"]
        if self.q_norm:
            q = values["q_normed"] = w.norm("q_normed", q, *self.q_norm)
        if self.k_norm:
            k = values["k_normed"] = w.norm("k_normed", k, *self.k_norm)
        q = values["q_roped"] = w.rope("q_roped", q, D)
        k = values["k_roped"] = w.rope("k_roped", k, D, self.k_table)
        if self.between:
            k = self.between(w, k)
        caches = w.cache("k_cache", K, D), w.cache("v_cache", K, D)
        slots = w.input("slot_mapping", "T")
        written = w.ops("write_kv", ("k_written", "v_written"), k, values["v"], slots, *caches)
        outputs = [w.attend("mixed", q, written, D)]
        if self.extra:
            read = values[self.extra]
            outputs.append(read if self.is_output else w.op("silu", "also", read))
        return w.graph(*outputs)


def fuse(graph: Graph) -> Graph:
    fused = verify(fuse_qk_norm_rope_write_kv(graph), "fuse_qk_norm_rope_write_kv")
    assert_same_meaning(graph, fused)
    return fused


def assert_unchanged(graph: Graph) -> None:
    assert fuse(graph).ops == graph.ops


def test_slices_ropes_and_write_become_one_op() -> None:
    fused = fuse(Layer().graph())
    assert printed_ops(fused) == lines("""
        q_roped: f32[T, 12], k_written: f32[N, 1, S, 4], v_written: f32[N, 1, S, 4] = \
qk_norm_rope_write_kv(qkv, positions, slot_mapping, rope_table, k_cache, v_cache) \
{num_q_heads=3, num_kv_heads=1, head_dim=4, eps=0, unit_offset=False}
        mixed: f32[T, 12] = paged_attention(q_roped, k_written, v_written, block_tables, cu_seqlens_q, seq_lens) \
{head_dim=4, scale=0.5}
    """)


def test_head_norms_are_fused_with_their_weights_and_eps() -> None:
    fused = fuse(Layer(q_norm=(D, 0.25), k_norm=(D, 0.25)).graph())
    assert printed_ops(fused)[0].endswith(
        "qk_norm_rope_write_kv(qkv, positions, slot_mapping, rope_table, k_cache, v_cache, q_normed.w, k_normed.w) "
        "{num_q_heads=3, num_kv_heads=1, head_dim=4, eps=0.25, unit_offset=False}"
    )


NEGATIVE = {
    "norm on q only": Layer(q_norm=(D, 0.25)),
    "norm on k only": Layer(k_norm=(D, 0.25)),
    "norms with different eps": Layer(q_norm=(D, 0.25), k_norm=(D, 0.5)),
    "norm of q over all heads": Layer(q_norm=(12, 0.25), k_norm=(D, 0.25)),
    "norms over half heads": Layer(q_norm=(2, 0.25), k_norm=(2, 0.25)),
    "k before q": Layer(q_columns=(4, 16), k_columns=(0, 4)),
    "k and v swapped": Layer(k_columns=(16, 20), v_columns=(12, 16)),
    "columns left out in front": Layer(q_columns=(4, 12)),
    "columns left out at the end": Layer(q_columns=(0, 8), k_columns=(8, 12), v_columns=(12, 16)),
    "k overlaps q": Layer(k_columns=(8, 12)),
    "k from another matrix": Layer(k_source="other"),
    "k with another table": Layer(k_table="rope_table_local"),
    "soft-cap between rope and write": Layer(between=lambda w, k: w.op("softcap", "capped", k, cap=2.0)),
    "second rope of k": Layer(between=lambda w, k: w.rope("again", k, D)),
}


@pytest.mark.parametrize("layer", NEGATIVE.values(), ids=NEGATIVE)
def test_what_only_resembles_the_pattern_stays(layer: Layer) -> None:
    assert_unchanged(layer.graph())


@pytest.mark.parametrize("is_output", [False, True], ids=["read", "output"])
@pytest.mark.parametrize("extra", ["q", "k", "v", "q_normed", "k_normed", "q_roped", "k_roped"])
def test_value_that_is_needed_elsewhere_stays(extra: str, is_output: bool) -> None:
    assert_unchanged(Layer(q_norm=(D, 0.25), k_norm=(D, 0.25), extra=extra, is_output=is_output).graph())


def test_write_that_no_attention_reads_stays() -> None:
    w = GraphWriter()
    qkv = w.x("qkv", 8)
    k, v = w.rope("k_roped", w.slice("k", qkv, 0, 4), D), w.slice("v", qkv, 4, 8)
    caches = w.cache("k_cache", K, D), w.cache("v_cache", K, D)
    w.ops("write_kv", ("k_written", "v_written"), k, v, w.input("slot_mapping", "T"), *caches)
    assert_unchanged(w.graph(w.op("silu", "out", qkv)))


def test_a_query_that_two_attentions_read_stays() -> None:
    w = GraphWriter()
    qkv = w.x("qkv", 20)
    q = w.rope("q_roped", w.slice("q", qkv, 0, 12), D)
    k, v = w.rope("k_roped", w.slice("k", qkv, 12, 16), D), w.slice("v", qkv, 16, 20)
    caches = w.cache("k_cache", K, D), w.cache("v_cache", K, D)
    written = w.ops("write_kv", ("k_written", "v_written"), k, v, w.input("slot_mapping", "T"), *caches)
    assert_unchanged(w.graph(w.attend("near", q, written, D, window=3), w.attend("far", q, written, D)))


def test_two_layers_are_fused_each_over_its_own_caches() -> None:
    w = GraphWriter()
    x = w.x("x", 8)
    for layer in range(2):
        qkv = w.linear(f"qkv.{layer}", x, 16)
        q, k = w.slice(f"q.{layer}", qkv, 0, 8), w.slice(f"k.{layer}", qkv, 8, 12)
        q, k = w.rope(f"q.{layer}.roped", q, D), w.rope(f"k.{layer}.roped", k, D)
        caches = w.cache(f"k_cache.{layer}", K, D), w.cache(f"v_cache.{layer}", K, D)
        names = (f"k_written.{layer}", f"v_written.{layer}")
        v = w.slice(f"v.{layer}", qkv, 12, 16)
        x = w.attend(f"mixed.{layer}", q, w.ops("write_kv", names, k, v, w.input("slot_mapping", "T"), *caches), D)
    fused = fuse(w.graph(x))
    assert [op.kind for op in fused.ops] == ["linear", "qk_norm_rope_write_kv", "paged_attention"] * 2
    assert [op.inputs[4].name for op in fused.ops if op.kind == "qk_norm_rope_write_kv"] == ["k_cache.0", "k_cache.1"]
