"""fuse_act_and_mul: the gated product of an MLP in one op.

    g, u = slice_columns(m, …), slice_columns(m, …); p = mul(silu(g), u)  →  p = act_and_mul(m)

Needs merge_linear's layout: gate, then up, side by side.
"""

from __future__ import annotations

from lean_engine.ir.graph import Graph, Op, replace_ops

ACTIVATIONS = ("silu", "gelu_tanh")


def fuse_act_and_mul(graph: Graph) -> Graph:
    producers, private = graph.producers(), graph.private_names()
    inserted: dict[Op, list[Op]] = {}
    removed: set[Op] = set()
    for mul in graph.ops:
        if mul.kind != "mul":
            continue
        activation = producers.get(mul.inputs[0].name)
        up = producers.get(mul.inputs[1].name)
        if activation is None or up is None or activation.kind not in ACTIVATIONS:
            continue
        gate = producers.get(activation.inputs[0].name)
        if gate is None or not are_halves(gate, up):
            continue
        if not {activation.outputs[0].name, gate.outputs[0].name, up.outputs[0].name} <= private:
            continue
        inserted[mul] = [Op("act_and_mul", gate.inputs, mul.outputs, {"activation": activation.kind})]
        removed.update((gate, up, activation, mul))
    return graph.with_ops(replace_ops(graph.ops, removed, inserted))


def are_halves(gate: Op, up: Op) -> bool:
    if not (gate.kind == up.kind == "slice_columns" and gate.inputs == up.inputs):
        return False
    columns = gate.inputs[0].columns
    half = columns // 2
    return (gate.attrs["start"], gate.attrs["stop"], up.attrs["start"], up.attrs["stop"]) == (0, half, half, columns)
