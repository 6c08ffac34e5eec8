"""What a native kernel module is written in: argument structs, launches, and the scope of one captured program.

A launch names an exported C function, which is called once per task with the launch's arguments. A module declares its
structs in ARGUMENTS (FooBarArgs here is foo_bar_args in C; their sizes are compared when the library is loaded) and its
kernels in KERNELS, by the names of the kernel table.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar, cast

import numpy as np

from lean_engine.runtime.device import Array, LaunchArgs

if TYPE_CHECKING:
    from lean_engine.runtime.cpu.native.library import Library

Pointer = ctypes.c_void_p
Shape = tuple[int, ...]
T = TypeVar("T")


_known: dict[int, tuple[Array, int]] = {}  # id → an array that is alive, and its address: NumPy takes 1 µs to tell it


def address(array: Array | None) -> int:
    """Where an array's memory begins; 0 for none."""
    known = _known.get(id(array))
    if known is not None:
        return known[1]
    return 0 if array is None else array.__array_interface__["data"][0]


@contextmanager
def known_addresses(launches: Sequence[LaunchArgs]) -> Iterator[None]:
    """Ask each array of a program for its address once: its launches share most of them."""
    for args in launches:
        for array in (*args.inputs, *args.outputs):
            if id(array) not in _known and isinstance(array, np.ndarray):
                _known[id(array)] = (array, address(array))
    try:
        yield
    finally:
        _known.clear()


@dataclass(frozen=True, slots=True, eq=False)
class NativeLaunch:
    """One entry of a launch list.

    What `args` points into must outlive the list: the launch's own arrays do, everything else stands in `keeps`.
    """

    kernel: str  # an exported C function of (args, task)
    args: ctypes.Structure
    count: int  # tasks; 0 = nothing to do
    count_of: str | None = None  # an exported C function of args: the number of tasks when the launch's turn comes
    keeps: tuple[object, ...] = ()


def no_workspace(shapes: Sequence[Shape], scalars: Mapping[str, Any], num_threads: int) -> int:
    return 0


@dataclass(frozen=True, slots=True)
class NativeKernel:
    """How a kernel of the kernel table becomes launches.

    capture: arrays of one step's sizes → launches. workspace_bytes: input shapes of the largest step, scalars, threads
    → scratch bytes that capture is given.
    """

    capture: Callable[[Scope, LaunchArgs], list[NativeLaunch]]
    workspace_bytes: Callable[[Sequence[Shape], Mapping[str, Any], int], int] = no_workspace


@dataclass(frozen=True, slots=True)
class Precision:
    """What weights are kept in, and what products are computed in."""

    weights: str = "stored"  # as the checkpoint has them; or "float32", "bfloat16", "float16", "int8"
    products: str = "float32"  # exact; or "bfloat16": activations are rounded to it too
    is_batch_invariant: bool = False  # a row's bits never depend on how many others there are


class Scope:
    """What the kernels of one captured program share.

    Args:
        constants: values derived from weights, shared by every program of the device.
    """

    def __init__(
        self,
        library: Library,
        num_threads: int,
        constants: dict[Hashable, Any],
        precision: Precision = Precision(),
    ) -> None:
        self.library = library
        self.num_threads = num_threads
        self.precision = precision
        self.prologue: list[NativeLaunch] = []  # run before the launches
        self._shared: dict[Hashable, object] = {}
        self._constants = constants

    def once_per_step(self, key: Hashable, make: Callable[[], tuple[T, list[NativeLaunch]]]) -> T:
        """The result of make, which also says what to launch at the head of each replay. The same key is made once."""
        if key not in self._shared:
            self._shared[key], launches = make()
            self.prologue += launches
        return cast(T, self._shared[key])

    def constant(self, key: Hashable, make: Callable[[], T]) -> T:
        """A value that lives as long as the device; the same key is made once."""
        if key not in self._constants:
            self._constants[key] = make()
        return cast(T, self._constants[key])
