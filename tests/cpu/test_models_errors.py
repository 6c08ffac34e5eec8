"""What config.json is refused for: one clear line that names the field, the value found and what would be right."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import tiny
from tiny import REMOVED, minimal_config

from lean_engine import models
from lean_engine.errors import ConfigError

SLIDING, FULL = "sliding_attention", "full_attention"


def llama_scaling(**changes: Any) -> dict[str, Any]:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaling |= {"original_max_position_embeddings": 64, **changes}
    return minimal_config("llama", rope_scaling={k: v for k, v in scaling.items() if v is not REMOVED})


YARN = {"rope_type": "yarn", "factor": 4.0}
ERRORS: list[tuple[dict[str, Any], str]] = [
    ({}, "config.json names neither architectures nor a model_type"),
    ({"num_hidden_layers": 2}, "config.json names neither architectures nor a model_type"),
    (minimal_config("gpt2"), "architecture 'gpt2' is not supported; supported: LlamaForCausalLM, MistralForCausalLM, "),
    (
        minimal_config("llama", architectures=["LlamaForSequenceClassification"]),
        "architecture 'LlamaForSequenceClassification' is not supported; supported: LlamaForCausalLM, ",
    ),
    (
        minimal_config("llama", architectures="LlamaForCausalLM"),
        "config.json: architectures is 'LlamaForCausalLM', must be a list",
    ),
    (minimal_config("llama", num_hidden_layers=REMOVED), "config.json: num_hidden_layers is None, must be an integer"),
    (minimal_config("llama", num_hidden_layers="2"), "config.json: num_hidden_layers is '2', must be an integer"),
    (
        minimal_config("llama", num_hidden_layers=0),
        "config.json: num_hidden_layers is 0, must be an integer from 1 to 1024",
    ),
    (minimal_config("llama", vocab_size=REMOVED), "config.json: vocab_size is missing"),
    (minimal_config("llama", vocab_size=None), "config.json: vocab_size is missing"),
    (minimal_config("llama", hidden_size="64"), "config.json: hidden_size is '64', must be an integer"),
    (minimal_config("llama", hidden_size=64.5), "config.json: hidden_size is 64.5, must be an integer"),
    (minimal_config("llama", hidden_size=True), "config.json: hidden_size is True, must be an integer"),
    (
        minimal_config("llama", intermediate_size=-1),
        "config.json: intermediate_size is -1, must be at least 1 and finite",
    ),
    (minimal_config("llama", rms_norm_eps=0), "config.json: rms_norm_eps is 0.0, must be above 0"),
    (minimal_config("llama", rms_norm_eps="1e-5"), "config.json: rms_norm_eps is '1e-5', must be a number"),
    (
        minimal_config("llama", rms_norm_eps=math.inf),
        "config.json: rms_norm_eps is inf, must be at least 0.0 and finite",
    ),
    (
        minimal_config("llama", rms_norm_eps=math.nan),
        "config.json: rms_norm_eps is nan, must be at least 0.0 and finite",
    ),
    (
        minimal_config("llama", num_key_value_heads=3),
        "num_attention_heads 4 is not a multiple of num_key_value_heads 3",
    ),
    (
        minimal_config("llama", num_attention_heads=65, num_key_value_heads=65),
        "config.json: head_dim is 0, must be at least 1",
    ),
    (
        minimal_config("llama", tie_word_embeddings="yes"),
        "config.json: tie_word_embeddings is 'yes', must be true or false",
    ),
    (minimal_config("llama", attention_bias="no"), "config.json: attention_bias is 'no', must be true or false"),
    (minimal_config("llama", mlp_bias=1), "config.json: mlp_bias is 1, must be true or false"),
    (
        minimal_config("llama", hidden_act="gelu"),
        "config.json: hidden_act 'gelu' is not supported; supported: silu, swish, gelu_",
    ),
    (
        minimal_config("llama", hidden_act=["silu"]),
        "config.json: hidden_act ['silu'] is not supported; supported: silu",
    ),
    (
        minimal_config("llama", dtype="float8_e4m3fn"),
        "config.json: dtype 'float8_e4m3fn' is not supported; supported: float32, ",
    ),
    (
        minimal_config("llama", eos_token_id="</s>"),
        "config.json: eos_token_id is '</s>', must be an id or a list of ids",
    ),
    (
        minimal_config("llama", eos_token_id=[1, True]),
        "config.json: eos_token_id is [1, True], must be an id or a list of ids",
    ),
    (minimal_config("llama", bos_token_id="<s>"), "config.json: bos_token_id is '<s>', must be an id or a list of ids"),
    (minimal_config("llama", bos_token_id=[1, 2]), "config.json: bos_token_id is [1, 2], must be one id"),
    (
        minimal_config("qwen3", use_sliding_window="true"),
        "config.json: use_sliding_window is 'true', must be true or false",
    ),
    (
        minimal_config("qwen2", use_sliding_window=True, max_window_layers=-1),
        "config.json: max_window_layers is -1, must be at least 0 and finite",
    ),
    (minimal_config("gemma2", layer_types=[FULL]), "config.json: layer_types has 1 entries, num_hidden_layers is 2"),
    (minimal_config("gemma2", layer_types=FULL), "config.json: layer_types is 'full_attention', must be a list"),
    (
        minimal_config("gemma2", layer_types=[FULL, "linear_attention"]),
        "config.json: layer type 'linear_attention' is not supported; supported: full_attention, sliding_attention",
    ),
    (
        minimal_config("gemma3_text", sliding_window=0),
        "config.json: sliding_window is 0, must be at least 1 and finite",
    ),
    (
        minimal_config("gemma3_text", sliding_window_pattern="6"),
        "config.json: sliding_window_pattern is '6', must be an integer",
    ),
    (
        minimal_config("gemma3_text", use_bidirectional_attention=True),
        "config.json: use_bidirectional_attention is not supported, must be false",
    ),
    (
        minimal_config("mixtral", num_local_experts=2, num_experts_per_tok=3),
        "config.json: num_experts_per_tok is 3, but there are 2",
    ),
    (
        minimal_config("qwen3_moe", decoder_sparse_step=0),
        "config.json: decoder_sparse_step is 0, must be at least 1 and finite",
    ),
    (minimal_config("qwen3_moe", mlp_only_layers=1), "config.json: mlp_only_layers is 1, must be a list"),
    (minimal_config("qwen3_moe", norm_topk_prob=1), "config.json: norm_topk_prob is 1, must be true or false"),
    (minimal_config("llama", rope_theta=0), "config.json: rope_theta is 0.0, must be above 0"),
    (
        minimal_config(
            "llama", rope_parameters={"rope_type": "default"}, rope_scaling={"type": "dynamic", "factor": 2.0}
        ),
        "rope type 'dynamic' is not supported",
    ),
    (minimal_config("llama", quantization_config={"quant_method": "fp8"}), "config.json: quantization_config {'quant_"),
    (minimal_config("llama", rope_theta=1), "config.json: rope_theta is 1, must be above 1"),
    (
        minimal_config("llama", rms_norm_eps=1e300),
        "config.json: rms_norm_eps is 1e+300, must be above 0 (from 1e-30 to",
    ),
    (minimal_config("llama", vocab_size=10**30), f"config.json: vocab_size is {10**30}, must be at most 2147483647"),
    (
        minimal_config("llama", num_hidden_layers=10**30),
        f"config.json: num_hidden_layers is {10**30}, must be an integer",
    ),
    (minimal_config("llama", eos_token_id=10**20), f"config.json: eos_token_id is {10**20}, must be an id or a list"),
    (minimal_config("llama", eos_token_id=-1), "config.json: eos_token_id is -1, must be an id or a list"),
    (
        minimal_config("mixtral", num_local_experts=10**9),
        "config.json: the number of experts is 1000000000, must be at",
    ),
    (
        minimal_config("llama", rope_scaling={"rope_type": "frequency_factors", "factors": 5}),
        "config.json: factors is 5, must be a list",
    ),
    (
        minimal_config("llama", rope_scaling={"rope_type": "frequency_factors", "factors": ["x"]}),
        "config.json: factors is 'x', must be a number",
    ),
    (
        minimal_config("phi3", rope_scaling={"type": "yarn", "factor": 2.0}),
        "rope type 'yarn' of a Phi-3 config.json means longrope, which is not supported",
    ),
    (minimal_config("llama", rope_scaling="dynamic"), "config.json: rope_scaling is 'dynamic', must be a mapping"),
    (minimal_config("llama", rope_parameters=[1]), "config.json: rope_parameters is [1], must be a mapping"),
    (
        minimal_config("gemma3_text", rope_parameters={FULL: 1e6, SLIDING: 1e4}),
        "config.json: full_attention is 1000000.0, must be a mapping",
    ),
    (
        minimal_config("llama", rope_scaling={"type": "dynamic", "factor": 2.0}),
        "rope type 'dynamic' is not supported; supported: ",
    ),
    (
        minimal_config("phi3", rope_scaling={"type": "longrope"}),
        "rope type 'longrope' is not supported; supported: default, linear",
    ),
    (minimal_config("phi3", rope_scaling={"type": "su"}), "rope type 'su' is not supported"),
    (minimal_config("qwen2", rope_scaling={"type": "mrope"}), "rope type 'mrope' is not supported"),
    (minimal_config("llama", rope_scaling={"type": "linear"}), "config.json: factor is missing"),
    (
        minimal_config("llama", rope_scaling={"type": "linear", "factor": 0}),
        "config.json: factor is 0.0, must be above 0",
    ),
    (
        llama_scaling(original_max_position_embeddings=REMOVED),
        "rope type 'llama3' needs original_max_position_embeddings, which config.json lacks",
    ),
    (
        llama_scaling(original_max_position_embeddings="8k"),
        "config.json: original_max_position_embeddings is '8k', must be an integer",
    ),
    (llama_scaling(low_freq_factor=REMOVED), "config.json: low_freq_factor is missing"),
    (llama_scaling(low_freq_factor=4.0), "rope: low_freq_factor 4 must be below high_freq_factor 4"),
    (
        minimal_config("qwen2", rope_scaling=YARN),
        "rope type 'yarn' needs original_max_position_embeddings, which config.json lacks",
    ),
    (
        minimal_config("qwen2", rope_scaling={**YARN, "original_max_position_embeddings": 64, "truncate": "no"}),
        "config.json: truncate is 'no', must be true or false",
    ),
    (
        minimal_config("llama", head_dim=15),
        "rope rotates 15 of head_dim 15 elements, must be even and at most head_dim",
    ),
    (
        minimal_config("phi3", partial_rotary_factor=1.5),
        "rope rotates 24 of head_dim 16 elements, must be even and at most head_dim",
    ),
    (
        minimal_config("phi3", partial_rotary_factor=0.01),
        "rope rotates 0 of head_dim 16 elements, must be even and at most head_dim",
    ),
    (
        minimal_config("phi3", partial_rotary_factor="half"),
        "config.json: partial_rotary_factor is 'half', must be a number",
    ),
    (
        minimal_config("llama", rope_scaling={"type": "frequency_factors", "factors": [1.0, 2.0]}),
        "rope has 2 frequency factors, must be 8",
    ),
]


@pytest.mark.parametrize(("raw", "message"), ERRORS, ids=[message[:60] for _, message in ERRORS])
def test_a_config_that_cannot_be_honoured_is_refused_in_one_line(raw: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        models.configure(raw)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


JUNK: tuple[Any, ...] = (None, "x", "", [], ["a"], [1, 2], {}, {"a": 1}, -1, 0, 1.5, True, False, math.inf, math.nan)


def keys_of(raw: dict[str, Any]) -> Iterator[str]:
    yield from raw
    yield from {"head_dim", "layer_types", "partial_rotary_factor", "rope_scaling", "rope_theta", "hidden_act"} - set(
        raw
    )
    yield from {"attention_bias", "mlp_bias", "sliding_window", "use_sliding_window", "max_window_layers"} - set(raw)


def answer(raw: dict[str, Any]) -> str:
    """The ConfigError's message, "" where the config is honoured."""
    try:
        models.configure(raw)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", [*tiny.NAMES, "qwen2-window-yarn"])
def test_junk_in_any_field_is_honoured_or_refused_but_never_a_traceback(name: str) -> None:
    raw = tiny.raw_config(name)
    rope_keys = [*raw["rope_parameters"], "rope_type", "factor", "original_max_position_embeddings"]
    cases = [{**raw, key: junk} for key in keys_of(raw) for junk in JUNK]
    cases += [{**raw, "rope_parameters": {**raw["rope_parameters"], key: junk}} for key in rope_keys for junk in JUNK]
    answers = [answer(case) for case in cases]
    assert not any("\n" in text for text in answers)
    assert len(cases) // 3 < sum(text != "" for text in answers) < len(cases)
