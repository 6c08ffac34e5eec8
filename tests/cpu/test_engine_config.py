"""EngineConfig honours an option or refuses it by name, with the value found and what would be right."""

import dataclasses
from typing import Any

import click
import pytest

from lean_engine import EngineConfig
from lean_engine.cli.options import sizes
from lean_engine.errors import ConfigError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 0}, "block_size is 0, must be an integer of at least 1"),
        ({"block_size": "16"}, "block_size is '16', must be an integer of at least 1"),
        ({"max_num_seqs": True}, "max_num_seqs is True, must be an integer of at least 1"),
        ({"threads": -1}, "threads is -1, must be an integer of at least 1"),
        ({"max_model_len": 1.5}, "max_model_len is 1.5, must be an integer of at least 1"),
        ({"num_gpu_blocks_override": 0}, "num_gpu_blocks_override is 0, must be an integer of at least 1"),
        ({"kv_cache_memory_bytes": "1GiB"}, "kv_cache_memory_bytes is '1GiB', must be an integer of at least 1"),
        ({"load_format": "pt"}, "load_format is 'pt', must be one of: auto, dummy"),
        ({"dtype": "int8"}, "dtype is 'int8', must be one of: auto, float32, float16, bfloat16"),
        ({"max_logprobs": -2}, "max_logprobs is -2, must be -1 (no cap), 0 or more"),
        ({"seed": "x"}, "seed is 'x', must be an integer of 64 bits"),
        ({"seed": 2**64}, f"seed is {2**64}, must be an integer of 64 bits"),
        ({"chat_template": 5}, "chat_template is 5, must be a string"),
        ({"quantization": "int4"}, "quantization is 'int4', must be one of: int8"),
        ({"kv_cache_dtype": "fp8"}, "kv_cache_dtype is 'fp8', must be one of: auto, float32, float16, bfloat16"),
        ({"cpu_kernels": "c"}, "cpu_kernels is 'c', must be one of: auto, compiled, numpy"),
        ({"enable_chunked_prefill": 1}, "enable_chunked_prefill is 1, must be true or false"),
        ({"max_num_batched_tokens": 64}, "max_num_batched_tokens 64 is below max_num_seqs 128"),
        ({"async_scheduling": "yes"}, "async_scheduling is 'yes', must be true or false"),
        ({"enforce_eager": None}, "enforce_eager is None, must be true or false"),
        ({"batch_invariant": "yes"}, "batch_invariant is 'yes', must be true or false"),
        ({"cudagraph_capture_sizes": 8}, "cudagraph_capture_sizes is 8, must be a list of integers of at least 1"),
        ({"cudagraph_capture_sizes": [1, 0]}, "cudagraph_capture_sizes is [1, 0], must be a list of integers"),
        (
            {"cudagraph_capture_sizes": [1], "enforce_eager": True},
            "cudagraph_capture_sizes is [1], but enforce_eager captures no graphs",
        ),
        ({"gpu_memory": 1}, "unknown engine option 'gpu_memory'; known: async_scheduling, batch_invariant, "),
    ],
)
def test_a_bad_option_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        EngineConfig.from_options(options)
    assert str(error.value).startswith(message)
    assert "\n" not in str(error.value)


def test_options_are_kept_and_cannot_be_changed_later() -> None:
    config = EngineConfig.from_options({"block_size": 32, "max_num_seqs": 8, "max_num_batched_tokens": 8})
    assert (config.block_size, config.max_num_seqs, config.max_num_batched_tokens) == (32, 8, 8)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.block_size = 4  # type: ignore[misc]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threads": 10**9}, "threads is 1000000000, must be at most 1024"),
        ({"block_size": 2**31}, "block_size is 2147483648, must be at most 2147483647"),
    ],
)
def test_an_option_that_no_machine_could_honour_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig.from_options(options)


@pytest.mark.parametrize(("text", "wanted"), [("1,2,4", (1, 2, 4)), ("8", (8,)), ("1 2, 16", (1, 2, 16))])
def test_capture_sizes_are_read_from_a_list_of_numbers(text: str, wanted: tuple[int, ...]) -> None:
    assert sizes(text) == wanted
    EngineConfig(cudagraph_capture_sizes=sizes(text))


@pytest.mark.parametrize("text", ["", "a", "1,-2", "1.5"])
def test_what_is_no_list_of_sizes_is_refused(text: str) -> None:
    with pytest.raises(click.BadParameter, match=r"is not a list of sizes; write for example 1,2,4,8"):
        sizes(text)
