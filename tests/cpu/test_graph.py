"""Graph: dimensions, types, and the questions passes ask of it."""

from __future__ import annotations

import pytest
from graph_writing import GraphWriter

from lean_engine.errors import ConfigError
from lean_engine.ir.graph import Op, TensorType, Value, evaluate, is_dim, replace_ops, substitute
from lean_engine.ir.sources import Concat, Rows, Stack, Tensor, concat

DIMS = {"T": 7, "B": 3, "R": 2, "M": 5, "N": 11, "S": 4}


@pytest.mark.parametrize(("dim", "number"), [(576, 576), ("T", 7), ("B+1", 4), ("N+10", 21), ("R", 2)])
def test_a_dimension_stands_for_a_number(dim: int | str, number: int) -> None:
    assert evaluate(dim, DIMS) == number


def test_a_letter_without_a_value_is_an_error() -> None:
    with pytest.raises(KeyError, match="T"):
        evaluate("T", {"B": 1})


@pytest.mark.parametrize("dim", [1, 49152, "T", "B", "R", "M", "N", "S", "B+1", "T+16"])
def test_known_letters_and_positive_numbers_are_dimensions(dim: int | str) -> None:
    assert is_dim(dim)


@pytest.mark.parametrize("dim", [0, -1, "", "t", "X", "T-1", "T+", "T+1+1", "TB", "1", "T*2", 1.0, None])
def test_everything_else_is_none(dim: object) -> None:
    assert not is_dim(dim)


@pytest.mark.parametrize(
    ("shape", "dtype", "num_bytes"),
    [
        (("T", 8), "float32", 7 * 8 * 4),
        (("B+1",), "int32", 4 * 4),
        (("N", 2, "S", 24), "bfloat16", 11 * 2 * 4 * 24 * 2),
        ((), "float32", 4),
        (("T", 3), "int8", 21),
    ],
)
def test_bytes_of_a_type(shape: tuple[int | str, ...], dtype: str, num_bytes: int) -> None:
    assert TensorType(shape, dtype).num_bytes(DIMS) == num_bytes


def test_bytes_of_an_unknown_dtype_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="unknown dtype 'float64'; known: float32, float16"):
        TensorType(("T",), "float64").num_bytes(DIMS)


def test_concrete_shape_puts_numbers_for_letters() -> None:
    assert TensorType(("B+1", 8, "S"), "float32").concrete_shape(DIMS) == (4, 8, 4)


def test_producers_users_and_private_names() -> None:
    w = GraphWriter()
    x = w.x("x", 8)
    a = w.op("silu", "a", x)
    b = w.op("mul", "b", a, a)
    c = w.op("add", "c", b, x)
    graph = w.graph(c, b)
    silu, mul, add = graph.ops
    assert graph.producers() == {"a": silu, "b": mul, "c": add}
    assert graph.users() == {"x": [silu, add], "a": [mul], "b": [add]}
    assert graph.private_names() == {"a"}  # b is an output, x has two readers


def test_parameter_is_found_by_name() -> None:
    w = GraphWriter()
    y = w.linear("y", w.x("x", 8), 4)
    graph = w.graph(y)
    assert graph.parameter("y.w") is graph.parameters[0]
    assert graph.parameter("y") is None


def test_with_ops_keeps_the_parameters_unless_others_are_given() -> None:
    w = GraphWriter()
    graph = w.graph(w.linear("y", w.x("x", 8), 4))
    assert graph.with_ops([]).parameters == graph.parameters
    assert graph.with_ops([]).ops == ()
    assert graph.with_ops(graph.ops, []).parameters == ()


def test_substitute_replaces_inputs_by_name_and_leaves_other_ops_alone() -> None:
    x, y, z = (Value(name, TensorType(("T", 4), "float32")) for name in "xyz")
    op = Op("add", (x, y), (z,))
    assert substitute(op, {"x": y}).inputs == (y, y)
    assert substitute(op, {"z": x}) is op


def test_replace_ops_inserts_in_place_of_an_op_or_before_it() -> None:
    a, b, c, new = (Op(kind, (), ()) for kind in ("a", "b", "c", "new"))
    assert replace_ops([a, b, c], {b}, {b: [new]}) == [a, new, c]
    assert replace_ops([a, b, c], set(), {b: [new]}) == [a, new, b, c]
    assert replace_ops([a, b, c], {a, c}, {}) == [b]


TENSOR = Tensor("t", (10, 4))


def test_sources_know_their_shapes_and_tensors() -> None:
    rows = Rows(TENSOR, 2, 5)
    assert rows.shape == (3, 4)
    assert Concat((rows, TENSOR)).shape == (13, 4)
    assert Stack((rows, rows)).shape == (2, 3, 4)
    assert list(Stack((Concat((rows, TENSOR)), TENSOR)).tensors()) == [TENSOR] * 3


def test_concat_joins_neighbouring_rows_only() -> None:
    a, b, c = Rows(TENSOR, 0, 3), Rows(TENSOR, 3, 8), Rows(TENSOR, 8, 10)
    assert concat((a, b, c)) == TENSOR
    assert concat((a, b)) == Rows(TENSOR, 0, 8)
    assert concat((b, a)) == Concat((b, a))
    assert concat((a, c)) == Concat((a, c))
    assert concat((a, Rows(Tensor("other", (10, 4)), 3, 8))) == Concat((a, Rows(Tensor("other", (10, 4)), 3, 8)))
    assert concat((TENSOR,)) == TENSOR
