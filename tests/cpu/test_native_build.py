"""Building the kernels: the cache and its key, processes side by side, compilers that are missing or fail, structs."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import stat
import time
from pathlib import Path

import pytest
from native_running import MACHINES, ProbeArgs, library_path, probe_library

from lean_engine.errors import ConfigError, LaunchError
from lean_engine.runtime.cpu.native.compiler import (
    CompilationError,
    Compiler,
    ask_ahead,
    find_compiler,
    first_error,
)
from lean_engine.runtime.cpu.native.library import Library, build_library, snake_case
from lean_engine.runtime.cpu.native.sources import Sources, kernel_sources

SOURCE = '#include "common.h"\nEXPORT int64_t answer(void);\nEXPORT int64_t answer(void) { return ANSWER; }\n'
COMMON = "#include <stdint.h>\n#define EXPORT\n#define ANSWER 42\n"


@pytest.fixture
def sources(tmp_path: Path) -> Sources:
    """One small source with its own common.h."""
    directory = tmp_path / "sources"
    directory.mkdir()
    (directory / "common.h").write_text(COMMON)
    (directory / "answer.c").write_text(SOURCE.replace("#define EXPORT", ""))
    return Sources([directory / "answer.c"], directory)


@pytest.fixture
def compiler() -> Compiler:
    try:
        return find_compiler(machine=(), extra=("-fvisibility=default",))
    except ConfigError as error:
        pytest.skip(str(error))


class Counted(Compiler):
    """Notes each compilation in a file and takes its time."""

    def build(self, sources: Sources, library: Path, scratch: Path) -> None:
        with open(sources.include / "log", "a") as log:
            log.write("compiled\n")
        time.sleep(0.05)
        super().build(sources, library, scratch)


def num_builds(sources: Sources) -> int:
    log = sources.include / "log"
    return len(log.read_text().splitlines()) if log.exists() else 0


def counted(compiler: Compiler) -> Counted:
    return Counted(compiler.command, compiler.machine, compiler.extra)


def answer(library: Path) -> int:
    return int(Library(library, ()).function("answer", ctypes.c_int64)())


def test_what_is_built_once_is_found_afterwards(compiler: Compiler, sources: Sources, tmp_path: Path) -> None:
    said: list[str] = []
    paths = [
        build_library(counted(compiler), sources, tmp_path / "cache", lambda: said.append("compiling"))
        for _ in range(2)
    ]
    assert paths[0] == paths[1]
    assert answer(paths[0]) == 42
    assert (num_builds(sources), said) == (1, ["compiling"])
    assert not [p for p in (tmp_path / "cache").iterdir() if p.name.startswith(".")]


def test_another_source_header_flag_or_compiler_is_another_library(
    compiler: Compiler, sources: Sources, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {compiler.key(sources)}
    (sources.include / "answer.c").write_text(SOURCE + "\n")
    keys.add(compiler.key(sources))
    (sources.include / "common.h").write_text(COMMON.replace("42", "43"))
    keys.add(compiler.key(sources))
    keys.add(Compiler(compiler.command, ("-DX=1",), compiler.extra).key(sources))
    monkeypatch.setattr(Compiler, "describe", lambda self: "#define __another_processor__ 1")
    keys.add(compiler.key(sources))
    assert len(keys) == 5


def test_description_tells_instruction_sets_apart() -> None:
    """What keeps a cache on a shared disk from being run on a processor that lacks its instructions."""
    if len(MACHINES) == 1:
        pytest.skip("only for x86-64")
    descriptions = {name: find_compiler(machine).describe() for name, machine in MACHINES.items()}
    assert "__AVX2__" in descriptions["avx2"]
    assert "__AVX2__" not in descriptions["sse2"]
    assert "__VERSION__" in descriptions["native"]


def test_damaged_library_is_built_anew(compiler: Compiler, sources: Sources, tmp_path: Path) -> None:
    path = build_library(counted(compiler), sources, tmp_path / "cache")
    for damage in (b"", path.read_bytes()[:-100], b"\0" + path.read_bytes()[1:]):
        path.write_bytes(damage)
        assert build_library(counted(compiler), sources, tmp_path / "cache") == path
    path.with_suffix(".sha256").unlink()
    build_library(counted(compiler), sources, tmp_path / "cache")
    assert num_builds(sources) == 5
    assert answer(path) == 42


def build_in_child(compiler: Compiler, sources: Sources, cache: Path) -> None:
    assert answer(build_library(compiler, sources, cache)) == 42


def test_processes_side_by_side_compile_once(compiler: Compiler, sources: Sources, tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    children = [
        context.Process(target=build_in_child, args=(counted(compiler), sources, tmp_path / "cache")) for _ in range(3)
    ]
    for child in children:
        child.start()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0, 0]
    assert num_builds(sources) == 1


def test_error_in_a_source_is_one_line_with_the_line_it_is_about(
    compiler: Compiler, sources: Sources, tmp_path: Path
) -> None:
    (sources.include / "answer.c").write_text("int f(void) {\n    return  missing_name;\n}\n")
    with pytest.raises(CompilationError) as caught:
        build_library(compiler, sources, tmp_path / "cache")
    message = str(caught.value)
    assert "answer.c:2: " in message
    assert message.endswith("return  missing_name;")
    assert "\n" not in message
    assert not list((tmp_path / "cache").glob("*.so"))


def test_message_of_another_kind_is_given_by_its_first_line() -> None:
    assert first_error("cc1: sorry\nand more\n") == "cc1: sorry"
    assert first_error("") == "it ended with an error"


def test_cache_that_cannot_be_written_is_named(compiler: Compiler, sources: Sources, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"compiled kernels cannot be stored in .*file"):
        build_library(compiler, sources, tmp_path / "file")


# ---- finding a compiler


def program(directory: Path, name: str, text: str = "exit 0") -> Path:
    path = directory / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_compiler_is_what_cc_names_with_its_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "mycc")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CC", "mycc -m64 'a b'")
    assert find_compiler().command == ("mycc", "-m64", "a b")
    monkeypatch.setenv("CC", "no-such-cc")
    with pytest.raises(ConfigError, match="CC is 'no-such-cc', but there is no such program"):
        find_compiler()


def test_without_cc_the_first_of_the_usual_names_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(ConfigError, match="no C compiler is installed"):
        find_compiler()
    clang = program(tmp_path, "clang")
    assert find_compiler().command == (str(clang),)
    cc = program(tmp_path, "cc")
    assert find_compiler().command == (str(cc),)


def test_compiler_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sources: Sources) -> None:
    monkeypatch.setenv("CC", str(program(tmp_path, "cc", "echo 'cc: license expired' >&2; exit 3")))
    with pytest.raises(CompilationError, match="cc: license expired"):
        build_library(find_compiler(), sources, tmp_path / "cache")
    monkeypatch.setenv("CC", str(program(tmp_path, "cc", "no interpreter")))
    (tmp_path / "cc").write_bytes(b"\x7fELF not a program")
    with pytest.raises(CompilationError, match="cannot be run"):
        build_library(find_compiler(), sources, tmp_path / "cache")


# ---- the library


def test_compiler_is_asked_once_in_a_process_and_ahead_where_that_is_wished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = tmp_path / "asked"
    monkeypatch.setenv("CC", str(program(tmp_path, "cc", f"echo x >> {asked}; echo '#define A 1'")))
    ask_ahead()
    assert [find_compiler().describe() for _ in range(2)] == ["#define A 1\n"] * 2
    assert asked.read_text() == "x\n"


def test_compiler_that_could_not_be_asked_ahead_is_an_error_where_it_is_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", str(program(tmp_path, "cc", "echo 'cc: license expired' >&2; exit 3")))
    for _ in range(2):
        ask_ahead()
        with pytest.raises(CompilationError, match="license expired"):
            find_compiler().describe()


@pytest.mark.parametrize("machine", MACHINES)
def test_kernels_compile_without_a_warning_for_every_kind_of_processor(machine: str) -> None:
    from lean_engine.runtime.cpu.native.device import ARGUMENTS

    Library(library_path(machine), ARGUMENTS)


def test_struct_of_another_size_is_refused() -> None:
    wrong = type("ProbeArgs", (ctypes.Structure,), {"_fields_": ProbeArgs._fields_[:-1]})
    with pytest.raises(CompilationError, match="struct probe_args has 48 bytes in C and 40 in Python"):
        Library(probe_library().path, [wrong])


def test_struct_that_the_library_does_not_know_is_refused() -> None:
    class UnheardOfArgs(ctypes.Structure):
        _fields_ = ()

    with pytest.raises(LaunchError, match="exports no sizeof_unheard_of_args"):
        Library(probe_library().path, [UnheardOfArgs])


def test_file_that_is_no_library_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "kernels.so"
    path.write_text("text")
    with pytest.raises(CompilationError, match="the compiled kernels cannot be loaded"):
        Library(path, ())


def test_names_of_structs_are_those_of_c() -> None:
    assert [snake_case(n) for n in ("RmsNormArgs", "QkNormRopeWriteKvArgs", "Q4Args")] == [
        "rms_norm_args", "qk_norm_rope_write_kv_args", "q4_args",
    ]  # fmt: skip


def test_sources_are_all_c_files_of_the_directory() -> None:
    names = {path.name for path in kernel_sources().files}
    assert names == {name for name in os.listdir(kernel_sources().include) if name.endswith(".c")}
    assert {"pool.c", "rows.c"} <= names
