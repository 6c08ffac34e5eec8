"""Qwen 3: Qwen 2 with RMSNorm on each head of q and k, and biases only where config.json asks for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lean_engine.config import Fields, ModelConfig
from lean_engine.ir.graph import Graph
from lean_engine.models.blocks import Builder, add, attention, embedding, gated_mlp, logits, rms_norm
from lean_engine.models.qwen2 import DEFAULTS, qwen_layer_types


def configure(raw: Mapping[str, Any]) -> ModelConfig:
    bias = Fields(raw).boolean("attention_bias", default=False)
    values = {**raw, "layer_types": qwen_layer_types(raw)}
    return ModelConfig.from_json(values, DEFAULTS | {"head_dim": 128}, qkv_bias=bias, o_bias=bias)


def build(config: ModelConfig, dtype: str, max_positions: int) -> Graph:
    b = Builder(config, dtype, max_positions)
    h = embedding(b)
    for i in range(config.num_layers):
        layer = f"model.layers.{i}"
        h = add(b, h, attention(b, rms_norm(b, h, f"{layer}.input_layernorm"), i, qk_norm=True))
        h = add(b, h, gated_mlp(b, rms_norm(b, h, f"{layer}.post_attention_layernorm"), f"{layer}.mlp"))
    return logits(b, h)
