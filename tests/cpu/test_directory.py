"""Checkpoint directories: which weights are used, sharding, the check against the config, and what damage says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from lean_engine.checkpoint.directory import DirectoryCheckpoint
from lean_engine.errors import CheckpointError

A = np.arange(6, dtype=np.float32).reshape(2, 3)
B = np.ones(3, np.float16)


def make(directory: Path, config: Any = None, **tensors: np.ndarray) -> Path:
    (directory / "config.json").write_text(json.dumps({"model_type": "llama"} if config is None else config))
    if tensors:
        save_file(tensors, directory / "model.safetensors")
    return directory


def make_sharded(directory: Path) -> Path:
    make(directory)
    save_file({"a": A, "extra": B}, directory / "model-00001-of-00002.safetensors")
    save_file({"b": B}, directory / "model-00002-of-00002.safetensors")
    weight_map = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    write_index(directory, weight_map)
    return directory


def write_index(directory: Path, weight_map: Any) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def failure(directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        DirectoryCheckpoint(directory)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_single_file_with_its_configs(tmp_path: Path) -> None:
    make(tmp_path, {"model_type": "llama", "hidden_size": 3}, a=A, b=B)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    checkpoint = DirectoryCheckpoint(tmp_path)
    assert checkpoint.config == {"model_type": "llama", "hidden_size": 3}
    assert checkpoint.generation_config == {"eos_token_id": [1, 2]}
    assert checkpoint.tokenizer_source == tmp_path
    assert set(checkpoint.names()) == {"a", "b"}
    assert (checkpoint.shape("a"), checkpoint.dtype("b")) == ((2, 3), "float16")
    assert np.array_equal(checkpoint.tensor("a"), A)
    checkpoint.release("a")
    assert np.array_equal(checkpoint.tensor("a"), A)


def test_generation_config_may_be_absent(tmp_path: Path) -> None:
    assert DirectoryCheckpoint(make(tmp_path, a=A)).generation_config == {}


def test_shards_are_read_as_the_index_says(tmp_path: Path) -> None:
    checkpoint = DirectoryCheckpoint(make_sharded(tmp_path))
    assert set(checkpoint.names()) == {"a", "b"}  # "extra" is in a shard but not in the index
    assert np.array_equal(checkpoint.tensor("a"), A)
    assert np.array_equal(checkpoint.tensor("b"), B)


def test_shard_that_is_missing_is_named(tmp_path: Path) -> None:
    make_sharded(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors: is missing; model.safetensors.index.json lists it" in failure(tmp_path)


def test_shard_that_is_truncated_is_named(tmp_path: Path) -> None:
    make_sharded(tmp_path)
    shard = tmp_path / "model-00001-of-00002.safetensors"
    shard.write_bytes(shard.read_bytes()[:-2])
    assert "model-00001-of-00002.safetensors: its header describes" in failure(tmp_path)


def test_index_that_contradicts_its_shard_is_refused(tmp_path: Path) -> None:
    make_sharded(tmp_path)
    write_index(tmp_path, {"a": "model-00002-of-00002.safetensors"})
    assert "model-00002-of-00002.safetensors: lacks tensor a" in failure(tmp_path)


@pytest.mark.parametrize(
    ("weight_map", "expected"),
    [
        (["a"], "has no weight_map"),
        ({"a": 1}, "has no weight_map"),
        ({"a": "../x.safetensors"}, "names the shard '../x.safetensors', must be a file beside it"),
    ],
)
def test_index_that_is_damaged_is_refused(tmp_path: Path, weight_map: Any, expected: str) -> None:
    make(tmp_path)
    write_index(tmp_path, weight_map)
    assert expected in failure(tmp_path)


def test_safetensors_of_other_names_are_used_without_an_index(tmp_path: Path) -> None:
    make(tmp_path)
    save_file({"a": A}, tmp_path / "part1.safetensors")
    save_file({"b": B}, tmp_path / "part2.safetensors")
    assert set(DirectoryCheckpoint(tmp_path).names()) == {"a", "b"}
    save_file({"b": B}, tmp_path / "part3.safetensors")
    assert "part3.safetensors: holds tensor b a second time; part2.safetensors has it too" in failure(tmp_path)


def test_directory_without_weights_says_what_is_needed(tmp_path: Path) -> None:
    make(tmp_path)
    assert "has no weights: expected model.safetensors" in failure(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    assert "has its weights as pytorch_model.bin; safetensors are needed" in failure(tmp_path)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("{", "config.json: is not valid JSON"), ("[1]", "config.json: is not a JSON object but list")],
)
def test_config_that_is_damaged_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    make(tmp_path, a=A)
    (tmp_path / "config.json").write_text(text)
    assert expected in failure(tmp_path)


def test_directory_without_config_names_the_gguf_file_in_it(tmp_path: Path) -> None:
    assert "it has no config.json" in failure(tmp_path)
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    assert f"give the path of the file: {tmp_path / 'm.gguf'}" in failure(tmp_path)


def test_generation_config_that_is_damaged_is_refused(tmp_path: Path) -> None:
    make(tmp_path, a=A)
    (tmp_path / "generation_config.json").write_text("nope")
    assert "generation_config.json: is not valid JSON" in failure(tmp_path)


def test_missing_tensor_names_the_files_that_were_searched(tmp_path: Path) -> None:
    checkpoint = DirectoryCheckpoint(make_sharded(tmp_path))
    for ask in (checkpoint.shape, checkpoint.dtype, checkpoint.tensor, checkpoint.release):
        with pytest.raises(CheckpointError, match=r"tensor c is missing; looked in model-00001.*, model-00002"):
            ask("c")


def test_expect_accepts_the_tensors_that_are_there(tmp_path: Path) -> None:
    tensors = {"a": A, "lm_head.weight": A, "model.layers.0.self_attn.rotary_emb.inv_freq": B}
    DirectoryCheckpoint(make(tmp_path, **tensors)).expect({"a": (2, 3)})


def test_expect_names_tensor_found_and_expected_shape(tmp_path: Path) -> None:
    checkpoint = DirectoryCheckpoint(make(tmp_path, a=A, b=B))
    with pytest.raises(CheckpointError, match=r"tensor a has shape \[2, 3\], its config asks for \[3, 2\]"):
        checkpoint.expect({"a": (3, 2), "b": (3,)})
    with pytest.raises(CheckpointError, match="tensor c is missing"):
        checkpoint.expect({"a": (2, 3), "b": (3,), "c": (1,)})


def test_expect_refuses_tensors_that_would_be_ignored(tmp_path: Path) -> None:
    checkpoint = DirectoryCheckpoint(make(tmp_path, **{"a": A, "q_proj.bias": B, "r": B}))
    with pytest.raises(CheckpointError, match=r"holds 2 tensors that its config has no use for, such as q_proj\.bias"):
        checkpoint.expect({"a": (2, 3)})


def test_expect_refuses_a_type_that_cannot_be_loaded(tmp_path: Path) -> None:
    checkpoint = DirectoryCheckpoint(make(tmp_path, a=A.astype(np.int8)))
    with pytest.raises(CheckpointError, match="tensor a is stored as I8, which cannot be loaded"):
        checkpoint.expect({"a": (2, 3)})


@pytest.mark.parametrize(
    ("prefix", "head"), [("language_model.model", "language_model.lm_head"), ("model.language_model", "lm_head")]
)
def test_multimodal_gemma3_is_reduced_to_its_language_model(tmp_path: Path, prefix: str, head: str) -> None:
    config = {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "model_type": "gemma3",
        "eos_token_id": [1, 106],
        "torch_dtype": "bfloat16",
        "text_config": {"hidden_size": 3, "eos_token_id": 1, "model_type": "gemma3"},
        "vision_config": {"hidden_size": 5},
    }
    tensors = {
        f"{prefix}.norm.weight": A,
        f"{head}.weight": B,
        "vision_tower.x.weight": A,
        "multi_modal_projector.y": B,
    }
    checkpoint = DirectoryCheckpoint(make(tmp_path, config, **tensors))
    assert checkpoint.config == {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_size": 3,
        "eos_token_id": [1, 106],
        "torch_dtype": "bfloat16",
    }
    assert set(checkpoint.names()) == {"model.norm.weight", "lm_head.weight"}
    assert np.array_equal(checkpoint.tensor("model.norm.weight"), A)
