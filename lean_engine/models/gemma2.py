"""Gemma 2: norms before and after each half, soft-caps, GeGLU, windows in every other layer, scaled embeddings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lean_engine.config import Fields, ModelConfig
from lean_engine.errors import ConfigError
from lean_engine.ir.graph import Graph
from lean_engine.models.blocks import Builder, add, attention, embedding, gated_mlp, logits, rms_norm

DEFAULTS = {
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
SOFTCAPS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}


def configure(raw: Mapping[str, Any]) -> ModelConfig:
    bias = read_bias(Fields(raw))
    kinds = ["full_attention" if i % 2 else "sliding_attention" for i in range(raw["num_hidden_layers"])]
    # A soft-cap of null switches it off; only a missing key means the family's value.
    values = {**SOFTCAPS, **raw}
    return ModelConfig.from_json(values, DEFAULTS | {"layer_types": kinds}, qkv_bias=bias, o_bias=bias)


def read_bias(c: Fields) -> bool:
    """attention_bias of a config that describes a decoder; Gemma's embedding models are none."""
    if c.boolean("use_bidirectional_attention", default=False):
        raise ConfigError("config.json: use_bidirectional_attention is not supported, must be false")
    return c.boolean("attention_bias", default=False)


def build(config: ModelConfig, dtype: str, max_positions: int) -> Graph:
    return build_gemma(config, dtype, max_positions, qk_norm=False)


def build_gemma(config: ModelConfig, dtype: str, max_positions: int, qk_norm: bool) -> Graph:
    b = Builder(config, dtype, max_positions, unit_offset=True)
    h = embedding(b, scale=math.sqrt(config.hidden_size))
    for i in range(config.num_layers):
        layer = f"model.layers.{i}"
        x = attention(b, rms_norm(b, h, f"{layer}.input_layernorm"), i, qk_norm=qk_norm)
        h = add(b, h, rms_norm(b, x, f"{layer}.post_attention_layernorm"))
        x = gated_mlp(b, rms_norm(b, h, f"{layer}.pre_feedforward_layernorm"), f"{layer}.mlp")
        h = add(b, h, rms_norm(b, x, f"{layer}.post_feedforward_layernorm"))
    return logits(b, h)
