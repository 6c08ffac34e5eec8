"""The oracle itself: checked against transformers' logits, and op by op against another way of computing the same."""

from __future__ import annotations

import math

import numpy as np
import pytest
import tiny
from graph_writing import GraphWriter
from meaning import Step, assert_close

from lean_engine.checkpoint import open_checkpoint
from lean_engine.ir import reference
from lean_engine.runtime.cpu.device import CpuDevice
from lean_engine.runtime.weights import load_weights

random = np.random.default_rng(5)


@pytest.mark.parametrize("name", [*tiny.NAMES, *tiny.EXTRA_NAMES])
def test_plain_graph_of_every_family_gives_the_logits_of_transformers(name: str) -> None:
    graph = tiny.plain(name)
    golden = np.load(tiny.directory(name) / "golden.npz")
    ids, wanted = golden["b1_ids"], golden["b1_logits"]
    step = Step(((0, len(ids)),), num_padded=0, num_sampled=len(ids))
    values = {**step.inputs(seed=3, vocab_size=1), "input_ids": ids, "sample_rows": np.arange(len(ids))}
    weights = load_weights(graph.parameters, open_checkpoint(str(tiny.directory(name))), CpuDevice(1))
    caches = {v.name: np.full(v.type.concrete_shape(step.dims), np.nan, np.float32) for v in graph.caches}
    logits = reference.run(graph, {**values, **weights, **caches})["logits"]
    assert logits.dtype == np.float32
    assert_close(logits, wanted, 2e-5)


def test_run_casts_every_value_to_its_type_and_keeps_those_it_was_given() -> None:
    w = GraphWriter()
    graph = w.graph(w.op("silu", "y", w.x("x", 2)))
    x = np.array([[1.0, -1.0]], np.float32)
    values = {"x": x}
    result = reference.run(graph, values)
    assert result["y"].dtype == np.float32
    assert result["x"] is x
    assert values.keys() == {"x"}


def test_rope_is_a_rotation_in_the_complex_plane() -> None:
    x, positions = random.standard_normal((3, 2 * 10)), np.array([0, 5, 2])
    angles = np.arange(7)[:, None] * np.array([1.0, 0.3, 0.01])  # rotary_dim 6 of head_dim 10
    out = reference.rope(x, positions, np.concatenate([np.cos(angles), np.sin(angles)], axis=1), 10)
    heads, found = x.reshape(3, 2, 10), out.reshape(3, 2, 10)
    turned = (heads[..., :3] + 1j * heads[..., 3:6]) * np.exp(1j * angles[positions])[:, None]
    np.testing.assert_allclose(found[..., :6], np.concatenate([turned.real, turned.imag], axis=-1), atol=1e-12)
    assert np.array_equal(found[..., 6:], heads[..., 6:])


def test_rms_norm_leaves_rows_of_root_mean_square_one() -> None:
    x = random.standard_normal((4, 12)) * 50
    heads = reference.rms_norm(x, np.ones(4), 0.0, unit_offset=False).reshape(4, 3, 4)
    np.testing.assert_allclose((heads**2).mean(axis=-1), 1.0)
    doubled = reference.rms_norm(x, np.ones(4), 0.0, unit_offset=True).reshape(4, 3, 4)
    np.testing.assert_allclose(doubled, 2 * heads)


def test_rms_norm_of_zeros_is_zero_and_eps_counts() -> None:
    assert not reference.rms_norm(np.zeros((2, 4)), np.ones(4), 1e-6, unit_offset=False).any()
    np.testing.assert_allclose(reference.rms_norm(np.ones((1, 4)), np.ones(4), 3.0, unit_offset=False), 0.5)


def test_paged_attention_equals_softmax_over_the_whole_sequence() -> None:
    block_size, length, heads, head_dim, scale = 4, 10, 4, 6, 0.3
    keys, values = random.standard_normal((2, length, 2, head_dim))
    q = random.standard_normal((3, heads * head_dim))  # the last three tokens
    table, caches = np.array([[2, 0, 3]]), np.full((2, 4, 2, block_size, head_dim), np.nan)
    for position in range(length):
        place = (table[0, position // block_size], slice(None), position % block_size)
        caches[0][place], caches[1][place] = keys[position], values[position]
    out = reference.paged_attention(
        q, caches[0], caches[1], table, np.array([0, 3]), np.array([length]), head_dim, scale, None, None
    )
    for row in range(3):
        seen = length - 2 + row
        for head in range(heads):
            scores = keys[:seen, head // 2] @ q[row].reshape(heads, head_dim)[head] * scale
            weights = np.exp(scores) / np.exp(scores).sum()
            np.testing.assert_allclose(out[row].reshape(heads, head_dim)[head], weights @ values[:seen, head // 2])


@pytest.mark.parametrize(("window", "seen"), [(1, [4]), (2, [3, 4]), (5, [0, 1, 2, 3, 4]), (None, [0, 1, 2, 3, 4])])
def test_a_window_counts_the_query_itself(window: int | None, seen: list[int]) -> None:
    values = np.eye(5)[None, None]  # [N=1, K=1, S=5, D=5]: the output shows each token's share
    shares = reference.paged_attention(
        np.zeros((1, 5)), np.zeros((1, 1, 5, 5)), values, np.array([[0]]), np.array([0, 1]), np.array([5]), 5, 1.0,
        window, None,
    )  # fmt: skip
    np.testing.assert_allclose(shares[0], [1 / len(seen) if i in seen else 0 for i in range(5)])


def test_softcap_bounds_the_scores() -> None:
    assert reference.softcap(np.array([1e9, -1e9, 0.0]), 30.0).tolist() == [30.0, -30.0, 0.0]
    np.testing.assert_allclose(reference.softcap(np.array([0.01]), 30.0), 0.01, rtol=1e-6)


def test_write_kv_skips_slot_minus_one() -> None:
    caches = np.zeros((2, 3, 2, 4, 5))
    k, v = random.standard_normal((2, 3, 10))
    reference.write_kv(k, v, np.array([6, -1, 9]), *caches)
    for cache, rows in zip(caches, (k, v), strict=True):
        assert np.array_equal(cache[1, :, 2], rows[0].reshape(2, 5))
        assert np.array_equal(cache[2, :, 1], rows[2].reshape(2, 5))
        assert np.count_nonzero(cache) == 20


def test_activations_at_known_points() -> None:
    x = np.array([0.0, 1.0, -1.0, 20.0])
    np.testing.assert_allclose(reference.silu(x), [0, 1 / (1 + math.exp(-1)), -1 / (1 + math.e), 20], rtol=1e-6)
    exact = [v * 0.5 * (1 + math.erf(v / math.sqrt(2))) for v in x]
    np.testing.assert_allclose(reference.gelu_tanh(x), exact, atol=3e-4)


def test_route_takes_the_lowest_ids_among_equals() -> None:
    weights, ids = reference.moe_route(np.zeros((1, 5)), 2, normalize=False)
    assert ids.tolist() == [[0, 1]]
    np.testing.assert_allclose(weights, 0.2)
    np.testing.assert_allclose(reference.moe_route(np.zeros((1, 5)), 2, normalize=True)[0], 0.5)


def test_experts_are_weighted_gated_mlps() -> None:
    x = random.standard_normal((2, 3))
    gate, up, down = (random.standard_normal((4, *shape)) for shape in ((5, 3), (5, 3), (3, 5)))
    weights, ids = np.array([[0.7, 0.3], [0.1, 0.9]]), np.array([[3, 0], [1, 3]])
    out = reference.moe_experts(x, weights, ids, np.concatenate([gate, up], axis=1), down, "silu")
    for row in range(2):
        wanted = np.zeros(3)
        for weight, e in zip(weights[row], ids[row], strict=True):
            g = gate[e] @ x[row]
            wanted += weight * (down[e] @ (g / (1 + np.exp(-g)) * (up[e] @ x[row])))
        np.testing.assert_allclose(out[row], wanted)
