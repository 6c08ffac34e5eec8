"""DeviceArray: the same views as NumPy's, by addresses alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from lean_engine.dtypes import numpy_dtype
from lean_engine.runtime.cuda.device_array import DeviceArray

BASE = np.arange(240, dtype=np.uint8)


def same(found: DeviceArray, wanted: np.ndarray[Any, Any], base: int = 1000) -> bool:
    offset = wanted.ctypes.data - BASE.ctypes.data
    return (found.address, found.shape, found.dtype) == (base + offset, wanted.shape, wanted.dtype)


def test_views_are_those_of_numpy() -> None:
    mine, theirs = DeviceArray("kept", 1000, BASE.shape, BASE.dtype), BASE
    for step in (
        lambda a: a[16:],
        lambda a: a[16:80].view(np.float32),
        lambda a: a[16:80].view(np.float32).reshape(4, 4),
        lambda a: a[16:80].view(np.float32).reshape((2, 2, 4))[1:],
        lambda a: a[:96].view(numpy_dtype("bfloat16")).reshape(-1, 8)[2:5].reshape(3, 4, 2),
        lambda a: a[:0],
        lambda a: a[200:300],
        lambda a: a[-8:],
    ):
        found, wanted = step(mine), step(theirs)  # type: ignore[no-untyped-call]
        assert same(found, wanted)
        assert (found.size, found.nbytes, found.ndim, len(found)) == (
            wanted.size,
            wanted.nbytes,
            wanted.ndim,
            len(wanted),
        )
        assert found.memory == "kept"
        assert found.flags.c_contiguous


@pytest.mark.parametrize("key", [0, slice(0, 8, 2), (slice(None), 0), Ellipsis])
def test_what_would_not_be_contiguous_is_refused(key: Any) -> None:
    with pytest.raises(TypeError, match=r"only \[start:stop\]|in steps of 2"):
        DeviceArray(None, 0, (8, 4), np.dtype(np.int32))[key]


def test_impossible_shapes_are_refused() -> None:
    array = DeviceArray(None, 0, (3, 2), np.dtype(np.int16))
    with pytest.raises(ValueError, match=r"cannot take the shape \[4, 2\]"):
        array.reshape(4, 2)
    with pytest.raises(ValueError, match="rows of 4 bytes are no whole number of float64"):
        array.view(np.float64)


def test_addresses_are_python_s_integers_whatever_shapes_are_made_of() -> None:
    """CuPy copies to no other; see test_cupy_calls.py."""
    array = DeviceArray(None, np.int64(4096), (np.int64(6), np.int32(4)), np.dtype("float32"))  # type: ignore[arg-type]
    for part in (array, array[1:], array[np.int64(2) : np.int64(3)], array.reshape(np.int64(24)), array.view("uint8")):
        assert type(part.address) is int
        assert {type(n) for n in part.shape} == {int}
        assert type(part.nbytes) is int
