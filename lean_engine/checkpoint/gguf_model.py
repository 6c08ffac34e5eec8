"""A GGUF file as a checkpoint: Hugging Face names, layouts and values, made lazily from what the file stores.

Undone on the way: the order of Q and K rows in Llama files (llama.cpp rotates neighbours, transformers halves), the 1
that Gemma files have added to norm weights, and the stacking of a layer's experts into one tensor.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lean_engine.checkpoint.base import Checkpoint
from lean_engine.checkpoint.gguf_config import read_config, read_generation_config
from lean_engine.checkpoint.gguf_file import GgufFile
from lean_engine.errors import CheckpointError

_LAYER_TENSOR = re.compile(r"blk\.(?P<layer>\d+)\.(?P<stem>\w+)(\.(?P<expert>\d+))?\.(?P<kind>weight|bias)")
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_CONFIG = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_QK_NORM = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_MLP_NORM = {"ffn_norm": "post_attention_layernorm"}
_GEMMA_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True, slots=True)
class Naming:
    """How one architecture's layer tensors are called in both worlds, and what the converter did to their values."""

    layer: dict[str, str]
    experts: dict[str, str] = field(default_factory=dict)  # {} stands for the expert's number
    has_permuted_qk: bool = False
    has_shifted_norms: bool = False


NAMINGS = {
    "llama": Naming(
        layer=_ATTENTION | _MLP_NORM | _MLP | {"ffn_gate_inp": "block_sparse_moe.gate"},
        experts={
            "ffn_gate": "block_sparse_moe.experts.{}.w1",
            "ffn_down": "block_sparse_moe.experts.{}.w2",
            "ffn_up": "block_sparse_moe.experts.{}.w3",
        },
        has_permuted_qk=True,
    ),
    "qwen2": Naming(_ATTENTION | _MLP_NORM | _MLP),
    "qwen3": Naming(_ATTENTION | _QK_NORM | _MLP_NORM | _MLP),
    "qwen3moe": Naming(
        layer=_ATTENTION | _QK_NORM | _MLP_NORM | _MLP | {"ffn_gate_inp": "mlp.gate"},
        experts={
            "ffn_gate": "mlp.experts.{}.gate_proj",
            "ffn_up": "mlp.experts.{}.up_proj",
            "ffn_down": "mlp.experts.{}.down_proj",
        },
    ),
    "gemma2": Naming(_ATTENTION | _GEMMA_NORMS | _MLP, has_shifted_norms=True),
    "gemma3": Naming(_ATTENTION | _QK_NORM | _GEMMA_NORMS | _MLP, has_shifted_norms=True),
    "phi3": Naming(
        {"attn_norm": "input_layernorm", "attn_qkv": "self_attn.qkv_proj", "attn_output": "self_attn.o_proj"}
        | _MLP_NORM
        | {"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"},
    ),
}


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a tensor comes from, and what undoes the converter."""

    gguf_name: str
    expert: int | None = None  # index along the stored tensor's first axis
    num_permuted_heads: int = 0  # 0 = rows are in order
    is_shifted: bool = False


class GgufCheckpoint(Checkpoint):
    """One GGUF file; `tensor` gives float32 whatever is stored.

    Raises:
        CheckpointError: the file is damaged, its architecture unknown, or a tensor has no counterpart in transformers.
    """

    def __init__(self, path: Path, source: str | None = None) -> None:
        self.source = source or str(path)
        self._file = GgufFile(path)
        self.tokenizer_source = self._file.metadata
        self.config = read_config(self._file)
        self.generation_config = read_generation_config(self._file)
        self._naming = NAMINGS[self._file.metadata["general.architecture"]]
        self._origins: dict[str, Origin] = {}
        for gguf_name in self._file.tensors:
            if gguf_name not in _IN_CONFIG:
                self._origins |= self._origins_of(gguf_name)

    def names(self) -> Collection[str]:
        return self._origins.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        origin = self._origin(name)
        stored = self._file.stored(origin.gguf_name).shape
        return stored if origin.expert is None else stored[1:]

    def dtype(self, name: str) -> str:
        self._file.check_loadable(self._origin(name).gguf_name)
        return "float32"

    def tensor(self, name: str) -> NDArray[np.float32]:
        origin = self._origin(name)
        values = self._file.tensor(origin.gguf_name, origin.expert)
        if origin.num_permuted_heads:
            values = unpermute(values, origin.num_permuted_heads)
        return values - np.float32(1) if origin.is_shifted else values

    def stored_type(self, name: str) -> str:
        origin = self._origin(name)
        self._file.check_loadable(origin.gguf_name)
        return "float32" if origin.is_shifted else self._file.stored(origin.gguf_name).stored_type

    def stored(self, name: str) -> NDArray[Any]:
        """Rows in the order of transformers; norm weights that the converter has shifted come as from `tensor`."""
        origin = self._origin(name)
        if origin.is_shifted:
            return self.tensor(name)
        rows = self._file.stored_rows(origin.gguf_name, origin.expert)
        return unpermute(rows, origin.num_permuted_heads) if origin.num_permuted_heads else rows

    def release(self, name: str) -> None:
        origin = self._origin(name)
        self._file.release(origin.gguf_name, origin.expert)

    def _origin(self, name: str) -> Origin:
        try:
            return self._origins[name]
        except KeyError:
            raise CheckpointError(f"{self.source}: tensor {name} is missing") from None

    def _origins_of(self, gguf_name: str) -> dict[str, Origin]:
        """The tensors made from one stored tensor: one, or one per expert."""
        is_shifted = self._naming.has_shifted_norms and gguf_name.endswith("norm.weight")
        if gguf_name in _TOP:
            return {_TOP[gguf_name]: Origin(gguf_name, is_shifted=is_shifted)}
        match = _LAYER_TENSOR.fullmatch(gguf_name)
        if match is None:
            raise self._unknown(gguf_name)
        layer, stem, kind = match["layer"], match["stem"], match["kind"]
        prefix = f"model.layers.{layer}."
        if match["expert"] is not None and stem in self._naming.experts:  # files of before April 2024
            return {f"{prefix}{self._naming.experts[stem].format(match['expert'])}.{kind}": Origin(gguf_name)}
        if match["expert"] is None and stem in self._naming.layer:
            heads = self._num_permuted_heads(stem)
            return {f"{prefix}{self._naming.layer[stem]}.{kind}": Origin(gguf_name, None, heads, is_shifted)}
        pattern = self._naming.experts.get(stem.removesuffix("_exps")) if stem.endswith("_exps") else None
        if pattern is None:
            raise self._unknown(gguf_name)
        num_experts = self._file.tensors[gguf_name].shape[0]
        return {f"{prefix}{pattern.format(i)}.{kind}": Origin(gguf_name, i) for i in range(num_experts)}

    def _num_permuted_heads(self, stem: str) -> int:
        heads = {"attn_q": self.config["num_attention_heads"], "attn_k": self.config["num_key_value_heads"]}
        return heads.get(stem, 0) if self._naming.has_permuted_qk else 0

    def _unknown(self, gguf_name: str) -> CheckpointError:
        architecture = self._file.metadata["general.architecture"]
        return CheckpointError(f"{self.source}: tensor {gguf_name} is not known of the architecture {architecture!r}")


def unpermute(rows: NDArray[Any], num_heads: int) -> NDArray[Any]:
    """Rows of a Q or K projection (or its bias) from llama.cpp's order to that of transformers.

    Within a head of D rows, llama.cpp keeps the two rows that rotate together side by side (0, D/2, 1, D/2 + 1, …).
    rows: [num_heads * D, …], of elements or of the bytes of quantised blocks, which lie within a row.
    """
    head_dim = rows.shape[0] // num_heads
    pairs = rows.reshape(num_heads, head_dim // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape)
