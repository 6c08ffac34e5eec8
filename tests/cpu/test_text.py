"""The printed form: stable, and for every tiny model equal to the program reviewed in tests/data/programs.

After a change that is meant: tools/print_programs.py, and read the diff.
"""

from __future__ import annotations

import pytest
import tiny
from graph_writing import GraphWriter

from lean_engine.ir.sources import Concat, RopeTable, Rows, Stack, Tensor
from lean_engine.ir.text import format_attr, format_graph, format_op

PROGRAMS = tiny.DATA / "programs"


@pytest.mark.parametrize("name", tiny.NAMES)
def test_optimized_program_is_the_reviewed_one(name: str) -> None:
    assert format_graph(tiny.optimized(name)) == (PROGRAMS / f"{name}.txt").read_text(encoding="utf-8")


def test_every_reviewed_program_has_its_model() -> None:
    assert sorted(file.stem for file in PROGRAMS.iterdir()) == tiny.NAMES


def test_whole_graph() -> None:
    w = GraphWriter()
    x = w.op("embedding", "x", w.input("input_ids", "T"), w.weight("table", 9, 8), scale=2.0)
    k, v = w.ops(
        "write_kv", ("k.w", "v.w"), w.slice("a", x, 0, 4), w.slice("b", x, 4, 8), w.input("slots", "T"),
        w.cache("k", 1, 4), w.cache("v", 1, 4),
    )  # fmt: skip
    y = w.attend("mixed", x, (k, v), 4, scale=1 / 3)
    assert (
        format_graph(w.graph(y, x))
        == """\
graph test
inputs
  input_ids: i32[T]
  slots: i32[T]
  block_tables: i32[B, M]
  cu_seqlens_q: i32[B+1]
  seq_lens: i32[B]
parameters
  table: f32[9, 8] = table
caches
  k: f32[N, 1, S, 4]
  v: f32[N, 1, S, 4]
ops
  x: f32[T, 8] = embedding(input_ids, table) {scale=2}
  a: f32[T, 4] = slice_columns(x) {start=0, stop=4}
  b: f32[T, 4] = slice_columns(x) {start=4, stop=8}
  k.w: f32[N, 1, S, 4], v.w: f32[N, 1, S, 4] = write_kv(a, b, slots, k, v)
  mixed: f32[T, 8] = paged_attention(x, k.w, v.w, block_tables, cu_seqlens_q, seq_lens) {head_dim=4, scale=0.333333}
outputs
  mixed, x
"""
    )


@pytest.mark.parametrize(
    ("value", "text"), [(1e-6, "1e-06"), (1.0, "1"), (0.125, "0.125"), (8, "8"), (True, "True"), ("silu", "silu")]
)
def test_attributes_print_short(value: object, text: str) -> None:
    assert format_attr(value) == text


def test_attribute_that_is_none_is_left_out() -> None:
    w = GraphWriter()
    w.attend("y", w.x("q", 4), (w.cache("k", 1, 4), w.cache("v", 1, 4)), 4, window=None, softcap=None)
    assert "window" not in format_op(w.all_ops[0])


def test_sources_print_as_recipes() -> None:
    tensor = Tensor("a.weight", (8, 4))
    assert str(Rows(tensor, 2, 5)) == "a.weight[2:5]"
    assert str(Concat((tensor, Rows(tensor, 0, 1)))) == "concat(a.weight, a.weight[0:1])"
    assert str(Stack((tensor,) * 8)) == "stack(a.weight, … 8 parts)"
    rope = tiny.optimized("llama3-rope").parameter("rope_table")
    assert rope is not None
    assert isinstance(rope.source, RopeTable)
    assert str(rope.source) == "rope_table(llama3, theta=10000)"
