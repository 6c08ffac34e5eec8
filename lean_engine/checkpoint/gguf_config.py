"""GGUF metadata → config.json and generation_config.json in transformers' spelling, one function per architecture.

Key names: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. What llama.cpp derives from the architecture
instead of reading it from the file (Gemma's query scale and layer pattern) is derived here by the same rule.

One key has no counterpart in transformers: Llama 3 files store, in place of the parameters of their rope scaling, its
result, a divisor of every frequency. It becomes rope_scaling = {"rope_type": "frequency_factors", "factors": [...]}:
inv_freq[i] = theta ** (-2 i / rotary_dim) / factors[i].
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lean_engine.checkpoint.gguf_file import GgufFile, StringArray
from lean_engine.errors import CheckpointError

# A chat model ends its turn with one of these, whatever the file calls its eos token; llama.cpp stops at them too.
END_OF_TURN_TOKENS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<|end|>")
_CONTROL_TOKEN = 3  # in tokenizer.ggml.token_type
_SAMPLING_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_k": "top_k",
    "general.sampling.top_p": "top_p",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}


class Hyperparameters:
    """Typed access to the `ARCH.*` keys of one file: every error names the file, the key and the value found."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self.architecture = str(file.metadata.get("general.architecture"))

    def has(self, key: str) -> bool:
        return f"{self.architecture}.{key}" in self.file.metadata

    def get(self, key: str, default: Any = None) -> Any:
        """The value as stored; CheckpointError where it is absent and there is no default."""
        value = self.file.metadata.get(f"{self.architecture}.{key}", default)
        if value is None:
            raise CheckpointError(f"{self.file.path}: the metadata key {self.architecture}.{key} is missing")
        return value

    def integer(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        value = self.get(key, default)
        if isinstance(value, list) and len(set(value)) == 1:  # one value per layer, all equal
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self._wrong(key, value, f"an integer of at least {minimum}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self._wrong(key, value, "a number")
        return float(value)

    def tensor_values(self, name: str) -> list[float]:
        return [float(str(value)) for value in self.file.tensor(name).ravel()]

    def _wrong(self, key: str, value: Any, wanted: str) -> CheckpointError:
        return CheckpointError(f"{self.file.path}: {self.architecture}.{key} is {str(value)[:80]}, must be {wanted}")


def read_config(file: GgufFile) -> dict[str, Any]:
    """The config.json of a GGUF file. Raises CheckpointError for an architecture that is not known."""
    h = Hyperparameters(file)
    if h.architecture not in CONFIGS:
        raise CheckpointError(
            f"{file.path}: the GGUF architecture {h.architecture!r} is not supported; supported: {', '.join(CONFIGS)}"
        )
    return CONFIGS[h.architecture](h)


def read_generation_config(file: GgufFile) -> dict[str, Any]:
    """The generation_config.json of a GGUF file: every id that ends a turn, and recommended sampling where stored."""
    ids = [file.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    for token_id in ids:
        if token_id is not None and not isinstance(token_id, int):
            raise CheckpointError(f"{file.path}: a token id that ends a turn is {token_id!r}, should be an integer")
    tokens, types = (file.metadata.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type"))
    if isinstance(tokens, StringArray) and isinstance(types, list):
        control_ids = [i for i, kind in enumerate(types[: len(tokens)]) if kind == _CONTROL_TOKEN]
        ids += [i for i in control_ids if tokens[i] in END_OF_TURN_TOKENS]
    config: dict[str, Any] = {"eos_token_id": list(dict.fromkeys(i for i in ids if i is not None))}
    config |= {name: file.metadata[key] for key, name in _SAMPLING_KEYS.items() if key in file.metadata}
    return config


def llama_config(h: Hyperparameters) -> dict[str, Any]:
    """Llama, and Mistral and Mixtral, which share the architecture name and differ by a window and by experts."""
    config = common_config(h)
    if h.integer("expert_count", 0, minimum=0):
        experts = {"num_local_experts": h.integer("expert_count")}
        experts["num_experts_per_tok"] = h.integer("expert_used_count")
        return named("mixtral", "MixtralForCausalLM") | config | experts | {"sliding_window": sliding_window(h)}
    if sliding_window(h):
        return named("mistral", "MistralForCausalLM") | config | {"sliding_window": sliding_window(h)}
    has_bias = {
        "attention_bias": "blk.0.attn_q.bias" in h.file.tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in h.file.tensors,
    }
    return named("llama", "LlamaForCausalLM") | config | has_bias


def qwen2_config(h: Hyperparameters) -> dict[str, Any]:
    return named("qwen2", "Qwen2ForCausalLM") | common_config(h) | {"use_sliding_window": False}


def qwen3_config(h: Hyperparameters) -> dict[str, Any]:
    switches = {"attention_bias": False, "use_sliding_window": False}
    return named("qwen3", "Qwen3ForCausalLM") | common_config(h) | switches


def qwen3moe_config(h: Hyperparameters) -> dict[str, Any]:
    config = common_config(h)
    layers = range(config["num_hidden_layers"])
    experts = {
        "num_experts": h.integer("expert_count"),
        "num_experts_per_tok": h.integer("expert_used_count"),
        "moe_intermediate_size": h.integer("expert_feed_forward_length"),
        "norm_topk_prob": bool(h.get("expert_weights_norm", True)),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [i for i in layers if f"blk.{i}.ffn_gate_inp.weight" not in h.file.tensors],
    }
    switches = {"attention_bias": False, "use_sliding_window": False}
    return named("qwen3_moe", "Qwen3MoeForCausalLM") | config | experts | switches


def gemma2_config(h: Hyperparameters) -> dict[str, Any]:
    config = common_config(h) | gemma_attention(h, layers_of_largest=46, default_pattern=2, default_window=4096)
    config["attn_logit_softcapping"] = h.number("attn_logit_softcapping", 50.0)
    config["final_logit_softcapping"] = h.number("final_logit_softcapping", 30.0)
    return named("gemma2", "Gemma2ForCausalLM") | config


def gemma3_config(h: Hyperparameters) -> dict[str, Any]:
    config = common_config(h) | gemma_attention(h, layers_of_largest=62, default_pattern=6, default_window=0)
    config["rope_theta"] = h.number("rope.freq_base", 1_000_000.0)
    config["rope_local_base_freq"] = h.number("rope.freq_base_swa", 10_000.0)
    config["attn_logit_softcapping"] = None
    softcap = h.number("final_logit_softcapping", 0.0)
    config["final_logit_softcapping"] = softcap or None
    return named("gemma3_text", "Gemma3ForCausalLM") | config


def phi3_config(h: Hyperparameters) -> dict[str, Any]:
    config = common_config(h) | {"sliding_window": sliding_window(h), "attention_bias": False}
    config["original_max_position_embeddings"] = h.integer(
        "rope.scaling.original_context_length", config["max_position_embeddings"]
    )
    return named("phi3", "Phi3ForCausalLM") | config


CONFIGS: dict[str, Callable[[Hyperparameters], dict[str, Any]]] = {
    "llama": llama_config,
    "qwen2": qwen2_config,
    "qwen3": qwen3_config,
    "qwen3moe": qwen3moe_config,
    "gemma2": gemma2_config,
    "gemma3": gemma3_config,
    "phi3": phi3_config,
}


def named(model_type: str, architecture: str) -> dict[str, Any]:
    return {"architectures": [architecture], "model_type": model_type}


def common_config(h: Hyperparameters) -> dict[str, Any]:
    """The keys every architecture has."""
    hidden_size = h.integer("embedding_length")
    num_heads = h.integer("attention.head_count")
    head_dim = h.integer("attention.key_length", hidden_size // num_heads)
    metadata = h.file.metadata
    return {
        "vocab_size": h.file.stored("token_embd.weight").shape[0],
        "hidden_size": hidden_size,
        "intermediate_size": h.integer("feed_forward_length"),
        "num_hidden_layers": h.integer("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": h.integer("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": h.integer("context_length"),
        "rms_norm_eps": h.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": h.number("rope.freq_base", 10_000.0),
        "rope_scaling": rope_scaling(h),
        "partial_rotary_factor": h.integer("rope.dimension_count", head_dim) / head_dim,
        "tie_word_embeddings": "output.weight" not in h.file.tensors,
        "torch_dtype": compute_dtype(h),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }


def compute_dtype(h: Hyperparameters) -> str:
    """The dtype config.json would name: that of the layers' weights, where they are stored unquantised.

    Quantised weights have more bits of mantissa than bfloat16 keeps, so they are named float16, but not those of Gemma,
    whose activations overflow it.
    """
    stored = h.file.stored("blk.0.attn_output.weight").type_name
    quantised = "bfloat16" if h.architecture.startswith("gemma") else "float16"
    return {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}.get(stored, quantised)


def rope_scaling(h: Hyperparameters) -> dict[str, Any] | None:
    kind = str(h.get("rope.scaling.type", "none"))
    tensors = h.file.tensors
    if "rope_freqs.weight" in tensors:
        if kind != "none":
            raise CheckpointError(
                f"{h.file.path}: has rope_freqs.weight and rope.scaling.type {kind!r}, must be one of them"
            )
        return {"rope_type": "frequency_factors", "factors": h.tensor_values("rope_freqs.weight")}
    if "rope_factors_long.weight" in tensors and "rope_factors_short.weight" in tensors:
        return {
            "rope_type": "longrope",
            "long_factor": h.tensor_values("rope_factors_long.weight"),
            "short_factor": h.tensor_values("rope_factors_short.weight"),
        }
    if kind == "none":
        return None
    scaling = {"rope_type": kind, "factor": h.number("rope.scaling.factor")}
    if h.has("rope.scaling.original_context_length"):
        scaling["original_max_position_embeddings"] = h.integer("rope.scaling.original_context_length")
    renamed = {"yarn_attn_factor": "attention_factor", "yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
    scaling |= {name: h.number(f"rope.scaling.{key}") for key, name in renamed.items() if h.has(f"rope.scaling.{key}")}
    return scaling


def sliding_window(h: Hyperparameters) -> int | None:
    """The window in tokens; 0 and an absent key both mean that there is none."""
    return h.integer("attention.sliding_window", 0, minimum=0) or None


def gemma_attention(
    h: Hyperparameters, *, layers_of_largest: int, default_pattern: int, default_window: int
) -> dict[str, Any]:
    """What Gemma 2 and 3 share: the activation, the query scale and which layers have a window."""
    num_layers, num_heads = h.integer("block_count"), h.integer("attention.head_count")
    hidden_size = h.integer("embedding_length")
    query_scalar = h.integer("attention.key_length", hidden_size // num_heads)
    if num_layers == layers_of_largest:  # the 27B model scales by hidden size, the others by head_dim
        query_scalar = hidden_size // num_heads
    window = h.integer("attention.sliding_window", default_window, minimum=0)
    pattern = h.get("attention.sliding_window_pattern", default_pattern)
    if isinstance(pattern, int):  # the last of every `pattern` layers sees everything
        pattern = [(i + 1) % pattern != 0 for i in range(num_layers)] if pattern else [False] * num_layers
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": query_scalar,
        "sliding_window": window or None,
        "layer_types": ["sliding_attention" if window and is_local else "full_attention" for is_local in pattern],
    }
