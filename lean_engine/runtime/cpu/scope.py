"""Scope: what the kernels of one captured program share.

Some work depends on the step's inputs alone (rotations of the positions, cache rows of the slots, which blocks each
request attends to). A kernel asks for it by key; it is done once at the head of every replay, whatever number of layers
asked.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast

from lean_engine.runtime.cpu.team import Team

Call = Callable[[], object]
T = TypeVar("T")


class Scope:
    def __init__(self, team: Team, constants: dict[Hashable, Any], uses_blas_threads: bool = False) -> None:
        self.team = team
        self.uses_blas_threads = uses_blas_threads  # for matrix products, instead of the team
        self.prologue: list[Call] = []  # run before the launches
        self._shared: dict[Hashable, object] = {}
        self._constants = constants

    def once_per_step(self, key: Hashable, make: Callable[[], tuple[T, Call]]) -> T:
        """The result of make, which also says what to call at the head of each replay. The same key is made once."""
        if key not in self._shared:
            self._shared[key], refresh = make()
            self.prologue.append(refresh)
        return cast(T, self._shared[key])

    def constant(self, key: Hashable, make: Callable[[], T]) -> T:
        """A value derived from weights, shared by every program of the device."""
        if key not in self._constants:
            self._constants[key] = make()
        return cast(T, self._constants[key])


def in_turn(*calls: Call) -> Call:
    """One call that makes several."""

    def run() -> None:
        for call in calls:
            call()

    return run
