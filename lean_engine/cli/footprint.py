"""A model's program from its configuration alone, for the memory it takes of a device.

What is counted: the weights; the workspace, which is the arena for the activations of the engine's largest step, the
rope tables and the step's inputs; and KV blocks.

Of this machine's CPU the device itself is asked, as the engine asks it: how it keeps weights (auto: in the types they
are stored in, which a GGUF file's header tells), keys and values, and what scratch its kernels need. A GPU, which need
not be here, gets everything in one type, 16 bits where none is named; its kernels' scratch is left out.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypedDict

from lean_engine.checkpoint import DEFAULT_MODEL, open_checkpoint
from lean_engine.checkpoint.base import Checkpoint
from lean_engine.checkpoint.resolve import looks_like_path
from lean_engine.errors import CheckpointError, ConfigError
from lean_engine.memory.budget import kv_bytes_per_block
from lean_engine.models.presets import PRESETS

if TYPE_CHECKING:
    from lean_engine.config import EngineConfig, ModelConfig
    from lean_engine.engine.workspace import Workspace
    from lean_engine.ir.graph import Dims, Graph, Parameter, Value
    from lean_engine.passes import Launch, Lowered
    from lean_engine.runtime.device import Device


@dataclass(frozen=True, slots=True)
class Footprint:
    """A compiled model and the memory it takes."""

    model: str
    config: ModelConfig
    engine: EngineConfig
    dtype: str  # of the arithmetic, where the device does not say otherwise of weights or of keys and values
    limit: int  # tokens: the context before it is fitted to the KV cache
    graph: Graph  # before the passes
    lowered: Lowered
    largest_step: Mapping[str, int]  # in tokens, requests and rows of logits
    arena_bytes: int
    weights_bytes: int  # of everything that is loaded; rope tables, which depend on the context, are workspace
    weights_type: str
    kv_cache_dtype: str

    @property
    def num_parameters(self) -> int:
        from lean_engine.passes.report import num_parameters

        return num_parameters(self.graph)

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
class HeldWeights:
    """A model's weights as they are stored, and as the CPU device keeps them."""

    file_bytes: int
    held_bytes: Mapping[str, int]  # of each parameter but the rope tables, by name; padding included
    types: tuple[str, ...]  # stored

    @property
    def num_bytes(self) -> int:
        """On the device."""
        return sum(self.held_bytes.values())

    @property
    def stored_type(self) -> str:
        return f"stored: {', '.join(self.types)}"


def held_weights(store: Checkpoint, parameters: Sequence[Parameter], device: Device) -> HeldWeights:
    """No tensor is read. store: one that knows how each is stored."""
    from lean_engine.ir.sources import RopeTable
    from lean_engine.runtime.weights import expected_shapes, weight_bytes

    shapes = expected_shapes(parameters)
    store.expect(shapes)
    loaded = [p for p in parameters if not isinstance(p.source, RopeTable)]
    types = {name: store.stored_type(name) for name in shapes}
    return HeldWeights(
        file_bytes=sum(bytes_as_stored(shape, types[name]) for name, shape in shapes.items()),
        held_bytes={p.value.name: weight_bytes([p], store, device) for p in loaded},
        types=tuple(sorted(set(types.values()))),
    )


def weight_store(model: str, source: Checkpoint | Mapping[str, Any], engine: EngineConfig) -> Checkpoint:
    """What knows how each tensor is stored: a GGUF file's header, else the type that the configuration names."""
    from pathlib import Path

    from lean_engine.checkpoint.dummy import DummyCheckpoint

    if not isinstance(source, Checkpoint):
        return DummyCheckpoint(dict(source), {}, Path(), model)
    return open_checkpoint(model, revision=engine.revision, token=engine.hf_token) if is_gguf(source) else source


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
        dtype: as EngineConfig.dtype.
        is_cpu: the device is this machine's CPU, whose kernels are compiled if need be; not some GPU.

    Raises:
        CheckpointError, ConfigError: there is no model of this name, or its configuration cannot be honoured.
    """
    from lean_engine import models
    from lean_engine.engine.cpu_device import make_cpu_device
    from lean_engine.engine.cuda_device import cuda_dtype

    source = config_source(model, engine)
    config = models.configure(source.config if isinstance(source, Checkpoint) else source)
    options = replace(engine, dtype=dtype)
    if not is_cpu:
        return on_gpu(model, config, engine, cuda_dtype(options, config))
    store = weight_store(model, source, engine)
    device = make_cpu_device(options, store, progress=True)
    try:
        return on_cpu(model, config, options, store, device)
    finally:
        device.close()


def on_gpu(model: str, config: ModelConfig, engine: EngineConfig, element_type: str) -> Footprint:
    from lean_engine.ir.sources import RopeTable

    compiled = compile_largest_step(config, engine, element_type, lambda launch, dims: 0)
    loaded = [p.value for p in compiled["lowered"].parameters if not isinstance(p.source, RopeTable)]
    count = int8_bytes if engine.quantization else lambda value: value.type.num_bytes({})
    return Footprint(
        model=model,
        config=config,
        engine=engine,
        dtype=element_type,
        weights_bytes=sum(map(count, loaded)),
        weights_type=engine.quantization or element_type,
        kv_cache_dtype=element_type if engine.kv_cache_dtype == "auto" else engine.kv_cache_dtype,
        **compiled,
    )


def on_cpu(model: str, config: ModelConfig, engine: EngineConfig, store: Checkpoint, device: Device) -> Footprint:
    compiled = compile_largest_step(config, engine, device.compute_dtype, device.workspace_bytes)
    held = held_weights(store, compiled["lowered"].parameters, device)
    named = device.compute_dtype if engine.dtype == "auto" else engine.dtype
    is_as_stored = engine.dtype == "auto" and bool(device.matrix_formats)
    return Footprint(
        model=model,
        config=config,
        engine=engine,
        dtype=named,
        weights_bytes=held.num_bytes,
        weights_type=engine.quantization or (held.stored_type if is_as_stored else named),
        kv_cache_dtype=device.kv_cache_dtype,
        **compiled,
    )


class Compiled(TypedDict):
    """Fields of Footprint."""

    limit: int
    graph: Graph
    lowered: Lowered
    largest_step: Mapping[str, int]
    arena_bytes: int


def compile_largest_step(
    config: ModelConfig, engine: EngineConfig, element_type: str, scratch_bytes: Callable[[Launch, Dims], int]
) -> Compiled:
    from lean_engine import models
    from lean_engine.engine.start import max_model_len_of
    from lean_engine.passes import lower, optimize, plan_memory
    from lean_engine.scheduling.setup import largest_step, step_dims

    limit = max_model_len_of(config, engine)
    graph = models.build(config, element_type, limit)
    lowered = lower(optimize(graph))
    largest = largest_step(engine, limit)
    memory = plan_memory(lowered, step_dims(largest, limit, engine.block_size), scratch_bytes)
    return Compiled(limit=limit, graph=graph, lowered=lowered, largest_step=largest, arena_bytes=memory.arena_bytes)


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
