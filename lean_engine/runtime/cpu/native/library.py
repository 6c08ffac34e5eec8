"""The kernels' shared library: built once for each kind of processor, cached, and checked when it is loaded."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lean_engine.errors import ConfigError, LaunchError
from lean_engine.runtime.cpu.native.compiler import CompilationError, Compiler
from lean_engine.runtime.cpu.native.launches import NativeLaunch
from lean_engine.runtime.cpu.native.pool import LaunchList, Pool
from lean_engine.runtime.cpu.native.sources import Sources
from lean_engine.runtime.cpu.native.weight_memory import WeightMemory
from lean_engine.runtime.whole_file import locked, read_whole, write_whole

SUFFIX = ".dylib" if sys.platform == "darwin" else ".so"


def build_library(
    compiler: Compiler, sources: Sources, directory: Path, on_compile: Callable[[], None] = lambda: None
) -> Path:
    """The path of the library in a directory that several processes may share; compiled if it is not there.

    Beside a library stands the hash of its content: one that is damaged is compiled anew. Processes that need the same
    library at once compile it once.

    Args:
        directory: made when it is first written to. Everything in it can be deleted while no engine is loading.
        on_compile: called before a compilation.

    Raises:
        CompilationError: the compiler refuses the sources.
        ConfigError: the directory cannot be written.
    """
    path = directory / f"kernels-{compiler.key(sources)}{SUFFIX}"
    if is_whole(path):
        return path
    import tempfile

    try:
        directory.mkdir(parents=True, exist_ok=True)
        with locked(path.with_suffix(".lock")):
            if not is_whole(path):  # another process may have compiled it meanwhile
                on_compile()
                with tempfile.TemporaryDirectory(prefix=".building-", dir=directory) as scratch:
                    built = Path(scratch) / path.name
                    compiler.build(sources, built, Path(scratch))
                    os.replace(built, path)
                write_whole(path.with_suffix(".sha256"), content_hash(path))
    except OSError as error:
        raise ConfigError(f"compiled kernels cannot be stored in {directory}: {error.strerror or error}") from None
    return path


def is_whole(path: Path) -> bool:
    wanted = read_whole(path.with_suffix(".sha256"))
    return wanted is not None and path.is_file() and content_hash(path) == wanted


def content_hash(path: Path) -> bytes:
    return hashlib.sha256(path.read_bytes()).hexdigest().encode()


class Library:
    """A loaded library and the addresses of what it exports.

    Args:
        arguments: the argument structs that Python fills in; see launches.py.

    Raises:
        CompilationError: the file cannot be loaded, or a struct has another size there.
    """

    def __init__(self, path: Path, arguments: Sequence[type[ctypes.Structure]]) -> None:
        self.path = path
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            raise CompilationError(f"the compiled kernels cannot be loaded: {error}") from None
        self._addresses: dict[str, int] = {}
        for struct in arguments:
            self._check_size(struct)

    def _check_size(self, struct: type[ctypes.Structure]) -> None:
        name = snake_case(struct.__name__)
        in_c = self.function(f"sizeof_{name}", ctypes.c_int64)()
        if in_c != ctypes.sizeof(struct):
            raise CompilationError(f"struct {name} has {in_c} bytes in C and {ctypes.sizeof(struct)} in Python")

    def has(self, name: str) -> bool:
        return hasattr(self._library, name)

    def function(self, name: str, result: Any, *arguments: Any) -> Any:
        """An exported function with its C types."""
        try:
            function = self._library[name]  # a new object each time: nobody else's types are changed
        except AttributeError:
            raise LaunchError(f"{self.path.name} exports no {name}") from None
        function.restype, function.argtypes = result, arguments
        return function

    def address(self, name: str) -> int:
        """Where an exported function is."""
        if name not in self._addresses:
            pointer = ctypes.cast(self.function(name, None), ctypes.c_void_p)
            self._addresses[name] = pointer.value or 0
        return self._addresses[name]


def snake_case(name: str) -> str:
    """RmsNormArgs → rms_norm_args."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


class Native:
    """The library with a pool to run it on, and memory for the weights that it reads."""

    def __init__(self, library: Library, num_threads: int) -> None:
        self.library = library
        self.pool = Pool(library, num_threads)
        self.weight_memory = WeightMemory()

    @property
    def num_threads(self) -> int:
        return self.pool.num_threads

    def run(self, launches: Sequence[NativeLaunch]) -> None:
        """Run launches now, in order; return when they are done."""
        self.pool.run(LaunchList(self.library, launches))

    def close(self) -> None:
        self.pool.close()
