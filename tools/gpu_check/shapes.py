"""The models whose shapes are measured, and what a decode step of each has to read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from lean_engine import models
from lean_engine.config import ModelConfig
from lean_engine.models.presets import PRESETS

SMOLLM2_135M: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
TINY: dict[str, Any] = {
    **SMOLLM2_135M,
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
CONFIGS: Mapping[str, dict[str, Any]] = {
    **{name: PRESETS[name] for name in ("llama-3.1-8b", "llama-3.2-1b", "qwen3-0.6b")},
    "smollm2-135m": SMOLLM2_135M,
    "tiny": TINY,
}
ELEMENT_BYTES = 2


@dataclass(frozen=True)
class Shape:
    """A model by its numbers."""

    name: str
    config: ModelConfig

    @property
    def gemms(self) -> dict[str, tuple[int, int]]:
        """Matrix product → columns of its result, depth."""
        c = self.config
        q, kv = c.num_q_heads * c.head_dim, c.num_kv_heads * c.head_dim
        return {
            "qkv": (q + 2 * kv, c.hidden_size),
            "o": (c.hidden_size, q),
            "gate_up": (2 * c.intermediate_size, c.hidden_size),
            "down": (c.hidden_size, c.intermediate_size),
            "head": (c.vocab_size, c.hidden_size),
        }

    @property
    def weight_bytes(self) -> int:
        """Read once in a step: the layers and the head; of the embedding a row per token, which is nothing."""
        sizes = {name: columns * depth for name, (columns, depth) in self.gemms.items()}
        head = sizes.pop("head")
        return ELEMENT_BYTES * (self.config.num_layers * sum(sizes.values()) + head)

    @property
    def kv_bytes_per_token(self) -> int:
        c = self.config
        return 2 * c.num_layers * c.num_kv_heads * c.head_dim * ELEMENT_BYTES

    def decode_bytes(self, batch: int, context_len: int) -> int:
        """What a decode step reads at least: weights once, keys and values of every token."""
        return self.weight_bytes + batch * context_len * self.kv_bytes_per_token


def shape_of(name: str) -> Shape:
    return Shape(name, models.configure(CONFIGS[name]))
