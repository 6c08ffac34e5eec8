"""Where a parameter comes from: a recipe over the checkpoint's tensors, realised by runtime/weights.

A family file names tensors; passes rearrange the recipes (merge_linear concatenates them) without touching data.
Every recipe knows its shape, so that the verifier can compare it with the parameter's type.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lean_engine.config import RopeConfig

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of the checkpoint, whole."""

    name: str
    shape: Shape

    def tensors(self) -> Iterator[Tensor]:
        yield self

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows start:stop of a tensor (models whose checkpoints hold merged matrices)."""

    tensor: Tensor
    start: int
    stop: int

    @property
    def shape(self) -> Shape:
        return (self.stop - self.start, *self.tensor.shape[1:])

    def tensors(self) -> Iterator[Tensor]:
        yield self.tensor

    def __str__(self) -> str:
        return f"{self.tensor}[{self.start}:{self.stop}]"


@dataclass(frozen=True, slots=True)
class Concat:
    """Parts below each other, along the first axis."""

    parts: tuple[Source, ...]

    @property
    def shape(self) -> Shape:
        return (sum(p.shape[0] for p in self.parts), *self.parts[0].shape[1:])

    def tensors(self) -> Iterator[Tensor]:
        for part in self.parts:
            yield from part.tensors()

    def __str__(self) -> str:
        return f"concat({', '.join(map(str, self.parts))})"


@dataclass(frozen=True, slots=True)
class Stack:
    """Parts of one shape along a new first axis (experts)."""

    parts: tuple[Source, ...]

    @property
    def shape(self) -> Shape:
        return (len(self.parts), *self.parts[0].shape)

    def tensors(self) -> Iterator[Tensor]:
        for part in self.parts:
            yield from part.tensors()

    def __str__(self) -> str:
        return f"stack({self.parts[0]}, … {len(self.parts)} parts)"


@dataclass(frozen=True, slots=True)
class RopeTable:
    """cos beside sin for every position, [max_positions, rotary_dim]; computed, not loaded."""

    rope: RopeConfig
    max_positions: int

    @property
    def shape(self) -> Shape:
        return (self.max_positions, self.rope.rotary_dim)

    def tensors(self) -> Iterator[Tensor]:
        return iter(())

    def __str__(self) -> str:
        return f"rope_table({self.rope.kind}, theta={self.rope.theta:g})"


Source = Tensor | Rows | Concat | Stack | RopeTable


def concat(parts: tuple[Source, ...]) -> Source:
    """Concat, simplified: neighbouring rows of one tensor join, all rows of a tensor are the tensor."""
    joined: list[Source] = []
    for part in parts:
        last = joined[-1] if joined else None
        if isinstance(last, Rows) and isinstance(part, Rows) and last.tensor == part.tensor and last.stop == part.start:
            joined[-1] = Rows(last.tensor, last.start, part.stop)
        else:
            joined.append(part)
    if len(joined) > 1:
        return Concat(tuple(joined))
    only = joined[0]
    if isinstance(only, Rows) and (only.start, only.stop) == (0, only.tensor.shape[0]):
        return only.tensor
    return only
