"""What a model is (ModelConfig) and how an engine runs it (EngineConfig).

ModelConfig is read from a config.json mapping in the transformers 4 or 5 spelling (GGUF metadata is translated to that
spelling by checkpoint/). Everything the forward pass depends on is a field here; an unknown value is refused by name.
A family's file under models/ supplies the defaults its config.json may leave out. Over 400 lines because both are
lists of fields with a check for each, and a reader looks a field up in one place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypeVar

from lean_engine.errors import ConfigError

Activation = Literal["silu", "gelu_tanh"]
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
}
MAX_EXPERTS = 4096
MAX_INTEGER = 2**31 - 1  # of any count or id
MAX_NUMBER, MIN_NUMBER = 1e30, 1e-30  # what float32 arithmetic can work with
LIMITS = {"threads": 1024, "kv_cache_memory_bytes": 2**63 - 1}  # of engine options; of the others MAX_INTEGER
ROPE_KINDS = ("default", "linear", "llama3", "yarn", "frequency_factors")
T = TypeVar("T", int, float)


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding of one kind of layer (Su et al. 2021, RoFormer) and its scaling."""

    theta: float
    rotary_dim: int  # the first rotary_dim of head_dim elements are rotated, in halves
    kind: str = "default"  # one of ROPE_KINDS
    factor: float = 1.0  # linear, llama3, yarn: context stretched by this factor
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_max_position_embeddings: int = 0  # llama3, yarn: tokens
    beta_fast: float = 32.0  # yarn: rotations
    beta_slow: float = 1.0  # yarn: rotations
    attention_factor: float | None = None  # yarn: scale of cos and sin; None = from factor and the two mscales
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn: whole dimensions as bounds of the ramp
    frequency_factors: tuple[float, ...] = ()  # frequency_factors: divisor of each frequency, [rotary_dim / 2]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder's dimensions and switches. Letters as in the README: H, I, Q, K, D, V."""

    model_type: str  # the family's key in models.FAMILIES
    vocab_size: int  # V
    hidden_size: int  # H
    intermediate_size: int  # I
    num_layers: int
    num_q_heads: int  # Q
    num_kv_heads: int  # K
    head_dim: int  # D
    max_position_embeddings: int  # tokens
    rms_norm_eps: float
    activation: Activation
    tie_word_embeddings: bool
    dtype: str  # of the checkpoint: "float32", "float16", "bfloat16"
    rope: RopeConfig
    rope_local: RopeConfig  # of the layers with a window; equals rope in most families
    windows: tuple[int | None, ...]  # per layer: tokens a query sees, itself included; None = all
    attention_scale: float  # multiplies q·k
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    attn_softcap: float | None = None
    final_softcap: float | None = None
    num_experts: int = 0  # 0 = dense
    num_experts_per_token: int = 0
    moe_intermediate_size: int = 0
    norm_topk_prob: bool = True
    moe_layers: tuple[bool, ...] = ()  # per layer; empty = all dense
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V of one token in all layers, per byte of element."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    @classmethod
    def from_json(cls, raw: Mapping[str, Any], defaults: Mapping[str, Any], **switches: Any) -> ModelConfig:
        """Read the fields every family shares.

        Args:
            raw: config.json, transformers 4 or 5 spelling.
            defaults: what the family's config class assumes for keys that raw leaves out.
            switches: fields that follow from the family and not from a key (qkv_bias, num_experts, …).
        """
        c = Fields({**defaults, **{k: v for k, v in raw.items() if v is not None or k not in defaults}})
        num_layers = c.integer("num_hidden_layers")
        num_q_heads = c.integer("num_attention_heads")
        hidden_size = c.integer("hidden_size")
        head_dim = c.integer("head_dim", default=hidden_size // num_q_heads)
        num_kv_heads = c.integer("num_key_value_heads", default=num_q_heads)
        if num_q_heads % num_kv_heads:
            raise ConfigError(
                f"num_attention_heads {num_q_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
            )
        rope, rope_local = read_ropes(c, head_dim)
        scalar = c.number("query_pre_attn_scalar", default=float(head_dim))
        num_experts, num_chosen = switches.get("num_experts", 0), switches.get("num_experts_per_token", 0)
        if num_experts > MAX_EXPERTS:
            raise ConfigError(f"config.json: the number of experts is {num_experts}, must be at most {MAX_EXPERTS}")
        if num_chosen > num_experts:
            raise ConfigError(f"config.json: num_experts_per_tok is {num_chosen}, but there are {num_experts} experts")
        return cls(
            model_type=str(raw.get("model_type")),
            vocab_size=c.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=c.integer("intermediate_size"),
            num_layers=num_layers,
            num_q_heads=num_q_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_position_embeddings=c.integer("max_position_embeddings"),
            rms_norm_eps=c.number("rms_norm_eps"),
            activation=read_activation(c),
            tie_word_embeddings=c.boolean("tie_word_embeddings", default=False),
            dtype=read_dtype(c),
            rope=rope,
            rope_local=rope_local,
            windows=read_windows(c, num_layers),
            attention_scale=scalar**-0.5,
            attn_softcap=c.optional_number("attn_logit_softcapping"),
            final_softcap=c.optional_number("final_logit_softcapping"),
            bos_token_id=read_bos(c),
            eos_token_ids=token_ids(c.get("eos_token_id"), "config.json: eos_token_id"),
            **switches,
        )


class Fields:
    """Typed access to config.json: every error names the key, the value found and the type wanted."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values

    def get(self, key: str, default: Any = None) -> Any:
        value = self.values.get(key)
        return default if value is None else value

    def integer(self, key: str, default: int | None = None, minimum: int = 1) -> int:
        return self._number(key, default, int, minimum)

    def number(self, key: str, default: float | None = None) -> float:
        value = self._number(key, default, float, 0.0)
        if not MIN_NUMBER <= value <= MAX_NUMBER:
            raise ConfigError(f"config.json: {key} is {value}, must be above 0 (from {MIN_NUMBER:g} to {MAX_NUMBER:g})")
        return value

    def optional_number(self, key: str) -> float | None:
        return None if self.get(key) is None else self.number(key)

    def mapping(self, key: str) -> Mapping[str, Any]:
        """The value, or {} where there is none."""
        value = self.get(key, {})
        if not isinstance(value, Mapping):
            raise ConfigError(f"config.json: {key} is {value!r}, must be a mapping")
        return value

    def list(self, key: str, default: list[Any]) -> list[Any]:
        value = self.get(key, default)
        if not isinstance(value, list):
            raise ConfigError(f"config.json: {key} is {value!r}, must be a list")
        return value

    def boolean(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise ConfigError(f"config.json: {key} is {value!r}, must be true or false")
        return value

    def _number(self, key: str, default: T | None, kind: type[T], minimum: T) -> T:
        value = self.get(key, default)
        if value is None:
            raise ConfigError(f"config.json: {key} is missing")
        is_fraction = kind is int and isinstance(value, float) and not value.is_integer()
        if isinstance(value, bool) or not isinstance(value, int | float) or is_fraction:
            raise ConfigError(f"config.json: {key} is {value!r}, must be {'an integer' if kind is int else 'a number'}")
        if not value >= minimum or value == float("inf"):
            raise ConfigError(f"config.json: {key} is {value!r}, must be at least {minimum} and finite")
        if kind is int and value > MAX_INTEGER:
            raise ConfigError(f"config.json: {key} is {value!r}, must be at most {MAX_INTEGER}")
        return kind(value)


def token_ids(value: Any, where: str) -> tuple[int, ...]:
    """An eos_token_id as it occurs in the wild: absent, one id, or a list of ids."""
    ids = [] if value is None else value if isinstance(value, list | tuple) else [value]
    for i in ids:
        if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i <= MAX_INTEGER:
            raise ConfigError(f"{where} is {value!r}, must be an id or a list of ids")
    return tuple(ids)


def read_bos(c: Fields) -> int | None:
    ids = token_ids(c.get("bos_token_id"), "config.json: bos_token_id")
    if len(ids) > 1:
        raise ConfigError(f"config.json: bos_token_id is {list(ids)}, must be one id")
    return ids[0] if ids else None


def read_activation(c: Fields) -> Activation:
    name = c.get("hidden_activation") or c.get("hidden_act", "silu")
    if not isinstance(name, str) or name not in ACTIVATIONS:
        raise ConfigError(f"config.json: hidden_act {name!r} is not supported; supported: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def read_dtype(c: Fields) -> str:
    name = str(c.get("dtype") or c.get("torch_dtype", "float32")).removeprefix("torch.")
    if name not in ("float32", "float16", "bfloat16"):
        raise ConfigError(f"config.json: dtype {name!r} is not supported; supported: float32, float16, bfloat16")
    return name


def read_windows(c: Fields, num_layers: int) -> tuple[int | None, ...]:
    """Per layer the sliding window, from layer_types where given (a family fills in its default pattern)."""
    kinds = c.list("layer_types", ["full_attention"] * num_layers)
    if len(kinds) != num_layers:
        raise ConfigError(f"config.json: layer_types has {len(kinds)} entries, num_hidden_layers is {num_layers}")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            raise ConfigError(
                f"config.json: layer type {kind!r} is not supported; supported: full_attention, sliding_attention"
            )
    if "sliding_attention" not in kinds:
        return (None,) * num_layers
    window = c.integer("sliding_window")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def read_ropes(c: Fields, head_dim: int) -> tuple[RopeConfig, RopeConfig]:
    """The rope of full-attention layers and that of sliding ones.

    transformers 4: rope_theta and rope_scaling beside each other (Gemma 3: rope_local_base_freq for sliding layers).
    transformers 5: rope_parameters, flat or one mapping per layer type.
    """
    nested, scaling = c.mapping("rope_parameters"), dict(c.mapping("rope_scaling"))
    if "type" in scaling:  # the older key; whatever rope_parameters says, this mapping names its own kind
        scaling["rope_type"] = scaling.get("rope_type") or scaling["type"]
    if "full_attention" in nested or "sliding_attention" in nested:
        full, sliding = (Fields(nested).mapping(kind) for kind in ("full_attention", "sliding_attention"))
        return read_rope(c, {**full, **scaling}, head_dim), read_rope(c, sliding, head_dim, local=True)
    rope = read_rope(c, {**nested, **scaling}, head_dim)
    if c.get("rope_local_base_freq") is not None:
        return rope, read_rope(c, {}, head_dim, local=True)
    return rope, rope


def read_rope(c: Fields, scaling: Mapping[str, Any], head_dim: int, local: bool = False) -> RopeConfig:
    theta_key = "rope_local_base_freq" if local else "rope_theta"
    s = Fields({theta_key: c.number(theta_key, default=10000.0), **scaling})
    kind = str(s.get("rope_type") or s.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise ConfigError(f"rope type {kind!r} is not supported; supported: {', '.join(ROPE_KINDS)}")
    whole = c.number("partial_rotary_factor", default=1.0)
    rotary_dim = int(head_dim * s.number("partial_rotary_factor", default=whole))
    if rotary_dim % 2 or not 0 < rotary_dim <= head_dim:
        raise ConfigError(
            f"rope rotates {rotary_dim} of head_dim {head_dim} elements, must be even and at most head_dim"
        )
    theta = s.number("rope_theta") if "rope_theta" in s.values else s.number(theta_key)
    if theta <= 1:
        raise ConfigError(f"config.json: rope_theta is {theta:g}, must be above 1")
    return RopeConfig(theta, rotary_dim, kind, **read_rope_scaling(c, s, kind, rotary_dim // 2))


def read_rope_scaling(c: Fields, s: Fields, kind: str, num_frequencies: int) -> dict[str, Any]:
    """The fields of RopeConfig that a kind has. c: config.json; s: its rope mapping."""
    options: dict[str, Any] = {}
    if kind in ("linear", "llama3", "yarn"):
        options["factor"] = s.number("factor")
    if kind in ("llama3", "yarn"):
        key = "original_max_position_embeddings"
        holder = s if c.get(key) is None else c
        if holder.get(key) is None:
            raise ConfigError(f"rope type {kind!r} needs {key}, which config.json lacks")
        options[key] = holder.integer(key)
    if kind == "llama3":
        low, high = s.number("low_freq_factor"), s.number("high_freq_factor")
        if low >= high:
            raise ConfigError(f"rope: low_freq_factor {low:g} must be below high_freq_factor {high:g}")
        options |= {"low_freq_factor": low, "high_freq_factor": high}
    if kind == "yarn":
        options |= {key: s.optional_number(key) for key in ("attention_factor", "mscale", "mscale_all_dim")}
        options |= {"beta_fast": s.number("beta_fast", default=32.0), "beta_slow": s.number("beta_slow", default=1.0)}
        options["truncate"] = s.boolean("truncate", default=True)
    if kind == "frequency_factors":
        factors = [Fields({"factors": f}).number("factors") for f in s.list("factors", [])]
        if len(factors) != num_frequencies:
            raise ConfigError(f"rope has {len(factors)} frequency factors, must be {num_frequencies}")
        options["frequency_factors"] = tuple(factors)
    return options


DEVICES = ("auto", "cuda", "cpu", "cuda-emulated")
HASH_ALGORITHMS = ("sha256", "builtin")
POLICIES = ("fcfs", "priority")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How an engine runs a model. Names and defaults follow vLLM where it has the same option."""

    revision: str | None = None  # Hub branch, tag or commit
    hf_token: str | None = None  # Hub access token; None = what the Hub library finds
    load_format: str = "auto"  # "auto" or "dummy" (random weights from a config alone)
    device: str = "auto"  # a GPU where one can be used, else the CPU; or "cuda", "cpu", "cuda-emulated" (for tests)
    dtype: str = "auto"  # of weights and products; on the CPU auto is float32 products of weights as they are stored
    quantization: str | None = None  # "int8": weights are rounded to 8 bits per output channel when they are loaded
    kv_cache_dtype: str = "auto"  # as computed, with quantised weights "float16"; the CPU device also keeps the others
    batch_invariant: bool = False  # logits never depend on what shares the batch, bit for bit (compiled CPU kernels)
    cpu_kernels: str = "auto"  # "compiled" by the system's C compiler, or "numpy"; auto: compiled if that can be
    threads: int | None = None  # of the CPU device; None = what the process may use
    max_model_len: int | None = None  # tokens of prompt and output; None = the model's context, fitted to the KV pool
    block_size: int = 16  # tokens per KV block
    num_gpu_blocks_override: int | None = None  # KV blocks, on whatever device; overrides the next
    kv_cache_memory_bytes: int | None = None  # of KV blocks; overrides the next
    gpu_memory_utilization: float | None = None  # of the device's whole memory, weights included; GPU: 0.9
    enable_prefix_caching: bool = True  # blocks of finished and running requests are found by their content
    prefix_caching_hash_algo: str = "sha256"  # or "builtin": Python's hash, with tokens compared
    max_num_batched_tokens: int | None = None  # token budget of a step; None = 512, or max_model_len without chunking
    max_num_seqs: int = 128  # requests that run at once
    enable_chunked_prefill: bool = True  # False: a prompt is computed in one step or waits
    long_prefill_token_threshold: int | None = None  # tokens of one prompt per step; see scheduling.Scheduler
    async_scheduling: bool | None = None  # launch a step before the results of the one before are read; None: on a GPU
    enforce_eager: bool = False  # CUDA: launch every kernel by itself, capture no graphs
    cudagraph_capture_sizes: Sequence[int] | None = None  # requests in a step, whose graphs are captured at start
    scheduling_policy: str = "fcfs"  # or "priority": a request's priority counts, lower ones first
    max_logprobs: int = 20  # cap of logprobs and prompt_logprobs; -1 = no cap
    seed: int | None = None  # of requests that bring none; None = fresh entropy for each
    chat_template: str | None = None  # a Jinja template, or the path of one; None = the model's own

    def __post_init__(self) -> None:
        for name in ("block_size", "max_num_seqs"):
            self._at_least_one(name)
        for name in (
            "threads",
            "max_model_len",
            "num_gpu_blocks_override",
            "kv_cache_memory_bytes",
            "max_num_batched_tokens",
        ):
            if getattr(self, name) is not None:
                self._at_least_one(name)
        self._one_of("load_format", ("auto", "dummy"))
        self._one_of("device", DEVICES)
        for name in ("dtype", "kv_cache_dtype"):
            self._one_of(name, ("auto", "float32", "float16", "bfloat16"))
        self._one_of("cpu_kernels", ("auto", "compiled", "numpy"))
        if self.quantization is not None:
            self._one_of("quantization", ("int8",))
        if not is_integer(self.max_logprobs) or self.max_logprobs < -1:
            raise ConfigError(f"max_logprobs is {self.max_logprobs!r}, must be -1 (no cap), 0 or more")
        if self.seed is not None and (not is_integer(self.seed) or not -(2**63) <= self.seed < 2**64):
            raise ConfigError(f"seed is {self.seed!r}, must be an integer of 64 bits")
        for name in ("revision", "hf_token", "chat_template"):
            if not isinstance(getattr(self, name), str | None):
                raise ConfigError(f"{name} is {getattr(self, name)!r}, must be a string")
        for name in ("enable_chunked_prefill", "enable_prefix_caching", "enforce_eager", "batch_invariant"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name} is {getattr(self, name)!r}, must be true or false")
        self._one_of("prefix_caching_hash_algo", HASH_ALGORITHMS)
        self._one_of("scheduling_policy", POLICIES)
        self._check_graphs()
        self._check_utilization()
        self._check_long_threshold()
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is below max_num_seqs {self.max_num_seqs}; "
                "every running request needs one token of the budget"
            )

    def _check_graphs(self) -> None:
        if not isinstance(self.async_scheduling, bool | None):
            raise ConfigError(f"async_scheduling is {self.async_scheduling!r}, must be true or false")
        sizes = self.cudagraph_capture_sizes
        if sizes is None:
            return
        if not isinstance(sizes, list | tuple) or not all(is_integer(size) and size >= 1 for size in sizes):
            raise ConfigError(f"cudagraph_capture_sizes is {sizes!r}, must be a list of integers of at least 1")
        if sizes and self.enforce_eager:
            raise ConfigError(f"cudagraph_capture_sizes is {sizes!r}, but enforce_eager captures no graphs")

    def _check_utilization(self) -> None:
        share = self.gpu_memory_utilization
        if share is not None and (isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1):
            raise ConfigError(f"gpu_memory_utilization is {share!r}, must be above 0 and at most 1")

    def _check_long_threshold(self) -> None:
        threshold = self.long_prefill_token_threshold
        if threshold is None:
            return
        if not is_integer(threshold) or not 0 <= threshold <= MAX_INTEGER:
            raise ConfigError(f"long_prefill_token_threshold is {threshold!r}, must be 0 (off) or a number of tokens")
        if threshold and not self.enable_chunked_prefill:
            raise ConfigError(f"long_prefill_token_threshold is {threshold}, but enable_chunked_prefill is false")

    def _at_least_one(self, name: str) -> None:
        value = getattr(self, name)
        if not is_integer(value) or value < 1:
            raise ConfigError(f"{name} is {value!r}, must be an integer of at least 1")
        maximum = LIMITS.get(name, MAX_INTEGER)
        if value > maximum:
            raise ConfigError(f"{name} is {value!r}, must be at most {maximum}")

    def _one_of(self, name: str, choices: Sequence[str]) -> None:
        value = getattr(self, name)
        if value not in choices:
            raise ConfigError(f"{name} is {value!r}, must be one of: {', '.join(choices)}")

    @classmethod
    def from_options(cls, options: Mapping[str, Any]) -> EngineConfig:
        """Make a config from keyword options; ConfigError names an option that does not exist."""
        known = {f.name for f in fields(cls)}
        for name in options:
            if name not in known:
                raise ConfigError(f"unknown engine option {name!r}; known: {', '.join(sorted(known))}")
        return cls(**options)


def is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
