"""Qwen 3 MoE: Qwen 3 attention; a mixture of experts in most layers, a dense MLP in the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lean_engine.config import Fields, ModelConfig
from lean_engine.ir.graph import Graph
from lean_engine.models.blocks import Builder, add, attention, embedding, gated_mlp, logits, rms_norm, sparse_mlp

DEFAULTS = {
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "sliding_window": 4096,
}


def configure(raw: Mapping[str, Any]) -> ModelConfig:
    c = Fields(raw)
    num_layers = c.integer("num_hidden_layers")
    step, dense = c.integer("decoder_sparse_step", default=1), c.list("mlp_only_layers", [])
    bias = c.boolean("attention_bias", default=False)
    has_window = c.boolean("use_sliding_window", default=False) and raw.get("sliding_window", 4096) is not None
    kind = "sliding_attention" if has_window else "full_attention"
    num_experts = "num_local_experts" if c.get("num_experts") is None else "num_experts"
    return ModelConfig.from_json(
        {**raw, "layer_types": [kind] * num_layers},
        DEFAULTS,
        qkv_bias=bias,
        o_bias=bias,
        num_experts=c.integer(num_experts, default=128),
        num_experts_per_token=c.integer("num_experts_per_tok", default=8),
        moe_intermediate_size=c.integer("moe_intermediate_size", default=768),
        norm_topk_prob=c.boolean("norm_topk_prob", default=False),
        moe_layers=tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers)),
    )


def build(config: ModelConfig, dtype: str, max_positions: int) -> Graph:
    b = Builder(config, dtype, max_positions)
    h = embedding(b)
    for i in range(config.num_layers):
        layer = f"model.layers.{i}"
        h = add(b, h, attention(b, rms_norm(b, h, f"{layer}.input_layernorm"), i, qk_norm=True))
        x = rms_norm(b, h, f"{layer}.post_attention_layernorm")
        if config.moe_layers[i]:
            h = add(b, h, sparse_mlp(b, x, f"{layer}.mlp", ("gate_proj", "up_proj", "down_proj")))
        else:
            h = add(b, h, gated_mlp(b, x, f"{layer}.mlp"))
    return logits(b, h)
