"""The one place that knows how the CUDA device is put together: the driver, matrix products, the list of kernels.

What still grows in lean_engine is reached through one function each, so that a change there is a change here.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from gpu_check.context import Context
from lean_engine.checkpoint.demo_model import cache_directory
from lean_engine.errors import ConfigError
from lean_engine.runtime.cuda.catalogue import by_source
from lean_engine.runtime.cuda.catalogue import every_instance as instances_of_table
from lean_engine.runtime.cuda.cubin_cache import CubinCache
from lean_engine.runtime.cuda.cublaslt import Algorithm
from lean_engine.runtime.cuda.cupy_driver import CupyDriver, device
from lean_engine.runtime.cuda.driver import Candidate, Driver
from lean_engine.runtime.cuda.emulated_driver import EmulatedDriver
from lean_engine.runtime.cuda.gemm_choice import candidates
from lean_engine.runtime.cuda.gemm_kernels import Gemm, Problem, gemm_instances
from lean_engine.runtime.cuda.instances import Instance
from lean_engine.runtime.cuda.moe_kernels import moe_instances
from lean_engine.runtime.cuda.nvrtc import Nvrtc
from lean_engine.runtime.cuda.sampling import sampling_instances
from lean_engine.runtime.device import Array

CHUNK = 8  # expressions that are compiled together: as many compilers as processors get work
EMULATED_ARCH = "sm_90"
LIBRARY = "cublaslt"


# ---- kernels


def every_instance(arch: str) -> list[Instance]:
    """All kernels there are, of the kernel table and beside it."""
    found = {*instances_of_table(arch), *gemm_instances(arch), *moe_instances(arch), *sampling_instances()}
    return sorted(found)


def chunks(instances: Iterable[Instance]) -> Iterator[tuple[str, list[str]]]:
    """Source and expressions, always cut alike: the cache knows a cubin by everything that is in it."""
    for source, expressions in by_source(instances).items():
        for start in range(0, len(expressions), CHUNK):
            yield source, expressions[start : start + CHUNK]


def make_cubins() -> CubinCache:
    return CubinCache(kept("cubin"), Nvrtc())


def kept(what: str) -> Path:
    """A directory that outlives this process: in the user's cache, or among temporary files if that is read-only."""
    for base in (cache_directory(), Path(tempfile.gettempdir()) / "lean-engine"):
        path = base / "gpu_check" / what
        with suppress(OSError):
            path.mkdir(parents=True, exist_ok=True)
            if os.access(path, os.W_OK):
                return path
    raise ConfigError(f"neither {cache_directory()} nor {tempfile.gettempdir()} can be written")


# ---- the driver


def open_driver(context: Context, loads_all: bool = True) -> Driver:
    """The GPU's driver with its kernels loaded, or the emulated one.

    A chunk that does not compile is left out; what needs it fails when it is prepared, with the compiler's message.
    """
    if context.is_emulated:
        return EmulatedDriver(EMULATED_ARCH)
    driver = CupyDriver(make_cubins(), kept("gemm"))
    if loads_all:
        load_all(driver)
    return driver


def load_all(driver: Driver) -> list[str]:
    """Prepare every kernel, chunk by chunk; what failed, as text."""
    failed = []
    for source, expressions in chunks(every_instance(driver.arch)):
        try:
            driver.prepare(Instance(source, expression) for expression in expressions)
        except Exception as error:
            failed.append(f"{source} {expressions[0]}…: {type(error).__name__}: {error}")
    return failed


# ---- products


MakeLaunch = Callable[[Gemm], Callable[[], None]]


def gemm_candidates(driver: Driver, problem: Problem) -> list[tuple[str, MakeLaunch]]:
    """Every way that a product can be computed here, by name, among which the driver chooses; the likeliest first."""
    ways = candidates_of(driver, problem)
    driver.prepare(way.instance(problem) for way in ways if not isinstance(way, Algorithm))
    return [(way_name(way, ways), partial(gemm_launch, driver, way)) for way in ways]


def chosen_gemm(driver: Driver, problem: Problem) -> tuple[str, MakeLaunch]:
    """The way that the device takes; found by measuring when it is asked for the first time on this machine."""
    way = driver.choose_gemm(problem)
    return way_name(way, candidates_of(driver, problem)), partial(gemm_launch, driver, way)


def candidates_of(driver: Driver, problem: Problem) -> list[Candidate]:
    return candidates(problem, driver.arch, driver._blas if isinstance(driver, CupyDriver) else None)


def way_name(way: Candidate, among: Sequence[Candidate]) -> str:
    """cuBLASLt's algorithms have no names that could be read: their place among all candidates."""
    if isinstance(way, Algorithm):
        return f"{LIBRARY} {among.index(way) if way in among else '?'}"
    return way.name


def gemm_launch(driver: Driver, way: Candidate, gemm: Gemm) -> Callable[[], None]:
    if isinstance(way, Algorithm):
        return partial(driver.multiply, gemm, way)
    call = way.call(gemm)
    driver.prepare([call.instance])
    return partial(driver.launch, call)


# ---- copies


def copy_on_device(driver: Driver, source: Array, target: Array) -> None:
    """Device → device, in stream order."""
    if isinstance(driver, CupyDriver):
        runtime = driver._cuda.runtime
        to, size = device(target).address, source.nbytes
        runtime.memcpyAsync(to, device(source).address, size, runtime.memcpyDeviceToDevice, driver._stream.ptr)
    else:
        target[...] = source


def num_processors() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def root() -> Path:
    """The checkout."""
    return Path(__file__).resolve().parents[2]
