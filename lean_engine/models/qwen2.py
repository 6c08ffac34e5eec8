"""Qwen 2 and 2.5: Llama with biases on q, k and v, and windows on the upper layers where config.json asks for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lean_engine.config import Fields, ModelConfig
from lean_engine.models.llama import build

__all__ = ["build", "configure", "qwen_layer_types"]
DEFAULTS = {
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "sliding_window": 4096,
}


def configure(raw: Mapping[str, Any]) -> ModelConfig:
    return ModelConfig.from_json({**raw, "layer_types": qwen_layer_types(raw)}, DEFAULTS, qkv_bias=True)


def qwen_layer_types(raw: Mapping[str, Any]) -> list[str]:
    """sliding_window counts only with use_sliding_window, and then from layer max_window_layers on."""
    c = Fields(raw)
    num_layers = c.integer("num_hidden_layers")
    has_window = c.boolean("use_sliding_window", default=False) and raw.get("sliding_window", 4096) is not None
    if not has_window:
        return ["full_attention"] * num_layers
    first = c.integer("max_window_layers", default=28, minimum=0)
    default = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    return c.list("layer_types", default)
