"""Each planted bug is caught by the checked emulator, and named by the rule that it breaks.

All are built before the first test, side by side.
"""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
from cuda_host import HostKernel, HostModule, KernelError
from cuda_kernel_running import assert_rounded, checked_kernels
from host_running import CUDA
from mutants import ENGINE, MUTANTS, WRONG, Mutant
from sample_runs import RUNS, relative_error

from lean_engine.runtime.cuda.instances import Instance

RIGHT = "right result"


@cache
def modules() -> dict[str, HostModule]:
    def build(mutant: Mutant) -> HostModule:
        source, options = mutant.source(), ["-O0"]
        return HostModule(CUDA / mutant.file, [mutant.kernel], options=options, is_checked=True, source=source)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(MUTANTS, pool.map(build, MUTANTS.values()), strict=True))


def outcome(mutant: Mutant, kernel: HostKernel) -> str:
    """What is reported, RIGHT or WRONG."""
    try:
        if mutant.run is None:
            return RIGHT if relative_error(RUNS[mutant.kernel](kernel, 0, 0)) < 1e-5 else WRONG
        run = mutant.run()
        run.reset()
        (call,) = run.calls()
        assert call.instance.expression == mutant.kernel
        kernel(call.grid, call.block, call.args)
    except KernelError as error:
        return str(error)
    try:
        for found, wanted in zip(run.outputs, run.expected(), strict=True):
            assert_rounded(found, wanted)
    except AssertionError:
        return WRONG
    return RIGHT


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name: str) -> None:
    mutant = MUTANTS[name]
    assert re.search(mutant.rule, outcome(mutant, modules()[name].get_function(mutant.kernel)))


@pytest.mark.parametrize("mutant", {(m.file, m.kernel): m for m in ENGINE.values()}.values(), ids=lambda m: m.kernel)
def test_original_is_right(mutant: Mutant) -> None:
    """Else being caught would say nothing. test_samples does the same for the samples."""
    kernel = checked_kernels().kernel(Instance(mutant.file, mutant.kernel))
    assert outcome(mutant, kernel) == RIGHT
