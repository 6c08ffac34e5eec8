"""eliminate_dead: what no output depends on goes, with its weights, inputs and caches."""

from __future__ import annotations

from graph_writing import GraphWriter, lines, printed_ops
from meaning import assert_same_meaning

from lean_engine.ir.graph import Graph
from lean_engine.ir.verify import verify
from lean_engine.passes.eliminate_dead import eliminate_dead


def eliminate(graph: Graph) -> Graph:
    result = verify(eliminate_dead(graph), "eliminate_dead")
    assert_same_meaning(graph, result)
    return result


def test_chain_that_nobody_reads_goes_from_its_end() -> None:
    w = GraphWriter()
    x = w.x("x", 8)
    kept = w.op("silu", "kept", x)
    w.norm("dead_norm", w.linear("dead_linear", x, 8))
    result = eliminate(w.graph(kept))
    assert printed_ops(result) == ["kept: f32[T, 8] = silu(x)"]
    assert result.parameters == ()


def test_inputs_that_only_dead_ops_read_go() -> None:
    w = GraphWriter()
    kept = w.op("silu", "kept", w.x("x", 8))
    w.gather("dead", w.x("y", 8))
    assert [v.name for v in eliminate(w.graph(kept)).inputs] == ["x"]


def test_op_lives_through_any_of_its_outputs() -> None:
    w = GraphWriter()
    _weights, ids = w.ops("moe_route", ("weights", "ids"), w.x("logits", 5), top_k=2, normalize=True)
    graph = w.graph(ids)
    assert eliminate(graph).ops == graph.ops


def test_cache_write_lives_through_its_attention_alone() -> None:
    w = GraphWriter()
    caches = [(w.cache(f"k.{i}", 1, 4), w.cache(f"v.{i}", 1, 4)) for i in range(2)]
    k, slots = w.x("k", 4), w.input("slot_mapping", "T")
    written = [w.ops("write_kv", (f"k.{i}.w", f"v.{i}.w"), k, k, slots, *caches[i]) for i in range(2)]
    result = eliminate(w.graph(w.attend("mixed", w.x("q", 8), written[1], 4)))
    assert printed_ops(result) == lines("""
        k.1.w: f32[N, 1, S, 4], v.1.w: f32[N, 1, S, 4] = write_kv(k, k, slot_mapping, k.1, v.1)
        mixed: f32[T, 8] = paged_attention(q, k.1.w, v.1.w, block_tables, cu_seqlens_q, seq_lens) \
{head_dim=4, scale=0.5}
    """)
    assert [v.name for v in result.caches] == ["k.1", "v.1"]


def test_nothing_dead_changes_nothing() -> None:
    w = GraphWriter()
    graph = w.graph(w.norm("n", w.linear("y", w.x("x", 8), 8, bias=True)))
    result = eliminate(graph)
    assert (result.ops, result.parameters, result.inputs) == (graph.ops, graph.parameters, graph.inputs)


def test_input_that_is_an_output_stays() -> None:
    w = GraphWriter()
    x = w.x("x", 8)
    assert eliminate(w.graph(x)).inputs == (x,)
