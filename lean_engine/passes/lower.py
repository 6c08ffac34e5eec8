"""lower: op → launch of a named kernel.

Kernels have the names of their ops, but for linear, whose kernel is gemm. A launch says everything a device needs but
addresses: values with symbolic shapes, scalars in the order the kernel declares them, and which outputs take over an
input's storage. The kernel table in runtime/kernels checks each launch when a program is bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lean_engine.ir.graph import Graph, Op, Parameter, Value
from lean_engine.ir.ops import OPS

KERNELS = {"linear": "gemm"}  # op kinds whose kernel has another name
COMPILE_TIME = {"linear": ("dtype",)}  # attributes that the values' types already say


@dataclass(frozen=True, slots=True, eq=False)
class Launch:
    kernel: str
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    scalars: Mapping[str, Any]
    inplace: Mapping[int, int] = field(default_factory=dict)  # output → input whose storage it may take over
    aliases: Mapping[int, int] = field(default_factory=dict)  # output → cache input that it is, updated


@dataclass(frozen=True, slots=True, eq=False)
class Lowered:
    name: str
    inputs: tuple[Value, ...]
    parameters: tuple[Parameter, ...]
    caches: tuple[Value, ...]
    launches: tuple[Launch, ...]
    outputs: tuple[Value, ...]


def lower(graph: Graph) -> Lowered:
    launches = tuple(lower_op(op) for op in graph.ops)
    return Lowered(graph.name, graph.inputs, graph.parameters, graph.caches, launches, graph.outputs)


def lower_op(op: Op) -> Launch:
    spec = OPS[op.kind]
    scalars = {k: v for k, v in op.attrs.items() if k not in COMPILE_TIME.get(op.kind, ())}
    return Launch(KERNELS.get(op.kind, op.kind), op.inputs, op.outputs, scalars, spec.inplace, spec.aliases)
