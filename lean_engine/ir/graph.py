"""Graph: an immutable list of ops in static single assignment form.

A Value is defined exactly once, by name: as a step input, a parameter, a KV cache or an op's output. Activations are
matrices [rows, columns]; heads are columns side by side. Symbolic dimensions are letters (T, B, R, M, N, S; see the
README), evaluated by `evaluate` when a program is planned or bound.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from lean_engine import dtypes
from lean_engine.ir.sources import Source

Dim = int | str  # "T", or "B+1"
Dims = Mapping[str, int]  # the letters' values
SYMBOLS = ("T", "B", "R", "M", "N", "S")


@dataclass(frozen=True, slots=True)
class TensorType:
    shape: tuple[Dim, ...]
    dtype: str  # a name in dtypes.DTYPES

    def concrete_shape(self, dims: Dims) -> tuple[int, ...]:
        return tuple(evaluate(d, dims) for d in self.shape)

    def num_bytes(self, dims: Dims) -> int:
        size = dtypes.dtype(self.dtype).num_bytes
        for n in self.concrete_shape(dims):
            size *= n
        return size


@dataclass(frozen=True, slots=True)
class Value:
    name: str  # unique in its graph
    type: TensorType

    @property
    def columns(self) -> int:
        """The last dimension, which is never symbolic in a matrix."""
        n = self.type.shape[-1]
        assert isinstance(n, int)
        return n


@dataclass(frozen=True, slots=True)
class Parameter:
    """A weight: its value in the graph and how it is made from the checkpoint's tensors."""

    value: Value
    source: Source


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    kind: str  # a key of ops.OPS
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    name: str
    inputs: tuple[Value, ...]  # of one step: input_ids [T], positions [T], …
    parameters: tuple[Parameter, ...]
    caches: tuple[Value, ...]  # K and V of each layer, [N, K, S, D]
    ops: tuple[Op, ...]  # in execution order
    outputs: tuple[Value, ...]

    def with_ops(self, ops: Iterable[Op], parameters: Iterable[Parameter] | None = None) -> Graph:
        """The same graph with other ops (and parameters)."""
        return replace(self, ops=tuple(ops), parameters=self.parameters if parameters is None else tuple(parameters))

    def producers(self) -> dict[str, Op]:
        """Value name → the op that defines it; inputs, parameters and caches are absent."""
        return {v.name: op for op in self.ops for v in op.outputs}

    def users(self) -> dict[str, list[Op]]:
        """Value name → the ops that read it, in order (an op that reads it twice is listed once)."""
        found: dict[str, list[Op]] = {}
        for op in self.ops:
            for name in dict.fromkeys(v.name for v in op.inputs):
                found.setdefault(name, []).append(op)
        return found

    def private_names(self) -> set[str]:
        """Names of the values that exactly one op reads and nobody outside: such a value may be fused away."""
        outputs = {v.name for v in self.outputs}
        return {name for name, ops in self.users().items() if len(ops) == 1 and name not in outputs}

    def parameter(self, name: str) -> Parameter | None:
        return next((p for p in self.parameters if p.value.name == name), None)


def evaluate(dim: Dim, dims: Dims) -> int:
    """The number a dimension stands for: an int, a letter, or a letter plus a number."""
    if isinstance(dim, int):
        return dim
    letter, _, offset = dim.partition("+")
    return dims[letter] + int(offset or 0)


@cache
def is_dim(dim: object) -> bool:
    """Whether dim is a positive int or a known letter, with or without an offset."""
    if isinstance(dim, int):
        return dim > 0
    return isinstance(dim, str) and re.fullmatch(rf"({'|'.join(SYMBOLS)})(\+\d+)?", dim) is not None


def substitute(op: Op, replacements: Mapping[str, Value]) -> Op:
    """The op with its inputs replaced by name."""
    if not any(v.name in replacements for v in op.inputs):
        return op
    return replace(op, inputs=tuple(replacements.get(v.name, v) for v in op.inputs))


def replace_ops(ops: Sequence[Op], removed: set[Op], inserted: Mapping[Op, Sequence[Op]]) -> list[Op]:
    """ops without the removed ones; inserted[op] stands in op's place, whether or not op itself is removed."""
    result: list[Op] = []
    for op in ops:
        result += inserted.get(op, ())
        if op not in removed:
            result.append(op)
    return result
