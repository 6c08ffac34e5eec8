"""Reading config.json: both spellings, every family's defaults and switches, and the graph that follows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import tiny
from tiny import REMOVED, minimal_config

from lean_engine import models
from lean_engine.ir.graph import Graph

ALL_NAMES = [*tiny.NAMES, *tiny.EXTRA_NAMES]
FAMILIES = {
    "llama": "llama-gqa-untied",
    "mistral": "mistral-swa",
    "mixtral": "mixtral",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3-moe",
    "phi3": "phi3",
    "gemma2": "gemma2",
    "gemma3_text": "gemma3",
}
SLIDING, FULL = "sliding_attention", "full_attention"


# ---- the two spellings


@pytest.mark.parametrize("name", tiny.NAMES)
def test_both_spellings_of_transformers_give_the_same_model(name: str) -> None:
    assert models.configure(tiny.raw_config(name)) == models.configure(tiny.raw_config(name, "config.v4.json"))


@pytest.mark.parametrize("name", ALL_NAMES)
def test_rope_in_the_open_equals_rope_parameters(name: str) -> None:
    raw = tiny.raw_config(name)
    assert models.configure(tiny.version_4_spelling(raw)) == models.configure(raw)


def test_scaling_may_spell_its_kind_type() -> None:
    scaling = {"factor": 4.0, "original_max_position_embeddings": 64}
    rope = models.configure(minimal_config("qwen2", rope_scaling={"type": "yarn", **scaling})).rope
    assert rope == models.configure(minimal_config("qwen2", rope_scaling={"rope_type": "yarn", **scaling})).rope
    assert (rope.kind, rope.factor) == ("yarn", 4.0)


def test_dtype_is_read_under_either_name() -> None:
    assert models.configure(minimal_config("llama", dtype="bfloat16")).dtype == "bfloat16"
    assert models.configure(minimal_config("llama", torch_dtype="float16")).dtype == "float16"
    assert models.configure(minimal_config("llama", torch_dtype="torch.float16")).dtype == "float16"
    assert models.configure(minimal_config("llama")).dtype == "float32"


@pytest.mark.parametrize("key", FAMILIES)
def test_family_is_found_by_architecture_or_by_model_type(key: str) -> None:
    raw = tiny.raw_config(FAMILIES[key])
    config = models.configure(raw)
    assert config.model_type == key
    assert models.configure({k: v for k, v in raw.items() if k != "architectures"}) == config
    assert models.configure({**raw, "model_type": "something else"}) == config


def test_every_family_is_covered_here() -> None:
    assert set(FAMILIES) == set(models.FAMILIES)


# ---- fields and defaults


def test_sizes_of_a_model_with_heads_wider_than_its_share() -> None:
    config = models.configure(tiny.raw_config("gemma2"))
    assert (config.num_q_heads, config.num_kv_heads, config.head_dim, config.hidden_size) == (4, 2, 24, 64)
    assert config.attention_scale == 20**-0.5
    assert config.kv_bytes_per_token == 2 * 3 * 2 * 24
    assert (config.attn_softcap, config.final_softcap) == (10.0, 8.0)


@pytest.mark.parametrize(
    ("model_type", "fields"),
    [
        ("llama", {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "windows": (None, None), "head_dim": 16}),
        ("mistral", {"max_position_embeddings": 131072, "windows": (4096, 4096)}),
        ("mixtral", {"rms_norm_eps": 1e-5, "num_experts": 8, "num_experts_per_token": 2, "windows": (None, None)}),
        ("qwen2", {"max_position_embeddings": 32768, "windows": (None, None), "qkv_bias": True, "o_bias": False}),
        ("qwen3", {"head_dim": 128, "qkv_bias": False, "attention_scale": 128**-0.5}),
        ("qwen3_moe", {"num_experts": 128, "num_experts_per_token": 8, "norm_topk_prob": False, "head_dim": 16}),
        ("phi3", {"rms_norm_eps": 1e-5, "max_position_embeddings": 4096, "windows": (None, None)}),
        ("gemma2", {"head_dim": 256, "windows": (4096, None), "attn_softcap": 50.0, "final_softcap": 30.0}),
        ("gemma2", {"tie_word_embeddings": True, "activation": "gelu_tanh", "attention_scale": 256**-0.5}),
        ("gemma3_text", {"max_position_embeddings": 131072, "windows": (4096, 4096), "attn_softcap": None}),
    ],
)
def test_what_a_config_leaves_out_is_the_familys_default(model_type: str, fields: dict[str, Any]) -> None:
    config = models.configure(minimal_config(model_type))
    assert {name: getattr(config, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("model_type", "theta", "local"),
    [("llama", 1e4, 1e4), ("qwen2", 1e4, 1e4), ("mixtral", 1e6, 1e6), ("gemma2", 1e4, 1e4), ("gemma3_text", 1e6, 1e4)],
)
def test_default_rope_bases(model_type: str, theta: float, local: float) -> None:
    config = models.configure(minimal_config(model_type))
    assert (config.rope.theta, config.rope_local.theta) == (theta, local)


def test_without_kv_heads_every_query_head_has_its_own() -> None:
    assert models.configure(minimal_config("llama", num_key_value_heads=REMOVED)).num_kv_heads == 4


@pytest.mark.parametrize("head_dim", [None, REMOVED])
def test_without_head_dim_it_is_the_share_of_a_head(head_dim: object) -> None:
    assert models.configure(minimal_config("llama", head_dim=head_dim)).head_dim == 16


@pytest.mark.parametrize(
    ("raw", "windows"),
    [
        (minimal_config("mistral", sliding_window=7), (7, 7)),
        (minimal_config("mistral", sliding_window=None), (None, None)),
        (minimal_config("mixtral", sliding_window=7), (7, 7)),
        (minimal_config("phi3", sliding_window=7), (7, 7)),
        (minimal_config("qwen2", sliding_window=7), (None, None)),
        (minimal_config("qwen2", use_sliding_window=True, sliding_window=7, max_window_layers=1), (None, 7)),
        (minimal_config("qwen2", use_sliding_window=True, sliding_window=7, max_window_layers=0), (7, 7)),
        (minimal_config("qwen2", use_sliding_window=True, sliding_window=7), (None, None)),
        (minimal_config("qwen2", use_sliding_window=True, sliding_window=None, max_window_layers=0), (None, None)),
        (minimal_config("qwen3", use_sliding_window=True, sliding_window=7, layer_types=[SLIDING, FULL]), (7, None)),
        (
            minimal_config("qwen3", use_sliding_window=False, sliding_window=7, layer_types=[SLIDING, FULL]),
            (None, None),
        ),
        (minimal_config("qwen3_moe", use_sliding_window=True, sliding_window=7), (7, 7)),
        (minimal_config("qwen3_moe", use_sliding_window=True, sliding_window=None), (None, None)),
        (minimal_config("gemma2", sliding_window=7, num_hidden_layers=3), (7, None, 7)),
        (minimal_config("gemma2", sliding_window=7, layer_types=[FULL, SLIDING]), (None, 7)),
        (minimal_config("gemma3_text", sliding_window=7, num_hidden_layers=7), (7, 7, 7, 7, 7, None, 7)),
        (minimal_config("gemma3_text", sliding_window=7, sliding_window_pattern=2), (7, None)),
        (minimal_config("gemma3_text", sliding_window=7, _sliding_window_pattern=2), (7, None)),
    ],
)
def test_which_layers_have_a_window(raw: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert models.configure(raw).windows == windows


def test_softcap_null_switches_it_off() -> None:
    config = models.configure(minimal_config("gemma2", attn_logit_softcapping=None, final_logit_softcapping=None))
    assert (config.attn_softcap, config.final_softcap) == (None, None)


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, (True, True, True, True)),
        ({"decoder_sparse_step": 2}, (False, True, False, True)),
        ({"mlp_only_layers": [0, 3]}, (False, True, True, False)),
        ({"mlp_only_layers": [1], "decoder_sparse_step": 2}, (False, False, False, True)),
        ({"mlp_only_layers": None}, (True, True, True, True)),
    ],
)
def test_which_layers_have_experts(changes: dict[str, Any], layers: tuple[bool, ...]) -> None:
    assert models.configure(minimal_config("qwen3_moe", num_hidden_layers=4, **changes)).moe_layers == layers


def test_number_of_experts_is_read_under_either_name() -> None:
    assert models.configure(minimal_config("qwen3_moe", num_experts=16)).num_experts == 16
    assert models.configure(minimal_config("qwen3_moe", num_local_experts=16)).num_experts == 16


@pytest.mark.parametrize(
    ("raw", "biases"),
    [
        (minimal_config("llama"), (False, False, False)),
        (minimal_config("llama", attention_bias=True), (True, True, False)),
        (minimal_config("llama", mlp_bias=True), (False, False, True)),
        (minimal_config("qwen2"), (True, False, False)),
        (minimal_config("qwen3", attention_bias=True), (True, True, False)),
        (minimal_config("gemma3_text", attention_bias=True), (True, True, False)),
    ],
)
def test_which_products_have_a_bias(raw: dict[str, Any], biases: tuple[bool, bool, bool]) -> None:
    config = models.configure(raw)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == biases


@pytest.mark.parametrize(("value", "ids"), [(None, ()), (2, (2,)), ([2, 7], (2, 7)), ([], ()), (REMOVED, ())], ids=str)
def test_eos_is_one_id_or_several(value: object, ids: tuple[int, ...]) -> None:
    assert models.configure(minimal_config("llama", eos_token_id=value)).eos_token_ids == ids


@pytest.mark.parametrize("name", ["silu", "swish"])
def test_names_of_the_activation(name: str) -> None:
    assert models.configure(minimal_config("llama", hidden_act=name)).activation == "silu"


def test_hidden_activation_stands_above_hidden_act() -> None:
    raw = minimal_config("gemma2", hidden_act="gelu", hidden_activation="gelu_pytorch_tanh")
    assert models.configure(raw).activation == "gelu_tanh"


def test_rope_may_cover_a_part_of_each_head() -> None:
    assert models.configure(minimal_config("phi3", partial_rotary_factor=0.5)).rope.rotary_dim == 8
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}
    assert models.configure(minimal_config("phi3", rope_parameters=rope)).rope.rotary_dim == 12


def test_rope_options_of_yarn_are_all_read() -> None:
    rope = models.configure(tiny.raw_config("qwen2-window-yarn")).rope
    assert (rope.kind, rope.factor, rope.original_max_position_embeddings) == ("yarn", 3.0, 32)
    assert (rope.beta_fast, rope.beta_slow, rope.truncate) == (16.0, 2.0, False)
    assert (rope.mscale, rope.mscale_all_dim, rope.attention_factor) == (0.8, 0.5, None)


def test_original_positions_beside_the_scaling_count_first() -> None:
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    raw = minimal_config("llama", original_max_position_embeddings=32, rope_scaling=scaling)
    assert models.configure(raw).rope.original_max_position_embeddings == 32


def test_gemma_3_scales_the_rope_of_its_full_layers_only() -> None:
    scaling = {"rope_type": "linear", "factor": 8.0}
    for raw in (
        minimal_config("gemma3_text", rope_theta=1e6, rope_local_base_freq=1e4, rope_scaling=scaling),
        minimal_config(
            "gemma3_text", rope_parameters={FULL: {**scaling, "rope_theta": 1e6}, SLIDING: {"rope_theta": 1e4}}
        ),
    ):
        config = models.configure(raw)
        assert (config.rope.kind, config.rope.factor, config.rope.theta) == ("linear", 8.0, 1e6)
        assert (config.rope_local.kind, config.rope_local.theta) == ("default", 1e4)


# ---- the graph


def parameter_shapes(graph: Graph) -> dict[str, tuple[int | str, ...]]:
    return {p.value.name: p.value.type.shape for p in graph.parameters}


def test_tied_head_is_the_embedding_itself() -> None:
    tied = tiny.plain("qwen2")
    assert tied.ops[-2].inputs[1].name == "model.embed_tokens.weight"
    assert "lm_head.weight" not in parameter_shapes(tied)
    assert parameter_shapes(tiny.plain("llama-gqa-untied"))["lm_head.weight"] == (512, 64)


def test_logits_are_float32_and_of_sampled_rows_whatever_the_dtype() -> None:
    graph = models.build(models.configure(tiny.raw_config("gemma2")), "bfloat16", 64)
    (logits,) = graph.outputs
    assert (logits.type.shape, logits.type.dtype) == (("R", 512), "float32")
    kinds = {p.value.name: p.value.type.dtype for p in graph.parameters}
    assert kinds.pop("rope_table") == "float32"
    assert set(kinds.values()) == {"bfloat16"}


def test_rope_tables_cover_max_positions_one_for_each_kind_of_layer() -> None:
    config = models.configure(tiny.raw_config("gemma3"))
    shapes = parameter_shapes(models.build(config, "float32", 77))
    assert (shapes["rope_table"], shapes["rope_table_local"]) == ((77, 24), (77, 24))
    same = replace(config, rope_local=config.rope)
    assert "rope_table_local" not in parameter_shapes(models.build(same, "float32", 77))


def test_gemma_scales_its_embedding_and_its_norms_by_one_plus_weight() -> None:
    graph = tiny.plain("gemma3")
    assert graph.ops[0].attrs == {"scale": 8.0}
    assert all(op.attrs["unit_offset"] for op in graph.ops if op.kind == "rms_norm")
    assert not any(op.attrs["unit_offset"] for op in tiny.plain("llama3-rope").ops if op.kind == "rms_norm")


@pytest.mark.parametrize("name", ALL_NAMES)
def test_each_layer_has_its_window_cap_and_caches(name: str) -> None:
    config, graph = models.configure(tiny.raw_config(name)), tiny.plain(name)
    attention = [op for op in graph.ops if op.kind == "paged_attention"]
    assert tuple(op.attrs["window"] for op in attention) == config.windows
    assert {op.attrs["softcap"] for op in attention} == {config.attn_softcap}
    assert {op.attrs["scale"] for op in attention} == {config.attention_scale}
    assert [v.name for v in graph.caches] == [f"{n}_cache.{i}" for i in range(config.num_layers) for n in "kv"]
    assert {v.type.shape for v in graph.caches} == {("N", config.num_kv_heads, "S", config.head_dim)}
