"""The one table of element types: name, size, NumPy type, CUDA C type.

Names are those of config.json and of the IR. `numpy_dtype` imports NumPy (and ml_dtypes for bfloat16) only when asked,
so that the compiler and the scheduler stay importable without either.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lean_engine.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True, slots=True)
class DType:
    """One element type."""

    name: str  # as in config.json: "float32"
    num_bytes: int
    short: str  # as in printed programs and safetensors: "f32"
    cuda: str  # as in cuda/: "float"


DTYPES = {
    d.name: d
    for d in (
        DType("float32", 4, "f32", "float"),
        DType("float16", 2, "f16", "half"),
        DType("bfloat16", 2, "bf16", "bfloat16"),
        DType("int32", 4, "i32", "int"),
        DType("int8", 1, "i8", "signed char"),
        DType("uint8", 1, "u8", "unsigned char"),
    )
}


def dtype(name: str) -> DType:
    """Look a type up by its name; ConfigError lists the known names."""
    try:
        return DTYPES[name]
    except KeyError:
        raise ConfigError(f"unknown dtype {name!r}; known: {', '.join(DTYPES)}") from None


def numpy_dtype(name: str) -> np.dtype:
    """The NumPy dtype of a type's name (ml_dtypes supplies bfloat16)."""
    import numpy as np

    if name == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(dtype(name).name)
