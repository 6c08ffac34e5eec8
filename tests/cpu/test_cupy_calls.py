"""Every call of CuPy that the driver and tools/gpu_check make, against an installed CuPy; no GPU is needed.

Without a driver a call with right arguments ends where CUDA is missing; one with a wrong name, number or type of
arguments is a TypeError before that.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterable
from functools import reduce
from types import SimpleNamespace
from typing import Any

import fake_cupy
import numpy as np
import pytest
from fake_cupy import FakeCuda

from lean_engine.errors import ConfigError
from lean_engine.runtime.cuda import cupy_driver
from lean_engine.runtime.cuda.cupy_driver import kernel_argument
from lean_engine.runtime.cuda.device_array import DeviceArray

STREAM = SimpleNamespace(ptr=0)  # CuPy reads nothing else of one
ADDRESS = 1 << 40
Call = tuple[tuple[Any, ...], dict[str, Any]]


def call(*positional: Any, **named: Any) -> Call:
    return positional, named


CALLS: dict[str, Call] = {  # the driver's, each with arguments of the types that it gives
    "Device": call(),
    "Event": call(disable_timing=True),
    "Event.record": call(STREAM),
    "Event.synchronize": call(),
    "Graph.launch": call(STREAM),
    "Graph.upload": call(STREAM),
    "Module": call(),
    "Module.load": call(b"cubin"),
    "Module.get_function": call("name"),
    "Stream": call(non_blocking=True),
    "Stream.begin_capture": call(cupy_driver.STREAM_CAPTURE_MODE_GLOBAL),
    "Stream.end_capture": call(),
    "Stream.synchronize": call(),
    "alloc": call(256),
    "alloc_pinned_memory": call(256),
    "driver.funcSetAttribute": call(ADDRESS, cupy_driver.MAX_DYNAMIC_SHARED_SIZE_BYTES, 65536),
    "runtime.getDeviceCount": call(),
    "runtime.getDeviceProperties": call(0),
    "runtime.memGetInfo": call(),
    "runtime.memcpyAsync": call(ADDRESS, ADDRESS, 4, 1, 0),
    "runtime.memcpy2DAsync": call(ADDRESS, 8, ADDRESS, 8, 4, 2, 1, 0),
}
GPU_CHECK_CALLS: dict[str, Call] = {  # what tools/gpu_check calls beside those
    "Event": call(),
    "get_elapsed_time": call(None, None),
    "runtime.driverGetVersion": call(),
    "runtime.runtimeGetVersion": call(),
}
CLASSES = ("Event", "Graph", "Module", "Stream", "Device")


@pytest.fixture
def cuda() -> Any:
    """An installed CuPy's cuda module, with the class of its graphs."""
    found = pytest.importorskip("cupy.cuda", reason="CuPy is not installed; the dev extra brings it")
    return SimpleNamespace(**{**vars(found), "Graph": importlib.import_module("cupy.cuda.graph").Graph})


@pytest.fixture
def cuda_without_driver(cuda: Any) -> Any:
    try:
        cuda.runtime.getDeviceCount()
    except cuda.runtime.CUDARuntimeError as error:
        if "cudaErrorInsufficientDriver" in str(error):
            return cuda
    pytest.skip("CUDA has a driver here, so the calls would be made")


# -- an installed CuPy


def test_names_are_those_of_cupy(cuda: Any) -> None:
    for name in (*cupy_driver.CUPY_NAMES, "runtime.memcpyDeviceToDevice", "function.Function.ptr", "MemoryPointer.ptr"):
        reduce(getattr, name.split("."), cuda)
    assert cuda.runtime.streamCaptureModeGlobal == cupy_driver.STREAM_CAPTURE_MODE_GLOBAL


@pytest.mark.parametrize("calls", [CALLS, GPU_CHECK_CALLS], ids=["driver", "gpu_check"])
def test_calls_fit_cupy_s_signatures(cuda: Any, calls: dict[str, Call]) -> None:
    assert check_calls(cuda, calls, calls) == list(calls), "CuPy does not tell some signatures any more"


FUNCTIONS = ["Device", "Event", *(name for name in CALLS if name.split(".")[0] not in CLASSES)]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_calls_get_as_far_as_cuda(cuda_without_driver: Any, name: str) -> None:
    positional, named = CALLS[name]
    with pytest.raises(RuntimeError, match=r"CUDA driver|libcuda"):
        reduce(getattr, name.split("."), cuda_without_driver)(*positional, **named)


def test_modules_are_loaded_from_bytes(cuda_without_driver: Any) -> None:
    module = cuda_without_driver.Module()
    with pytest.raises(RuntimeError, match="CUDA driver"):
        module.load(*CALLS["Module.load"][0])
    with pytest.raises(TypeError, match="expected bytes"):
        module.load("cubin")


KERNEL_ARGUMENTS = (  # of every type that a KernelCall may hold
    None,
    DeviceArray(None, ADDRESS, (1,), np.dtype(np.int32)),
    np.int32(-1),
    np.uint32(1),
    np.uint64(1 << 40),
    np.int64(1),
    np.float32(0.5),
)


def test_kernels_are_launched_with_arguments_that_cupy_takes(cuda_without_driver: Any) -> None:
    function = cuda_without_driver.function.Function
    kernel = function.__new__(function)  # of no module
    args = tuple(map(kernel_argument, KERNEL_ARGUMENTS))
    with pytest.raises(RuntimeError, match="CUDA driver"):
        kernel((3,), (32, 2), args, 0, STREAM)
    with pytest.raises(TypeError, match="Unsupported type"):
        kernel((3,), (32,), (KERNEL_ARGUMENTS[1],), 0, STREAM)
    with pytest.raises(TypeError, match="'grid' has incorrect type"):
        kernel([3], (32,), args, 0, STREAM)


def test_addresses_of_copies_must_be_python_s_integers(cuda_without_driver: Any) -> None:
    """Which the fake asks for as well, over a whole engine."""
    positional, _ = CALLS["runtime.memcpyAsync"]
    for place in (0, 1, 4):
        wrong = [np.int64(value) if i == place else value for i, value in enumerate(positional)]
        with pytest.raises(TypeError, match="an integer is required"):
            cuda_without_driver.runtime.memcpyAsync(*wrong)


def test_pinned_memory_is_read_and_written_as_a_buffer(cuda: Any) -> None:
    host = np.arange(16, dtype=np.uint8)
    memory = cuda.pinned_memory.PinnedMemoryPointer(SimpleNamespace(ptr=host.ctypes.data, size=16), 0)
    raw = np.frombuffer(memory, np.uint8, 12)
    raw[3] = 99
    assert (host[3], len(raw), len(np.frombuffer(memory, np.uint8, 0))) == (99, 12, 0)


# -- the fake of it


def test_calls_fit_the_signatures_of_the_fake() -> None:
    fake = make_fake()
    methods = [name for name in CALLS if "." in name and name.split(".")[0] in CLASSES]
    others = [name for name in CALLS if name not in methods]
    assert [*check_calls(fake_cupy, CALLS, methods), *check_calls(fake, CALLS, others)] == [*methods, *others]


def test_fake_refuses_the_addresses_that_cupy_refuses() -> None:
    fake = make_fake()
    target, source = fake.alloc(4).ptr, np.zeros(4, np.uint8)
    fake.Stream(non_blocking=True)
    fake.runtime.memcpyAsync(target, source.ctypes.data, 4, 1, 7)
    with pytest.raises(TypeError, match="an integer is required"):
        fake.runtime.memcpyAsync(np.int64(target), source.ctypes.data, 4, 1, 7)


def make_fake() -> FakeCuda:
    try:
        return FakeCuda()
    except ConfigError as error:
        pytest.skip(str(error))


# -- signatures


def check_calls(cuda: Any, calls: dict[str, Call], names: Iterable[str]) -> list[str]:
    """Bind calls to the signatures of what they call; the names whose signatures could be found."""
    checked = []
    for name in names:
        positional, named = calls[name]
        owner, _, _ = name.partition(".")
        is_method = owner in CLASSES and "." in name
        found = signature_of(reduce(getattr, name.split("."), cuda), is_method)
        if found is not None:
            has_self = is_method and next(iter(found.parameters), "") == "self"
            found.bind(*[None] * has_self, *positional, **named)
            checked.append(name)
    return checked


def signature_of(function: Any, is_method: bool) -> inspect.Signature | None:
    """As Python knows it, or as Cython writes it into a docstring; None where neither tells."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        pass
    match = re.match(r"[\w.]+\((.*?)\)", (function.__doc__ or "").strip())
    if match is None:
        return None
    names = [part.strip() for part in match[1].split(",") if part.strip()]
    has_self = bool(names) and names[0].split()[-1] == "self"
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [
        inspect.Parameter(
            name.split("=")[0].split()[-1], kind, default=None if "=" in name else inspect.Parameter.empty
        )
        for name in ([] if has_self or not is_method else ["self"]) + names
    ]
    return inspect.Signature(parameters)


def test_signatures_are_read_from_docstrings_where_python_has_none() -> None:
    class Compiled:
        __doc__ = "memcpyAsync(intptr_t dst, intptr_t src, size_t size, int kind, intptr_t stream=0)"
        __call__ = None

    found = signature_of(Compiled(), is_method=False)
    assert found is not None
    assert list(found.parameters) == ["dst", "src", "size", "kind", "stream"]
    found.bind(1, 2, 3, 4)
    with pytest.raises(TypeError):
        found.bind(1, 2, 3)
