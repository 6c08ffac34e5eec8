"""Engines over weights that nobody trained, on a device that is given: for checks and for times."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lean_engine import models
from lean_engine.checkpoint.dummy import DummyCheckpoint
from lean_engine.config import EngineConfig
from lean_engine.dtypes import numpy_dtype
from lean_engine.engine.core import Engine
from lean_engine.engine.outputs import RequestOutput
from lean_engine.engine.start import Started, assemble
from lean_engine.runtime.device import Device
from lean_engine.sampling.params import SamplingParams

TILE = 1 << 20  # distinct numbers of a matrix of noise
MAX_STEPS = 100_000


class RoundedCheckpoint(DummyCheckpoint):
    """Random weights rounded to a type, so that devices that compute in different types read the same numbers."""

    def __init__(self, config: dict[str, Any], dtype: str) -> None:
        super().__init__(config, {}, Path(), f"{config['model_type']} in {dtype}")
        self._element = numpy_dtype(dtype)

    def tensor(self, name: str) -> NDArray[Any]:
        return super().tensor(name).astype(self._element)


class NoiseCheckpoint(RoundedCheckpoint):
    """Random weights at the speed of memory: a million numbers of the right size, again and again."""

    def __init__(self, config: dict[str, Any], dtype: str) -> None:
        super().__init__(config, dtype)
        self._noise: dict[int, NDArray[Any]] = {}  # depth → as many numbers as the largest matrix of it has

    def tensor(self, name: str) -> NDArray[Any]:
        shape = self.shape(name)
        if len(shape) < 2:
            return super().tensor(name)
        size, depth = math.prod(shape), shape[-1]
        if len(self._noise.get(depth, ())) < size:
            values = np.random.default_rng(depth).standard_normal(min(size, TILE), np.float32) / np.float32(depth**0.5)
            self._noise[depth] = np.resize(values.astype(self._element), size)
        return self._noise[depth][:size].reshape(shape)


def start(checkpoint: DummyCheckpoint, device: Device, **options: Any) -> Started:
    """An engine on a device of one's own making; token ids only."""
    config = EngineConfig.from_options({"load_format": "dummy", **options})
    return assemble(checkpoint, models.configure(checkpoint.config), None, device, config, None)


def generate(engine: Engine, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> list[RequestOutput]:
    """What LLM.generate does."""
    groups = [engine.add(str(i), p, one) for i, (p, one) in enumerate(zip(prompts, params, strict=True))]
    for _ in range(MAX_STEPS):
        if not engine.has_work():
            break
        engine.step()
    return [group.output(None) for group in groups]
