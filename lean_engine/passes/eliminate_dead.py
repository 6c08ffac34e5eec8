"""eliminate_dead: drop ops whose outputs nobody reads, then parameters, inputs and caches that no op reads.

An op that updates a cache lives through the attention that reads the updated version.
"""

from __future__ import annotations

from dataclasses import replace

from lean_engine.ir.graph import Graph, Op


def eliminate_dead(graph: Graph) -> Graph:
    live = {v.name for v in graph.outputs}
    kept: list[Op] = []
    for op in reversed(graph.ops):
        if any(v.name in live for v in op.outputs):
            kept.append(op)
            live.update(v.name for v in op.inputs)
    return replace(
        graph,
        ops=tuple(reversed(kept)),
        parameters=tuple(p for p in graph.parameters if p.value.name in live),
        inputs=tuple(v for v in graph.inputs if v.name in live),
        caches=tuple(v for v in graph.caches if v.name in live),
    )
