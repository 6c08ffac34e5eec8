"""Checkpoint tensors of every type that matrices can be packed from."""

from __future__ import annotations

from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, quants
from gguf.constants import GGML_QUANT_SIZES
from numpy.typing import NDArray

F16_SCALES = {"q8_0": [0], "q4_0": [0], "q4_1": [0, 2], "q4_k": [0, 2], "q6_k": [208]}  # their places in a block


def random_blocks(rows: int, depth: int, block_type: str, seed: int = 0) -> NDArray[np.uint8]:
    """Rows of blocks of random bits, with scales that are finite."""
    rng = np.random.default_rng(seed)
    elements, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[block_type.upper()]]
    raw = rng.integers(0, 256, (rows, depth // elements, block_bytes), dtype=np.uint8)
    for place in F16_SCALES[block_type]:
        scales = rng.uniform(-0.02, 0.02, (*raw.shape[:2], 1)).astype(np.float16)
        raw[..., place : place + 2] = scales.view(np.uint8)
    return raw.reshape(rows, -1)


def dequantised(raw: NDArray[np.uint8], block_type: str) -> NDArray[np.float32]:
    return quants.dequantize(raw, GGMLQuantizationType[block_type.upper()])


class Store:
    """A checkpoint of arrays; a pair of a block type and rows of blocks for GGUF's."""

    def __init__(self, **tensors: Any) -> None:
        self.tensors = tensors
        self.released: list[str] = []

    def stored_type(self, name: str) -> str:
        tensor = self.tensors[name]
        return tensor[0] if isinstance(tensor, tuple) else tensor.dtype.name

    def stored(self, name: str) -> NDArray[Any]:
        tensor = self.tensors[name]
        return tensor[1] if isinstance(tensor, tuple) else tensor

    def tensor(self, name: str) -> NDArray[Any]:
        tensor = self.tensors[name]
        return dequantised(tensor[1], tensor[0]) if isinstance(tensor, tuple) else tensor

    def release(self, name: str) -> None:
        self.released.append(name)
