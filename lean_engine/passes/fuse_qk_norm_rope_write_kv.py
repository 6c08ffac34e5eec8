"""fuse_qk_norm_rope_write_kv: from the merged projection to roped q and written K and V in one op.

    q, k, v = slice_columns(qkv, …); q, k = rms_norm(q), rms_norm(k)?; q, k = rope(q), rope(k); caches = write_kv(k, v)
 →  q, k_cache, v_cache = qk_norm_rope_write_kv(qkv, positions, slots, table, k_cache, v_cache[, q norm, k norm])

Three to six passes over q, k and v become one. Needs merge_linear's layout: q, then k, then v, side by side.
"""

from __future__ import annotations

from dataclasses import dataclass

from lean_engine.ir.graph import Graph, Op, Value, replace_ops


@dataclass(frozen=True, slots=True)
class Head:
    """The ops between the merged projection and rope, for q or k."""

    slice: Op
    norm: Op | None
    rope: Op

    @property
    def ops(self) -> list[Op]:
        return [op for op in (self.slice, self.norm, self.rope) if op is not None]


def fuse_qk_norm_rope_write_kv(graph: Graph) -> Graph:
    producers, users, private = graph.producers(), graph.users(), graph.private_names()
    inserted: dict[Op, list[Op]] = {}
    removed: set[Op] = set()
    for write in graph.ops:
        if write.kind != "write_kv":
            continue
        attention = next((op for op in users.get(write.outputs[0].name, []) if op.kind == "paged_attention"), None)
        v = producers.get(write.inputs[1].name)
        if attention is None or v is None or write.inputs[1].name not in private:
            continue
        q, k = match_head(attention.inputs[0], producers, private), match_head(write.inputs[0], producers, private)
        if q is None or k is None or not is_merged(q, k, v, attention.attrs["head_dim"]):
            continue
        inserted[write] = [fused_op(q, k, v, write, attention.attrs["head_dim"])]
        removed.update(q.ops, k.ops, {v, write})
    return graph.with_ops(replace_ops(graph.ops, removed, inserted))


def match_head(value: Value, producers: dict[str, Op], private: set[str]) -> Head | None:
    """Walk up from the rope's output to the slice; None unless each value on the way has one reader."""
    rope = producers.get(value.name)
    if rope is None or rope.kind != "rope":
        return None
    chain = [value, rope.inputs[0]]
    above = producers.get(rope.inputs[0].name)
    norm = above if above is not None and above.kind == "rms_norm" else None
    if norm is not None:
        chain.append(norm.inputs[0])
        above = producers.get(norm.inputs[0].name)
    if above is None or above.kind != "slice_columns" or not {v.name for v in chain} <= private:
        return None
    return Head(above, norm, rope)


def is_merged(q: Head, k: Head, v: Op, head_dim: int) -> bool:
    """Whether q, k and v are the neighbouring columns of one matrix and q and k are treated alike."""
    qkv = q.slice.inputs[0]
    if v.kind != "slice_columns" or not (k.slice.inputs[0] == v.inputs[0] == qkv):
        return False
    bounds = [(op.attrs["start"], op.attrs["stop"]) for op in (q.slice, k.slice, v)]
    is_adjacent = (bounds[0][0], bounds[2][1]) == (0, qkv.columns)
    is_adjacent = is_adjacent and bounds[0][1] == bounds[1][0] and bounds[1][1] == bounds[2][0]
    has_same_rope = q.rope.inputs[1:] == k.rope.inputs[1:]
    if q.norm is None or k.norm is None:
        return is_adjacent and has_same_rope and q.norm is k.norm
    norms_heads = q.norm.inputs[1].columns == k.norm.inputs[1].columns == head_dim
    return is_adjacent and has_same_rope and norms_heads and q.norm.attrs == k.norm.attrs


def fused_op(q: Head, k: Head, v: Op, write: Op, head_dim: int) -> Op:
    norm_attrs = q.norm.attrs if q.norm is not None else {"eps": 0.0, "unit_offset": False}
    norm_weights = (q.norm.inputs[1], k.norm.inputs[1]) if q.norm is not None and k.norm is not None else ()
    _k, _v, slots, k_cache, v_cache = write.inputs
    positions, table = q.rope.inputs[1:]
    attrs = {
        "num_q_heads": q.slice.outputs[0].columns // head_dim,
        "num_kv_heads": k.slice.outputs[0].columns // head_dim,
        "head_dim": head_dim,
        **norm_attrs,
    }
    inputs = (q.slice.inputs[0], positions, slots, table, k_cache, v_cache, *norm_weights)
    return Op("qk_norm_rope_write_kv", inputs, (q.rope.outputs[0], *write.outputs), attrs)
