#!/usr/bin/env python3
"""Makes tests/data/tiny_extra: tiny random checkpoints and the logits that transformers computes for them in float32.

    python tools/make_tiny_goldens.py [NAME ...]

The only file of the project that imports torch and transformers (5 or later); the tests read what it wrote. Each
directory holds config.json, model.safetensors and golden.npz with <sequence>_ids [n] int32 and <sequence>_logits [n, V]
float32. Weights are large enough that attention is peaked, norms differ from one and biases from zero: leaving out a
window, a scaling, a soft-cap, a bias or a norm moves the logits far beyond the tests' tolerance.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import numpy as np
import torch
import transformers

OUT = Path(__file__).parent.parent / "tests" / "data" / "tiny_extra"
SEQUENCE_LENGTHS = {"a": 37, "b0": 5, "b1": 21, "b2": 13}  # tokens
BASE: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}


def rope(theta: float = 10000.0, **scaling: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta, **scaling}}


def configs() -> dict[str, transformers.PreTrainedConfig]:
    """Directory name → a configuration with what the checkpoints of tests/data/tiny leave out."""
    t = transformers
    return {
        # biases everywhere, an embedding that is the head as well, one KV head, linear scaling
        "llama-bias-linear": t.LlamaConfig(
            **BASE, attention_bias=True, mlp_bias=True, tie_word_embeddings=True, **rope(rope_type="linear", factor=4.0)
        ),
        # windows from layer 1 on, YaRN with all its options
        "qwen2-window-yarn": t.Qwen2Config(
            **{**BASE, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 10},
            use_sliding_window=True,
            sliding_window=7,
            max_window_layers=1,
            **rope(
                rope_type="yarn",
                factor=3.0,
                original_max_position_embeddings=32,
                mscale=0.8,
                mscale_all_dim=0.5,
                beta_fast=16.0,
                beta_slow=2.0,
                truncate=False,
            ),
        ),
        # a rotation that covers half of each head, a window in every layer, merged matrices
        "phi3-partial-window": t.Phi3Config(
            **{k: v for k, v in BASE.items() if k not in ("head_dim", "num_attention_heads", "num_key_value_heads")},
            num_attention_heads=4,
            num_key_value_heads=2,
            sliding_window=6,
            original_max_position_embeddings=128,
            **rope(partial_rotary_factor=0.6),
        ),
        # no soft-caps, the default pattern of windows
        "gemma2-uncapped": t.Gemma2Config(
            **{**BASE, "num_hidden_layers": 3},
            query_pre_attn_scalar=9,
            sliding_window=6,
            attn_logit_softcapping=None,
            final_logit_softcapping=None,
            **rope(),
        ),
        # the default pattern of windows: six layers of one kind of rope, then one of the other
        "gemma3-seven-layers": t.Gemma3TextConfig(
            **{**BASE, "intermediate_size": 40, "num_hidden_layers": 7, "head_dim": 8},
            query_pre_attn_scalar=11,
            sliding_window=6,
            final_logit_softcapping=6.0,
        ),
        # router weights that do not sum to one, experts in every second layer
        "qwen3-moe-sparse-step": t.Qwen3MoeConfig(
            **{**BASE, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2},
            moe_intermediate_size=18,
            num_experts=5,
            num_experts_per_tok=2,
            norm_topk_prob=False,
            decoder_sparse_step=2,
            attention_bias=True,
            **rope(),
        ),
    }


def gain(name: str, is_gemma: bool) -> tuple[float, float]:
    """(mean, deviation) that a parameter's elements are drawn with; a linear's deviation is per √fan_in."""
    if "norm" in name:
        mean = 0.0 if is_gemma else 1.0  # Gemma multiplies by 1 + weight
        mean += 1.2 if "q_norm" in name or "k_norm" in name else 0.0
        mean += 3.0 if is_gemma and ("post_attention" in name or "post_feedforward" in name) else 0.0
        return mean, 0.3
    if name.endswith("bias"):
        return 0.0, 0.5
    if "embed_tokens" in name:
        return 0.0, 0.25 if is_gemma else 0.5
    return 0.0, 2.0 if any(part in name for part in ("q_proj", "k_proj", "qkv_proj")) else 1.3


def random_model(config: transformers.PreTrainedConfig, seed: int) -> torch.nn.Module:
    """A float32 model whose weights are exact in bfloat16, the type they are stored in."""
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager"
    )
    model = model.float().eval()
    generator = torch.Generator().manual_seed(seed)
    is_gemma = "gemma" in config.model_type
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean, deviation = gain(name, is_gemma)
            is_linear = parameter.ndim > 1 and "embed_tokens" not in name
            scale = deviation / parameter.shape[-1] ** 0.5 if is_linear else deviation
            values = mean + scale * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(values.to(torch.bfloat16).float())
    model.tie_weights()
    return model


def golden(model: torch.nn.Module, vocab_size: int, seed: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(seed)
    arrays: dict[str, np.ndarray] = {}
    for name, length in SEQUENCE_LENGTHS.items():
        ids = random.integers(2, vocab_size, length).astype(np.int32)
        with torch.no_grad():
            logits = model(input_ids=torch.tensor(ids[None].astype(np.int64)), use_cache=False).logits[0]
        arrays |= {f"{name}_ids": ids, f"{name}_logits": logits.numpy()}
    return arrays


def write(directory: Path, config: transformers.PreTrainedConfig, seed: int) -> None:
    model = random_model(config, seed)
    arrays = golden(model, config.vocab_size, seed)
    directory.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(directory)
    (directory / "generation_config.json").unlink()
    np.savez_compressed(directory / "golden.npz", **arrays)


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    for seed, (name, config) in enumerate(configs().items()):
        if not names or name in names:
            write(OUT / name, config, seed)
            size = sum(file.stat().st_size for file in (OUT / name).iterdir())
            print(f"{name}: {size:,} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
