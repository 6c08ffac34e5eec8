"""The pipeline as a whole: what no pass may change, and how many launches and parameters each family ends with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from meaning import Step, assert_close, run_exact, step_values
from random_graphs import graphs

from lean_engine import passes
from lean_engine.errors import VerifyError
from lean_engine.ir.graph import Graph, Value
from lean_engine.ir.verify import verify
from lean_engine.passes.merge_linear import merge_linear

ALL_NAMES = [*tiny.NAMES, *tiny.EXTRA_NAMES]


@pytest.mark.parametrize("name", ALL_NAMES)
def test_every_pass_keeps_outputs_and_caches_of_every_family(name: str) -> None:
    graph, step = tiny.plain(name), Step()
    outputs, caches = run_exact(graph, step_values(graph, step, seed=1))
    for run in passes.PIPELINE:
        graph = run(graph)
        found, found_caches = run_exact(graph, step_values(graph, step, seed=1))
        assert_close(found[0], outputs[0], 1e-9)
        assert found_caches.keys() == caches.keys()
        for cache in caches:
            assert_close(found_caches[cache], caches[cache], 1e-9)


@settings(max_examples=40, deadline=None)
@given(graphs(), st.permutations(passes.PIPELINE))
def test_passes_in_any_order_keep_what_a_random_graph_means(
    graph: Graph, order: list[Callable[[Graph], Graph]]
) -> None:
    step = Step(((0, 3), (5, 1), (2, 2)), num_padded=1, num_sampled=3)
    outputs, caches = run_exact(graph, step_values(graph, step, seed=2))
    for run in order:
        graph = verify(run(graph), run.__name__)
        found, found_caches = run_exact(graph, step_values(graph, step, seed=2))
        for array, wanted in zip(found, outputs, strict=True):
            assert_close(array, wanted, 1e-9)
        for cache, array in found_caches.items():
            assert_close(array, caches[cache], 1e-9)


@pytest.mark.parametrize("name", ALL_NAMES)
def test_a_second_run_of_the_pipeline_finds_nothing_to_do(name: str) -> None:
    graph = tiny.optimized(name)
    again = passes.optimize(graph)
    assert [op.kind for op in again.ops] == [op.kind for op in graph.ops]
    assert again.parameters == graph.parameters


def test_optimize_names_the_pass_that_broke_a_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    def break_outputs(graph: Graph) -> Graph:
        return replace(graph, outputs=(Value("nowhere", graph.outputs[0].type),))

    monkeypatch.setattr(passes, "PIPELINE", (merge_linear, break_outputs))
    with pytest.raises(VerifyError, match=r"after break_outputs: R6: output nowhere is not defined"):
        passes.optimize(tiny.plain("qwen2"))


DENSE = {"gemm": 4, "qk_norm_rope_write_kv": 1, "paged_attention": 1, "add_rms_norm": 2, "act_and_mul": 1}
SPARSE = {"gemm": 3, "qk_norm_rope_write_kv": 1, "paged_attention": 1, "add_rms_norm": 2, "moe_route": 1}
SPARSE |= {"moe_experts": 1}
GEMMA = DENSE | {"rms_norm": 2}  # the norms after attention and MLP
ENDS = {
    "embedding": 1,
    "rms_norm": 1,
    "gemm": 1,
    "gather_rows": 2,
}  # first norm, LM head, rows of residual and attention
CAPPED = {"softcap": 1}


def total(*parts: dict[str, int]) -> Counter[str]:
    counts: Counter[str] = Counter()
    for part in parts:
        counts.update(part)
    return counts


LAUNCHES = {
    "gemma2": total(ENDS, CAPPED, *[GEMMA] * 3),
    "gemma2-uncapped": total(ENDS, *[GEMMA] * 3),
    "gemma3": total(ENDS, *[GEMMA] * 3),
    "gemma3-seven-layers": total(ENDS, CAPPED, *[GEMMA] * 7),
    "llama-bias-linear": total(ENDS, *[DENSE] * 2),
    "llama-gqa-tied": total(ENDS, *[DENSE] * 3),
    "llama-gqa-untied": total(ENDS, *[DENSE] * 2),
    "llama3-rope": total(ENDS, *[DENSE] * 2),
    "mistral-swa": total(ENDS, *[DENSE] * 2),
    "mixtral": total(ENDS, *[SPARSE] * 2),
    "phi3": total(ENDS, *[DENSE] * 2),
    "phi3-partial-window": total(ENDS, *[DENSE] * 2),
    "qwen2": total(ENDS, *[DENSE] * 2),
    "qwen2-window-yarn": total(ENDS, *[DENSE] * 3),
    "qwen3": total(ENDS, *[DENSE] * 2),
    "qwen3-moe": total(ENDS, SPARSE, DENSE, SPARSE),
    "qwen3-moe-sparse-step": total(ENDS, DENSE, SPARSE, DENSE),
}


@pytest.mark.parametrize("name", ALL_NAMES)
def test_launches_of_each_family_are_exactly_these(name: str) -> None:
    lowered = passes.lower(tiny.optimized(name))
    assert Counter(launch.kernel for launch in lowered.launches) == LAUNCHES[name]


LAYER_WEIGHTS = 6  # two norms, qkv, o, gate_up, down
PARAMETERS = {
    "gemma2": 3 + 3 * (LAYER_WEIGHTS + 2),  # embedding, final norm, rope table; two more norms a layer
    "gemma3": 4 + 3 * (LAYER_WEIGHTS + 4),  # a second rope table; q and k norms
    "llama-bias-linear": 3 + 2 * (LAYER_WEIGHTS + 4),  # a bias for each product
    "llama-gqa-tied": 3 + 3 * LAYER_WEIGHTS,
    "llama-gqa-untied": 4 + 2 * LAYER_WEIGHTS,
    "mixtral": 4 + 2 * (LAYER_WEIGHTS + 1),  # the router
    "phi3": 4 + 2 * LAYER_WEIGHTS,
    "qwen2": 3 + 2 * (LAYER_WEIGHTS + 1),  # the bias of qkv
    "qwen3": 3 + 2 * (LAYER_WEIGHTS + 2),
    "qwen3-moe": 4 + 3 * (LAYER_WEIGHTS + 2) + 2,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_number_of_parameters_after_merging(name: str) -> None:
    assert len(tiny.optimized(name).parameters) == PARAMETERS[name]


@pytest.mark.parametrize("name", ALL_NAMES)
def test_merging_neither_loses_nor_repeats_a_tensor(name: str) -> None:
    def tensors(graph: Graph) -> Counter[str]:
        return Counter(t.name for p in graph.parameters for t in p.source.tensors())

    after = tensors(tiny.optimized(name))
    assert after.keys() == tensors(tiny.plain(name)).keys()
    assert set(after.values()) == {1}


@pytest.mark.parametrize("name", ALL_NAMES)
def test_everything_after_the_last_attention_runs_on_sampled_rows(name: str) -> None:
    launches = passes.lower(tiny.optimized(name)).launches
    last = max(i for i, launch in enumerate(launches) if launch.kernel == "paged_attention")
    rows = [(launch.kernel, launch.outputs[0].type.shape[0]) for launch in launches[last + 1 :]]
    assert all(letter == "R" for _, letter in rows)
    assert sum(kernel == "gather_rows" for kernel, _ in rows) == 2
