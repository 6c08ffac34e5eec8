"""The printed form of a graph: stable, one op a line, fit for golden files and diffs.

name: f32[T, 576] = rms_norm(x, weight) {eps=1e-05}
"""

from __future__ import annotations

from typing import Any

from lean_engine import dtypes
from lean_engine.ir.graph import Graph, Op, TensorType, Value


def format_type(tensor_type: TensorType) -> str:
    return f"{dtypes.dtype(tensor_type.dtype).short}[{', '.join(map(str, tensor_type.shape))}]"


def format_value(value: Value) -> str:
    return f"{value.name}: {format_type(value.type)}"


def format_attr(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def format_op(op: Op) -> str:
    attrs = ", ".join(f"{k}={format_attr(v)}" for k, v in op.attrs.items() if v is not None)
    line = f"{', '.join(map(format_value, op.outputs))} = {op.kind}({', '.join(v.name for v in op.inputs)})"
    return f"{line} {{{attrs}}}" if attrs else line


def format_graph(graph: Graph) -> str:
    """The whole graph as text, ending in a newline."""
    lines = [f"graph {graph.name}", "inputs"]
    lines += [f"  {format_value(v)}" for v in graph.inputs]
    lines += ["parameters"]
    lines += [f"  {format_value(p.value)} = {p.source}" for p in graph.parameters]
    lines += ["caches"]
    lines += [f"  {format_value(v)}" for v in graph.caches]
    lines += ["ops"]
    lines += [f"  {format_op(op)}" for op in graph.ops]
    lines += ["outputs", f"  {', '.join(v.name for v in graph.outputs)}"]
    return "\n".join(lines) + "\n"
