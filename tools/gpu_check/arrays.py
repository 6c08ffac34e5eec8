"""Arrays on a driver's device: values brought there and back, noise without end, guards around what is written."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lean_engine.dtypes import numpy_dtype
from lean_engine.runtime.cuda.driver import Driver

Array = NDArray[Any]

# Element type → distance of 1 to the next number, smallest number above 0.
FLOATS = {"float16": (2.0**-10, 2.0**-24), "bfloat16": (2.0**-7, 2.0**-133), "float32": (2.0**-23, 2.0**-149)}
GUARD_BYTES = 256
NOISE_ELEMENTS = 1 << 23  # distinct ones; memory beyond holds them again
EMULATED_NOISE_ELEMENTS = 1 << 16


def place(driver: Driver, values: Any, dtype: str) -> Array:
    """Values on the device, in another type if need be."""
    source = np.asarray(values)
    array = driver.allocate(source.shape, dtype)
    overwrite(driver, array, source)
    return array


def overwrite(driver: Driver, array: Array, values: Any) -> None:
    host = driver.allocate_host(array.shape, array.dtype.name)
    with np.errstate(over="ignore", invalid="ignore"):
        host[...] = np.asarray(values).astype(host.dtype)
    driver.upload(host, array)
    driver.synchronize()


def fetch(driver: Driver, array: Array) -> Array:
    host = driver.allocate_host(array.shape, array.dtype.name)
    driver.download(array, host)
    driver.synchronize()
    return host


def noise(driver: Driver, num_elements: int, dtype: str, scale: float = 1.0) -> Array:
    """Normal numbers [num_elements] on the device, repeated in turn: as random as power and clocks need them."""
    most = NOISE_ELEMENTS if num_elements > EMULATED_NOISE_ELEMENTS else EMULATED_NOISE_ELEMENTS
    num_distinct = min(num_elements, most)
    host = driver.allocate_host((num_distinct,), dtype)
    values = np.random.default_rng(num_distinct).standard_normal(num_distinct, np.float32)
    host[...] = (values * np.float32(scale)).astype(host.dtype)
    array = driver.allocate((num_elements,), dtype)
    repeat(driver, array, host)
    return array


def repeat(driver: Driver, array: Array, host: Array) -> None:
    """Fill a flat array with what a shorter one in page-locked memory holds, again and again."""
    for start in range(0, array.shape[0], len(host)):
        part = array[start : start + len(host)]
        driver.upload(host[: part.shape[0]], part)
    driver.synchronize()


def shaped(flat: Array, start: int, shape: Sequence[int]) -> Array:
    """A part of a flat array, from an element on."""
    return flat[start : start + math.prod(shape)].reshape(tuple(shape))


class Guarded:
    """An array of 0xFF (NaN, -1) between two guards that must not change."""

    def __init__(self, driver: Driver, shape: Sequence[int], dtype: str) -> None:
        self._driver = driver
        num_bytes = math.prod(shape) * numpy_dtype(dtype).itemsize
        self._stop = GUARD_BYTES + num_bytes
        self._raw = driver.allocate((self._stop + GUARD_BYTES,), "uint8")
        self.array = self._raw[GUARD_BYTES : self._stop].view(numpy_dtype(dtype)).reshape(tuple(shape))
        self.poison()

    def poison(self) -> None:
        overwrite(self._driver, self._raw, np.full(self._raw.shape, 0xFF, np.uint8))

    def content(self) -> Array:
        """The array's values; AssertionError where something was written beside it."""
        raw = fetch(self._driver, self._raw)
        if (raw[:GUARD_BYTES] != 0xFF).any() or (raw[self._stop :] != 0xFF).any():
            raise AssertionError("a kernel wrote beside its output")
        inside: Array = raw[GUARD_BYTES : self._stop].view(self.array.dtype).reshape(self.array.shape)
        return inside
