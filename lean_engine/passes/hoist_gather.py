"""hoist_gather: compute only the rows that are sampled.

    logits = gather_rows(linear(rms_norm(h), W), rows)  →  logits = linear(rms_norm(gather_rows(h, rows)), W)

A gather moves above every op whose rows do not mix, as long as nobody else reads that op's output. It stops at the last
layer's attention, so that layer's output projection and MLP, the final norm and the LM head run on R rows, not T.
"""

from __future__ import annotations

from dataclasses import replace

from lean_engine.ir.graph import Graph, Op, TensorType, Value
from lean_engine.ir.ops import OPS


def hoist_gather(graph: Graph) -> Graph:
    while (hoisted := hoist_one(graph)) is not None:
        graph = hoisted
    return graph


def hoist_one(graph: Graph) -> Graph | None:
    """Move gathers above one producer: the first whose every reader gathers the same rows. None: there is none."""
    gathered = {op.inputs[0].name for op in graph.ops if op.kind == "gather_rows"}
    outputs = {v.name for v in graph.outputs}
    for producer in reversed(graph.ops):
        if not OPS[producer.kind].row_inputs or any(v.name in outputs for v in producer.outputs):
            continue
        if not any(v.name in gathered for v in producer.outputs):
            continue
        gathers = [op for v in producer.outputs for op in graph.ops if v in op.inputs]
        if not gathers or not all(op.kind == "gather_rows" and op.inputs[1] == gathers[0].inputs[1] for op in gathers):
            continue
        if len({op.inputs[0].name for op in gathers}) == len(gathers):  # two names for the same rows stay two gathers
            return hoist_above(graph, producer, gathers)
    return None


def hoist_above(graph: Graph, producer: Op, gathers: list[Op]) -> Graph:
    rows = gathers[0].inputs[1]
    at = graph.ops.index(producer)
    gathered = {op.inputs[0].name: op for op in graph.ops if op.kind == "gather_rows" and op.inputs[1] == rows}
    new_ops: list[Op] = []
    inputs = list(producer.inputs)
    for i in OPS[producer.kind].row_inputs:
        x = inputs[i]
        gather = gathered.setdefault(
            x.name, Op("gather_rows", (x, rows), (Value(f"{x.name}.rows", with_rows(x, rows)),))
        )
        if gather not in graph.ops[:at] and gather not in new_ops:
            new_ops.append(gather)  # new, or one that stands further down
        inputs[i] = gather.outputs[0]
    renamed = {op.inputs[0].name: op.outputs[0] for op in gathers}
    results = tuple(renamed.get(v.name, Value(f"{v.name}.rows", with_rows(v, rows))) for v in producer.outputs)
    new_ops.append(replace(producer, inputs=tuple(inputs), outputs=results))
    gone = {*gathers, *new_ops}
    return graph.with_ops([*graph.ops[:at], *new_ops, *(op for op in graph.ops[at + 1 :] if op not in gone)])


def with_rows(value: Value, rows: Value) -> TensorType:
    return TensorType((rows.type.shape[0], *value.type.shape[1:]), value.type.dtype)
