"""The cubin cache with a compiler that only counts: keys, damage, processes side by side."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lean_engine.errors import ConfigError
from lean_engine.runtime.cuda.cubin_cache import CubinCache
from lean_engine.runtime.cuda.nvrtc import Cubin, Resources
from lean_engine.runtime.cuda.sources import KernelSource

SOURCE = KernelSource("norm.cu", "text", {"common.cuh": "header"})


class CountingCompiler:
    """Stands where Nvrtc stands; writes a line into a file for each compilation."""

    version = (12, 9)

    def __init__(self, log: Path, seconds: float = 0.0) -> None:
        self.log, self.seconds = log, seconds

    def compile(
        self, source: KernelSource, expressions: Sequence[str], arch: str, options: Sequence[str] = ()
    ) -> Cubin:
        with open(self.log, "a") as file:
            file.write(f"{source.name} {arch}\n")
        time.sleep(self.seconds)
        names = {e: f"symbol of {e}" for e in expressions}
        return Cubin(b"\x7fELF\n\0" + arch.encode(), names, {e: Resources(32, 128, 0, 0) for e in expressions})

    def count(self) -> int:
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


@pytest.fixture
def compiler(tmp_path: Path) -> CountingCompiler:
    return CountingCompiler(tmp_path / "log")


@pytest.fixture
def cache(tmp_path: Path, compiler: Any) -> CubinCache:
    return CubinCache(tmp_path / "cubin", compiler)


def test_second_request_reads_what_the_first_compiled(cache: CubinCache, compiler: CountingCompiler) -> None:
    first, second = (cache.get(SOURCE, ["f<1>", "f<2>"], "sm_80") for _ in range(2))
    assert compiler.count() == 1
    assert (second.data, second.names, second.resources) == (first.data, first.names, first.resources)
    assert second.data == b"\x7fELF\n\0sm_80"


def test_everything_that_decides_a_cubin_is_in_its_key(cache: CubinCache, compiler: CountingCompiler) -> None:
    cache.get(SOURCE, ["f"], "sm_80")
    requests: list[tuple[Any, ...]] = [
        (replace(SOURCE, text="other"), ["f"], "sm_80"),
        (replace(SOURCE, headers={"common.cuh": "other"}), ["f"], "sm_80"),
        (SOURCE, ["g"], "sm_80"),
        (SOURCE, ["f"], "sm_90"),
        (SOURCE, ["f"], "sm_80", ["-DX=1"]),
    ]
    for number, request in enumerate(requests):
        cache.get(*request)
        assert compiler.count() == 2 + number
    compiler.version = (13, 0)
    cache.get(SOURCE, ["f"], "sm_80")
    assert compiler.count() == 2 + len(requests)


@pytest.mark.parametrize("damage", ["empty", "cut", "changed", "other format"])
def test_damaged_entry_is_compiled_anew(cache: CubinCache, compiler: CountingCompiler, damage: str) -> None:
    wanted = cache.get(SOURCE, ["f"], "sm_80").data
    path = cache.path(SOURCE, ["f"], "sm_80", [])
    raw = path.read_bytes()
    changed = raw[:-1] + bytes([raw[-1] ^ 1])
    path.write_bytes({"empty": b"", "cut": raw[:-1], "changed": changed, "other format": b"{}\n\n"}[damage])
    assert cache.get(SOURCE, ["f"], "sm_80").data == wanted
    assert compiler.count() == 2
    assert path.read_bytes() == raw


def get_in_a_child(directory: Path) -> bytes:
    compiler: Any = CountingCompiler(directory / "log", seconds=0.3)
    return CubinCache(directory / "cubin", compiler).get(SOURCE, ["f"], "sm_80").data


def test_processes_that_want_the_same_cubin_compile_it_once(tmp_path: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        found = pool.map(get_in_a_child, [tmp_path] * 3)
    assert len(set(found)) == 1
    assert CountingCompiler(tmp_path / "log").count() == 1


def test_directory_that_cannot_be_written_is_named(tmp_path: Path, compiler: Any) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"compiled kernels cannot be stored in .*file/cubin: Not a directory"):
        CubinCache(tmp_path / "file" / "cubin", compiler).get(SOURCE, ["f"], "sm_80")


def test_failed_compilation_leaves_nothing_behind(cache: CubinCache, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: Any) -> Cubin:
        raise ValueError("no")

    monkeypatch.setattr(cache.nvrtc, "compile", fail)
    with pytest.raises(ValueError, match="no"):
        cache.get(SOURCE, ["f"], "sm_80")
    assert [name for name in os.listdir(cache.directory) if not name.endswith(".lock")] == []
