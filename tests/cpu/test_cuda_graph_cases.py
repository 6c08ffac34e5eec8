"""What graphs over padded steps have broken elsewhere, each with a test of its own; see also test_cuda_emulated.py."""

from __future__ import annotations

import gc
import tempfile
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_cupy import FakeCubins, FakeCuda

from lean_engine.errors import ConfigError, LaunchError
from lean_engine.runtime.cuda.cublaslt import WORKSPACE_BYTES
from lean_engine.runtime.cuda.cupy_driver import CupyDriver
from lean_engine.runtime.cuda.device import CudaDevice
from lean_engine.runtime.cuda.emulated_driver import EmulatedDriver
from lean_engine.runtime.cuda.instances import Instance
from lean_engine.runtime.device import LaunchArgs


@pytest.fixture
def device() -> CudaDevice:
    try:
        return CudaDevice(EmulatedDriver(), "float16")
    except ConfigError as error:
        pytest.skip(str(error))


def filled(device: CudaDevice, values: Any, dtype: str) -> Any:
    array = device.allocate(np.shape(values), dtype)
    array[...] = values
    return array


def test_slot_minus_one_is_skipped_and_never_taken_as_the_last_slot(device: CudaDevice) -> None:
    rng = np.random.default_rng(0)
    caches = [device.allocate((3, 2, 16, 64), "float16") for _ in range(2)]
    k, v = (filled(device, rng.normal(size=(4, 128)), "float16") for _ in range(2))
    slots = filled(device, [17, -1, 20, -1], "int32")
    device.capture([LaunchArgs("write_kv", [k, v, slots, *caches], caches, {}, slots[:0])])()
    for cache in caches:
        written = ~np.isnan(cache.astype(np.float32)).all(axis=(1, 3))  # [N, S]
        assert np.argwhere(written).tolist() == [[1, 1], [1, 4]]


def test_rows_of_length_0_give_zeros_and_no_nan(device: CudaDevice) -> None:
    """Of four rows in a graph, two are requests of length 0 over a cache that holds NaN."""
    rng = np.random.default_rng(1)
    caches = [device.allocate((3, 1, 16, 64), "float16") for _ in range(2)]
    for cache in caches:
        cache[1] = rng.normal(size=cache[1].shape)
    q = filled(device, rng.normal(size=(4, 128)), "float16")
    tables = filled(device, [[1], [2], [1], [0]], "int32")
    starts, lengths = filled(device, [0, 1, 2, 3, 4], "int32"), filled(device, [9, 0, 16, 0], "int32")
    out = device.allocate((4, 128), "float16")
    scalars = {"head_dim": np.int32(64), "scale": np.float32(0.125), "window": None, "softcap": None}
    workspace = device.allocate((1 << 22,), "uint8")
    inputs = [q, *caches, tables, starts, lengths]
    device.capture([LaunchArgs("paged_attention", inputs, [out], scalars, workspace)])()
    assert np.isfinite(out.astype(np.float32)).all()
    assert [bool(row.any()) for row in out] == [True, False, True, False]


def make_driver() -> tuple[CupyDriver, FakeCuda, list[int]]:
    try:
        cuda = FakeCuda()
    except ConfigError as error:
        pytest.skip(str(error))
    workspaces: list[int] = []

    def make_blas(workspace: int) -> Any:
        assert not cuda.is_capturing
        workspaces.append(workspace)
        return cuda.make_blas(workspace)

    return CupyDriver(FakeCubins(), Path(tempfile.mkdtemp()), make_blas, cuda), cuda, workspaces


def test_cublas_workspace_is_set_once_before_any_capture() -> None:
    driver, cuda, workspaces = make_driver()
    assert len(workspaces) == 1
    cuda.view(workspaces[0], "uint8", WORKSPACE_BYTES)  # lies in an allocation that lives
    driver.capture(lambda: None)()
    assert len(workspaces) == 1


def test_nothing_is_allocated_or_compiled_during_a_capture() -> None:
    emulated = EmulatedDriver()
    for forbidden, message in (
        (lambda: emulated.allocate((1,), "int32"), "memory is allocated"),
        (lambda: emulated.prepare([Instance("norm.cu", "rms_norm<half, 8, 1>")]), "a kernel is compiled"),
    ):
        with pytest.raises(LaunchError, match=message):
            emulated.capture(forbidden)  # type: ignore[arg-type]


class Buffer:
    """Stands in for an array's memory."""


def test_buffers_live_as_long_as_the_graph_that_points_to_them() -> None:
    driver, _, _ = make_driver()
    buffer = Buffer()
    life = weakref.ref(buffer)

    def run(held: Buffer = buffer) -> None:
        """What is captured holds its arrays, as launches do."""

    replay = driver.capture(run)
    del buffer, run
    gc.collect()
    assert life() is not None, "the graph would replay over memory that is given to somebody else"
    replay()
    del replay
    gc.collect()
    assert life() is None
