"""Packed matrices: what is read back is what the checkpoint means, bit for bit, in as many bytes as it has."""

from __future__ import annotations

from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType, quants
from native_running import MACHINES, library_path
from native_weights import Store, dequantised, random_blocks

from lean_engine.config import RopeConfig
from lean_engine.errors import CheckpointError
from lean_engine.ir.sources import Concat, RopeTable, Rows, Source, Stack, Tensor
from lean_engine.runtime.cpu.native import gemm
from lean_engine.runtime.cpu.native.launches import Precision
from lean_engine.runtime.cpu.native.library import Library, Native
from lean_engine.runtime.cpu.native.matrices import BLOCKS, EXACT, Matrix, load_matrix, matrix_bytes, matrix_of

ODD_SHAPES = [(1, 1), (15, 31), (17, 33), (49, 577), (64, 256)]


@cache
def native(machine: str = "native") -> Native:
    return Native(Library(library_path(machine), gemm.ARGUMENTS), num_threads=2)


def load(source: Source, store: Store, precision: Precision = EXACT) -> Matrix:
    matrix = load_matrix(source, store, native(), precision)
    assert matrix.nbytes == matrix_bytes(source, store, precision, native().library)
    assert matrix.shape == source.shape
    return matrix


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("shape", ODD_SHAPES)
@pytest.mark.parametrize("element", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_elements_are_read_back_as_they_were(machine: str, shape: tuple[int, int], element: Any) -> None:
    weights = np.random.default_rng(0).normal(size=shape).astype(element)
    matrix = matrix_of(weights, native(machine))
    assert matrix.format == np.dtype(element).name
    np.testing.assert_array_equal(matrix.read(native(machine)), weights.astype(np.float32))


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("block_type", BLOCKS)
def test_blocks_are_read_back_as_the_gguf_package_dequantises_them(machine: str, block_type: str) -> None:
    for rows in (1, 16, 49):
        raw = random_blocks(rows, 768, block_type)
        matrix = matrix_of(raw, native(machine), block_type=block_type)
        assert matrix.format == block_type
        assert matrix.shape == (rows, 768)
        np.testing.assert_array_equal(matrix.read(native(machine)), dequantised(raw, block_type))


@pytest.mark.parametrize(("block_type", "excess"), [(b, 1.03 if b == "q4_k" else 1.0) for b in BLOCKS])
def test_blocks_take_the_bytes_that_the_file_has(block_type: str, excess: float) -> None:
    raw = random_blocks(64, 1024, block_type)
    assert matrix_of(raw, native(), block_type=block_type).nbytes <= excess * raw.nbytes


@pytest.mark.parametrize("machine", MACHINES)
def test_float16_and_bfloat16_round_to_nearest_even(machine: str) -> None:
    edges = [0.0, -0.0, 1e-9, 2.0**-25, 2.0**-24 * 1.5, 6.1e-5, 65504, 65519.9, 65520, 1e5, np.inf, -np.inf, np.nan]
    random = np.random.default_rng(0).integers(0, 1 << 32, 2000, dtype=np.uint32).view(np.float32)
    small = np.random.default_rng(1).normal(size=2000).astype(np.float32) * 1e-5
    values = np.concatenate([np.float32(edges), random, small])[None]
    with np.errstate(all="ignore"):
        for name, element in (("float16", np.float16), ("bfloat16", ml_dtypes.bfloat16)):
            matrix = matrix_of(values, native(machine), Precision(name))
            wanted = values.astype(element).astype(np.float32)
            np.testing.assert_array_equal(matrix.read(native(machine)), wanted)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("element", [np.float32, ml_dtypes.bfloat16, np.float16])
def test_int8_is_symmetric_with_a_scale_per_output(machine: str, element: Any) -> None:
    weights = np.random.default_rng(0).normal(size=(33, 577)).astype(element)
    weights[5] = 0
    matrix = matrix_of(weights, native(machine), Precision("int8"))
    exact = weights.astype(np.float32)
    scale = np.abs(exact).max(axis=1, keepdims=True) / np.float32(127)
    found = matrix.read(native(machine))
    assert (np.abs(found - exact) <= scale * 0.5001).all()
    steps = np.divide(found, scale, out=np.zeros_like(found), where=scale > 0)
    np.testing.assert_allclose(steps, np.rint(steps), atol=1e-4)
    assert matrix.nbytes == 48 * 640 + 48 * 4  # rows to 16, columns to 64, and scales


def test_int8_keeps_a_nan_visible() -> None:
    weights = np.ones((3, 40), np.float32)
    weights[1, 7] = np.nan
    found = matrix_of(weights, native(), Precision("int8")).read(native())
    assert np.isnan(found[1]).all()
    assert np.isfinite(found[[0, 2]]).all()


def test_merged_rows_keep_their_types() -> None:
    q, k, v = (
        random_blocks(rows, 512, t, seed) for seed, (rows, t) in enumerate([(32, "q4_k"), (16, "q4_k"), (20, "q6_k")])
    )
    store = Store(q=("q4_k", q), k=("q4_k", k), v=("q6_k", v))
    matrix = load(Concat((Tensor("q", (32, 512)), Tensor("k", (16, 512)), Tensor("v", (20, 512)))), store)
    assert matrix.format == "mixed"
    assert [(p.format, p.first, p.num_outputs) for p in matrix.parts] == [("q4_k", 0, 48), ("q6_k", 48, 20)]
    wanted = np.concatenate([dequantised(q, "q4_k"), dequantised(k, "q4_k"), dequantised(v, "q6_k")])
    np.testing.assert_array_equal(matrix.read(native()), wanted)
    assert store.released == ["q", "k", "v"]


def test_rows_that_end_within_a_panel_are_followed_by_a_part_of_their_own() -> None:
    gate, up = (np.random.default_rng(seed).normal(size=(24, 33)).astype(np.float32) for seed in (0, 1))
    matrix = load(Concat((Tensor("gate", (24, 33)), Tensor("up", (24, 33)))), Store(gate=gate, up=up))
    assert [(p.first, p.num_outputs) for p in matrix.parts] == [(0, 24), (24, 24)]
    np.testing.assert_array_equal(matrix.read(native()), np.concatenate([gate, up]))


def test_some_rows_of_a_tensor_are_packed() -> None:
    merged = np.random.default_rng(0).normal(size=(40, 64)).astype(ml_dtypes.bfloat16)
    tensor = Tensor("merged", (40, 64))
    store = Store(merged=merged)
    matrix = load(Concat((Rows(tensor, 8, 24), Rows(tensor, 32, 40))), store)
    np.testing.assert_array_equal(
        matrix.read(native()), np.concatenate([merged[8:24], merged[32:40]]).astype(np.float32)
    )
    assert store.released == ["merged"]


def test_a_stack_of_experts_has_the_same_parts_for_each() -> None:
    blocks = {f"e{e}": random_blocks(32, 256, "q4_k", e) for e in range(3)}
    store = Store(**{name: ("q4_k", raw) for name, raw in blocks.items()})
    matrix = load(Stack(tuple(Tensor(name, (32, 256)) for name in blocks)), store)
    assert (matrix.format, matrix.shape) == ("q4_k", (3, 32, 256))
    np.testing.assert_array_equal(
        matrix.read(native()), np.stack([dequantised(raw, "q4_k") for raw in blocks.values()])
    )
    assert len(matrix.c_parts) == 3


def test_experts_stored_in_different_types_are_kept_as_float32() -> None:
    store = Store(a=("q4_k", random_blocks(16, 256, "q4_k")), b=("q6_k", random_blocks(16, 256, "q6_k")))
    matrix = load(Stack((Tensor("a", (16, 256)), Tensor("b", (16, 256)))), store)
    assert matrix.format == "float32"
    np.testing.assert_array_equal(matrix.read(native()), np.stack([store.tensor("a"), store.tensor("b")]))


def test_a_block_type_without_a_format_becomes_float32() -> None:
    weights = np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)
    raw = quants.quantize(weights, GGMLQuantizationType.Q5_0)
    matrix = load(Tensor("w", (16, 64)), Store(w=("q5_0", raw)))
    assert matrix.format == "float32"
    np.testing.assert_array_equal(matrix.read(native()), dequantised(raw, "q5_0"))


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "float16", "int8"])
def test_precision_overrides_how_a_checkpoint_stores_its_weights(weights: str) -> None:
    store = Store(w=("q4_1", random_blocks(16, 64, "q4_1")))
    matrix = load(Tensor("w", (16, 64)), store, Precision(weights))
    assert matrix.format == weights
    bound = {"float32": 0, "bfloat16": 2**-8, "float16": 2**-11, "int8": 2**-7}[weights] * np.abs(
        store.tensor("w")
    ).max()
    assert np.abs(matrix.read(native()) - store.tensor("w")).max() <= bound


def test_what_is_no_matrix_is_refused() -> None:
    rope = RopeTable(RopeConfig(theta=1e4, rotary_dim=8), 16)
    with pytest.raises(CheckpointError, match="cannot be part of a weight matrix"):
        load_matrix(Concat((rope,)), Store(), native(), Precision())
