"""NVRTC by ctypes: CUDA C++ to cubins for any architecture, without a GPU, a driver or CuPy.

CuPy compiles for the device at hand only, and with include paths of its own. This binding takes sources that include
nothing from the toolkit, and reads from ptxas what each kernel needs of registers, shared memory and local memory.
"""

from __future__ import annotations

import ctypes
import ctypes.util
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lean_engine.errors import ConfigError, LeanEngineError
from lean_engine.runtime.cuda import libraries
from lean_engine.runtime.cuda.sources import KernelSource

OPTIONS = ("--std=c++17", "--ptxas-options=-v")
PACKAGES = "nvidia-cuda-nvrtc-cu12 (or nvidia-cuda-nvrtc for CUDA 13)"
_ERROR = re.compile(r"^(?P<file>[^\s(]+)\((?P<line>\d+)\): (?:catastrophic )?error: (?P<text>.*)$", re.MULTILINE)


class CompileError(LeanEngineError):
    """A kernel's source does not compile. A bug, never a user's fault.

    Attributes:
        log: everything the compiler said.
    """

    def __init__(self, message: str, log: str) -> None:
        super().__init__(message)
        self.log = log


@dataclass(frozen=True, slots=True)
class Resources:
    """What one kernel needs, as ptxas counted it."""

    registers: int  # per thread
    shared_bytes: int  # static, per block
    spill_bytes: int  # stores and loads of spilled registers, per thread
    stack_bytes: int  # local memory, per thread


@dataclass(frozen=True, slots=True, eq=False)
class Cubin:
    """A compiled source.

    names and resources have an entry for each name expression it was compiled for.
    """

    data: bytes
    names: Mapping[str, str]  # "rms_norm<half, 8, 1>" → the symbol in the cubin
    resources: Mapping[str, Resources]


class Nvrtc:
    """The compiler.

    Args:
        library: path of libnvrtc; by default the first that library_paths finds.

    Raises:
        ConfigError: there is none, or it cannot be loaded.
    """

    def __init__(self, library: str | Path | None = None) -> None:
        path = next(library_paths(), None) if library is None else library
        if path is None:
            raise ConfigError(f"NVRTC, the CUDA compiler library, is not installed; pip install {PACKAGES}")
        try:
            self._library = ctypes.CDLL(str(path))
        except OSError as error:
            raise ConfigError(f"{path} cannot be loaded: {error}") from None
        self._library.nvrtcGetErrorString.restype = ctypes.c_char_p
        self.path = str(path)
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
        self.version = (major.value, minor.value)

    def architectures(self) -> tuple[str, ...]:
        """What it can compile for: "sm_80", …"""
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        numbers = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", numbers)
        return tuple(f"sm_{number}" for number in numbers)

    def compile(
        self, source: KernelSource, expressions: Sequence[str], arch: str, options: Sequence[str] = ()
    ) -> Cubin:
        """Compile some of a source's kernels.

        Args:
            expressions: the kernels, as C++ names them: "rms_norm<half, 8, 1>".
            arch: a real architecture: "sm_90".
            options: besides OPTIONS.

        Raises:
            ConfigError: this NVRTC does not know the architecture.
            CompileError: the source is wrong; the message names the file, the line and its text.
        """
        if arch not in self.architectures():
            known = ", ".join(self.architectures())
            raise ConfigError(f"NVRTC {self.version[0]}.{self.version[1]} has no architecture {arch}; it has {known}")
        program = self._create(source)
        try:
            for expression in expressions:
                self._call("nvrtcAddNameExpression", program, expression.encode())
            flags = encoded([f"--gpu-architecture={arch}", *OPTIONS, *options])
            status = self._library.nvrtcCompileProgram(program, len(flags), flags)
            log = self._read("ProgramLog", program).rstrip(b"\0").decode(errors="replace")
            if status:
                raise CompileError(f"{describe(source, log)} ({arch}, NVRTC {self.version[0]}.{self.version[1]})", log)
            names = {expression: self._lowered_name(program, expression) for expression in expressions}
            found = parse_resources(log)
            resources = {expression: found[name] for expression, name in names.items()}
            return Cubin(self._read("CUBIN", program), names, resources)
        finally:
            self._call("nvrtcDestroyProgram", ctypes.byref(program))

    def _create(self, source: KernelSource) -> ctypes.c_void_p:
        program = ctypes.c_void_p()
        headers, names = encoded(source.headers.values()), encoded(source.headers)
        text, name = source.text.encode(), source.name.encode()
        self._call("nvrtcCreateProgram", ctypes.byref(program), text, name, len(names), headers, names)
        return program

    def _lowered_name(self, program: ctypes.c_void_p, expression: str) -> str:
        name = ctypes.c_char_p()
        self._call("nvrtcGetLoweredName", program, expression.encode(), ctypes.byref(name))
        return (name.value or b"").decode()

    def _read(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"nvrtcGet{what}Size", program, ctypes.byref(size))
        data = ctypes.create_string_buffer(size.value)
        self._call(f"nvrtcGet{what}", program, data)
        return data.raw

    def _call(self, name: str, *args: object) -> None:
        status = getattr(self._library, name)(*args)
        if status:
            raise CompileError(f"{name} failed: {self._library.nvrtcGetErrorString(status).decode()}", "")


def encoded(texts: Iterable[str]) -> ctypes.Array[ctypes.c_char_p]:
    values = [text.encode() for text in texts]
    return (ctypes.c_char_p * len(values))(*values)


def library_paths() -> Iterator[Path]:
    """Where NVRTC is, the place to be tried first first."""
    for path in libraries.library_paths("nvrtc"):
        if ".alt" not in path.name:  # a second build of it that lies beside it on Windows
            yield path


def describe(source: KernelSource, log: str) -> str:
    """The first error in a log, with the text of its line."""
    match = _ERROR.search(log)
    if match is None:
        return f"{source.name}: {' '.join(log.split()) or 'the compiler failed without a message'}"
    line = source.line(match["file"], int(match["line"]))
    quoted = f": {line.strip()}" if line else ""
    return f"{match['file']}:{match['line']}: {match['text'].strip()}{quoted}"


def parse_resources(log: str) -> dict[str, Resources]:
    """Symbol → what `ptxas -v` says of it."""
    found = {}
    for part in log.split("Compiling entry function '")[1:]:

        def number(pattern: str, text: str = part) -> int:
            match = re.search(pattern, text)
            return int(match[1]) if match else 0

        found[part.split("'")[0]] = Resources(
            registers=number(r"Used (\d+) registers"),
            shared_bytes=number(r"(\d+) bytes smem"),
            spill_bytes=number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads"),
            stack_bytes=number(r"(\d+) bytes stack frame"),
        )
    return found
