"""Random steps for a graph, and the comparison of two graphs by what ir/reference computes for both in float64."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lean_engine.ir import reference
from lean_engine.ir.graph import Dims, Graph, Value
from lean_engine.runtime.weights import write_source

Array = NDArray[Any]
Values = dict[str, Array]


@dataclass(frozen=True)
class Step:
    """A step's requests, each (tokens already in the cache, tokens of this step), and rows that belong to none."""

    requests: tuple[tuple[int, int], ...] = ((0, 5), (9, 1), (3, 4), (17, 1), (0, 1))
    num_padded: int = 2  # rows at the end with slot -1
    block_size: int = 4
    num_sampled: int = 4

    @property
    def dims(self) -> Dims:
        num_tokens = sum(new for _, new in self.requests) + self.num_padded
        longest = max(sum(request) for request in self.requests)
        blocks = -(-longest // self.block_size) + 1
        num_blocks = 1 + blocks * len(self.requests)
        letters = {"T": num_tokens, "B": len(self.requests), "R": self.num_sampled, "M": blocks}
        return letters | {"N": num_blocks, "S": self.block_size}

    def inputs(self, seed: int, vocab_size: int) -> Values:
        """The int32 arrays of the step; blocks are dealt out in random order, block 0 to nobody."""
        random, d = np.random.default_rng(seed), self.dims
        tables = 1 + random.permutation(d["N"] - 1).reshape(d["B"], d["M"])
        positions, slots = np.zeros(d["T"], int), np.full(d["T"], -1)
        starts = np.cumsum([0, *(new for _, new in self.requests)])
        for b, (context, new) in enumerate(self.requests):
            rows, p = slice(starts[b], starts[b + 1]), np.arange(context, context + new)
            positions[rows] = p
            slots[rows] = tables[b, p // self.block_size] * self.block_size + p % self.block_size
        arrays = {
            "input_ids": random.integers(0, vocab_size, d["T"]),
            "positions": positions,
            "slot_mapping": slots,
            "block_tables": tables,
            "cu_seqlens_q": starts,
            "seq_lens": np.array([context + new for context, new in self.requests]),
            "sample_rows": random.integers(0, d["T"], d["R"]),
        }
        return {name: array.astype(np.int32) for name, array in arrays.items()}

    def context_slots(self, inputs: Values) -> Array:
        """The cache slots that earlier steps have filled."""
        slots = [
            inputs["block_tables"][b, p // self.block_size] * self.block_size + p % self.block_size
            for b, (context, _) in enumerate(self.requests)
            for p in range(context)
        ]
        return np.array(slots, int)


def noise(name: str, shape: Sequence[int], seed: int) -> Array:
    """Normal noise that depends on the name and the seed only."""
    return np.random.default_rng([zlib.crc32(name.encode()), seed]).standard_normal(shape)


class RandomTensors:
    """A checkpoint of noise: variance 1 / fan_in for matrices, norm weights around one."""

    def __init__(self, graph: Graph, seed: int) -> None:
        self.shapes = {t.name: t.shape for p in graph.parameters for t in p.source.tensors()}
        self.seed = seed

    def expect(self, shapes: dict[str, tuple[int, ...]]) -> None:
        assert shapes.items() <= self.shapes.items()

    def tensor(self, name: str) -> Array:
        shape = self.shapes[name]
        values = noise(name, shape, self.seed)
        return 1 + 0.3 * values if len(shape) == 1 else 1.5 * values / shape[-1] ** 0.5

    def stored_type(self, name: str) -> str:
        return "float32"

    def stored(self, name: str) -> Array:
        return self.tensor(name).astype(np.float32)

    def release(self, name: str) -> None:
        pass


def cache_values(cache: Value, step: Step, inputs: Values, seed: int) -> Array:
    """NaN but for the slots of earlier tokens."""
    values = np.full(cache.type.concrete_shape(step.dims), np.nan)
    for slot in step.context_slots(inputs):
        place = (slot // step.block_size, slice(None), slot % step.block_size)
        values[place] = noise(f"{cache.name}/{slot}", values[place].shape, seed)
    return values


def step_values(graph: Graph, step: Step, seed: int) -> Values:
    """A float64 array for every parameter, cache and real input, an int32 array for every other input."""
    tables = [op.inputs[1] for op in graph.ops if op.kind == "embedding"]
    inputs = step.inputs(seed, int(tables[0].type.shape[0]) if tables else 2)
    values: Values = {}
    for value in graph.inputs:
        is_known = value.name in inputs
        values[value.name] = (
            inputs[value.name] if is_known else noise(value.name, value.type.concrete_shape(step.dims), seed)
        )
    store = RandomTensors(graph, seed)
    for parameter in graph.parameters:
        values[parameter.value.name] = np.empty(parameter.source.shape)
        write_source(parameter.source, store, values[parameter.value.name])
    values |= {cache.name: cache_values(cache, step, inputs, seed) for cache in graph.caches}
    return values


def run_exact(graph: Graph, values: Values) -> tuple[list[Array], Values]:
    """What ir/reference computes with no rounding to the values' types: the outputs, and the caches afterwards."""
    values = values | {cache.name: values[cache.name].copy() for cache in graph.caches}
    for op in graph.ops:
        with np.errstate(over="ignore"):  # exp in silu
            results = reference.OPS[op.kind](*(values[v.name] for v in op.inputs), **op.attrs)
        results = results if isinstance(results, tuple) else (results,)
        values |= {v.name: np.asarray(result) for v, result in zip(op.outputs, results, strict=True)}
    return [values[v.name] for v in graph.outputs], {cache.name: values[cache.name] for cache in graph.caches}


def assert_same_meaning(before: Graph, after: Graph, step: Step | None = None, seed: int = 0) -> None:
    """Both graphs give the same outputs and leave the same in the caches, to 1e-9 of each array's largest element."""
    step = step or Step()
    outputs, caches = run_exact(before, step_values(before, step, seed))
    found, found_caches = run_exact(after, step_values(after, step, seed))
    assert len(outputs) == len(found)
    for wanted, array in [*zip(outputs, found, strict=True), *((caches[n], a) for n, a in found_caches.items())]:
        assert_close(array, wanted, 1e-9)


def assert_close(found: Array, wanted: Array, tolerance: float) -> None:
    """|found - wanted| ≤ tolerance · max |wanted|, NaN where and only where NaN is wanted."""
    assert found.shape == wanted.shape
    assert np.array_equal(np.isnan(found), np.isnan(wanted))
    if np.isnan(wanted).all():
        return
    worst = np.nanmax(np.abs(found.astype(np.float64) - wanted))
    assert worst <= tolerance * max(np.nanmax(np.abs(wanted)), 1e-30), f"off by {worst}"
