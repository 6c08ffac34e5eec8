"""Mistral: Llama with a sliding window in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lean_engine.config import ModelConfig
from lean_engine.models.llama import build

__all__ = ["build", "configure"]
DEFAULTS = {
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "sliding_window": 4096,
}


def configure(raw: Mapping[str, Any]) -> ModelConfig:
    # An explicit null means no window; only a missing key means the family's 4096.
    kind = "full_attention" if raw.get("sliding_window", 4096) is None else "sliding_attention"
    return ModelConfig.from_json(raw, DEFAULTS | {"layer_types": [kind] * raw["num_hidden_layers"]})
