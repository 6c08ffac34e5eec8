"""Whole models as GGUF and back.

The committed tiny checkpoints are written the way llama.cpp's converter does (names by the gguf package's own table);
opened again, names, values and config must be those of the safetensors original.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf import GGUFWriter
from gguf_writing import add_tensor, write_gguf

from lean_engine.checkpoint import gguf_config, gguf_model
from lean_engine.checkpoint.directory import DirectoryCheckpoint
from lean_engine.checkpoint.gguf_model import GgufCheckpoint
from lean_engine.errors import CheckpointError

TINY = Path(__file__).parents[1] / "data" / "tiny"
VALUES = np.ones((6, 256), np.float32)


def failure(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        GgufCheckpoint(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    return str(caught.value)


ARCHITECTURES = {"llama": "llama", "mistral": "llama", "mixtral": "llama", "gemma3_text": "gemma3"}
ARCHITECTURES |= {"qwen2": "qwen2", "qwen3": "qwen3", "qwen3_moe": "qwen3moe", "gemma2": "gemma2", "phi3": "phi3"}
MERGED_EXPERTS = {
    "mixtral": "layers.{layer}.feed_forward.experts.{part}",
    "qwen3_moe": "model.layers.{layer}.mlp.experts.{part}",
}
FACTORS = [1.0, 1.25, 3.5, 8.0, 8.0, 8.0, 8.0, 8.0]


class Original:
    """One committed tiny model."""

    def __init__(self, family: str) -> None:
        checkpoint = DirectoryCheckpoint(TINY / family)
        self.config: dict[str, Any] = json.loads((TINY / family / "config.v4.json").read_text())
        self.model_type: str = self.config["model_type"]
        self.config["head_dim"] = self.head_dim()
        self.architecture = ARCHITECTURES[self.model_type]
        self.tensors = {name: checkpoint.tensor(name).astype(np.float32) for name in checkpoint.names()}

    def head_dim(self) -> int:
        return self.config.get("head_dim") or self.config["hidden_size"] // self.config["num_attention_heads"]

    def write(self, path: Path, kind: Type = Type.F32) -> Path:
        def fill(writer: GGUFWriter) -> None:
            self.write_metadata(writer)
            for name, values in self.gguf_tensors():
                add_tensor(writer, name, values, Type.F32 if values.ndim == 1 else kind)

        return write_gguf(path, fill, self.architecture)

    def write_metadata(self, w: GGUFWriter) -> None:
        c = self.config
        w.add_block_count(c["num_hidden_layers"])
        w.add_context_length(c["max_position_embeddings"])
        w.add_embedding_length(c["hidden_size"])
        w.add_feed_forward_length(c["intermediate_size"])
        w.add_head_count(c["num_attention_heads"])
        w.add_head_count_kv(c["num_key_value_heads"])
        w.add_layer_norm_rms_eps(c["rms_norm_eps"])
        w.add_rope_freq_base(c["rope_theta"])
        w.add_key_length(self.head_dim())
        w.add_bos_token_id(c["bos_token_id"])
        w.add_eos_token_id(c["eos_token_id"])
        w.add_pad_token_id(c["pad_token_id"])
        if c.get("sliding_window"):
            w.add_sliding_window(c["sliding_window"])
        if "moe_intermediate_size" in c:
            w.add_expert_feed_forward_length(c["moe_intermediate_size"])
        if num_experts := c.get("num_local_experts") or c.get("num_experts"):
            w.add_expert_count(num_experts)
            w.add_expert_used_count(c["num_experts_per_tok"])
        if self.model_type == "gemma2":
            w.add_attn_logit_softcapping(c["attn_logit_softcapping"])
            w.add_final_logit_softcapping(c["final_logit_softcapping"])
        if self.model_type == "gemma3_text":
            w.add_sliding_window_pattern(3)
            w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            w.add_rope_scaling_factor(c["rope_scaling"]["factor"])

    def gguf_tensors(self) -> Iterator[tuple[str, np.ndarray]]:
        num_layers = self.config["num_hidden_layers"]
        names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[self.architecture.upper()], num_layers)
        dense_names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3, num_layers)  # of layers without experts
        experts: dict[str, list[np.ndarray]] = {}
        for name, values in sorted(self.tensors.items(), key=lambda item: expert_number(item[0])):
            if ".experts." in name:
                _, _, layer, *_, part, _ = name.split(".")
                merged = MERGED_EXPERTS[self.model_type].format(layer=layer, part=part)
                experts.setdefault(merged, []).append(values)
            else:
                kinds = (".weight", ".bias")
                gguf_name = names.get_name(name, kinds) or dense_names.get_name(name, kinds)
                yield gguf_name, self.converted(name, values)
        for merged, slices in experts.items():
            yield names.get_name(merged) + ".weight", np.stack(slices)
        if self.config.get("rope_scaling") and self.architecture == "llama":
            yield "rope_freqs.weight", np.array(FACTORS, np.float32)

    def converted(self, name: str, values: np.ndarray) -> np.ndarray:
        """What llama.cpp's converter does to values: Gemma norms plus one, Llama Q and K rows interleaved."""
        if self.architecture.startswith("gemma") and name.endswith("norm.weight"):
            return values + 1
        if self.architecture != "llama" or (".self_attn.q_proj" not in name and ".self_attn.k_proj" not in name):
            return values
        dim = self.head_dim()
        order = [i // 2 + i % 2 * (dim // 2) for i in range(dim)]
        return np.concatenate([values[h : h + dim][order] for h in range(0, len(values), dim)])


def expert_number(name: str) -> int:
    return int(name.split(".experts.")[1].split(".")[0]) if ".experts." in name else -1


FAMILIES = sorted(p.name for p in TINY.iterdir() if p.is_dir())
# The file does not carry these (or the tiny model's value is not the architecture's).
LOST = {"torch_dtype", "query_pre_attn_scalar"}


@pytest.mark.parametrize("family", FAMILIES)
def test_model_comes_back_with_names_values_and_config_of_transformers(tmp_path: Path, family: str) -> None:
    original = Original(family)
    checkpoint = GgufCheckpoint(original.write(tmp_path / "m.gguf"))
    assert set(checkpoint.names()) == set(original.tensors)
    checkpoint.expect({name: values.shape for name, values in original.tensors.items()})
    shifted = original.architecture.startswith("gemma")
    for name, values in original.tensors.items():
        assert np.allclose(checkpoint.tensor(name), values, rtol=0, atol=2e-7 if shifted else 0), name
        checkpoint.release(name)
    if family == "llama3-rope":
        original.config["rope_scaling"] = {"rope_type": "frequency_factors", "factors": FACTORS}
    shared = (set(original.config) & set(checkpoint.config)) - LOST
    assert len(shared) >= 15
    assert {k: checkpoint.config[k] for k in shared} == {k: original.config[k] for k in shared}
    for key in ("architectures", "model_type", "head_dim", "num_local_experts", "num_experts", "norm_topk_prob"):
        if key in original.config:
            assert checkpoint.config[key] == original.config[key]


def test_every_architecture_has_a_config_and_names() -> None:
    assert list(gguf_config.CONFIGS) == list(gguf_model.NAMINGS)
    assert set(ARCHITECTURES.values()) == set(gguf_config.CONFIGS)


def test_quantised_projection_is_put_back_in_order(tmp_path: Path) -> None:
    original = Original("llama-gqa-tied")
    checkpoint = GgufCheckpoint(original.write(tmp_path / "m.gguf", Type.Q8_0))
    name = "model.layers.1.self_attn.k_proj.weight"
    quantised = gguf.quants.dequantize(gguf.quants.quantize(original.tensors[name], Type.Q8_0), Type.Q8_0)
    assert np.array_equal(checkpoint.tensor(name), quantised)
    assert checkpoint.config["torch_dtype"] == "float16"


@pytest.mark.parametrize("family", ["llama-gqa-tied", "mixtral"])
def test_rows_of_blocks_are_those_of_the_values(tmp_path: Path, family: str) -> None:
    """Whole rows move where Q and K are put back in order, and experts are slices."""
    checkpoint = GgufCheckpoint(Original(family).write(tmp_path / "x.gguf", Type.Q8_0))
    matrices = [name for name in checkpoint.names() if len(checkpoint.shape(name)) == 2]
    assert len(matrices) > 10
    for name in matrices:
        assert checkpoint.stored_type(name) == "q8_0"
        assert np.array_equal(gguf.quants.dequantize(checkpoint.stored(name), Type.Q8_0), checkpoint.tensor(name)), name
    norm = "model.layers.0.input_layernorm.weight"
    assert checkpoint.stored_type(norm) == "float32"
    assert np.array_equal(checkpoint.stored(norm), checkpoint.tensor(norm))


def test_shifted_norms_of_gemma_come_unshifted_in_either_way(tmp_path: Path) -> None:
    checkpoint = GgufCheckpoint(Original("gemma3").write(tmp_path / "x.gguf"))
    norm = "model.norm.weight"
    assert checkpoint.stored_type(norm) == "float32"
    assert np.array_equal(checkpoint.stored(norm), checkpoint.tensor(norm))


def test_gemma3_scales_the_rope_of_full_attention_layers_only(tmp_path: Path) -> None:
    config = GgufCheckpoint(Original("gemma3").write(tmp_path / "m.gguf")).config
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}
    assert (config["rope_theta"], config["rope_local_base_freq"]) == (1_000_000.0, 10_000.0)
    assert config["hidden_act"] == config["hidden_activation"] == "gelu_pytorch_tanh"
    assert config["layer_types"] == ["sliding_attention", "sliding_attention", "full_attention"]


class Variant(Original):
    """A tiny model with other metadata or tensors in the file."""

    def __init__(self, family: str, change: Callable[[GGUFWriter], None]) -> None:
        super().__init__(family)
        self.change = change

    def write_metadata(self, w: GGUFWriter) -> None:
        super().write_metadata(w)
        self.change(w)

    def open(self, path: Path) -> GgufCheckpoint:
        return GgufCheckpoint(self.write(path))


def test_yarn_scaling_keeps_its_parameters(tmp_path: Path) -> None:
    def yarn(w: GGUFWriter) -> None:
        w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        w.add_rope_scaling_factor(4.0)
        w.add_rope_scaling_orig_ctx_len(64)
        w.add_rope_scaling_yarn_beta_fast(16.0)
        w.add_rope_scaling_yarn_attn_factor(1.1)

    assert Variant("qwen2", yarn).open(tmp_path / "m.gguf").config["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 16.0,
        "attention_factor": 1.1,
    }


def test_phi3_long_context_factors_and_partial_rotation(tmp_path: Path) -> None:
    def long_context(w: GGUFWriter) -> None:
        w.add_rope_scaling_orig_ctx_len(64)
        w.add_rope_dimension_count(12)
        w.add_sliding_window(0)
        add_tensor(w, "rope_factors_long.weight", np.array([1, 2, 3.1, 4, 5, 6], np.float32))
        add_tensor(w, "rope_factors_short.weight", np.ones(6, np.float32))

    config = Variant("phi3", long_context).open(tmp_path / "m.gguf").config
    assert config["rope_scaling"] == {
        "rope_type": "longrope",
        "long_factor": [1, 2, 3.1, 4, 5, 6],
        "short_factor": [1] * 6,
    }
    assert config["original_max_position_embeddings"] == 64
    assert config["partial_rotary_factor"] == 12 / 16
    assert config["sliding_window"] is None


def test_attention_and_mlp_biases_of_llama_are_found_and_put_in_order(tmp_path: Path) -> None:
    bias = np.arange(64, dtype=np.float32)

    def biases(w: GGUFWriter) -> None:
        add_tensor(w, "blk.0.ffn_down.bias", bias)

    variant = Variant("llama-gqa-tied", biases)
    variant.tensors["model.layers.0.self_attn.q_proj.bias"] = bias
    checkpoint = variant.open(tmp_path / "m.gguf")
    assert (checkpoint.config["attention_bias"], checkpoint.config["mlp_bias"]) == (True, True)
    assert np.array_equal(checkpoint.tensor("model.layers.0.self_attn.q_proj.bias"), bias)
    assert np.array_equal(checkpoint.tensor("model.layers.0.mlp.down_proj.bias"), bias)


def test_experts_stored_one_by_one_are_named_as_the_stacked_ones(tmp_path: Path) -> None:
    extra = np.ones((4, 32), np.float32)
    checkpoint = Variant("mixtral", lambda w: add_tensor(w, "blk.7.ffn_up.3.weight", extra)).open(tmp_path / "m.gguf")
    assert np.array_equal(checkpoint.tensor("model.layers.7.block_sparse_moe.experts.3.w3.weight"), extra)


def test_stop_ids_unite_eos_eot_and_end_of_turn_tokens(tmp_path: Path) -> None:
    tokens = ["<unk>", "<eos>", "<|im_end|>", "<|end|>", "x", "<eot>"]

    def vocabulary(w: GGUFWriter) -> None:
        w.add_token_list(tokens)
        w.add_token_types([3, 3, 3, 1, 1, 3, 3])  # "<|end|>" is an ordinary token here; the last type is of no token
        w.add_eot_token_id(5)
        w.add_float32("general.sampling.temp", 0.7)

    checkpoint = Variant("llama-gqa-tied", vocabulary).open(tmp_path / "m.gguf")
    assert checkpoint.config["eos_token_id"] == 1
    assert checkpoint.generation_config == {"eos_token_id": [1, 5, 2], "temperature": 0.7}
    assert isinstance(checkpoint.tokenizer_source, dict)
    assert list(checkpoint.tokenizer_source["tokenizer.ggml.tokens"]) == tokens


def test_largest_gemma_scales_queries_by_hidden_size(tmp_path: Path) -> None:
    original = Original("gemma2")
    original.config["num_hidden_layers"] = 46
    config = GgufCheckpoint(original.write(tmp_path / "m.gguf")).config
    assert config["query_pre_attn_scalar"] == 64 // 4
    assert config["layer_types"][:3] == ["sliding_attention", "full_attention", "sliding_attention"]
    assert GgufCheckpoint(Original("gemma2").write(tmp_path / "n.gguf")).config["query_pre_attn_scalar"] == 24


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (
            lambda w: add_tensor(w, "blk.0.ffn_norm_exps.weight", VALUES),
            "tensor blk.0.ffn_norm_exps.weight is not known",
        ),
        (lambda w: add_tensor(w, "v.patch_embd.weight", VALUES), "tensor v.patch_embd.weight is not known"),
        (
            lambda w: w.add_uint32("llama.rope.dimension_count", 0),
            "llama.rope.dimension_count is 0, must be an integer",
        ),
        (lambda w: w.add_string("llama.attention.sliding_window", "4k"), "attention.sliding_window is 4k, must be"),
        (lambda w: w.add_array("llama.rope.dimension_count", [8, 4]), "dimension_count is [8, 4], must be"),
        (lambda w: w.add_string("llama.rope.scaling.type", "yarn"), "key llama.rope.scaling.factor is missing"),
    ],
)
def test_metadata_or_tensor_that_cannot_be_translated_is_named(
    tmp_path: Path, change: Callable[[GGUFWriter], None], expected: str
) -> None:
    path = Variant("llama-gqa-tied", change).write(tmp_path / "m.gguf")
    assert expected in failure(path)


def test_unknown_architecture_lists_the_known_ones(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", lambda w: None, "mamba")
    assert (
        "the GGUF architecture 'mamba' is not supported; "
        "supported: llama, qwen2, qwen3, qwen3moe, gemma2, gemma3, phi3" in failure(path)
    )


def test_missing_metadata_key_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", lambda w: add_tensor(w, "token_embd.weight", VALUES))
    assert "the metadata key llama.embedding_length is missing" in failure(path)


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    checkpoint = GgufCheckpoint(Original("qwen2").write(tmp_path / "m.gguf"))
    with pytest.raises(CheckpointError, match=r"m\.gguf: tensor model\.layers\.9\.x is missing"):
        checkpoint.tensor("model.layers.9.x")
