"""The rules of a well-formed graph, checked after every pass.

R1  Every value is defined once.
R2  An op reads only values defined before it.
R3  An op's kind, number of inputs and attributes are those of the op table.
R4  An op's output types follow from its inputs by the op table's rule.
R5  A cache is threaded: a version that an op has updated is not read by a later op.
R6  Every graph output is defined.
R7  A parameter's type has the shape of its source.
R8  A shape holds positive numbers and known letters only.
"""

from __future__ import annotations

from lean_engine.errors import VerifyError
from lean_engine.ir.graph import Graph, Op, Value, is_dim
from lean_engine.ir.ops import OPS, infer_types


def verify(graph: Graph, stage: str) -> Graph:
    """Return the graph; VerifyError names the stage (a pass), the rule and the op."""
    defined: set[str] = set()
    stale: set[str] = set()
    for value in (*graph.inputs, *(p.value for p in graph.parameters), *graph.caches):
        define(value, defined, stage)
    for parameter in graph.parameters:
        if parameter.value.type.shape != parameter.source.shape:
            fail(
                stage, 7, f"{parameter.value.name} is {parameter.value.type.shape}, its source {parameter.source.shape}"
            )
    for op in graph.ops:
        verify_op(op, defined, stale, stage)
    for value in graph.outputs:
        if value.name not in defined:
            fail(stage, 6, f"output {value.name} is not defined")
    return graph


def verify_op(op: Op, defined: set[str], stale: set[str], stage: str) -> None:
    for value in op.inputs:
        if value.name not in defined:
            fail(stage, 2, f"{label(op)} reads {value.name} before it is defined")
        if value.name in stale:
            fail(stage, 5, f"{label(op)} reads {value.name}, which an earlier op has updated")
    try:
        types = infer_types(op.kind, tuple(v.type for v in op.inputs), op.attrs)
    except VerifyError as error:
        fail(stage, 3, str(error))
    if types != tuple(v.type for v in op.outputs):
        fail(stage, 4, f"{label(op)}: declared {[v.type for v in op.outputs]}, inferred {list(types)}")
    stale.update(op.inputs[i].name for i in OPS[op.kind].aliases.values())
    for value in op.outputs:
        define(value, defined, stage)


def label(op: Op) -> str:
    return f"{op.kind} → {', '.join(v.name for v in op.outputs)}"


def define(value: Value, defined: set[str], stage: str) -> None:
    if value.name in defined:
        fail(stage, 1, f"{value.name} is defined twice")
    for dim in value.type.shape:
        if not is_dim(dim):
            fail(stage, 8, f"{value.name} has dimension {dim!r}")
    defined.add(value.name)


def fail(stage: str, rule: int, message: str) -> None:
    raise VerifyError(f"after {stage}: R{rule}: {message}")
