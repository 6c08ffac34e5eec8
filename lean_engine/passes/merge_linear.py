"""merge_linear: projections of the same input become one.

    q = linear(x, Wq), k = linear(x, Wk), v = linear(x, Wv)
 →  m = linear(x, [Wq; Wk; Wv]), q = slice_columns(m, …), k = …, v = …

One large product streams its weights better than three small ones; the weights are concatenated when they are loaded.
Only linears that all have a bias, or all have none, and whose weights nobody else reads, are merged.
"""

from __future__ import annotations

from lean_engine.ir.graph import Graph, Op, Parameter, TensorType, Value, replace_ops
from lean_engine.ir.sources import concat


def merge_linear(graph: Graph) -> Graph:
    users = graph.users()
    groups: dict[tuple[str, int, str], list[Op]] = {}
    for op in graph.ops:
        if op.kind == "linear" and all(len(users[v.name]) == 1 for v in op.inputs[1:]):
            groups.setdefault((op.inputs[0].name, len(op.inputs), op.attrs["dtype"]), []).append(op)
    inserted: dict[Op, list[Op]] = {}
    merged_parameters: dict[str, Parameter] = {}
    removed: set[Op] = set()
    for group in groups.values():
        if len(group) < 2:
            continue
        weights = [merge_parameters(graph, [op.inputs[i] for op in group]) for i in range(1, len(group[0].inputs))]
        inserted[group[0]] = merged_ops(group, [p.value for p in weights])
        removed.update(group)
        for i, parameter in enumerate(weights):
            merged_parameters[group[0].inputs[1 + i].name] = parameter
    kept = [merged_parameters.get(p.value.name, p) for p in graph.parameters]
    gone = {v.name for op in removed for v in op.inputs[1:]}
    return graph.with_ops(
        replace_ops(graph.ops, removed, inserted),
        [p for p in kept if p.value.name not in gone],
    )


def merge_parameters(graph: Graph, values: list[Value]) -> Parameter:
    parameters = [p for v in values if (p := graph.parameter(v.name)) is not None]
    source = concat(tuple(p.source for p in parameters))
    value = Value(merge_names([v.name for v in values]), TensorType(source.shape, values[0].type.dtype))
    return Parameter(value, source)


def merge_names(names: list[str]) -> str:
    """a.q.w, a.k.w, a.v.w → a.{q,k,v}.w"""
    head = common_prefix(names)
    tail = common_prefix([name[len(head) :][::-1] for name in names])[::-1]
    middles = [name[len(head) : len(name) - len(tail)] for name in names]
    return f"{head}{{{','.join(middles)}}}{tail}"


def common_prefix(texts: list[str]) -> str:
    length = 0
    for letters in zip(*texts, strict=False):
        if len(set(letters)) > 1:
            break
        length += 1
    return texts[0][:length]


def merged_ops(group: list[Op], weights: list[Value]) -> list[Op]:
    x = group[0].inputs[0]
    columns = [op.outputs[0].columns for op in group]
    out_type = TensorType((x.type.shape[0], sum(columns)), group[0].outputs[0].type.dtype)
    merged = Value(merge_names([op.outputs[0].name for op in group]), out_type)
    ops = [Op("linear", (x, *weights), (merged,), group[0].attrs)]
    start = 0
    for op, width in zip(group, columns, strict=True):
        ops.append(Op("slice_columns", (merged,), op.outputs, {"start": start, "stop": start + width}))
        start += width
    return ops
