"""A model's program from its configuration alone, for the memory it takes of a device.

What is counted: the weights; the workspace, which is the arena for the activations of the engine's largest step, the
rope tables and the step's inputs; and KV blocks. Kernels' own scratch depends on the device and is left out.

Of a GGUF file the CPU keeps the blocks as they are stored and computes in float32, and the file's header tells how many
bytes that is; a GPU gets 16 bits for each weight.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lean_engine.checkpoint import DEFAULT_MODEL, open_checkpoint
from lean_engine.checkpoint.base import Checkpoint
from lean_engine.checkpoint.resolve import looks_like_path
from lean_engine.errors import CheckpointError, ConfigError
from lean_engine.memory.budget import kv_bytes_per_block
from lean_engine.models.presets import PRESETS

if TYPE_CHECKING:
    from lean_engine.config import EngineConfig, ModelConfig
    from lean_engine.engine.workspace import Workspace
    from lean_engine.ir.graph import Graph, Parameter, Value
    from lean_engine.passes import Lowered


@dataclass(frozen=True, slots=True)
class Footprint:
    """A compiled model and the memory it takes."""

    model: str
    config: ModelConfig
    engine: EngineConfig
    dtype: str
    limit: int  # tokens: the context before it is fitted to the KV cache
    graph: Graph  # before the passes
    lowered: Lowered
    largest_step: Mapping[str, int]  # in tokens, requests and rows of logits
    arena_bytes: int
    stored: StoredWeights | None  # of a GGUF file, where the device keeps them so

    @property
    def num_parameters(self) -> int:
        from lean_engine.passes.report import num_parameters

        return num_parameters(self.graph)

    @property
    def weights_bytes(self) -> int:
        """Of everything that is loaded; rope tables, which depend on the context, are workspace."""
        from lean_engine.ir.sources import RopeTable

        if self.stored is not None:
            return self.stored.held_bytes
        loaded = [p.value for p in self.lowered.parameters if not isinstance(p.source, RopeTable)]
        if self.engine.quantization is None:
            return sum(value.type.num_bytes({}) for value in loaded)
        return sum(int8_bytes(value) for value in loaded)

    @property
    def weights_type(self) -> str:
        if self.stored is not None:
            return self.stored.description
        return self.dtype if self.engine.quantization is None else self.engine.quantization

    @property
    def kv_cache_dtype(self) -> str:
        return self.dtype if self.engine.kv_cache_dtype == "auto" else self.engine.kv_cache_dtype

    def kv_block_bytes(self, block_size: int) -> int:
        from lean_engine.dtypes import dtype

        c = self.config
        return kv_bytes_per_block(
            c.num_layers, c.num_kv_heads, c.head_dim, block_size, dtype(self.kv_cache_dtype).num_bytes
        )

    def workspace(self, max_model_len: int) -> Workspace:
        """For a context of so many tokens."""
        from lean_engine.engine.workspace import workspace_of

        block_size = self.engine.block_size
        return workspace_of(self.lowered, self.arena_bytes, self.largest_step, max_model_len, block_size)


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """A GGUF file's weights."""

    file_bytes: int
    held_bytes: int  # by the CPU device, padding included
    types: tuple[str, ...]

    @property
    def description(self) -> str:
        return f"stored: {', '.join(self.types)}"


def stored_weights(model: str, engine: EngineConfig, parameters: Sequence[Parameter]) -> StoredWeights:
    """From the header of the file; the CPU's kernels, which know how blocks are packed, are compiled if need be."""
    from lean_engine.engine.cpu_device import make_cpu_device
    from lean_engine.runtime.weights import expected_shapes, weight_bytes

    checkpoint = open_checkpoint(model, revision=engine.revision, token=engine.hf_token)
    device = make_cpu_device(engine, progress=True)
    try:
        held_bytes = weight_bytes(parameters, checkpoint, device)
    finally:
        device.close()
    names = expected_shapes(parameters)
    file_bytes = sum(bytes_as_stored(shape, checkpoint.stored_type(name)) for name, shape in names.items())
    return StoredWeights(file_bytes, held_bytes, tuple(sorted({checkpoint.stored_type(name) for name in names})))


def bytes_as_stored(shape: Sequence[int], stored_type: str) -> int:
    """Of a tensor in a type of elements or of GGUF's blocks."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    from lean_engine.dtypes import DTYPES

    count = math.prod(shape)
    if stored_type in DTYPES:
        return count * DTYPES[stored_type].num_bytes
    elements, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[stored_type.upper()]]
    return count // elements * block_bytes


def is_gguf(checkpoint: Checkpoint) -> bool:
    return isinstance(checkpoint.tokenizer_source, dict)


def int8_bytes(value: Value) -> int:
    """A weight matrix as int8 with a float32 scale per output channel; other parameters as they are."""
    shape = value.type.concrete_shape({})
    if len(shape) == 1:
        return value.type.num_bytes({})
    return math.prod(shape) + 4 * math.prod(shape[:-1])


def footprint_of(model: str, engine: EngineConfig, dtype: str, is_cpu: bool) -> Footprint:
    """Compile a model from its configuration.

    Args:
        is_cpu: the device is this machine's CPU, not some GPU.

    Raises:
        CheckpointError, ConfigError: there is no model of this name, or its configuration cannot be honoured.
    """
    from lean_engine import models
    from lean_engine.engine.start import max_model_len_of
    from lean_engine.passes import lower, optimize, plan_memory
    from lean_engine.scheduling.setup import largest_step, step_dims

    source = config_source(model, engine)
    config = models.configure(source.config if isinstance(source, Checkpoint) else source)
    limit = max_model_len_of(config, engine)
    element_type = config.dtype if dtype == "auto" else dtype
    is_kept = is_cpu and dtype == "auto" and engine.quantization is None
    is_kept_as_stored = is_kept and isinstance(source, Checkpoint) and is_gguf(source)
    if is_kept_as_stored:
        element_type = "float32"
    graph = models.build(config, element_type, limit)
    lowered = lower(optimize(graph))
    largest = largest_step(engine, limit)
    memory = plan_memory(lowered, step_dims(largest, limit, engine.block_size), lambda launch, dims: 0)
    stored = stored_weights(model, engine, lowered.parameters) if is_kept_as_stored else None
    return Footprint(model, config, engine, element_type, limit, graph, lowered, largest, memory.arena_bytes, stored)


def raw_config(model: str, engine: EngineConfig) -> Mapping[str, Any]:
    """config.json of whatever MODEL names, see config_source."""
    source = config_source(model, engine)
    return source.config if isinstance(source, Checkpoint) else source


def config_source(model: str, engine: EngineConfig) -> Checkpoint | Mapping[str, Any]:
    """What exists on disk, else a preset's config.json, else what open_checkpoint finds; no weight is read."""
    is_local = os.path.exists(os.path.expanduser(model))
    if model in PRESETS and not is_local:
        if engine.revision is not None:
            raise ConfigError(f"revision is {engine.revision!r}, but {model} is a preset")
        return PRESETS[model]
    try:
        return open_checkpoint(model, revision=engine.revision, token=engine.hf_token, load_format="dummy")
    except CheckpointError as error:
        if is_local or looks_like_path(model) or model == DEFAULT_MODEL:
            raise
        raise CheckpointError(f"{error}; presets, which need no files: {', '.join(PRESETS)}") from None
