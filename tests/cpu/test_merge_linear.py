"""merge_linear: projections of one input become one product and slices."""

from __future__ import annotations

import pytest
from graph_writing import GraphWriter, lines, printed_ops
from meaning import assert_same_meaning

from lean_engine.ir.graph import Graph, Value
from lean_engine.ir.sources import Concat, Rows, Tensor
from lean_engine.passes.merge_linear import merge_linear, merge_names


def assert_unchanged(graph: Graph) -> None:
    merged = merge_linear(graph)
    assert merged.ops == graph.ops
    assert merged.parameters == graph.parameters


def test_three_projections_become_one_product_and_three_slices() -> None:
    w = GraphWriter()
    x = w.x("x", 8)
    q, k, v = (w.linear(f"a.{name}_proj", x, n) for name, n in (("q", 8), ("k", 4), ("v", 4)))
    graph = w.graph(q, k, v)
    merged = merge_linear(graph)
    assert printed_ops(merged) == lines("""
        a.{q,k,v}_proj: f32[T, 16] = linear(x, a.{q,k,v}_proj.w) {dtype=float32}
        a.q_proj: f32[T, 8] = slice_columns(a.{q,k,v}_proj) {start=0, stop=8}
        a.k_proj: f32[T, 4] = slice_columns(a.{q,k,v}_proj) {start=8, stop=12}
        a.v_proj: f32[T, 4] = slice_columns(a.{q,k,v}_proj) {start=12, stop=16}
    """)
    (parameter,) = merged.parameters
    assert parameter.source == Concat(
        (Tensor("a.q_proj.w", (8, 8)), Tensor("a.k_proj.w", (4, 8)), Tensor("a.v_proj.w", (4, 8)))
    )
    assert_same_meaning(graph, merged)


def test_biases_are_merged_with_their_weights() -> None:
    w = GraphWriter()
    x = w.x("x", 8)
    graph = w.graph(w.linear("up", x, 4, bias=True), w.linear("gate", x, 6, bias=True))
    merged = merge_linear(graph)
    assert printed_ops(merged)[0] == "{up,gate}: f32[T, 10] = linear(x, {up,gate}.w, {up,gate}.b) {dtype=float32}"
    assert [(p.value.name, p.value.type.shape) for p in merged.parameters] == [
        ("{up,gate}.w", (10, 8)),
        ("{up,gate}.b", (10,)),
    ]
    assert_same_meaning(graph, merged)


def test_neighbouring_rows_of_one_tensor_become_that_tensor() -> None:
    w = GraphWriter()
    x, stored = w.x("x", 8), Tensor("gate_up", (12, 8))
    gate = w.op("linear", "gate", x, w.parameter("gate.w", Rows(stored, 0, 6)), dtype="float32")
    up = w.op("linear", "up", x, w.parameter("up.w", Rows(stored, 6, 12)), dtype="float32")
    graph = w.graph(gate, up)
    merged = merge_linear(graph)
    assert [p.source for p in merged.parameters] == [stored]
    assert_same_meaning(graph, merged)


def test_the_merged_product_stands_where_the_first_was() -> None:
    w = GraphWriter()
    x = w.x("x", 8)
    a = w.linear("a", x, 8)
    middle = w.op("silu", "middle", a)
    b = w.linear("b", x, 8)
    graph = w.graph(w.op("add", "sum", middle, b))
    merged = merge_linear(graph)
    assert [op.kind for op in merged.ops] == ["linear", "slice_columns", "slice_columns", "silu", "add"]
    assert_same_meaning(graph, merged)


def test_one_with_a_bias_stays_alone_and_the_others_merge() -> None:
    w = GraphWriter()
    x = w.x("x", 8)
    graph = w.graph(w.linear("q", x, 8, bias=True), w.linear("k", x, 4), w.linear("v", x, 4))
    merged = merge_linear(graph)
    assert printed_ops(merged)[:2] == [
        "q: f32[T, 8] = linear(x, q.w, q.b) {dtype=float32}",
        "{k,v}: f32[T, 8] = linear(x, {k,v}.w) {dtype=float32}",
    ]
    assert_same_meaning(graph, merged)


def test_a_bias_on_one_of_two_keeps_both() -> None:
    w = GraphWriter()
    x = w.x("x", 8)
    assert_unchanged(w.graph(w.linear("q", x, 8, bias=True), w.linear("k", x, 4)))


def test_projections_of_different_inputs_stay() -> None:
    w = GraphWriter()
    x = w.x("x", 8)
    assert_unchanged(w.graph(w.linear("a", x, 8), w.linear("b", w.op("silu", "y", x), 8)))


def test_one_projection_stays() -> None:
    w = GraphWriter()
    assert_unchanged(w.graph(w.linear("a", w.x("x", 8), 8)))


def test_a_weight_that_two_projections_share_stays() -> None:
    w = GraphWriter()
    x = w.x("x", 8)
    assert_unchanged(w.graph(w.linear("a", x, 8, weight="shared"), w.linear("b", x, 8, weight="shared")))


def test_a_weight_that_the_embedding_reads_too_stays() -> None:
    w = GraphWriter()
    x = w.op("embedding", "x", w.input("input_ids", "T"), w.weight("tied", 9, 8), scale=1.0)
    assert_unchanged(w.graph(w.linear("head", x, 9, weight="tied"), w.linear("other", x, 9)))


def test_projections_to_different_types_stay() -> None:
    w = GraphWriter()
    x = w.x("x", 8)
    a = w.op("linear", "a", x, w.weight("a.w", 8, 8), dtype="float32")
    b = w.op("linear", "b", x, w.weight("b.w", 8, 8), dtype="bfloat16")
    assert_unchanged(w.graph(a, b))


def test_two_groups_merge_by_themselves() -> None:
    w = GraphWriter()
    x, y = w.x("x", 8), w.x("y", 8)

    def pair(name: str, source: Value) -> list[Value]:
        return [w.linear(f"{name}{i}", source, 4) for i in range(2)]

    graph = w.graph(*pair("a", x), *pair("b", y))
    merged = merge_linear(graph)
    assert [op.outputs[0].name for op in merged.ops if op.kind == "linear"] == ["a{0,1}", "b{0,1}"]
    assert_same_meaning(graph, merged)


@pytest.mark.parametrize(
    ("names", "merged"),
    [
        (["l.q_proj.w", "l.k_proj.w", "l.v_proj.w"], "l.{q,k,v}_proj.w"),
        (["gate", "up"], "{gate,up}"),
        (["a", "ab"], "a{,b}"),
        (["aba", "aa"], "a{b,}a"),
    ],
)
def test_merged_names_show_what_differs(names: list[str], merged: str) -> None:
    assert merge_names(names) == merged
