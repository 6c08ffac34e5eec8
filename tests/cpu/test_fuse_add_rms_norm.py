"""fuse_add_rms_norm: a residual add and the norm that reads the sum."""

from __future__ import annotations

from graph_writing import GraphWriter, lines, printed_ops
from meaning import assert_same_meaning

from lean_engine.ir.graph import Graph
from lean_engine.ir.verify import verify
from lean_engine.passes.fuse_add_rms_norm import fuse_add_rms_norm


def fuse(graph: Graph) -> Graph:
    fused = verify(fuse_add_rms_norm(graph), "fuse_add_rms_norm")
    assert_same_meaning(graph, fused)
    return fused


def test_add_and_norm_become_one_op_with_the_sum_as_second_output() -> None:
    w = GraphWriter()
    total = w.op("add", "sum", w.x("residual", 8), w.x("x", 8))
    normed = w.op("rms_norm", "normed", total, w.weight("w", 8), eps=0.25, unit_offset=True)
    assert printed_ops(fuse(w.graph(normed, total))) == lines("""
        normed: f32[T, 8], sum: f32[T, 8] = add_rms_norm(x, residual, w) {eps=0.25, unit_offset=True}
    """)


def test_other_readers_of_the_sum_keep_reading_it() -> None:
    w = GraphWriter()
    total = w.op("add", "sum", w.x("residual", 8), w.x("x", 8))
    y = w.linear("mlp", w.norm("normed", total), 8)
    assert printed_ops(fuse(w.graph(w.op("add", "next", total, y))))[-1] == "next: f32[T, 8] = add(sum, mlp)"


def test_the_first_of_two_norms_is_fused() -> None:
    w = GraphWriter()
    total = w.op("add", "sum", w.x("residual", 8), w.x("x", 8))
    first, second = w.norm("first", total), w.norm("second", total)
    assert printed_ops(fuse(w.graph(first, second))) == lines("""
        first: f32[T, 8], sum: f32[T, 8] = add_rms_norm(x, residual, first.w) {eps=1e-06, unit_offset=False}
        second: f32[T, 8] = rms_norm(sum, second.w) {eps=1e-06, unit_offset=False}
    """)


def test_a_sum_of_a_value_with_itself_is_fused() -> None:
    w = GraphWriter()
    x = w.x("x", 8)
    assert [op.kind for op in fuse(w.graph(w.norm("n", w.op("add", "sum", x, x)))).ops] == ["add_rms_norm"]


def test_norm_over_heads_stays() -> None:
    w = GraphWriter()
    graph = w.graph(w.norm("n", w.op("add", "sum", w.x("residual", 8), w.x("x", 8)), width=4))
    assert fuse(graph).ops == graph.ops


def test_norm_over_rows_is_found_behind_a_norm_over_heads() -> None:
    w = GraphWriter()
    total = w.op("add", "sum", w.x("residual", 8), w.x("x", 8))
    graph = w.graph(w.norm("heads", total, width=4), w.norm("rows", total))
    assert [op.kind for op in fuse(graph).ops] == ["add_rms_norm", "rms_norm"]


def test_soft_cap_between_add_and_norm_keeps_both() -> None:
    w = GraphWriter()
    capped = w.op("softcap", "capped", w.op("add", "sum", w.x("residual", 8), w.x("x", 8)), cap=3.0)
    graph = w.graph(w.norm("n", capped))
    assert fuse(graph).ops == graph.ops


def test_product_before_a_norm_stays() -> None:
    w = GraphWriter()
    graph = w.graph(w.norm("n", w.op("mul", "product", w.x("a", 8), w.x("b", 8))))
    assert fuse(graph).ops == graph.ops


def test_sum_without_a_norm_stays() -> None:
    w = GraphWriter()
    graph = w.graph(w.op("add", "sum", w.x("residual", 8), w.x("x", 8)))
    assert fuse(graph).ops == graph.ops
