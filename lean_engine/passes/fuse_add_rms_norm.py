"""fuse_add_rms_norm: a residual add joins the RMSNorm that reads the sum.

    s = add(residual, x), y = rms_norm(s, w)  →  y, s = add_rms_norm(x, residual, w)

The sum is written over the residual, which saves one pass over the activations. Norms per head are left alone.
"""

from __future__ import annotations

from lean_engine.ir.graph import Graph, Op, replace_ops


def fuse_add_rms_norm(graph: Graph) -> Graph:
    users = graph.users()
    inserted: dict[Op, list[Op]] = {}
    removed: set[Op] = set()
    for add in graph.ops:
        if add.kind != "add":
            continue
        total = add.outputs[0]
        norms = [
            op for op in users.get(total.name, []) if op.kind == "rms_norm" and op.inputs[1].columns == total.columns
        ]
        if not norms:
            continue
        residual, x = add.inputs
        norm = norms[0]
        inserted[add] = [Op("add_rms_norm", (x, residual, norm.inputs[1]), (norm.outputs[0], total), norm.attrs)]
        removed.update((add, norm))
    return graph.with_ops(replace_ops(graph.ops, removed, inserted))
