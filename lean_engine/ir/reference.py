"""What each op means, in plain NumPy: the oracle that passes and kernels are tested against.

Every function takes the op's inputs as arrays and its attributes by name, computes in float64 and returns the outputs
in the op table's order. Slow and obvious on purpose. Caches are updated in place, as on a device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lean_engine.dtypes import numpy_dtype
from lean_engine.ir.graph import Graph

Array = NDArray[Any]
Real = NDArray[np.float64]


def real(x: Array) -> Real:
    return np.asarray(x).astype(np.float64)


def embedding(ids: Array, table: Array, scale: float) -> Array:
    return real(table)[ids] * scale


def rms_norm(x: Array, weight: Array, eps: float, unit_offset: bool) -> Array:
    heads = real(x).reshape(len(x), -1, len(weight))
    normed = heads / np.sqrt((heads**2).mean(axis=-1, keepdims=True) + eps)
    return (normed * (real(weight) + (1.0 if unit_offset else 0.0))).reshape(x.shape)


def add_rms_norm(x: Array, residual: Array, weight: Array, eps: float, unit_offset: bool) -> tuple[Array, Array]:
    total = real(x) + real(residual)
    return rms_norm(total, weight, eps, unit_offset), total


def linear(x: Array, weight: Array, bias: Array | None = None, dtype: str = "float32") -> Array:
    y = real(x) @ real(weight).T
    return y if bias is None else y + real(bias)


def slice_columns(x: Array, start: int, stop: int) -> Array:
    return x[:, start:stop]


def rope(x: Array, positions: Array, table: Array, head_dim: int) -> Array:
    """Rotate the first rotary_dim columns of each head: element i pairs with element i + rotary_dim / 2."""
    half = table.shape[1] // 2
    cos, sin = real(table[positions, :half])[:, None], real(table[positions, half:])[:, None]
    heads = real(x).reshape(len(x), -1, head_dim)
    left, right = heads[..., :half].copy(), heads[..., half : 2 * half].copy()
    heads[..., :half] = left * cos - right * sin
    heads[..., half : 2 * half] = right * cos + left * sin
    return heads.reshape(x.shape)


def write_kv(k: Array, v: Array, slots: Array, k_cache: Array, v_cache: Array) -> tuple[Array, Array]:
    """Token t goes to block slots[t] // S, place slots[t] % S; slot -1 writes nowhere."""
    _blocks, num_heads, block_size, head_dim = k_cache.shape
    for row, slot in enumerate(slots):
        if slot >= 0:
            k_cache[slot // block_size, :, slot % block_size] = k[row].reshape(num_heads, head_dim)
            v_cache[slot // block_size, :, slot % block_size] = v[row].reshape(num_heads, head_dim)
    return k_cache, v_cache


def paged_attention(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    block_tables: Array,
    cu_seqlens_q: Array,
    seq_lens: Array,
    head_dim: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> Array:
    """Request b's queries are rows cu_seqlens_q[b]:cu_seqlens_q[b + 1], the last tokens of its seq_lens[b]."""
    out = np.zeros(q.shape)
    num_kv_heads, block_size = k_cache.shape[1:3]
    group = q.shape[1] // head_dim // num_kv_heads
    for b, length in enumerate(seq_lens):
        first, last = cu_seqlens_q[b], cu_seqlens_q[b + 1]
        for row in range(first, last if length else first):  # a request of length 0 is padding: zeros
            position = length - (last - row)
            start = 0 if window is None else max(0, position - window + 1)
            seen = np.arange(start, position + 1)
            blocks = block_tables[b, seen // block_size]
            for head in range(q.shape[1] // head_dim):
                columns = slice(head * head_dim, (head + 1) * head_dim)
                k = real(k_cache[blocks, head // group, seen % block_size])
                v = real(v_cache[blocks, head // group, seen % block_size])
                scores = softcap_of(k @ real(q[row, columns]) * scale, softcap)
                weights = np.exp(scores - scores.max())
                out[row, columns] = weights / weights.sum() @ v
    return out


def softcap_of(x: Real, cap: float | None) -> Real:
    return x if cap is None else cap * np.tanh(x / cap)


def qk_norm_rope_write_kv(
    qkv: Array,
    positions: Array,
    slots: Array,
    table: Array,
    k_cache: Array,
    v_cache: Array,
    q_norm: Array | None = None,
    k_norm: Array | None = None,
    *,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    eps: float,
    unit_offset: bool,
) -> tuple[Array, Array, Array]:
    q_end, k_end = num_q_heads * head_dim, (num_q_heads + num_kv_heads) * head_dim
    q, k, v = qkv[:, :q_end], qkv[:, q_end:k_end], qkv[:, k_end:]
    if q_norm is not None and k_norm is not None:
        q, k = rms_norm(q, q_norm, eps, unit_offset), rms_norm(k, k_norm, eps, unit_offset)
    q, k = rope(q, positions, table, head_dim), rope(k, positions, table, head_dim)
    return (q, *write_kv(k, v, slots, k_cache, v_cache))


def silu(x: Array) -> Array:
    return real(x) / (1.0 + np.exp(-real(x)))


def gelu_tanh(x: Array) -> Array:
    """The tanh approximation of GELU (Hendrycks and Gimpel 2016)."""
    y = real(x)
    return 0.5 * y * (1.0 + np.tanh(np.sqrt(2.0 / np.pi) * (y + 0.044715 * y**3)))


ACTIVATIONS: Mapping[str, Callable[[Array], Array]] = {"silu": silu, "gelu_tanh": gelu_tanh}


def act_and_mul(gate_up: Array, activation: str) -> Array:
    half = gate_up.shape[1] // 2
    return ACTIVATIONS[activation](gate_up[:, :half]) * real(gate_up[:, half:])


def mul(a: Array, b: Array) -> Array:
    return real(a) * real(b)


def add(a: Array, b: Array) -> Array:
    return real(a) + real(b)


def softcap(x: Array, cap: float) -> Array:
    return softcap_of(real(x), cap)


def gather_rows(x: Array, rows: Array) -> Array:
    return x[rows]


def moe_route(logits: Array, top_k: int, normalize: bool) -> tuple[Array, Array]:
    """Softmax over all experts, the top_k largest (equal ones: lowest id first), rescaled to sum 1 if normalize."""
    p = np.exp(real(logits) - real(logits).max(axis=-1, keepdims=True))
    p /= p.sum(axis=-1, keepdims=True)
    ids = np.argsort(-p, axis=-1, kind="stable")[:, :top_k]
    weights = np.take_along_axis(p, ids, axis=-1)
    return weights / weights.sum(axis=-1, keepdims=True) if normalize else weights, ids.astype(np.int32)


def moe_experts(x: Array, weights: Array, ids: Array, gate_up: Array, down: Array, activation: str) -> Array:
    out = np.zeros(x.shape)
    for row in range(len(x)):
        for weight, expert in zip(weights[row], ids[row], strict=True):
            hidden = act_and_mul((real(gate_up[expert]) @ real(x[row]))[None], activation)[0]
            out[row] += weight * (real(down[expert]) @ hidden)
    return out


OPS: Mapping[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        embedding, rms_norm, add_rms_norm, linear, slice_columns, rope, write_kv, paged_attention,
        qk_norm_rope_write_kv, silu, gelu_tanh, act_and_mul, mul, add, softcap, gather_rows, moe_route, moe_experts,
    )
}  # fmt: skip


def run(graph: Graph, values: dict[str, Array]) -> dict[str, Array]:
    """Interpret a graph. values: an array for each input, parameter and cache. Returns every value by name."""
    values = dict(values)
    for op in graph.ops:
        results = OPS[op.kind](*(values[v.name] for v in op.inputs), **op.attrs)
        for value, result in zip(op.outputs, results if isinstance(results, tuple) else (results,), strict=True):
            values[value.name] = np.asarray(result).astype(numpy_dtype(value.type.dtype), copy=False)
    return values
