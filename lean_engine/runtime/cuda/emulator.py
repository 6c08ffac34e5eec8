"""The CUDA kernels on the CPU: the instances of the kernel table through tools/cuda_host, in a source checkout.

Slow, and meant for tests: what the launcher of the CUDA device decides can be run and checked without a GPU.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

from lean_engine.errors import ConfigError
from lean_engine.runtime.cuda.instances import Instance, KernelCall
from lean_engine.runtime.cuda.sources import cuda_source_directory
from lean_engine.runtime.source_files import PACKAGE


def load_emulator() -> ModuleType:
    """The package cuda_host of a source checkout.

    Raises:
        ConfigError: lean-engine is installed from a wheel, or there is no g++.
    """
    tools = PACKAGE.parent / "tools"
    if not (tools / "cuda_host" / "__init__.py").is_file():
        raise ConfigError("the emulated CUDA device needs a source checkout of lean-engine; this is an installation")
    if str(tools) not in sys.path:
        sys.path.append(str(tools))
    emulator = importlib.import_module("cuda_host")
    if (reason := emulator.missing_reason()) is not None:
        raise ConfigError(reason)
    return emulator


class EmulatedKernels:
    """Builds instances when they are first needed, those of one source together, and binds calls to addresses.

    Args:
        is_checked: check every memory access, about twice as slow; see tools/cuda_host/README.md.

    Raises:
        ConfigError: as load_emulator.
    """

    def __init__(self, is_checked: bool = False) -> None:
        self._emulator = load_emulator()
        self._is_checked = is_checked
        self._kernels: dict[Instance, Any] = {}  # cuda_host.HostKernel

    def build(self, wanted: Iterable[Instance]) -> None:
        """Build what is missing, sources side by side."""
        by_source: dict[str, list[str]] = {}
        for instance in sorted(set(wanted) - set(self._kernels)):
            by_source.setdefault(instance.source, []).append(instance.expression)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            modules = pool.map(self._module, by_source.items())
        for module, (source, expressions) in zip(modules, by_source.items(), strict=True):
            for name in expressions:
                self._kernels[Instance(source, name)] = module.get_function(name)

    def _module(self, item: tuple[str, list[str]]) -> Any:
        source, expressions = item
        path = cuda_source_directory() / source
        return self._emulator.HostModule(path, expressions, is_checked=self._is_checked)

    def kernel(self, instance: Instance) -> Any:
        """The emulator's kernel of an instance."""
        self.build([instance])
        return self._kernels[instance]

    def bind(self, call: KernelCall) -> Callable[..., None]:
        """A call to be run any number of times over the same addresses, as launch(order=0, preempt=0)."""
        kernel = self.kernel(call.instance)
        kernel.max_dynamic_shared_size_bytes = max(kernel.max_dynamic_shared_size_bytes, call.shared_bytes)
        bound: Callable[..., None] = kernel.bind(call.grid, call.block, call.args, shared_mem=call.shared_bytes)
        return bound
