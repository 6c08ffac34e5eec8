"""Qwen 2 and 2.5: Llama with biases on q, k and v, and windows on the upper layers where config.json asks for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lean_engine.config import ModelConfig
from lean_engine.models.llama import build

__all__ = ["build", "configure", "qwen_layer_types"]
DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
    "sliding_window": 4096,
}


def configure(raw: Mapping[str, Any]) -> ModelConfig:
    return ModelConfig.from_json({**raw, "layer_types": qwen_layer_types(raw)}, DEFAULTS, qkv_bias=True)


def qwen_layer_types(raw: Mapping[str, Any]) -> list[str]:
    """sliding_window counts only with use_sliding_window, and then from layer max_window_layers on."""
    num_layers = raw["num_hidden_layers"]
    if not raw.get("use_sliding_window"):
        return ["full_attention"] * num_layers
    first = raw.get("max_window_layers", 28)
    default = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    return raw.get("layer_types") or default
