"""The op table: for each kind its attributes, its shape rule, and the properties that passes ask for.

Shapes in the table's comments use the README's letters; [T, Q·D] is Q heads of D columns side by side. What an op
computes is defined by ir/reference.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lean_engine.errors import VerifyError
from lean_engine.ir.graph import Dim, Dims, Op, TensorType, evaluate

Types = tuple[TensorType, ...]
Rule = Callable[[Types, Mapping[str, Any]], Types]


@dataclass(frozen=True, slots=True)
class OpSpec:
    kind: str
    num_inputs: tuple[int, ...]  # the counts that are allowed (an optional bias is the last input)
    attrs: tuple[str, ...]  # exactly these
    infer: Rule
    row_inputs: tuple[int, ...] = ()  # row i of the output depends on row i of these inputs and on nothing else's rows
    inplace: Mapping[int, int] = field(default_factory=dict)  # output → input whose storage it may take over
    aliases: Mapping[int, int] = field(default_factory=dict)  # output → cache input that it is, updated


def require(condition: bool, kind: str, types: Types, wanted: str) -> None:
    if not condition:
        found = ", ".join(f"{t.dtype}{list(t.shape)}" for t in types)
        raise VerifyError(f"{kind}: inputs are {found}; must be {wanted}")


def matrix(rows: Dim, columns: int, dtype: str) -> TensorType:
    return TensorType((rows, columns), dtype)


def infer_embedding(types: Types, attrs: Mapping[str, Any]) -> Types:
    ids, table = types
    require(len(ids.shape) == 1 and len(table.shape) == 2, "embedding", types, "ids [T], table [V, H]")
    return (TensorType((ids.shape[0], table.shape[1]), table.dtype),)


def infer_rms_norm(types: Types, attrs: Mapping[str, Any]) -> Types:
    x, weight = types
    is_ok = len(x.shape) == 2 and len(weight.shape) == 1 and int(x.shape[1]) % int(weight.shape[0]) == 0
    require(is_ok, "rms_norm", types, "x [T, n·C], weight [C]")
    return (x,)


def infer_add_rms_norm(types: Types, attrs: Mapping[str, Any]) -> Types:
    x, residual, weight = types
    require(
        x == residual and weight.shape == x.shape[1:], "add_rms_norm", types, "x [T, H], residual [T, H], weight [H]"
    )
    return (x, x)


def infer_linear(types: Types, attrs: Mapping[str, Any]) -> Types:
    x, weight = types[0], types[1]
    is_ok = len(x.shape) == len(weight.shape) == 2 and x.shape[1] == weight.shape[1]
    require(
        is_ok and all(b.shape == weight.shape[:1] for b in types[2:]), "linear", types, "x [T, C], w [O, C], bias [O]"
    )
    return (TensorType((x.shape[0], weight.shape[0]), attrs["dtype"]),)


def infer_slice_columns(types: Types, attrs: Mapping[str, Any]) -> Types:
    (x,) = types
    start, stop = attrs["start"], attrs["stop"]
    require(len(x.shape) == 2 and 0 <= start < stop <= int(x.shape[1]), "slice_columns", types, f"x [T, ≥ {stop}]")
    return (matrix(x.shape[0], stop - start, x.dtype),)


def infer_rope(types: Types, attrs: Mapping[str, Any]) -> Types:
    x, positions, table = types
    head_dim = attrs["head_dim"]
    is_ok = len(x.shape) == 2 and int(x.shape[1]) % head_dim == 0 and positions.shape == x.shape[:1]
    require(is_ok and int(table.shape[1]) <= head_dim, "rope", types, "x [T, n·D], positions [T], table [P, ≤ D]")
    return (x,)


def infer_write_kv(types: Types, attrs: Mapping[str, Any]) -> Types:
    k, v, slots, k_cache, v_cache = types
    columns = int(k_cache.shape[1]) * int(k_cache.shape[3])
    is_ok = k == v and k.shape[1] == columns and slots.shape == k.shape[:1] and k_cache == v_cache
    require(is_ok, "write_kv", types, "k and v [T, K·D], slots [T], caches [N, K, S, D]")
    return (k_cache, v_cache)


def infer_paged_attention(types: Types, attrs: Mapping[str, Any]) -> Types:
    q, k_cache, v_cache, tables, cu_seqlens, seq_lens = types
    group_columns = int(k_cache.shape[1]) * attrs["head_dim"]
    is_ok = k_cache == v_cache and k_cache.shape[3] == attrs["head_dim"] and int(q.shape[1]) % group_columns == 0
    is_ok = is_ok and (tables.shape, cu_seqlens.shape, seq_lens.shape) == (("B", "M"), ("B+1",), ("B",))
    require(is_ok, "paged_attention", types, "q [T, Q·D], caches [N, K, S, D], tables [B, M], cu [B+1], lens [B]")
    return (q,)


def infer_qk_norm_rope_write_kv(types: Types, attrs: Mapping[str, Any]) -> Types:
    qkv, positions, slots, _table, k_cache, v_cache = types[:6]
    num_q, num_kv, head_dim = attrs["num_q_heads"], attrs["num_kv_heads"], attrs["head_dim"]
    is_ok = qkv.shape[1] == (num_q + 2 * num_kv) * head_dim and positions.shape == slots.shape == qkv.shape[:1]
    is_ok = is_ok and (k_cache.shape[1], k_cache.shape[3]) == (num_kv, head_dim)
    is_ok = is_ok and all(w.shape == (head_dim,) for w in types[6:])
    require(is_ok, "qk_norm_rope_write_kv", types, "qkv [T, (Q+2K)·D], positions, slots [T], table, caches, norms [D]")
    return (matrix(qkv.shape[0], num_q * head_dim, qkv.dtype), k_cache, v_cache)


def infer_unary(types: Types, attrs: Mapping[str, Any]) -> Types:
    require(len(types[0].shape) == 2, "unary op", types, "x [T, C]")
    return types


def infer_binary(types: Types, attrs: Mapping[str, Any]) -> Types:
    require(types[0] == types[1] and len(types[0].shape) == 2, "binary op", types, "two of [T, C]")
    return types[:1]


def infer_act_and_mul(types: Types, attrs: Mapping[str, Any]) -> Types:
    (x,) = types
    require(len(x.shape) == 2 and int(x.shape[1]) % 2 == 0, "act_and_mul", types, "gate beside up [T, 2·I]")
    return (matrix(x.shape[0], int(x.shape[1]) // 2, x.dtype),)


def infer_gather_rows(types: Types, attrs: Mapping[str, Any]) -> Types:
    x, rows = types
    require(len(x.shape) == 2 and len(rows.shape) == 1, "gather_rows", types, "x [T, C], rows [R]")
    return (TensorType((rows.shape[0], x.shape[1]), x.dtype),)


def infer_moe_route(types: Types, attrs: Mapping[str, Any]) -> Types:
    (logits,) = types
    top_k = attrs["top_k"]
    require(len(logits.shape) == 2 and top_k <= int(logits.shape[1]), "moe_route", types, f"logits [T, E ≥ {top_k}]")
    return (matrix(logits.shape[0], top_k, "float32"), matrix(logits.shape[0], top_k, "int32"))


def infer_moe_experts(types: Types, attrs: Mapping[str, Any]) -> Types:
    x, weights, ids, gate_up, down = types
    is_ok = weights.shape == ids.shape and gate_up.shape[2] == down.shape[1] == x.shape[1]
    is_ok = is_ok and gate_up.shape[0] == down.shape[0] and int(gate_up.shape[1]) == 2 * int(down.shape[2])
    require(is_ok, "moe_experts", types, "x [T, H], weights, ids [T, k], gate_up [E, 2·I, H], down [E, H, I]")
    return (x,)


OPS = {
    spec.kind: spec
    for spec in (
        # the ops a family file writes
        OpSpec("embedding", (2,), ("scale",), infer_embedding),
        OpSpec("rms_norm", (2,), ("eps", "unit_offset"), infer_rms_norm, row_inputs=(0,)),
        OpSpec("linear", (2, 3), ("dtype",), infer_linear, row_inputs=(0,)),
        OpSpec("slice_columns", (1,), ("start", "stop"), infer_slice_columns, row_inputs=(0,)),
        OpSpec("rope", (3,), ("head_dim",), infer_rope),
        OpSpec("write_kv", (5,), (), infer_write_kv, aliases={0: 3, 1: 4}),
        OpSpec("paged_attention", (6,), ("head_dim", "scale", "window", "softcap"), infer_paged_attention),
        OpSpec("silu", (1,), (), infer_unary, row_inputs=(0,), inplace={0: 0}),
        OpSpec("gelu_tanh", (1,), (), infer_unary, row_inputs=(0,), inplace={0: 0}),
        OpSpec("mul", (2,), (), infer_binary, row_inputs=(0, 1), inplace={0: 0}),
        OpSpec("add", (2,), (), infer_binary, row_inputs=(0, 1), inplace={0: 0}),
        OpSpec("softcap", (1,), ("cap",), infer_unary, row_inputs=(0,), inplace={0: 0}),
        OpSpec("gather_rows", (2,), (), infer_gather_rows),
        OpSpec("moe_route", (1,), ("top_k", "normalize"), infer_moe_route, row_inputs=(0,)),
        OpSpec("moe_experts", (5,), ("activation",), infer_moe_experts, row_inputs=(0, 1, 2)),
        # the ops that passes make
        OpSpec(
            "add_rms_norm", (3,), ("eps", "unit_offset"), infer_add_rms_norm, row_inputs=(0, 1), inplace={0: 0, 1: 1}
        ),
        OpSpec(
            "qk_norm_rope_write_kv",
            (6, 8),  # the last two: weights of the q and k norms
            ("num_q_heads", "num_kv_heads", "head_dim", "eps", "unit_offset"),
            infer_qk_norm_rope_write_kv,
            aliases={1: 4, 2: 5},
        ),
        OpSpec("act_and_mul", (1,), ("activation",), infer_act_and_mul, row_inputs=(0,)),
    )
}


def infer_types(kind: str, inputs: Types, attrs: Mapping[str, Any]) -> Types:
    """Check an op's inputs and attributes; return its outputs' types. VerifyError says what is wrong."""
    spec = OPS.get(kind)
    if spec is None:
        raise VerifyError(f"unknown op {kind!r}; known: {', '.join(OPS)}")
    if len(inputs) not in spec.num_inputs:
        raise VerifyError(f"{kind} has {len(inputs)} inputs, must have {' or '.join(map(str, spec.num_inputs))}")
    if set(attrs) != set(spec.attrs):
        raise VerifyError(f"{kind} has attributes {sorted(attrs)}, must have {sorted(spec.attrs)}")
    return spec.infer(inputs, attrs)


def num_flops(op: Op, dims: Dims) -> int:
    """Multiply-adds counted as two; only matrix products count. Attention is left out: it depends on the lengths."""
    rows = evaluate(op.inputs[0].type.shape[0], dims)
    if op.kind == "linear":
        return 2 * rows * op.inputs[1].columns * op.outputs[0].columns
    if op.kind == "moe_experts":
        hidden, intermediate = op.inputs[0].columns, op.inputs[4].columns
        return 2 * rows * op.inputs[2].columns * 3 * hidden * intermediate
    return 0
