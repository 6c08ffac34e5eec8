"""The verifier: every numbered rule, broken once on purpose."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import tiny
from graph_writing import GraphWriter

from lean_engine.errors import VerifyError
from lean_engine.ir.graph import Graph, Op, Parameter, TensorType, Value
from lean_engine.ir.sources import Tensor
from lean_engine.ir.verify import verify

X = Value("x", TensorType(("T", 8), "float32"))
Y = Value("y", TensorType(("T", 8), "float32"))
SILU = Op("silu", (X,), (Y,))
GRAPH = Graph("test", (X,), (), (), (SILU,), (Y,))


def assert_breaks(graph: Graph, rule: int, message: str) -> None:
    with pytest.raises(VerifyError, match=rf"^after a_pass: R{rule}: {re.escape(message)}"):
        verify(graph, "a_pass")


def test_well_formed_graph_is_returned() -> None:
    assert verify(GRAPH, "a_pass") is GRAPH


@pytest.mark.parametrize("name", tiny.NAMES)
def test_every_family_is_well_formed(name: str) -> None:
    verify(tiny.plain(name), "build")
    verify(tiny.optimized(name), "optimize")


def test_r1_output_with_the_name_of_an_input() -> None:
    assert_breaks(replace(GRAPH, ops=(Op("silu", (X,), (X,)),)), 1, "x is defined twice")


def test_r1_two_ops_with_one_output_name() -> None:
    assert_breaks(replace(GRAPH, ops=(SILU, SILU)), 1, "y is defined twice")


def test_r1_parameter_with_the_name_of_an_input() -> None:
    weight = Parameter(Value("x", TensorType((8,), "float32")), Tensor("x", (8,)))
    assert_breaks(replace(GRAPH, parameters=(weight,)), 1, "x is defined twice")


def test_r2_op_before_the_one_it_reads() -> None:
    z = Value("z", Y.type)
    graph = replace(GRAPH, ops=(Op("silu", (Y,), (z,)), SILU))
    assert_breaks(graph, 2, "silu → z reads y before it is defined")


def test_r2_value_that_nothing_defines() -> None:
    assert_breaks(replace(GRAPH, inputs=()), 2, "silu → y reads x before it is defined")


def test_r3_unknown_op() -> None:
    assert_breaks(replace(GRAPH, ops=(Op("relu", (X,), (Y,)),)), 3, "unknown op 'relu'")


def test_r3_wrong_number_of_inputs() -> None:
    assert_breaks(replace(GRAPH, ops=(Op("silu", (X, X), (Y,)),)), 3, "silu has 2 inputs, must have 1")


def test_r3_wrong_attributes() -> None:
    graph = replace(GRAPH, ops=(Op("softcap", (X,), (Y,), {"limit": 3.0}),))
    assert_breaks(graph, 3, "softcap has attributes ['limit'], must have ['cap']")


def test_r3_inputs_that_do_not_fit() -> None:
    narrow = Value("w", TensorType(("T", 4), "float32"))
    graph = replace(GRAPH, inputs=(X, narrow), ops=(Op("add", (X, narrow), (Y,)),))
    assert_breaks(graph, 3, "binary op: inputs are float32['T', 8], float32['T', 4]; must be two of [T, C]")


@pytest.mark.parametrize(
    "declared", [TensorType(("T", 4), "float32"), TensorType(("T", 8), "bfloat16"), TensorType(("R", 8), "float32")]
)
def test_r4_declared_type_that_does_not_follow(declared: TensorType) -> None:
    wrong = Value("y", declared)
    assert_breaks(replace(GRAPH, ops=(Op("silu", (X,), (wrong,)),), outputs=(wrong,)), 4, "silu → y: declared")


def test_r4_output_too_many() -> None:
    graph = replace(GRAPH, ops=(Op("silu", (X,), (Y, Value("z", Y.type))),))
    assert_breaks(graph, 4, "silu → y, z: declared")


def cache_graph(second_reads_old: bool) -> Graph:
    w = GraphWriter()
    old = w.cache("k", 1, 4), w.cache("v", 1, 4)
    x, slots = w.x("x", 4), w.input("slot_mapping", "T")
    new = w.ops("write_kv", ("k.w", "v.w"), x, x, slots, *old)
    w.attend("mixed", w.x("q", 4), new, 4)
    read = w.attend("again", w.x("q", 4), old if second_reads_old else new, 4)
    return Graph("test", tuple(w.values.values()), (), tuple(w.caches), tuple(w.all_ops), (read,))


def test_r5_attention_over_a_cache_that_has_been_updated() -> None:
    verify(cache_graph(second_reads_old=False), "a_pass")
    assert_breaks(cache_graph(True), 5, "paged_attention → again reads k, which an earlier op has updated")


def test_r6_output_that_nothing_defines() -> None:
    assert_breaks(replace(GRAPH, ops=()), 6, "output y is not defined")


def test_r7_parameter_of_another_shape_than_its_source() -> None:
    weight = Parameter(Value("w", TensorType((4, 8), "float32")), Tensor("stored", (8, 4)))
    assert_breaks(replace(GRAPH, parameters=(weight,)), 7, "w is (4, 8), its source (8, 4)")


@pytest.mark.parametrize("dim", [0, -8, "Q", "T*2", "T+"])
def test_r8_dimension_that_is_neither_number_nor_letter(dim: int | str) -> None:
    odd = Value("odd", TensorType((dim, 8), "float32"))
    assert_breaks(replace(GRAPH, inputs=(X, odd)), 8, f"odd has dimension {dim!r}")


def test_r8_holds_for_outputs_of_ops() -> None:
    odd = Value("x", TensorType(("Q", 8), "float32"))
    assert_breaks(replace(GRAPH, inputs=(odd,)), 8, "x has dimension 'Q'")
