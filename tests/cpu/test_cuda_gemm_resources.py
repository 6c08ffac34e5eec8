"""skinny_gemm.cu and moe.cu compiled for every architecture: no spills, no local memory, and blocks that fit an SM.

python tests/cpu/test_cuda_gemm_resources.py     prints registers and shared memory
"""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from functools import cache

import pytest

from lean_engine.checkpoint.demo_model import cache_directory
from lean_engine.errors import ConfigError
from lean_engine.runtime.cuda.attention import SHARED_KIB
from lean_engine.runtime.cuda.cubin_cache import CubinCache
from lean_engine.runtime.cuda.gemm_kernels import TENSOR_WEIGHTS, gemm_instances, tensor_shared_bytes
from lean_engine.runtime.cuda.instances import ARCHITECTURES
from lean_engine.runtime.cuda.moe_kernels import moe_instances
from lean_engine.runtime.cuda.nvrtc import Nvrtc, Resources
from lean_engine.runtime.cuda.sources import kernel_source

REGISTERS_PER_SM = 65_536
REGISTER_UNIT = 8  # per thread
SOURCES = {"skinny_gemm.cu": gemm_instances, "moe.cu": moe_instances}
MIN_THREADS = 384  # of an SM at once: three blocks of 128, so that loads enough are in flight

Job = tuple[str, str]  # source, architecture


@cache
def cubins() -> CubinCache:
    try:
        return CubinCache(cache_directory() / "cubin", Nvrtc())
    except ConfigError as error:
        pytest.skip(str(error))


def expressions(source: str, arch: str) -> tuple[str, ...]:
    return tuple(i.expression for i in SOURCES[source](arch))


def compile_job(job: Job) -> dict[str, Resources]:
    source, arch = job
    return dict(cubins().get(kernel_source(source), expressions(source, arch), arch).resources)


@cache
def compile_side_by_side() -> None:
    """In processes: NVRTC lets one thread of a process compile at a time."""
    jobs = [(source, arch) for source in SOURCES for arch in ARCHITECTURES]
    missing = [
        (source, arch)
        for source, arch in jobs
        if not cubins().path(kernel_source(source), expressions(source, arch), arch, ()).exists()
    ]
    if len(missing) > 1:
        with ProcessPoolExecutor(min(8, os.cpu_count() or 1), multiprocessing.get_context("spawn")) as pool:
            for future in [pool.submit(compile_job, job) for job in missing]:
                future.exception()  # what does not compile is reported by the test that needs it


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_instance_compiles_without_spills_and_enough_threads_fit(arch: str, source: str) -> None:
    compile_side_by_side()
    found = compile_job((source, arch))
    assert set(found) == set(expressions(source, arch))
    for expression, r in found.items():
        assert (r.spill_bytes, r.stack_bytes) == (0, 0), expression
        registers = -(-r.registers // REGISTER_UNIT) * REGISTER_UNIT
        assert MIN_THREADS * registers <= REGISTERS_PER_SM, expression


def test_tiles_fit_the_shared_memory_of_every_architecture_that_has_them() -> None:
    for tokens, choices in TENSOR_WEIGHTS.items():
        for weights in choices:
            for arch in ARCHITECTURES[1:]:
                assert tensor_shared_bytes(weights, tokens) <= SHARED_KIB[arch][1] * 1024


def test_shared_memory_is_what_the_kernel_counts_on() -> None:
    """TensorPart::SHARED_BYTES, read out of a kernel that stores it."""
    source = kernel_source("skinny_gemm.cu")
    shapes = [(weights, tokens) for tokens, choices in TENSOR_WEIGHTS.items() for weights in choices]
    text = source.text + "".join(
        f"\nstatic_assert(TensorPart<half, {weights}, {tokens}, Plain>::SHARED_BYTES == "
        f'{tensor_shared_bytes(weights, tokens)}, "");'
        for weights, tokens in shapes
    )
    changed = type(source)(source.name, text, source.headers)
    cubins().nvrtc.compile(changed, ["few_rows_gemm<half, half, 1, 4, Plain>"], "sm_80")


def main() -> None:
    compile_side_by_side()
    for source in SOURCES:
        columns = [compile_job((source, arch)) for arch in ARCHITECTURES]
        print(f"{source:72} {' '.join(f'{arch:>6}' for arch in ARCHITECTURES)}  shared")
        for name in sorted({name for column in columns for name in column}):
            numbers = [str(c[name].registers) if name in c else "-" for c in columns]
            shared = max(c[name].shared_bytes for c in columns if name in c)
            print(f"{name:72} {' '.join(f'{n:>6}' for n in numbers)}  {shared:>6}")


if __name__ == "__main__":
    main()
