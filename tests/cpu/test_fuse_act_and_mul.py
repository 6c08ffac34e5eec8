"""fuse_act_and_mul: the gated product of an MLP whose gate and up are the halves of one matrix."""

from __future__ import annotations

import pytest
from graph_writing import GraphWriter, lines, printed_ops
from meaning import assert_same_meaning

from lean_engine.ir.graph import Graph, Value
from lean_engine.ir.verify import verify
from lean_engine.passes.fuse_act_and_mul import fuse_act_and_mul


def fuse(graph: Graph) -> Graph:
    fused = verify(fuse_act_and_mul(graph), "fuse_act_and_mul")
    assert_same_meaning(graph, fused)
    return fused


def assert_unchanged(graph: Graph) -> None:
    assert fuse(graph).ops == graph.ops


def halves(w: GraphWriter, columns: int = 16) -> tuple[Value, Value]:
    m = w.x("m", columns)
    return w.slice("gate", m, 0, 8), w.slice("up", m, 8, 16)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_slices_activation_and_product_become_one_op(activation: str) -> None:
    w = GraphWriter()
    gate, up = halves(w)
    graph = w.graph(w.op("mul", "product", w.op(activation, "act", gate), up))
    assert printed_ops(fuse(graph)) == [f"product: f32[T, 8] = act_and_mul(m) {{activation={activation}}}"]


def test_two_mlps_are_fused_each_by_itself() -> None:
    w = GraphWriter()
    products = []
    for name in ("a", "b"):
        m = w.x(name, 16)
        gate, up = w.slice(f"{name}.gate", m, 0, 8), w.slice(f"{name}.up", m, 8, 16)
        products.append(w.op("mul", f"{name}.product", w.op("silu", f"{name}.act", gate), up))
    assert printed_ops(fuse(w.graph(*products))) == lines("""
        a.product: f32[T, 8] = act_and_mul(a) {activation=silu}
        b.product: f32[T, 8] = act_and_mul(b) {activation=silu}
    """)


def test_swapped_halves_stay() -> None:
    w = GraphWriter()
    gate, up = halves(w)
    assert_unchanged(w.graph(w.op("mul", "product", w.op("silu", "act", up), gate)))


def test_activation_as_second_factor_stays() -> None:
    w = GraphWriter()
    gate, up = halves(w)
    assert_unchanged(w.graph(w.op("mul", "product", up, w.op("silu", "act", gate))))


def test_slices_that_leave_columns_out_stay() -> None:
    w = GraphWriter()
    gate, up = halves(w, columns=20)
    assert_unchanged(w.graph(w.op("mul", "product", w.op("silu", "act", gate), up)))


def test_slices_that_overlap_stay() -> None:
    w = GraphWriter()
    m = w.x("m", 16)
    gate, up = w.slice("gate", m, 0, 8), w.slice("up", m, 4, 12)
    assert_unchanged(w.graph(w.op("mul", "product", w.op("silu", "act", gate), up)))


def test_halves_of_two_matrices_stay() -> None:
    w = GraphWriter()
    gate, up = w.slice("gate", w.x("m", 16), 0, 8), w.slice("up", w.x("n", 16), 8, 16)
    assert_unchanged(w.graph(w.op("mul", "product", w.op("silu", "act", gate), up)))


@pytest.mark.parametrize("extra", ["gate", "up", "act"])
def test_value_with_another_reader_stays(extra: str) -> None:
    w = GraphWriter()
    gate, up = halves(w)
    act = w.op("silu", "act", gate)
    product = w.op("mul", "product", act, up)
    also = w.op("softcap", "also", {"gate": gate, "up": up, "act": act}[extra], cap=2.0)
    assert_unchanged(w.graph(product, also))


@pytest.mark.parametrize("extra", ["gate", "up", "act"])
def test_value_that_is_an_output_stays(extra: str) -> None:
    w = GraphWriter()
    gate, up = halves(w)
    act = w.op("silu", "act", gate)
    product = w.op("mul", "product", act, up)
    assert_unchanged(w.graph(product, {"gate": gate, "up": up, "act": act}[extra]))


def test_soft_cap_between_activation_and_product_stays() -> None:
    w = GraphWriter()
    gate, up = halves(w)
    capped = w.op("softcap", "capped", w.op("silu", "act", gate), cap=2.0)
    assert_unchanged(w.graph(w.op("mul", "product", capped, up)))


def test_sum_instead_of_a_product_stays() -> None:
    w = GraphWriter()
    gate, up = halves(w)
    assert_unchanged(w.graph(w.op("add", "sum", w.op("silu", "act", gate), up)))


def test_factors_that_come_from_outside_stay() -> None:
    w = GraphWriter()
    assert_unchanged(w.graph(w.op("mul", "product", w.op("silu", "act", w.x("g", 8)), w.x("u", 8))))
