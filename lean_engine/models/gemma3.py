"""Gemma 3 (text): Gemma 2 without soft-caps; q and k norms, five windowed layers to one full, a rope base for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lean_engine.config import Fields, ModelConfig
from lean_engine.ir.graph import Graph
from lean_engine.models import gemma2

# The text_config of a multimodal checkpoint leaves out whatever equals transformers' default.
DEFAULTS = gemma2.DEFAULTS | {
    "vocab_size": 262208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_attention_heads": 8,
    "max_position_embeddings": 131072,
    "rope_theta": 1e6,
    "rope_local_base_freq": 1e4,
}


def configure(raw: Mapping[str, Any]) -> ModelConfig:
    c = Fields(raw)
    bias = gemma2.read_bias(c)
    period = c.integer("sliding_window_pattern", default=c.integer("_sliding_window_pattern", default=6))
    kinds = ["sliding_attention" if (i + 1) % period else "full_attention" for i in range(raw["num_hidden_layers"])]
    # Gemma 3's attention has no soft-cap: transformers reads the key and does not use it.
    raw = {**raw, "attn_logit_softcapping": None}
    return ModelConfig.from_json(raw, DEFAULTS | {"layer_types": kinds}, qkv_bias=bias, o_bias=bias)


def build(config: ModelConfig, dtype: str, max_positions: int) -> Graph:
    return gemma2.build_gemma(config, dtype, max_positions, qk_norm=True)
