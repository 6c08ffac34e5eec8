"""Checkpoint tensors → the device's parameters.

Every parameter gets one buffer of the device; its recipe (ir/sources) is written into it part by part, converted on the
way, and the checkpoint's pages are released behind: the weights are never twice in memory. Shapes are compared before
anything is allocated: the engine shows the checkpoint what `expected_shapes` says.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from lean_engine.ir.graph import Parameter
from lean_engine.ir.sources import Concat, Rows, Source, Stack, Tensor
from lean_engine.runtime.device import Array, Device
from lean_engine.runtime.rope import rope_table


class TensorStore(Protocol):
    """What is needed of a checkpoint."""

    def tensor(self, name: str) -> NDArray[Any]: ...

    def release(self, name: str) -> None: ...


def expected_shapes(parameters: Sequence[Parameter]) -> dict[str, tuple[int, ...]]:
    """Checkpoint tensor → the shape that the configuration implies."""
    return {t.name: t.shape for p in parameters for t in p.source.tensors()}


def load_weights(
    parameters: Sequence[Parameter],
    store: TensorStore,
    device: Device,
    on_progress: Callable[[int], None] = lambda num_bytes: None,
) -> dict[str, Array]:
    """Parameter name → its buffer. The store has what `expected_shapes` says.

    Args:
        on_progress: called with the bytes of each buffer when it is filled.
    """
    buffers: dict[str, Array] = {}
    for parameter in parameters:
        value = parameter.value
        buffer = device.allocate(parameter.source.shape, value.type.dtype)
        device.fill(buffer, partial(write_source, parameter.source, store))
        buffers[value.name] = buffer
        on_progress(buffer.nbytes)
    return buffers


def write_source(source: Source, store: TensorStore, out: Array) -> None:
    """Realise a recipe into out, which has its shape."""
    if isinstance(source, Concat):
        start = 0
        for part in source.parts:
            stop = start + part.shape[0]
            write_source(part, store, out[start:stop])
            start = stop
    elif isinstance(source, Stack):
        for part, place in zip(source.parts, out, strict=True):
            write_source(part, store, place)
    elif isinstance(source, Rows):
        write_tensor(source.tensor.name, store, out, slice(source.start, source.stop))
    elif isinstance(source, Tensor):
        write_tensor(source.name, store, out, slice(None))
    else:
        out[...] = rope_table(source.rope, source.max_positions)


def write_tensor(name: str, store: TensorStore, out: Array, rows: slice) -> None:
    copy_converted(store.tensor(name)[rows], out)
    store.release(name)


def copy_converted(source: Array, out: Array) -> None:
    """out[...] = source; bfloat16 → float32 by shifting bits, four times as fast as a cast by element."""
    if source.dtype.name == "bfloat16" and out.dtype == np.float32:
        bits = out.view(np.uint32)
        bits[...] = source.view(np.uint16)
        bits <<= np.uint32(16)
    else:
        out[...] = source
