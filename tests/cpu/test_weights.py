"""Loading weights: every recipe, conversion between types, and what is asked of a checkpoint before and after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tiny
from numpy.typing import NDArray

from lean_engine import passes
from lean_engine.checkpoint import open_checkpoint
from lean_engine.config import RopeConfig
from lean_engine.ir.graph import Parameter, TensorType, Value
from lean_engine.ir.sources import Concat, RopeTable, Rows, Source, Stack, Tensor
from lean_engine.runtime import weights as weights_module
from lean_engine.runtime.cpu.device import CpuDevice
from lean_engine.runtime.rope import rope_table
from lean_engine.runtime.weights import copy_converted, expected_shapes, load_weights, write_source

Array = NDArray[Any]


class Store:
    """Tensors in memory; writes down what is asked of it."""

    def __init__(self, **tensors: Array) -> None:
        self.tensors = tensors
        self.calls: list[str] = []

    def tensor(self, name: str) -> Array:
        self.calls.append(f"tensor {name}")
        return self.tensors[name]

    def release(self, name: str) -> None:
        self.calls.append(f"release {name}")


def ones(name: str, *shape: int) -> Tensor:
    return Tensor(name, shape)


def counting(*shape: int, start: int = 0) -> Array:
    return np.arange(start, start + np.prod(shape), dtype=np.float32).reshape(shape)


A, B = counting(4, 3), counting(2, 3, start=100)
STORE: dict[str, Array] = {"a": A, "b": B}
SOURCES: dict[str, tuple[Source, Array]] = {
    "a tensor": (ones("a", 4, 3), A),
    "rows of one": (Rows(ones("a", 4, 3), 1, 3), A[1:3]),
    "parts below each other": (Concat((ones("b", 2, 3), Rows(ones("a", 4, 3), 3, 4))), np.concatenate([B, A[3:]])),
    "parts along a new axis": (Stack((ones("a", 4, 3), ones("a", 4, 3))), np.stack([A, A])),
    "a stack of concatenations": (
        Stack((Concat((ones("a", 4, 3), ones("b", 2, 3))), Concat((Rows(ones("a", 4, 3), 0, 4), ones("b", 2, 3))))),
        np.stack([np.concatenate([A, B])] * 2),
    ),
    "a rope table": (
        RopeTable(RopeConfig(theta=100.0, rotary_dim=4), 5),
        rope_table(RopeConfig(theta=100.0, rotary_dim=4), 5),
    ),
}


@pytest.mark.parametrize(("source", "wanted"), SOURCES.values(), ids=SOURCES)
def test_recipe_is_written_whole(source: Source, wanted: Array) -> None:
    out = np.full(source.shape, np.nan, np.float32)
    write_source(source, Store(**STORE), out)
    assert np.array_equal(out, wanted)


def test_every_tensor_is_released_once_it_is_copied() -> None:
    store = Store(**STORE)
    source = Concat((ones("a", 4, 3), ones("b", 2, 3)))
    write_source(source, store, np.empty(source.shape, np.float32))
    assert store.calls == ["tensor a", "release a", "tensor b", "release b"]


def parameter(name: str, source: Source) -> Parameter:
    return Parameter(Value(name, TensorType(source.shape, "float32")), source)


def test_each_parameter_is_filled_and_counted() -> None:
    sources: dict[str, Source] = {"p": Concat((ones("a", 4, 3), ones("b", 2, 3))), "q": ones("b", 2, 3)}
    parameters = [parameter(n, s) for n, s in sources.items()]
    assert expected_shapes(parameters) == {"a": (4, 3), "b": (2, 3)}
    sizes: list[int] = []
    weights = load_weights(parameters, Store(**STORE), CpuDevice(1), sizes.append)
    assert np.array_equal(weights["p"], np.concatenate([A, B]))
    assert np.array_equal(weights["q"], B)
    assert sizes == [4 * 3 * 4, 2 * 3 * 4, 2 * 3 * 4]


def test_large_tensors_are_written_and_counted_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights_module, "CHUNK_BYTES", 3 * 3 * 4)
    source = Stack((ones("a", 4, 3), ones("a", 4, 3)))
    filled: list[tuple[int, ...]] = []

    class Staging(CpuDevice):
        def fill(self, array: Array, write: Callable[[Array], None]) -> None:
            filled.append(array.shape)
            super().fill(array, write)

    sizes: list[int] = []
    weights = load_weights([parameter("p", source)], Store(**STORE), Staging(1), sizes.append)
    assert np.array_equal(weights["p"], np.stack([A, A]))
    assert filled == [(3, 3), (1, 3)] * 2
    assert sizes == [36, 12] * 2


@pytest.mark.parametrize("kind", [np.float32, np.float16, ml_dtypes.bfloat16], ids=str)
def test_values_survive_the_conversion_exactly(kind: type) -> None:
    values = [[0.0, -0.0, 1.0, -2.5], [65504.0, 6e-5, -3e-39, 1e-45], [np.inf, -np.inf, 240, 0.1]]
    source: Array = np.array(values).astype(kind)
    out = np.empty(source.shape, np.float32)
    copy_converted(source, out)
    assert np.array_equal(out, source.astype(np.float32))
    assert np.array_equal(np.signbit(out), np.signbit(source.astype(np.float32)))


def test_bfloat16_goes_into_a_part_of_a_buffer_and_from_a_read_only_view() -> None:
    source: Array = np.array([1.5, -0.25, 3.0, 8.0], ml_dtypes.bfloat16).reshape(2, 2)
    source.flags.writeable = False
    out = np.zeros((4, 2), np.float32)
    copy_converted(source, out[1:3])
    assert out.tolist() == [[0, 0], [1.5, -0.25], [3, 8], [0, 0]]


def test_bfloat16_nan_stays_nan() -> None:
    out = np.zeros(1, np.float32)
    copy_converted(np.array([np.nan], ml_dtypes.bfloat16), out)
    assert np.isnan(out[0])


def test_bfloat16_is_copied_as_it_is_into_bfloat16() -> None:
    source = np.array([1.5, -0.25], ml_dtypes.bfloat16)
    out = np.zeros(2, ml_dtypes.bfloat16)
    copy_converted(source, out)
    assert np.array_equal(out, source)


@pytest.mark.parametrize("name", ["llama-gqa-tied", "phi3", "qwen2", "mixtral"])
def test_merged_weights_of_a_model_are_the_checkpoints_tensors_in_order(name: str) -> None:
    checkpoint = open_checkpoint(str(tiny.directory(name)))
    weights = load_weights(passes.lower(tiny.optimized(name)).parameters, checkpoint, CpuDevice(1))
    prefix = "model.layers.1."

    def stored(*names: str) -> Array:
        return np.concatenate([checkpoint.tensor(prefix + n).astype(np.float32) for n in names])

    wanted: tuple[str, list[str]] = {
        "llama-gqa-tied": ("self_attn.{q,k,v}_proj.weight", [f"self_attn.{n}_proj.weight" for n in "qkv"]),
        "phi3": ("mlp.{gate,up}_proj.weight", ["mlp.gate_up_proj.weight"]),
        "qwen2": ("self_attn.{q,k,v}_proj.bias", [f"self_attn.{n}_proj.bias" for n in "qkv"]),
        "mixtral": ("self_attn.{q,k,v}_proj.weight", [f"self_attn.{n}_proj.weight" for n in "qkv"]),
    }[name]
    assert np.array_equal(weights[prefix.join(["", wanted[0]])], stored(*wanted[1]))
    if name == "mixtral":
        expert = stored("block_sparse_moe.experts.3.w1.weight", "block_sparse_moe.experts.3.w3.weight")
        assert np.array_equal(weights[f"model.{prefix[6:]}block_sparse_moe.experts.gate_up"][3], expert)
