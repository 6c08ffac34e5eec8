"""The sub-graphs that decoder families share, and the Builder they are written on.

A family file calls these to build the plain, unfused graph: one op per line of the paper's formula. Fusion, merging of
projections and computing logits for sampled rows only are left to passes/.
"""

from __future__ import annotations

from typing import Any

from lean_engine.config import ModelConfig, RopeConfig
from lean_engine.ir.graph import Dim, Graph, Op, Parameter, TensorType, Value
from lean_engine.ir.ops import infer_types
from lean_engine.ir.sources import Concat, RopeTable, Rows, Source, Stack, Tensor


class Builder:
    """Collects values and ops; each op's output types come from the op table.

    Args:
        config: the model.
        dtype: element type of weights, activations and KV cache. Logits are float32.
        max_positions: positions the rope tables cover (the engine's max_model_len).
        unit_offset: RMSNorm multiplies by 1 + weight (Gemma).
    """

    def __init__(self, config: ModelConfig, dtype: str, max_positions: int, unit_offset: bool = False) -> None:
        self.config = config
        self.dtype = dtype
        self.max_positions = max_positions
        self.unit_offset = unit_offset
        self._inputs: dict[str, Value] = {}
        self._parameters: dict[str, Parameter] = {}
        self._caches: list[Value] = []
        self._ops: list[Op] = []

    def input(self, name: str, *shape: Dim) -> Value:
        """An int32 array of the step; the same name is the same value."""
        return self._inputs.setdefault(name, Value(name, TensorType(shape, "int32")))

    def parameter(self, name: str, source: Source, dtype: str | None = None) -> Value:
        """A weight; the same name is the same value (tied embeddings, rope tables)."""
        if name not in self._parameters:
            value = Value(name, TensorType(source.shape, dtype or self.dtype))
            self._parameters[name] = Parameter(value, source)
        return self._parameters[name].value

    def weight(self, name: str, *shape: int) -> Value:
        """A weight that is one tensor of the checkpoint."""
        return self.parameter(name, Tensor(name, shape))

    def cache(self, name: str) -> Value:
        shape: tuple[Dim, ...] = ("N", self.config.num_kv_heads, "S", self.config.head_dim)
        self._caches.append(Value(name, TensorType(shape, self.dtype)))
        return self._caches[-1]

    def ops(self, kind: str, names: tuple[str, ...], *inputs: Value, **attrs: Any) -> tuple[Value, ...]:
        types = infer_types(kind, tuple(v.type for v in inputs), attrs)
        outputs = tuple(Value(name, t) for name, t in zip(names, types, strict=True))
        self._ops.append(Op(kind, inputs, outputs, attrs))
        return outputs

    def op(self, kind: str, name: str, *inputs: Value, **attrs: Any) -> Value:
        """Append an op with one output."""
        return self.ops(kind, (name,), *inputs, **attrs)[0]

    def graph(self, *outputs: Value) -> Graph:
        return Graph(
            self.config.model_type,
            tuple(self._inputs.values()),
            tuple(self._parameters.values()),
            tuple(self._caches),
            tuple(self._ops),
            outputs,
        )


def short(name: str) -> str:
    """The name of an activation: its module's, without the common prefix."""
    return name.removeprefix("model.")


def embedding(b: Builder, scale: float = 1.0) -> Value:
    """Token ids → [T, H]."""
    table = b.weight("model.embed_tokens.weight", b.config.vocab_size, b.config.hidden_size)
    return b.op("embedding", "embed_tokens", b.input("input_ids", "T"), table, scale=scale)


def rms_norm(b: Builder, x: Value, module: str, width: int | None = None) -> Value:
    """RMSNorm over the row, or over each head where width is head_dim."""
    weight = b.weight(f"{module}.weight", width or x.columns)
    return b.op("rms_norm", short(module), x, weight, eps=b.config.rms_norm_eps, unit_offset=b.unit_offset)


def linear(b: Builder, x: Value, module: str, num_out: int, bias: bool = False, rows: Rows | None = None) -> Value:
    """x·Wᵀ (+ bias). rows: the weight is a part of a merged matrix of the checkpoint; module then only names it."""
    name = f"{module}.weight"
    weight = b.parameter(name, rows) if rows else b.weight(name, num_out, x.columns)
    inputs = (x, weight, b.weight(f"{module}.bias", num_out)) if bias else (x, weight)
    return b.op("linear", short(module), *inputs, dtype=b.dtype)


def rope(b: Builder, x: Value, kind: RopeConfig, table_name: str) -> Value:
    table = b.parameter(table_name, RopeTable(kind, b.max_positions), "float32")
    return b.op("rope", f"{x.name}.rope", x, b.input("positions", "T"), table, head_dim=b.config.head_dim)


def attention(b: Builder, x: Value, layer: int, qk_norm: bool = False, merged: str | None = None) -> Value:
    """Causal self-attention over the paged KV cache, [T, H] → [T, H].

    Args:
        qk_norm: RMSNorm of each head of q and k before RoPE.
        merged: the checkpoint holds q, k and v as the rows of this one tensor.
    """
    c = b.config
    module = f"model.layers.{layer}.self_attn"
    widths = {"q": c.num_q_heads * c.head_dim, "k": c.num_kv_heads * c.head_dim, "v": c.num_kv_heads * c.head_dim}
    tensor = Tensor(merged, (sum(widths.values()), c.hidden_size)) if merged else None
    heads, start = {}, 0
    for name, width in widths.items():
        rows = Rows(tensor, start, start + width) if tensor else None
        heads[name] = linear(b, x, f"{module}.{name}_proj", width, bias=c.qkv_bias, rows=rows)
        start += width
    q, k, v = heads.values()
    if qk_norm:
        q = rms_norm(b, q, f"{module}.q_norm", c.head_dim)
        k = rms_norm(b, k, f"{module}.k_norm", c.head_dim)
    window = c.windows[layer]
    is_local = window is not None and c.rope_local != c.rope
    kind, table_name = (c.rope_local, "rope_table_local") if is_local else (c.rope, "rope_table")
    q, k = rope(b, q, kind, table_name), rope(b, k, kind, table_name)
    k_cache, v_cache = b.cache(f"k_cache.{layer}"), b.cache(f"v_cache.{layer}")
    names = (f"k_cache.{layer}.written", f"v_cache.{layer}.written")
    k_cache, v_cache = b.ops("write_kv", names, k, v, b.input("slot_mapping", "T"), k_cache, v_cache)
    tables, lens = b.input("block_tables", "B", "M"), b.input("seq_lens", "B")
    cu_seqlens = b.input("cu_seqlens_q", "B+1")
    attrs = {"head_dim": c.head_dim, "scale": c.attention_scale, "window": window, "softcap": c.attn_softcap}
    mixed = b.op("paged_attention", f"{short(module)}.mixed", q, k_cache, v_cache, tables, cu_seqlens, lens, **attrs)
    return linear(b, mixed, f"{module}.o_proj", c.hidden_size, bias=c.o_bias)


def gated_mlp(b: Builder, x: Value, module: str, merged: str | None = None) -> Value:
    """down(act(gate(x)) · up(x)), [T, H] → [T, H]. merged: gate and up are the rows of this one tensor."""
    c = b.config
    size = c.intermediate_size
    tensor = Tensor(merged, (2 * size, c.hidden_size)) if merged else None
    gate_rows, up_rows = (Rows(tensor, 0, size), Rows(tensor, size, 2 * size)) if tensor else (None, None)
    gate = linear(b, x, f"{module}.gate_proj", size, bias=c.mlp_bias, rows=gate_rows)
    up = linear(b, x, f"{module}.up_proj", size, bias=c.mlp_bias, rows=up_rows)
    activated = b.op(c.activation, f"{short(module)}.activated", gate)
    product = b.op("mul", f"{short(module)}.product", activated, up)
    return linear(b, product, f"{module}.down_proj", c.hidden_size, bias=c.mlp_bias)


def sparse_mlp(b: Builder, x: Value, module: str, names: tuple[str, str, str]) -> Value:
    """Mixture of experts: softmax router, top-k, gated MLPs. names: the gate, up and down tensors of one expert."""
    c = b.config
    gate, up, down = names
    size, hidden = c.moe_intermediate_size, c.hidden_size
    logits = linear(b, x, f"{module}.gate", c.num_experts)
    route = (f"{short(module)}.expert_weights", f"{short(module)}.expert_ids")
    weights, ids = b.ops("moe_route", route, logits, top_k=c.num_experts_per_token, normalize=c.norm_topk_prob)
    experts = [f"{module}.experts.{e}" for e in range(c.num_experts)]
    pairs = [
        Concat((Tensor(f"{e}.{gate}.weight", (size, hidden)), Tensor(f"{e}.{up}.weight", (size, hidden))))
        for e in experts
    ]
    gate_up = b.parameter(f"{module}.experts.gate_up", Stack(tuple(pairs)))
    stacked = Stack(tuple(Tensor(f"{e}.{down}.weight", (hidden, size)) for e in experts))
    inputs = (x, weights, ids, gate_up, b.parameter(f"{module}.experts.down", stacked))
    return b.op("moe_experts", f"{short(module)}.experts", *inputs, activation=c.activation)


def add(b: Builder, residual: Value, x: Value) -> Value:
    return b.op("add", f"{x.name}.added", residual, x)


def logits(b: Builder, hidden: Value) -> Graph:
    """Final norm, LM head, optional soft-cap; logits [R, V] float32 of the rows that the step samples."""
    c = b.config
    x = rms_norm(b, hidden, "model.norm")
    name = "model.embed_tokens.weight" if c.tie_word_embeddings else "lm_head.weight"
    head = b.weight(name, c.vocab_size, c.hidden_size)
    y = b.op("linear", "lm_head", x, head, dtype="float32")
    if c.final_softcap is not None:
        y = b.op("softcap", "lm_head.capped", y, cap=c.final_softcap)
    return b.graph(b.op("gather_rows", "logits", y, b.input("sample_rows", "R")))
