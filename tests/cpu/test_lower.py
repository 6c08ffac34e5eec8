"""lower: each op becomes one launch of a kernel that the table knows, with the scalars its signature wants."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tiny
from graph_writing import GraphWriter

from lean_engine.ir.graph import Graph
from lean_engine.ir.ops import OPS
from lean_engine.passes.lower import KERNELS, lower, lower_op
from lean_engine.runtime.kernels import KERNELS as SIGNATURES


def test_linear_is_a_gemm_without_the_dtype_that_its_output_says() -> None:
    w = GraphWriter()
    w.linear("y", w.x("x", 8), 4, bias=True)
    launch = lower_op(w.all_ops[0])
    assert (launch.kernel, dict(launch.scalars)) == ("gemm", {})
    assert [v.name for v in launch.inputs] == ["x", "y.w", "y.b"]


def test_other_ops_keep_their_name_and_attributes() -> None:
    w = GraphWriter()
    w.norm("y", w.x("x", 8), eps=0.5)
    launch = lower_op(w.all_ops[0])
    assert (launch.kernel, dict(launch.scalars)) == ("rms_norm", {"eps": 0.5, "unit_offset": False})
    assert launch.outputs[0].name == "y"


def test_launch_says_which_storage_an_output_may_take_and_which_cache_it_is() -> None:
    w = GraphWriter()
    w.op("add", "sum", w.x("a", 4), w.x("b", 4))
    caches = w.cache("k", 1, 4), w.cache("v", 1, 4)
    w.ops("write_kv", ("k.w", "v.w"), w.x("a", 4), w.x("b", 4), w.input("slot_mapping", "T"), *caches)
    add, write = map(lower_op, w.all_ops)
    assert (add.inplace, add.aliases) == ({0: 0}, {})
    assert (write.inplace, write.aliases) == ({}, {0: 3, 1: 4})


@pytest.mark.parametrize("name", [*tiny.NAMES, *tiny.EXTRA_NAMES])
@pytest.mark.parametrize("graph_of", [tiny.plain, tiny.optimized], ids=["plain", "optimized"])
def test_every_launch_of_every_family_fits_the_signature_of_its_kernel(
    name: str, graph_of: Callable[[str], Graph]
) -> None:
    graph = graph_of(name)
    lowered = lower(graph)
    assert len(lowered.launches) == len(graph.ops)
    assert (lowered.name, lowered.inputs, lowered.parameters) == (graph.name, graph.inputs, graph.parameters)
    assert (lowered.caches, lowered.outputs) == (graph.caches, graph.outputs)
    for launch in lowered.launches:
        signature = SIGNATURES[launch.kernel]
        num_required = sum(not p.is_optional for p in signature.inputs)
        assert num_required <= len(launch.inputs) <= len(signature.inputs)
        assert len(launch.outputs) == len(signature.outputs)
        assert set(launch.scalars) == set(signature.scalars)


def test_every_op_kind_has_a_kernel() -> None:
    assert {KERNELS.get(kind, kind) for kind in OPS} == set(SIGNATURES)
