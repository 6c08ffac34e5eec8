"""The build cache: one library per content, made once, and errors that show the source."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from cuda_host import BuildError, HostModule, build

SOURCE = '#include "part.cuh"\n__global__ void set(float* out) { out[threadIdx.x] = VALUE; }\n'


@pytest.fixture
def source(tmp_path: Path) -> Path:
    (tmp_path / "part.cuh").write_text("#define VALUE 1.0f\n")
    (tmp_path / "set.cu").write_text(SOURCE)
    return tmp_path / "set.cu"


def value(path: Path) -> float:
    out = np.zeros(1, np.float32)
    HostModule(path, ["set"]).get_function("set")((1,), (1,), (out,))
    return float(out[0])


def test_change_of_a_header_builds_anew(source: Path) -> None:
    assert value(source) == 1
    (source.parent / "part.cuh").write_text("#define VALUE 2.0f\n")
    assert value(source) == 2


def build_in_a_child(path: Path) -> Path:
    return HostModule(path, ["set"]).library_path


def test_processes_that_want_the_same_library_build_it_once(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "part.cuh").write_text(f"#define VALUE {time.time_ns()}.0f\n")  # surely not built before
    log, compiler = tmp_path / "log", tmp_path / "bin" / "g++"
    compiler.parent.mkdir()
    compiler.write_text(f'#!/bin/sh\necho "$@" >> {log}\nexec {shutil.which("g++")} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{compiler.parent}:{os.environ['PATH']}")
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        paths = pool.map(build_in_a_child, [source] * 3)
    assert len(set(paths)) == 1
    assert log.read_text().count("-c ") == 1


def test_library_that_nobody_uses_is_removed(tmp_path: Path) -> None:
    old, new = tmp_path / "old-1", tmp_path / "new-1"
    for folder in (old, new):
        folder.mkdir()
        (folder / "libold.so").touch()
        Path(f"{folder}.lock").touch()
    for path in (old / "libold.so", old):
        os.utime(path, (0, 0))
    (tmp_path / ".build-1").mkdir()
    os.utime(tmp_path / ".build-1", (0, 0))
    build.remove_unused(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [".build-1", "new-1", "new-1.lock"]


def test_build_error_shows_the_source_line(source: Path) -> None:
    with pytest.raises(BuildError, match=r"set\.cu:2:\d+: error: 'absent' was not declared"):
        HostModule(source, ["set"], source=SOURCE.replace("VALUE", "absent"))


def test_two_names_of_dynamic_shared_memory_are_refused(source: Path) -> None:
    text = "".join(
        f"__global__ void f{name}() {{ extern __shared__ float {name}[]; {name}[0] = 1; }}\n" for name in "ab"
    )
    with pytest.raises(BuildError, match="dynamic shared memory has the names a, b; use one"):
        HostModule(source, ["fa"], source=text)


@pytest.mark.parametrize(("tools", "reason"), [("gcc g++", None), ("gcc", "needs g++"), ("", "needs gcc")])
def test_missing_compiler_is_named(
    tools: str, reason: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for tool in tools.split():
        (tmp_path / tool).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    found = build.missing_reason()
    assert found is None if reason is None else reason in (found or "")


def test_other_processors_use_ucontext(source: Path) -> None:
    """The same launches through the portable context switch."""
    library = build.runtime_library(["-DCUDA_HOST_UCONTEXT"])
    assert library != build.runtime_library()
    code = f"""
import sys; sys.path.append({str(build.HERE.parent)!r})
import numpy as np
from cuda_host import build, kernel
plain = build.runtime_library
for module in (build, kernel):
    module.runtime_library = lambda: plain(["-DCUDA_HOST_UCONTEXT"])
text = '''__global__ void turn(int* out) {{
    __shared__ int x[64]; x[threadIdx.x] = threadIdx.x; __syncthreads(); out[threadIdx.x] = x[63 - threadIdx.x]; }}'''
out = np.zeros(64, np.int32)
module = kernel.HostModule({str(source)!r}, ["turn"], source=text)
module.get_function("turn")((1,), (64,), (out,), order=3)
print(*out)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [str(i) for i in range(63, -1, -1)]
