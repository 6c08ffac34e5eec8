"""Mixtral: Mistral attention, a mixture of experts in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lean_engine.config import Fields, ModelConfig
from lean_engine.ir.graph import Graph
from lean_engine.models.blocks import Builder, add, attention, embedding, logits, rms_norm, sparse_mlp

DEFAULTS = {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "rope_theta": 1e6,
}


def configure(raw: Mapping[str, Any]) -> ModelConfig:
    c = Fields(raw)
    num_layers = c.integer("num_hidden_layers")
    kind = "full_attention" if c.get("sliding_window") is None else "sliding_attention"
    return ModelConfig.from_json(
        raw,
        DEFAULTS | {"layer_types": [kind] * num_layers},
        num_experts=c.integer("num_local_experts", default=8),
        num_experts_per_token=c.integer("num_experts_per_tok", default=2),
        moe_intermediate_size=c.integer("intermediate_size"),
        moe_layers=(True,) * num_layers,
    )


def build(config: ModelConfig, dtype: str, max_positions: int) -> Graph:
    b = Builder(config, dtype, max_positions)
    h = embedding(b)
    for i in range(config.num_layers):
        layer = f"model.layers.{i}"
        h = add(b, h, attention(b, rms_norm(b, h, f"{layer}.input_layernorm"), i))
        x = rms_norm(b, h, f"{layer}.post_attention_layernorm")
        h = add(b, h, sparse_mlp(b, x, f"{layer}.block_sparse_moe", ("w1", "w3", "w2")))
    return logits(b, h)
