"""Phi-3: Llama whose checkpoint holds q, k, v and gate, up as merged matrices; RoPE may cover a part of each head."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lean_engine.config import Fields, ModelConfig
from lean_engine.errors import ConfigError
from lean_engine.ir.graph import Graph
from lean_engine.models.blocks import Builder, add, attention, embedding, gated_mlp, logits, rms_norm

DEFAULTS = {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "tie_word_embeddings": False}


def configure(raw: Mapping[str, Any]) -> ModelConfig:
    scaling = {**Fields(raw).mapping("rope_parameters"), **Fields(raw).mapping("rope_scaling")}
    rope_type = scaling.get("rope_type") or scaling.get("type")
    if rope_type == "yarn":
        raise ConfigError("rope type 'yarn' of a Phi-3 config.json means longrope, which is not supported")
    kind = "full_attention" if raw.get("sliding_window") is None else "sliding_attention"
    return ModelConfig.from_json(raw, DEFAULTS | {"layer_types": [kind] * raw["num_hidden_layers"]})


def build(config: ModelConfig, dtype: str, max_positions: int) -> Graph:
    b = Builder(config, dtype, max_positions)
    h = embedding(b)
    for i in range(config.num_layers):
        layer = f"model.layers.{i}"
        x = rms_norm(b, h, f"{layer}.input_layernorm")
        h = add(b, h, attention(b, x, i, merged=f"{layer}.self_attn.qkv_proj.weight"))
        x = rms_norm(b, h, f"{layer}.post_attention_layernorm")
        h = add(b, h, gated_mlp(b, x, f"{layer}.mlp", merged=f"{layer}.mlp.gate_up_proj.weight"))
    return logits(b, h)
