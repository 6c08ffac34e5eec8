"""NVRTC: every kernel compiles for every architecture without spills, at the cost that the golden table says.

python tests/cpu/test_cuda_nvrtc.py     writes tests/data/cuda_kernels.json anew, to be reviewed as a diff
"""

from __future__ import annotations

import importlib.machinery
import json
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from lean_engine.checkpoint.demo_model import cache_directory
from lean_engine.errors import ConfigError
from lean_engine.runtime.cuda import libraries, nvrtc
from lean_engine.runtime.cuda.catalogue import by_source, every_instance
from lean_engine.runtime.cuda.cubin_cache import CubinCache
from lean_engine.runtime.cuda.instances import ARCHITECTURES, instances_for
from lean_engine.runtime.cuda.nvrtc import CompileError, Cubin, Nvrtc, Resources
from lean_engine.runtime.cuda.sources import KernelSource, kernel_source

GOLDEN = Path(__file__).parents[1] / "data" / "cuda_kernels.json"
SAMPLES = Path(__file__).parents[1] / "cuda_host" / "samples.cu"


@cache
def compiler() -> Nvrtc:
    try:
        return Nvrtc()
    except ConfigError as error:
        pytest.skip(str(error))


def source_of(text: str, name: str = "sample.cu") -> KernelSource:
    headers = {header: kernel_source(header).text for header in ("common.cuh", "tensor_core.cuh")}
    return KernelSource(name, text, headers)


Job = tuple[str, tuple[str, ...], str]  # source, expressions, architecture


def jobs(arch: str) -> list[Job]:
    sources = by_source(every_instance(arch))
    return [(source, tuple(expressions), arch) for source, expressions in sources.items()]


def compile_job(job: Job) -> Cubin:
    source, expressions, arch = job
    return CubinCache(cache_directory() / "cubin", compiler()).get(kernel_source(source), expressions, arch)


@cache
def compile_side_by_side() -> None:
    """Fill the cache with what it lacks. In processes: NVRTC lets one thread of a process compile at a time."""
    cubins = CubinCache(cache_directory() / "cubin", compiler())
    every = [job for arch in ARCHITECTURES for job in jobs(arch)]
    missing = [job for job in every if not cubins.path(kernel_source(job[0]), job[1], job[2], ()).exists()]
    if len(missing) > 1:
        with ProcessPoolExecutor(min(8, os.cpu_count() or 1), multiprocessing.get_context("spawn")) as pool:
            for future in [pool.submit(compile_job, job) for job in missing]:
                future.exception()  # what does not compile is reported by the test that needs it


@cache
def resources(arch: str) -> dict[str, Resources]:
    """Expression → what the kernel needs, of all instances for an architecture."""
    compile_side_by_side()
    return {expression: r for job in jobs(arch) for expression, r in compile_job(job).resources.items()}


def table() -> dict[str, Any]:
    """What the golden holds: a column per architecture, null where a kernel is not compiled."""
    columns = [resources(arch) for arch in ARCHITECTURES]
    names = sorted({name for column in columns for name in column})

    def rows(field: str) -> dict[str, list[int | None]]:
        return {name: [getattr(c[name], field) if name in c else None for c in columns] for name in names}

    return {
        "nvrtc": list(compiler().version),
        "architectures": list(ARCHITECTURES),
        "registers": rows("registers"),
        "shared_bytes": rows("shared_bytes"),
    }


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_kernel_compiles_without_spills_or_local_memory(arch: str) -> None:
    found = resources(arch)
    assert set(found) == {i.expression for i in every_instance(arch)}
    small = {i.expression for i in instances_for(arch)}
    for name, r in found.items():
        assert (r.spill_bytes, r.stack_bytes) == (0, 0), name
        assert 8 <= r.registers <= (64 if name in small else 255), name  # 64: two blocks of 512 threads fit


def test_registers_and_shared_memory_are_those_of_the_golden() -> None:
    golden = json.loads(GOLDEN.read_text())
    if (version := list(compiler().version)) != golden["nvrtc"]:
        pytest.skip(f"the golden is of NVRTC {golden['nvrtc']}, this is {version}")
    assert table() == golden


def test_tensor_core_wrappers_compile() -> None:
    source = source_of(SAMPLES.read_text())
    for arch in ("sm_80", "sm_90", "sm_120"):
        cubin = compiler().compile(source, ["tile_product<half>", "tile_product<bfloat16>", "split_sum"], arch)
        assert {r.spill_bytes + r.stack_bytes for r in cubin.resources.values()} == {0}


def test_bfloat16_is_what_sm_75_lacks() -> None:
    with pytest.raises(CompileError, match="bf16"):
        compiler().compile(kernel_source("elementwise.cu"), ["add<bfloat16>"], "sm_75")


def test_cubin_has_its_symbols_and_resources() -> None:
    text = """
extern "C" __global__ void plain(float* out) {
    __shared__ float values[100];
    values[threadIdx.x] = out[threadIdx.x];
    __syncthreads();
    out[threadIdx.x] = values[99 - threadIdx.x];
}
template <int N> __global__ void sum(float* out) { for (int i = 0; i < N; ++i) out[0] += out[i]; }
"""
    cubin = compiler().compile(source_of(text), ["plain", "sum<3>"], "sm_80")
    assert cubin.data[:4] == b"\x7fELF"
    assert cubin.names == {"plain": "plain", "sum<3>": "_Z3sumILi3EEvPf"}
    assert (cubin.resources["plain"].shared_bytes, cubin.resources["sum<3>"].shared_bytes) == (400, 0)


def test_spills_and_stack_are_read_from_the_log() -> None:
    text = """
__global__ void spills(float* out) {
    float values[64];
    for (int i = 0; i < 64; ++i) values[i] = out[i * threadIdx.x];
    __syncthreads();
    for (int i = 0; i < 64; ++i) out[i] = values[i] * values[(i * 7 + 3) % 64];
    out[64] = values[int(out[65]) & 63];
}
"""
    r = compiler().compile(source_of(text), ["spills"], "sm_80", ["--maxrregcount=24"]).resources["spills"]
    assert r.registers <= 24
    assert r.stack_bytes >= 256
    assert r.spill_bytes > 0


def test_error_names_the_file_the_line_and_its_text() -> None:
    text = '#include "common.cuh"\n\n__global__ void f(float* out) {\n    out[0] = absent;\n}\n'
    with pytest.raises(CompileError) as caught:
        compiler().compile(source_of(text), ["f"], "sm_80")
    version = ".".join(map(str, compiler().version))
    wanted = f'sample.cu:4: identifier "absent" is undefined: out[0] = absent; (sm_80, NVRTC {version})'
    assert str(caught.value) == wanted
    assert "1 error detected" in caught.value.log


def test_error_in_a_header_shows_the_header() -> None:
    source = KernelSource("f.cu", '#include "h.cuh"\n__global__ void f() {}', {"h.cuh": "\n__device__ int a = ;\n"})
    with pytest.raises(CompileError, match=r"^h\.cuh:2: expected an expression: __device__ int a = ; \(sm_80"):
        compiler().compile(source, ["f"], "sm_80")


def test_unknown_kernel_and_architecture_are_named() -> None:
    source = kernel_source("gather.cu")
    with pytest.raises(CompileError, match="missing_kernel"):
        compiler().compile(source, ["missing_kernel<half>"], "sm_80")
    with pytest.raises(ConfigError, match=r"has no architecture sm_10; it has sm_\d+, "):
        compiler().compile(source, ["gather_rows<half, 8>"], "sm_10")


def test_absent_compiler_is_one_line_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(nvrtc, "library_paths", lambda: iter(()))
    with pytest.raises(ConfigError, match=r"NVRTC.* is not installed; pip install nvidia-cuda-nvrtc-cu12"):
        Nvrtc()
    broken = tmp_path / "libnvrtc.so.12"
    broken.write_bytes(b"not a library")
    with pytest.raises(ConfigError, match=r"libnvrtc\.so\.12 cannot be loaded"):
        Nvrtc(broken)


@pytest.mark.skipif(sys.platform == "win32", reason="libraries have other names on Windows")
def test_oldest_wheel_comes_before_the_toolkit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    places = ["nvidia/cu13/lib/libnvrtc.so.13", "nvidia/cuda_nvrtc/lib/libnvrtc.so.12", "toolkit/lib64/libnvrtc.so.11"]
    for place in places:
        (tmp_path / place).parent.mkdir(parents=True)
        (tmp_path / place).touch()
    (tmp_path / "nvidia/cuda_nvrtc/lib/libnvrtc-builtins.so.12.9").touch()
    spec = importlib.machinery.ModuleSpec("nvidia", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path / "nvidia")]
    monkeypatch.setattr(libraries.importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "toolkit"))
    found = [path.relative_to(tmp_path).as_posix() for path in nvrtc.library_paths() if path.is_relative_to(tmp_path)]
    assert found == [places[1], places[0], places[2]]


def main() -> None:
    rows = table()
    lines = [f' "{key}": {json.dumps(rows[key])}' for key in ("nvrtc", "architectures")]
    for key in ("registers", "shared_bytes"):
        body = ",\n".join(f"  {json.dumps(name)}: {json.dumps(values)}" for name, values in rows[key].items())
        lines.append(f' "{key}": {{\n{body}\n }}')
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
