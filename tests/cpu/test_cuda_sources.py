"""CUDA sources with the headers they include."""

from __future__ import annotations

from pathlib import Path

import pytest

from lean_engine.errors import ConfigError
from lean_engine.runtime.cuda import sources
from lean_engine.runtime.cuda.catalogue import every_instance
from lean_engine.runtime.cuda.sources import KernelSource, cuda_source_directory, kernel_source


def test_source_comes_with_every_header_it_includes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "common.cuh").write_text("// common\n")
    (tmp_path / "a.cuh").write_text('#include "common.cuh"\n#include "b.cuh"\n')
    (tmp_path / "b.cuh").write_text('#include "a.cuh"\n')
    (tmp_path / "k.cu").write_text('#include "a.cuh"\n// #include "c.cuh" is a comment\n')
    monkeypatch.setattr(sources, "cuda_source_directory", lambda: tmp_path)
    kernel_source.cache_clear()
    try:
        assert set(kernel_source("k.cu").headers) == {"a.cuh", "b.cuh", "common.cuh"}
        with pytest.raises(ConfigError, match=r"has no absent\.cu; install lean-engine again"):
            kernel_source("absent.cu")
    finally:
        kernel_source.cache_clear()


def test_digest_follows_names_and_texts() -> None:
    source = KernelSource("k.cu", "text", {"a.cuh": "1", "b.cuh": "2"})
    others = [
        KernelSource("l.cu", "text", {"a.cuh": "1", "b.cuh": "2"}),
        KernelSource("k.cu", "other", {"a.cuh": "1", "b.cuh": "2"}),
        KernelSource("k.cu", "text", {"a.cuh": "2", "b.cuh": "1"}),
        KernelSource("k.cu", "text", {"a.cuh": "1"}),
    ]
    assert source.digest == KernelSource("k.cu", "text", {"b.cuh": "2", "a.cuh": "1"}).digest
    assert len({s.digest for s in (source, *others)}) == 5


def test_sources_include_nothing_of_the_toolkit() -> None:
    for path in cuda_source_directory().glob("*.cu*"):
        assert "#include <" not in path.read_text(), path.name
    assert {i.source for i in every_instance("sm_90")} == {p.name for p in cuda_source_directory().glob("*.cu")}
