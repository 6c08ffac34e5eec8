"""Device memory that a model takes beside weights and KV cache, the same for the engine and for `plan`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lean_engine.ir.graph import TensorType
from lean_engine.ir.sources import RopeTable
from lean_engine.passes import Lowered
from lean_engine.scheduling.setup import step_dims


@dataclass(frozen=True, slots=True)
class Workspace:
    """What a step needs beside weights and KV cache, bytes."""

    arena_bytes: int  # activations
    rope_table_bytes: int
    input_bytes: int  # ids, positions, slots, block tables, …

    @property
    def num_bytes(self) -> int:
        return self.arena_bytes + self.rope_table_bytes + self.input_bytes


def workspace_of(
    lowered: Lowered, arena_bytes: int, largest_step: Mapping[str, int], max_model_len: int, block_size: int
) -> Workspace:
    """For a context of so many tokens.

    Args:
        largest_step: in tokens, requests and rows of logits; see scheduling.setup.largest_step.
    """
    dims = step_dims(largest_step, max_model_len, block_size)
    tables = [
        TensorType(RopeTable(p.source.rope, max_model_len).shape, p.value.type.dtype)
        for p in lowered.parameters
        if isinstance(p.source, RopeTable)
    ]
    return Workspace(
        arena_bytes,
        sum(table.num_bytes({}) for table in tables),
        sum(value.type.num_bytes(dims) for value in lowered.inputs),
    )
