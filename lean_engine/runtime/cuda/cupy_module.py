"""The one import of CuPy."""

from __future__ import annotations

import importlib
from types import ModuleType

from lean_engine.errors import ConfigError


def import_cupy() -> ModuleType:
    """CuPy's cuda module.

    Raises:
        ConfigError: CuPy is not installed, or there is no usable GPU; the message says which.
    """
    try:
        cuda = importlib.import_module("cupy.cuda")
    except ImportError as error:
        raise ConfigError(f"CuPy cannot be imported ({error}); install lean-engine[cuda12] or [cuda13]") from None
    try:
        num_devices = cuda.runtime.getDeviceCount()
    except cuda.runtime.CUDARuntimeError as error:
        raise ConfigError(f"no usable CUDA driver: {error}") from None
    if num_devices == 0:
        raise ConfigError("the CUDA driver shows no GPU")
    return cuda
