"""Flags that several commands share: the model, the engine's options, sampling; and help in sections.

Engine flags are made from EngineConfig's fields and sampling flags carry the names of SamplingParams, with dashes. A
command lists the flags it honours and gets no others, so no flag is accepted and ignored.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click
from click.core import ParameterSource

from lean_engine.checkpoint import DEFAULT_MODEL
from lean_engine.config import EngineConfig
from lean_engine.errors import ConfigError
from lean_engine.units import parse_bytes

MODEL_HELP = f"""MODEL is a directory (config.json, safetensors, tokenizer.json), a .gguf file, a Hugging Face id
(owner/name, or owner/name:file.gguf), or {DEFAULT_MODEL}, the default, which is downloaded once (93 MB)."""

TOKEN_UNITS = {"": 1, "k": 1000, "K": 1024, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30}
Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


model_argument = click.argument("model", required=False)


class Option(click.Option):
    """An option that stands in a named section of the help."""

    def __init__(self, *args: Any, section: str = "Other", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.section = section


class Command(click.Command):
    """A command whose help lists options by section, what MODEL can be, and an example."""

    def __init__(self, *args: Any, examples: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.examples = examples

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = None if isinstance(param, click.Argument) else param.get_help_record(ctx)
            if record is not None:
                sections.setdefault(getattr(param, "section", "Other"), []).append(record)
        for name, records in sections.items():
            with formatter.section(name):
                formatter.write_dl(records)

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_paragraph()
        formatter.write_text(" ".join(MODEL_HELP.split()))
        with formatter.section("Examples"):
            for example in self.examples:
                formatter.write(f"{'':>{formatter.current_indent}}{example}\n")


def tokens(text: str) -> int:
    """A number of tokens, written as in vLLM: 32768, 32K = 32 × 1024, 32k = 32 × 1000, 1.5k, 1M."""
    match = re.fullmatch(r"(-?\d{1,200})(\.\d+)?([kKmMgG]?)", str(text).strip(), re.ASCII)
    count = 0.5 if match is None else int(match[1]) if match[2] is None else float(match[1] + match[2])
    count *= 1 if match is None else TOKEN_UNITS[match[3]]
    if count != int(count):
        raise click.BadParameter(
            f"{text!r} is not a number of tokens; write for example 32768, 32K (the same) or 32k (32,000)"
        )
    return int(count)


def size(text: str) -> int:
    """A number of bytes with or without a unit."""
    try:
        return parse_bytes(text)
    except ConfigError as error:
        raise click.BadParameter(str(error)) from None


def sizes(text: str) -> tuple[int, ...]:
    """Integers with commas or blanks between them."""
    words = str(text).replace(",", " ").split()
    if not words or not all(word.isascii() and word.isdigit() for word in words):
        raise click.BadParameter(f"{text!r} is not a list of sizes; write for example 1,2,4,8")
    return tuple(map(int, words))


ENGINE_FLAGS: dict[str, tuple[Any, str]] = {  # field of EngineConfig → its type, and help with the unit
    "revision": (str, "Branch, tag or commit on the Hub. Default: the main branch."),
    "hf_token": (str, "Access token for the Hub. Default: HF_TOKEN, or what `hf auth login` has stored."),
    "load_format": (str, "auto reads the weights; dummy makes random ones and needs only the configuration."),
    "device": (str, "cpu, cuda, auto (a GPU if one can be used) or cuda-emulated (its kernels on the CPU, for tests)."),
    "dtype": (str, "Type of weights and products: float32, float16, bfloat16; auto: the checkpoint's (CPU: exact)."),
    "quantization": (str, "int8 rounds weights to 8 bits per output channel as they are loaded. Default: none."),
    "kv_cache_dtype": (
        str,
        "Type of keys and values: auto (as computed; CPU, quantised weights: float16), or float32, bfloat16, float16.",
    ),
    "batch_invariant": (
        bool,
        "Whether logits never depend on what shares the batch, to the last bit (compiled CPU kernels). Default: off.",
    ),
    "cpu_kernels": (str, "auto compiles the CPU's kernels once if there is a C compiler; compiled insists; numpy."),
    "threads": (int, "CPU threads. Default: all CPUs this process may use."),
    "max_model_len": (
        tokens,
        "Context: tokens of prompt and answer, such as 4096, 4K or 32k. Default: the model's, fitted to memory.",
    ),
    "block_size": (int, "Tokens per KV block."),
    "num_gpu_blocks_override": (
        int,
        "KV blocks to allocate, on whatever device. Default: --kv-cache-memory-bytes decides.",
    ),
    "kv_cache_memory_bytes": (
        size,
        "Memory of the KV cache, such as 512MiB or 4GiB. Default: 40 % of what is free beside the weights.",
    ),
    "gpu_memory_utilization": (
        float,
        "Share of the device's whole memory for weights, workspace and KV cache, such as 0.5. Default: as the above.",
    ),
    "enable_prefix_caching": (bool, "Whether KV blocks are reused by prompts that begin alike. Default: on."),
    "prefix_caching_hash_algo": (str, "How blocks are recognised: sha256, or builtin (tokens are compared on a hit)."),
    "max_num_batched_tokens": (
        tokens,
        "Tokens computed in one step at most. Default: 512; without chunked prefill, the context.",
    ),
    "max_num_seqs": (int, "Requests that run at once at most."),
    "enable_chunked_prefill": (bool, "Whether a long prompt may be spread over several steps. Default: on."),
    "long_prefill_token_threshold": (
        tokens,
        "Tokens of one prompt in a step at most; 0 = no bound. Default: half of a step while shorter prompts wait.",
    ),
    "async_scheduling": (
        bool,
        "Whether a step is launched before the results of the one before it are read. Default: on a GPU.",
    ),
    "enforce_eager": (bool, "On a GPU, whether every kernel is launched by itself instead of a graph. Default: off."),
    "cudagraph_capture_sizes": (
        sizes,
        "Requests in a step, such as 1,2,4, whose graphs a GPU captures at start. Default: each when it first occurs.",
    ),
    "scheduling_policy": (str, "Order of requests: fcfs (as they come) or priority (a lower number first)."),
    "max_logprobs": (int, "Cap of --logprobs, tokens per position; -1 = none."),
    "seed": (int, "Random seed of requests that bring none. Default: a fresh one for each."),
    "chat_template": (str, "A Jinja chat template, or the path of a file with one. Default: the model's."),
}

RUNNING = (  # what every command that runs an engine honours
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "enable_chunked_prefill",
    "block_size",
    "kv_cache_memory_bytes",
    "num_gpu_blocks_override",
    "gpu_memory_utilization",
    "enable_prefix_caching",
    "prefix_caching_hash_algo",
    "long_prefill_token_threshold",
    "device",
    "threads",
    "cpu_kernels",
    "async_scheduling",
    "enforce_eager",
    "cudagraph_capture_sizes",
    "dtype",
    "quantization",
    "kv_cache_dtype",
    "batch_invariant",
    "load_format",
    "revision",
    "hf_token",
)

SAMPLING_FLAGS: dict[str, tuple[Any, str]] = {  # field of SamplingParams → its type, and help
    "max_tokens": (tokens, "Tokens to generate at most."),
    "temperature": (float, "Randomness: 0 takes the likeliest token each time, 1 samples as the model was trained."),
    "top_p": (float, "Sample from the likeliest tokens whose probabilities sum to this, in (0, 1]; 1 = off."),
    "top_k": (int, "Sample from this many of the likeliest tokens; 0 = all."),
    "min_p": (float, "Drop tokens less likely than this share of the likeliest one, in [0, 1]; 0 = off."),
    "seed": (int, "Random seed: the same seed gives the same answer."),
    "stop": (str, "End before this text appears; may be given several times."),
    "n": (int, "Answers per prompt; more than 1 needs a --temperature above 0."),
    "logprobs": (int, "With --json, report this many likeliest tokens per position and the chosen one; -1 = all."),
    "presence_penalty": (float, "Lower the logit of tokens already generated, in [-2, 2]; 0 = off."),
    "frequency_penalty": (float, "The same for each time they were generated, in [-2, 2]; 0 = off."),
    "repetition_penalty": (float, "Divide the logits of tokens in prompt or answer, above 0; 1 = off."),
    "ignore_eos": (bool, "Do not end at the model's end-of-text token."),
}


def engine_options(*names: str) -> Decorator:
    """The flags of these fields of EngineConfig; the command gets them as one mapping, `engine`."""
    options = [engine_option(name) for name in names]
    return gather("engine", names, options)


def engine_option(name: str) -> Decorator:
    kind, text = ENGINE_FLAGS[name]
    default = EngineConfig.__dataclass_fields__[name].default
    return click.option(
        flag(name, has_negative=kind is bool),
        name,
        cls=Option,
        section="Engine",
        type=None if kind is bool else kind,
        default=default,
        show_default=default is not None and kind is not bool,
        help=text,
    )


def sampling_options(defaults: Mapping[str, str]) -> Decorator:
    """Sampling flags; the command gets those that were given as one mapping, `sampling`.

    Args:
        defaults: field of SamplingParams → its default as the help shows it.
    """
    options = [sampling_option(name, shown) for name, shown in defaults.items()]
    return gather("sampling", tuple(defaults), options, drop_unset=True)


def sampling_option(name: str, shown_default: str) -> Decorator:
    kind, text = SAMPLING_FLAGS[name]
    settings: dict[str, Any] = {"is_flag": True, "default": None} if kind is bool else {"type": kind, "default": None}
    if name == "stop":
        settings["multiple"] = True
    help_text = f"{text}  [default: {shown_default}]"
    return click.option(flag(name), name, cls=Option, section="Sampling", help=help_text, **settings)


def flag(name: str, has_negative: bool = False) -> str:
    """max_tokens → --max-tokens."""
    spelled = name.replace("_", "-")
    return f"--{spelled}/--no-{spelled}" if has_negative else f"--{spelled}"


def is_given(name: str) -> bool:
    """Whether the running command's parameter was on the command line."""
    return click.get_current_context().get_parameter_source(name) is not ParameterSource.DEFAULT


def gather(key: str, names: Sequence[str], options: Sequence[Decorator], drop_unset: bool = False) -> Decorator:
    """Put options on a command and hand their values over as one mapping."""

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def command(**values: Any) -> Any:
            taken = {name: values.pop(name) for name in names}
            if drop_unset:
                taken = {name: value for name, value in taken.items() if value not in (None, ())}
            return function(**values, **{key: taken})

        decorated: Callable[..., Any] = command
        for option in reversed(options):
            decorated = option(decorated)
        return decorated

    return decorate
