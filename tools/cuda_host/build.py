"""Builds shared libraries with g++ and keeps them in a per-user cache, by the hash of everything that went into them.

Several processes may ask for the same library at once: one builds it, the others wait for it.
"""

from __future__ import annotations

import functools
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

HERE = Path(__file__).resolve().parent
MAX_SHARED_BYTES = 232_448  # dynamic shared memory of one block on sm_90, more than on any other
KEPT_SECONDS = 30 * 86_400  # a library that nobody has used for so long is removed

RUNTIME_SOURCES = ("fibers.cpp", "rendezvous.cpp", "async_copy.cpp", "check.cpp", "races.cpp", "profile.cpp")
FLAGS = (
    "-std=c++17",
    "-O2",
    "-g1",
    "-fPIC",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-fno-threadsafe-statics",
    "-fno-gnu-unique",  # or all modules of a process would share one copy of a template's __shared__ arrays
)
CHECK_FLAGS = (
    "-O1",  # builds in half the time
    "-fsanitize=thread",
    "-fsanitize=bounds,alignment",
    "-fno-tree-sra",  # which would split a 16-byte access into four
    "--param=tsan-instrument-func-entry-exit=0",
)
DYNAMIC_SHARED = re.compile(r"extern\s+__shared__[^;]*?(\w+)\s*\[\s*\]")
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


class BuildError(RuntimeError):
    """g++ refused a source; the message holds what it said."""


def missing_reason() -> str | None:
    """Why kernels cannot be built here, or None."""
    if sys.platform != "linux":
        return f"the CUDA emulator needs Linux (this is {sys.platform})"
    for tool in ("gcc", "g++"):
        if shutil.which(tool) is None:
            return f"the CUDA emulator needs {tool}, which is not installed"
    return None


def cache_directory() -> Path:
    """LEAN_ENGINE_CACHE, or the user's cache directory, and cuda_host below it."""
    if chosen := os.environ.get("LEAN_ENGINE_CACHE"):
        return Path(chosen).expanduser() / "cuda_host"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "lean-engine" / "cuda_host"


def runtime_library(flags: Sequence[str] = ()) -> Path:
    """The emulator's own library; every kernel library is linked to it."""
    sources = [HERE / name for name in RUNTIME_SOURCES]
    texts = [path.read_text() for path in (*sources, *sorted(HERE.glob("*.h")))]
    command = ["g++", *FLAGS, *flags, "-Wall", "-Wextra"]

    def make(folder: Path, library: Path) -> None:
        objects = [str(folder / f"{path.stem}.o") for path in sources]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            compile_all = [[*command, "-c", str(s), "-o", o] for s, o in zip(sources, objects, strict=True)]
            list(pool.map(run, compile_all))  # list: to raise what a compilation raised
        run(["g++", "-shared", *objects, "-o", str(library)])

    return cached("cuda_host", [*command, *texts], make)


def kernel_library(
    name: str, text: str, include_directory: Path, expressions: Sequence[str], options: Sequence[str], is_checked: bool
) -> Path:
    """A source's kernels as a library, with an entry point per expression: "rms_norm<bfloat16, 1>"."""
    runtime = runtime_library()
    headers = included_headers(text, include_directory)
    own = [path.read_text() for path in sorted(HERE.glob("*.h"))]
    flags = [*FLAGS, *(CHECK_FLAGS if is_checked else ()), "-fno-extern-tls-init", "-Wno-unknown-pragmas"]
    flags += ["-include", str(HERE / "cuda_host.h"), "-I", str(include_directory), *options]
    dynamic = sorted(set(DYNAMIC_SHARED.findall("".join([text, *headers]))))
    if len(dynamic) > 1:
        raise BuildError(f"{name}: dynamic shared memory has the names {', '.join(dynamic)}; use one in all kernels")

    def make(folder: Path, library: Path) -> None:
        (folder / name).write_text(f'#line 1 "{name}"\n{text}')
        entries = "".join(f"CUDA_HOST_KERNEL({i}, {e})\n" for i, e in enumerate(expressions))
        (folder / "stub.cpp").write_text(f'#include "{folder / name}"\n#line 1 "stub.cpp"\n{entries}')
        (folder / "shared.c").write_text(dynamic_shared_source(dynamic[0] if dynamic else None))
        objects = [str(folder / "stub.o"), str(folder / "shared.o")]
        run(["gcc", "-O1", "-fPIC", "-c", str(folder / "shared.c"), "-o", objects[1]])
        run(["g++", *flags, "-c", str(folder / "stub.cpp"), "-o", objects[0]])
        link = ["g++", "-shared", "-Wl,-Bsymbolic", *objects, str(runtime), f"-Wl,-rpath,{runtime.parent}"]
        run([*link, "-o", str(library)])

    return cached(Path(name).stem, [text, *headers, *own, str(runtime), *flags, *expressions], make)


def dynamic_shared_source(name: str | None) -> str:
    """C, so that the symbol of `extern __shared__` has no mangled type. The anchor makes a thread's copy exist."""
    anchor = "static _Thread_local char anchor;\nvoid* cuda_host_anchor(void) { return &anchor; }\n"
    if name is None:
        return f"{anchor}void* cuda_host_dynamic(void) {{ return 0; }}\n"
    return (
        f"{anchor}_Thread_local unsigned char {name}[{MAX_SHARED_BYTES}] __attribute__((aligned(1024)));\n"
        f"void* cuda_host_dynamic(void) {{ return {name}; }}\n"
    )


def included_headers(text: str, directory: Path) -> list[str]:
    """The text of each file that is included in quotes, directly or not, each once."""
    found: dict[str, str] = {}
    wanted = INCLUDE.findall(text)
    while wanted:
        name = wanted.pop()
        if name not in found:
            found[name] = (directory / name).read_text()
            wanted += INCLUDE.findall(found[name])
    return [found[name] for name in sorted(found)]


def cached(name: str, ingredients: Iterable[str], make: Callable[[Path, Path], None]) -> Path:
    """The library that make(folder, library) writes, from the cache if it is there."""
    import fcntl  # not at the top: the package can be imported, and say what is missing, on any system

    text = "\0".join([*ingredients, compiler_version()])
    folder = cache_directory() / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:24]}"
    library = folder / f"lib{name}.so"
    if library.exists():
        os.utime(library)
        return library
    folder.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            build(name, folder, make)
    return library


def build(name: str, folder: Path, make: Callable[[Path, Path], None]) -> None:
    """Build beside the final place and move there in one step, so that no one ever sees half a library."""
    remove_unused(folder.parent)
    with tempfile.TemporaryDirectory(prefix=".build-", dir=folder.parent) as scratch:
        library = Path(scratch) / f"lib{name}.so"
        make(Path(scratch), library)
        folder.mkdir(exist_ok=True)
        library.replace(folder / library.name)


def remove_unused(directory: Path) -> None:
    oldest = time.time() - KEPT_SECONDS
    for folder in directory.iterdir():
        if folder.name.startswith(".") or not folder.is_dir():
            continue
        with suppress(FileNotFoundError):  # another process removes it too
            if max(path.stat().st_mtime for path in (folder, *folder.iterdir())) < oldest:
                shutil.rmtree(folder, ignore_errors=True)
                Path(f"{folder}.lock").unlink(missing_ok=True)


@functools.cache
def compiler_version() -> str:
    return subprocess.run(["g++", "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]


def run(command: Sequence[str]) -> None:
    environment = {**os.environ, "LC_ALL": "C"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise BuildError(done.stderr.strip() or f"{command[0]} ended with exit code {done.returncode}")
