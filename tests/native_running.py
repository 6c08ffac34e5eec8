"""The compiled CPU device, and its library with the tests' own kernels, built for several kinds of processor."""

from __future__ import annotations

import ctypes
import itertools
import platform
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lean_engine.checkpoint.demo_model import cache_directory
from lean_engine.errors import ConfigError
from lean_engine.runtime.cpu.device import CpuDevice
from lean_engine.runtime.cpu.native.compiler import find_compiler
from lean_engine.runtime.cpu.native.launches import Pointer, Scope
from lean_engine.runtime.cpu.native.library import Library, build_library
from lean_engine.runtime.cpu.native.sources import Sources, kernel_sources

if TYPE_CHECKING:
    from lean_engine.runtime.cpu.native.device import NativeCpuDevice

PROBES = Path(__file__).with_name("native_probes.c")
IS_X86 = platform.machine().lower() in ("x86_64", "amd64")
MACHINES: dict[str, tuple[str, ...] | None] = {"native": None}
if IS_X86:
    MACHINES |= {"avx2": ("-mavx2", "-mfma", "-mf16c"), "sse2": ("-march=x86-64",)}


class ProbeArgs(ctypes.Structure):
    _fields_ = (
        ("values", Pointer),
        ("wrong", Pointer),
        ("num_values", ctypes.c_int64),
        ("expected", ctypes.c_int64),
        ("spin", ctypes.c_int64),
        ("count", Pointer),
    )


class SetCountArgs(ctypes.Structure):
    _fields_ = (("target", Pointer), ("value", ctypes.c_int64))


class NestedArgs(ctypes.Structure):
    _fields_ = (("run", Pointer), ("pool", Pointer), ("result", Pointer))


class MapArgs(ctypes.Structure):
    _fields_ = (("x", Pointer), ("out", Pointer), ("count", ctypes.c_int64))


PROBE_ARGUMENTS = (ProbeArgs, SetCountArgs, NestedArgs, MapArgs)


@cache
def library_path(machine: str = "native") -> Path:
    """All kernels, with warnings as errors; skips where there is no compiler, or no such instructions."""
    return build(machine, kernel_sources())


@cache
def probe_library(machine: str = "native") -> Library:
    """The pool and the tests' own kernels."""
    sources = kernel_sources()
    pool = [path for path in sources.files if path.name == "pool.c"]
    return Library(build(machine, Sources([*pool, PROBES], sources.include)), PROBE_ARGUMENTS)


def build(machine: str, sources: Sources) -> Path:
    if machine == "avx2" and not {"avx2", "fma", "f16c"} <= processor_features():
        pytest.skip("this processor has no AVX2")
    try:
        compiler = find_compiler(MACHINES[machine], extra=("-Werror",))
    except ConfigError as error:
        pytest.skip(str(error))
    return build_library(compiler, sources, cache_directory() / "cpu")


def processor_features() -> set[str]:
    info = Path("/proc/cpuinfo")
    return set(info.read_text().split()) if info.exists() else set()


def cpu_device(name: str, threads: int = 2, **options: Any) -> CpuDevice | NativeCpuDevice:
    """The CPU device with NumPy's kernels, or with compiled ones for one of MACHINES."""
    if name == "numpy":
        return CpuDevice(threads)
    from lean_engine.runtime.cpu.native.device import NativeCpuDevice

    return NativeCpuDevice(library_path(name), threads, **options)


def required_tiles() -> Any:
    """A fixture: skips a module's tests where the processor has no AMX tiles, or the system does not grant them."""

    @pytest.fixture(scope="module", autouse=True)
    def tiles() -> None:
        from lean_engine.runtime.cpu.native.attention import has_tiles

        if not has_tiles(Scope(Library(library_path(), ()), 1, {})):
            pytest.skip("no AMX tiles of bfloat16")

    return tiles


def compiled_devices(
    kv_cache_dtypes: Sequence[str] = ("float32",), machines: Sequence[str] = tuple(MACHINES), **options: Any
) -> Any:
    """A fixture: the compiled device for each of these machines, with keys and values in each of these types."""
    kinds = list(itertools.product(machines, kv_cache_dtypes))

    def name(kind: tuple[str, str]) -> str:
        return "-".join(kind if len(kv_cache_dtypes) > 1 else kind[:1])

    @pytest.fixture(scope="module", params=kinds, ids=name)
    def device(request: pytest.FixtureRequest) -> Iterator[Any]:
        machine, kv_cache_dtype = request.param
        device = cpu_device(machine, 2, kv_cache_dtype=kv_cache_dtype, **options)
        yield device
        device.close()

    return device
