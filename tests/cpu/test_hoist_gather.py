"""hoist_gather: rows are picked before the work on them, not after."""

from __future__ import annotations

from graph_writing import GraphWriter, lines, printed_ops
from meaning import assert_same_meaning

from lean_engine.ir.graph import Graph
from lean_engine.ir.verify import verify
from lean_engine.passes.hoist_gather import hoist_gather


def hoist(graph: Graph) -> Graph:
    """The hoisted graph, verified and compared with the original by meaning."""
    hoisted = verify(hoist_gather(graph), "hoist_gather")
    assert_same_meaning(graph, hoisted)
    return hoisted


def test_gather_moves_above_head_and_norm() -> None:
    w = GraphWriter()
    y = w.linear("head", w.norm("norm", w.x("x", 8)), 16)
    assert printed_ops(hoist(w.graph(w.gather("logits", y)))) == lines("""
        x.rows: f32[R, 8] = gather_rows(x, sample_rows)
        norm.rows: f32[R, 8] = rms_norm(x.rows, norm.w) {eps=1e-06, unit_offset=False}
        logits: f32[R, 16] = linear(norm.rows, head.w) {dtype=float32}
    """)


def test_gather_moves_above_every_op_that_does_not_mix_rows() -> None:
    w = GraphWriter()
    x = w.x("x", 8)
    wide = w.linear("wide", x, 16)
    product = w.op("mul", "product", w.op("gelu_tanh", "g", w.slice("gate", wide, 0, 8)), w.slice("up", wide, 8, 16))
    y = w.op("softcap", "capped", w.op("add", "sum", x, product), cap=2.0)
    hoisted = hoist(w.graph(w.gather("out", y)))
    assert [op.kind for op in hoisted.ops].count("gather_rows") == 1
    assert hoisted.ops[0].kind == "gather_rows"
    assert all(op.outputs[0].type.shape[0] == "R" for op in hoisted.ops)


def test_gather_moves_above_a_mixture_of_experts() -> None:
    w = GraphWriter()
    x = w.x("x", 8)
    names = ("weights", "ids")
    weights, ids = w.ops("moe_route", names, w.linear("router", x, 3), top_k=2, normalize=True)
    stacks = w.weight("gate_up", 3, 10, 8), w.weight("down", 3, 8, 5)
    y = w.op("moe_experts", "experts", x, weights, ids, *stacks, activation="silu")
    hoisted = hoist(w.graph(w.gather("out", y)))
    assert [op.kind for op in hoisted.ops] == ["gather_rows", "linear", "moe_route", "moe_experts"]


def test_rows_of_a_value_are_gathered_once_for_two_readers() -> None:
    w = GraphWriter()
    h = w.op("embedding", "h", w.input("input_ids", "T"), w.weight("table", 9, 8), scale=1.0)
    y = w.op("add", "y", h, w.linear("mlp", w.norm("norm", h), 8))
    assert printed_ops(hoist(w.graph(w.gather("out", y)))) == lines("""
        h: f32[T, 8] = embedding(input_ids, table) {scale=1}
        h.rows: f32[R, 8] = gather_rows(h, sample_rows)
        norm.rows: f32[R, 8] = rms_norm(h.rows, norm.w) {eps=1e-06, unit_offset=False}
        mlp.rows: f32[R, 8] = linear(norm.rows, mlp.w) {dtype=float32}
        out: f32[R, 8] = add(h.rows, mlp.rows)
    """)


def test_gather_stops_where_another_op_needs_all_rows() -> None:
    w = GraphWriter()
    y = w.linear("y", w.x("x", 8), 8)
    roped = w.rope("roped", y, 4)
    hoisted = hoist(w.graph(roped, w.gather("out", w.op("silu", "z", y))))
    assert printed_ops(hoisted) == lines("""
        y: f32[T, 8] = linear(x, y.w) {dtype=float32}
        roped: f32[T, 8] = rope(y, positions, rope_table) {head_dim=4}
        y.rows: f32[R, 8] = gather_rows(y, sample_rows)
        out: f32[R, 8] = silu(y.rows)
    """)


def test_gather_stops_at_attention_and_embedding() -> None:
    w = GraphWriter()
    mixed = w.attend("mixed", w.x("q", 8), (w.cache("k", 1, 4), w.cache("v", 1, 4)), 4)
    h = w.op("embedding", "h", w.input("input_ids", "T"), w.weight("table", 9, 8), scale=1.0)
    graph = w.graph(w.gather("a", mixed), w.gather("b", h))
    assert hoist_gather(graph).ops == graph.ops


def test_gather_of_a_value_that_is_an_output_itself_stays() -> None:
    w = GraphWriter()
    y = w.linear("y", w.x("x", 8), 8)
    graph = w.graph(y, w.gather("out", y))
    assert hoist(graph).ops == graph.ops


def test_gathers_of_different_rows_stay() -> None:
    w = GraphWriter()
    y = w.linear("y", w.x("x", 8), 8)
    first = w.gather("first", y)
    second = w.op("gather_rows", "second", y, w.input("cu_seqlens_q", "B+1"))
    graph = w.graph(first, second)
    assert hoist(graph).ops == graph.ops


def test_gather_of_other_rows_of_the_same_value_is_not_taken_for_ours() -> None:
    w = GraphWriter()
    x = w.x("x", 8)
    other = w.op("gather_rows", "other", x, w.input("cu_seqlens_q", "B+1"))
    hoisted = hoist(w.graph(other, w.gather("out", w.op("silu", "y", x))))
    assert printed_ops(hoisted) == lines("""
        other: f32[B+1, 8] = gather_rows(x, cu_seqlens_q)
        x.rows: f32[R, 8] = gather_rows(x, sample_rows)
        out: f32[R, 8] = silu(x.rows)
    """)


def test_the_same_rows_under_two_names_stay_two_gathers() -> None:
    w = GraphWriter()
    y = w.linear("y", w.x("x", 8), 8)
    graph = w.graph(w.gather("first", y), w.gather("second", y))
    assert hoist(graph).ops == graph.ops


def test_a_gather_further_down_moves_up_to_its_new_reader() -> None:
    w = GraphWriter()
    x = w.x("x", 8)
    y = w.op("silu", "y", x)
    hoisted = hoist(w.graph(w.gather("out", y), w.gather("x_rows", x)))
    assert printed_ops(hoisted) == lines("""
        x_rows: f32[R, 8] = gather_rows(x, sample_rows)
        out: f32[R, 8] = silu(x_rows)
    """)
