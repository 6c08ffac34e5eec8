"""Llama 2 and 3, and what is built like them (SmolLM, TinyLlama, …)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lean_engine.config import Fields, ModelConfig
from lean_engine.ir.graph import Graph
from lean_engine.models.blocks import Builder, add, attention, embedding, gated_mlp, logits, rms_norm

DEFAULTS = {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "tie_word_embeddings": False}


def configure(raw: Mapping[str, Any]) -> ModelConfig:
    c = Fields(raw)
    bias, mlp_bias = c.boolean("attention_bias", default=False), c.boolean("mlp_bias", default=False)
    return ModelConfig.from_json(raw, DEFAULTS, qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias)


def build(config: ModelConfig, dtype: str, max_positions: int) -> Graph:
    b = Builder(config, dtype, max_positions)
    h = embedding(b)
    for i in range(config.num_layers):
        layer = f"model.layers.{i}"
        h = add(b, h, attention(b, rms_norm(b, h, f"{layer}.input_layernorm"), i))
        h = add(b, h, gated_mlp(b, rms_norm(b, h, f"{layer}.post_attention_layernorm"), f"{layer}.mlp"))
    return logits(b, h)
