"""Random weights: the same for the same name, of a scale that keeps activations finite."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from lean_engine.checkpoint.dummy import DummyCheckpoint
from lean_engine.errors import CheckpointError

SHAPES = {
    "model.embed_tokens.weight": (64, 256),
    "model.layers.0.mlp.up_proj.weight": (512, 256),
    "model.layers.1.mlp.up_proj.weight": (512, 256),
    "model.layers.0.input_layernorm.weight": (256,),
    "model.layers.0.self_attn.q_proj.bias": (256,),
}


def dummy() -> DummyCheckpoint:
    checkpoint = DummyCheckpoint({"model_type": "llama"}, {"eos_token_id": 2}, Path("somewhere"), "a model")
    checkpoint.expect(SHAPES)
    return checkpoint


def test_has_the_declared_tensors_and_the_config_it_was_given() -> None:
    checkpoint = dummy()
    assert set(checkpoint.names()) == set(SHAPES)
    assert all(checkpoint.tensor(name).shape == checkpoint.shape(name) == shape for name, shape in SHAPES.items())
    assert all(str(checkpoint.tensor(name).dtype) == checkpoint.dtype(name) == "float32" for name in SHAPES)
    assert (checkpoint.config, checkpoint.generation_config) == ({"model_type": "llama"}, {"eos_token_id": 2})
    assert checkpoint.tokenizer_source == Path("somewhere")
    checkpoint.release("model.embed_tokens.weight")


def test_values_depend_on_the_name_and_nothing_else() -> None:
    first, second = dummy(), dummy()
    second.tensor("model.embed_tokens.weight")
    name, other = "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"
    assert np.array_equal(first.tensor(name), second.tensor(name))
    assert not np.array_equal(first.tensor(name), first.tensor(other))


def test_matrices_keep_the_variance_of_their_input() -> None:
    matrix = dummy().tensor("model.layers.0.mlp.up_proj.weight")
    assert abs(matrix.mean()) < 1e-3
    assert abs(matrix.std() * 256**0.5 - 1) < 0.01


def test_norms_are_one_and_biases_zero() -> None:
    assert np.all(dummy().tensor("model.layers.0.input_layernorm.weight") == 1)
    assert np.all(dummy().tensor("model.layers.0.self_attn.q_proj.bias") == 0)


def test_tensor_that_was_not_declared_is_refused() -> None:
    for ask in (dummy().tensor, dummy().shape, dummy().dtype):
        with pytest.raises(CheckpointError, match="random weights for a model: tensor x has not been declared"):
            ask("x")
