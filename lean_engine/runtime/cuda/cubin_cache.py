"""A disk cache of cubins, keyed by everything that decides them: sources, kernels, architecture, compiler, options.

Processes that need the same cubin at once compile it once: the first holds a lock, the others wait and read. A file
that is damaged or of another format is compiled anew. A file holds a line of JSON, the names and
resources of the kernels, and then the cubin.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from lean_engine.errors import ConfigError
from lean_engine.runtime.cuda.nvrtc import OPTIONS, Cubin, Nvrtc, Resources
from lean_engine.runtime.cuda.sources import KernelSource
from lean_engine.runtime.whole_file import locked, read_whole, write_whole

FORMAT = 1  # of the files; another number, another key


class CubinCache:
    """Compiles through a directory.

    Args:
        directory: made when it is first written to. Everything in it can be deleted at any time.
        nvrtc: the compiler.
    """

    def __init__(self, directory: Path, nvrtc: Nvrtc) -> None:
        self.directory = directory
        self.nvrtc = nvrtc

    def get(self, source: KernelSource, expressions: Sequence[str], arch: str, options: Sequence[str] = ()) -> Cubin:
        """The cubin from the cache, or compiled and stored; arguments and errors are those of Nvrtc.compile.

        Raises:
            ConfigError: the directory cannot be written.
        """
        path = self.path(source, expressions, arch, options)
        if (cubin := read_cubin(path)) is not None:
            return cubin
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with locked(path.with_suffix(".lock")):
                if (cubin := read_cubin(path)) is not None:  # another process has compiled it meanwhile
                    return cubin
                cubin = self.nvrtc.compile(source, expressions, arch, options)
                write_cubin(path, cubin)
                return cubin
        except OSError as error:
            reason = error.strerror or error
            raise ConfigError(f"compiled kernels cannot be stored in {self.directory}: {reason}") from None

    def path(self, source: KernelSource, expressions: Sequence[str], arch: str, options: Sequence[str]) -> Path:
        """Where the cubin is, or would be."""
        key = [FORMAT, source.digest, list(expressions), arch, self.nvrtc.version, OPTIONS, list(options)]
        digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()
        return self.directory / f"{Path(source.name).stem}-{arch}-{digest[:24]}.cubin"


def read_cubin(path: Path) -> Cubin | None:
    """None if there is no such file, or not a whole one."""
    if (body := read_whole(path)) is None:
        return None
    head, _, data = body.partition(b"\n")
    kernels = json.loads(head)
    names = {expression: kernel["symbol"] for expression, kernel in kernels.items()}
    resources = {expression: Resources(**kernel["resources"]) for expression, kernel in kernels.items()}
    return Cubin(data, names, resources)


def write_cubin(path: Path, cubin: Cubin) -> None:
    """Put a whole file in place in one step."""
    kernels = {
        expression: {"symbol": name, "resources": dataclasses.asdict(cubin.resources[expression])}
        for expression, name in cubin.names.items()
    }
    write_whole(path, json.dumps(kernels).encode() + b"\n" + cubin.data)
