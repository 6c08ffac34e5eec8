"""The BLAS runs one thread while a device is open, and as many as before once the last one is gone."""

import gc

from lean_engine.runtime.cpu import blas
from lean_engine.runtime.cpu.device import CpuDevice


def num_threads() -> list[int]:
    return [library.num_threads for library in blas.libraries().lib_controllers]


def test_threads_come_back_when_the_last_device_is_closed() -> None:
    blas.set_num_threads(2)
    before = num_threads()
    first, second = CpuDevice(1), CpuDevice(2)
    assert num_threads() == [1] * len(before)
    first.close()
    first.close()  # a second time changes nothing
    assert num_threads() == [1] * len(before)
    second.close()
    assert num_threads() == before


def test_threads_come_back_when_a_device_is_dropped() -> None:
    blas.set_num_threads(2)
    before = num_threads()
    device = CpuDevice(1)
    assert num_threads() == [1] * len(before)
    del device
    gc.collect()
    assert num_threads() == before
