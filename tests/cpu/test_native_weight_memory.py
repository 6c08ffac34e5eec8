"""Memory of packed weights: aligned, apart from each other, given back, and refused with numbers."""

from __future__ import annotations

import gc
import mmap
import weakref

import numpy as np
import pytest

from lean_engine.errors import OutOfMemory
from lean_engine.runtime.cpu.native import weight_memory
from lean_engine.runtime.cpu.native.weight_memory import PAGE, WeightMemory


def test_arrays_are_zeroed_aligned_and_apart() -> None:
    memory = WeightMemory()
    arrays = [
        memory.take(shape, dtype) for shape, dtype in (((3, 5), np.float32), ((7,), np.uint8), ((0, 4), np.uint8))
    ]
    arrays += [memory.take((1 << 16,), np.uint8) for _ in range(3)]
    for number, array in enumerate(arrays):
        assert array.ctypes.data % 64 == 0
        assert (array == 0).all()
        array[...] = number
    assert all((array == number).all() for number, array in enumerate(arrays))
    assert (arrays[0].shape, arrays[0].dtype) == ((3, 5), np.float32)


def test_a_new_region_begins_where_the_last_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_memory, "REGION", PAGE)
    memory = WeightMemory()
    first, second, third, fourth = (memory.take((size,), np.uint8) for size in (PAGE // 2, PAGE // 2, 1, 3 * PAGE))
    assert second.ctypes.data == first.ctypes.data + PAGE // 2
    for array in (first, third, fourth):
        assert array.ctypes.data % PAGE == 0
    fourth[...] = 1
    assert not first.any()


def test_a_region_lives_as_long_as_what_lies_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    regions: list[weakref.ref[mmap.mmap]] = []

    class Region(mmap.mmap):
        def __init__(self, *arguments: object, **options: object) -> None:
            regions.append(weakref.ref(self))

    monkeypatch.setattr(weight_memory, "REGION", PAGE)
    monkeypatch.setattr(mmap, "mmap", Region)
    memory = WeightMemory()
    first, other = memory.take((PAGE // 2,), np.uint8), memory.take((16,), np.uint8)
    memory.take((PAGE,), np.uint8)
    del first
    gc.collect()
    other[...] = 1
    assert regions[0]() is not None
    del other
    gc.collect()
    assert regions[0]() is None


def test_a_system_without_huge_pages_has_memory_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 9999, raising=False)  # no advice of this number is known
    assert not WeightMemory().take((PAGE,), np.uint8).any()


@pytest.mark.parametrize("num_bytes", [1 << 60, 1 << 64])
def test_more_than_there_is_is_refused_with_both_numbers(num_bytes: int) -> None:
    with pytest.raises(
        OutOfMemory, match=rf"cannot allocate {num_bytes:,} bytes of weights; [\d,]+ bytes of memory are"
    ):
        WeightMemory().take((num_bytes,), np.uint8)
