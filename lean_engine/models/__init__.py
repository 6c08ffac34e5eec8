"""Families: config.json → ModelConfig → the plain graph.

To add one: write models/<family>.py with `configure` and `build` (compose blocks.py), and name it in FAMILIES.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import Any

from lean_engine.config import Fields, ModelConfig
from lean_engine.errors import ConfigError
from lean_engine.ir.graph import Graph
from lean_engine.ir.verify import verify
from lean_engine.models import gemma2, gemma3, llama, mistral, mixtral, phi3, qwen2, qwen3, qwen3_moe

MAX_LAYERS = 1024  # what a graph of a layer each can sensibly hold

# model_type of config.json → (the architecture that goes with it, the family's file)
FAMILIES: dict[str, tuple[str, ModuleType]] = {
    "llama": ("LlamaForCausalLM", llama),
    "mistral": ("MistralForCausalLM", mistral),
    "mixtral": ("MixtralForCausalLM", mixtral),
    "qwen2": ("Qwen2ForCausalLM", qwen2),
    "qwen3": ("Qwen3ForCausalLM", qwen3),
    "qwen3_moe": ("Qwen3MoeForCausalLM", qwen3_moe),
    "phi3": ("Phi3ForCausalLM", phi3),
    "gemma2": ("Gemma2ForCausalLM", gemma2),
    "gemma3_text": ("Gemma3ForCausalLM", gemma3),
}


def configure(raw: Mapping[str, Any]) -> ModelConfig:
    """Read a config.json. ConfigError: an unknown architecture or value, a missing or contradictory field."""
    model_type = find_model_type(raw)
    num_layers = raw.get("num_hidden_layers")
    if isinstance(num_layers, bool) or not isinstance(num_layers, int) or not 1 <= num_layers <= MAX_LAYERS:
        raise ConfigError(
            f"config.json: num_hidden_layers is {num_layers!r}, must be an integer from 1 to {MAX_LAYERS}"
        )
    if raw.get("quantization_config"):
        raise ConfigError(f"config.json: quantization_config {str(raw['quantization_config'])[:80]} is not supported")
    config: ModelConfig = FAMILIES[model_type][1].configure({**raw, "model_type": model_type})
    return config


def find_model_type(raw: Mapping[str, Any]) -> str:
    """The family's key, from architectures where given and else from model_type."""
    names = Fields(raw).list("architectures", [])
    by_architecture = {architecture: key for key, (architecture, _) in FAMILIES.items()}
    for name in names:
        if name in by_architecture:
            return by_architecture[name]
    model_type = raw.get("model_type")
    if not names and model_type in FAMILIES:
        return str(model_type)
    found = names[0] if names else model_type
    if found is None:
        raise ConfigError("config.json names neither architectures nor a model_type")
    raise ConfigError(f"architecture {found!r} is not supported; supported: {', '.join(by_architecture)}")


def build(config: ModelConfig, dtype: str, max_positions: int) -> Graph:
    """The model's plain graph, verified. dtype: of weights, activations and KV cache."""
    graph: Graph = FAMILIES[config.model_type][1].build(config, dtype, max_positions)
    return verify(graph, f"models/{config.model_type}")
