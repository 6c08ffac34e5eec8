"""Random weights from a config alone (`load_format="dummy"`): for measuring speed and memory without a download."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lean_engine.checkpoint.base import Checkpoint
from lean_engine.dtypes import numpy_dtype
from lean_engine.errors import CheckpointError

STORED_TYPES = ("float32", "float16", "bfloat16")


class DummyCheckpoint(Checkpoint):
    """Has exactly the tensors that `expect` declared; their values depend on the name and shape only.

    Matrices are float32 noise of variance 1 / fan_in, norm weights are one and biases zero, so activations stay finite.
    """

    def __init__(
        self,
        config: dict[str, Any],
        generation_config: dict[str, Any],
        tokenizer_source: Path | dict[str, Any],
        source: str,
    ) -> None:
        self.config = config
        self.generation_config = generation_config
        self.tokenizer_source = tokenizer_source
        self.source = f"random weights for {source}"
        self._shapes: dict[str, tuple[int, ...]] = {}

    def expect(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes |= {name: tuple(shape) for name, shape in shapes.items()}

    def names(self) -> Collection[str]:
        return self._shapes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        try:
            return self._shapes[name]
        except KeyError:
            raise CheckpointError(f"{self.source}: tensor {name} has not been declared") from None

    def dtype(self, name: str) -> str:
        self.shape(name)
        return "float32"

    def stored_type(self, name: str) -> str:
        """The type that the config says its checkpoint has, so that what is measured is the size of that."""
        self.shape(name)
        named = self.config.get("dtype") or self.config.get("torch_dtype")
        return named if named in STORED_TYPES else "float32"

    def stored(self, name: str) -> NDArray[Any]:
        return self.tensor(name).astype(numpy_dtype(self.stored_type(name)), copy=False)

    def tensor(self, name: str) -> NDArray[np.float32]:
        shape = self.shape(name)
        if len(shape) == 1 and "norm" in name:
            return np.ones(shape, np.float32)
        if name.endswith(".bias"):
            return np.zeros(shape, np.float32)
        values = np.random.default_rng(zlib.crc32(name.encode())).random(shape, np.float32)
        values -= np.float32(0.5)  # uniform on ±0.5 has variance 1/12
        values *= np.float32((12 / shape[-1]) ** 0.5)
        return values
