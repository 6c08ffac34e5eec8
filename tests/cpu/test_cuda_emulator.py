"""EmulatedKernels: unchecked as well as checked, replays over the same addresses, and where it cannot be had."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cuda_kernel_running import CudaRun, checked_kernels, normal

from lean_engine.errors import ConfigError
from lean_engine.runtime.cuda import emulator
from lean_engine.runtime.cuda.emulator import EmulatedKernels


def test_unchecked_kernels_give_the_same_bits() -> None:
    run = CudaRun("act_and_mul", [normal(3, 240)], "bfloat16", {"activation": "silu"})
    (wanted,) = run.run()
    run.reset()
    EmulatedKernels().bind(run.calls()[0])()
    assert np.array_equal(run.outputs[0].view(np.uint16), wanted.view(np.uint16))


def test_replay_reads_what_the_arrays_hold_then() -> None:
    run = CudaRun("add", [np.zeros((1, 8)), np.ones((1, 8))], "float16")
    replay = checked_kernels().bind(run.calls()[0])
    run.inputs[0].flags.writeable = True
    for value in (1, 4):
        run.inputs[0][:] = value
        replay()
        assert (run.outputs[0] == value + 1).all()


def test_emulator_needs_a_checkout_and_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(emulator, "PACKAGE", tmp_path / "lean_engine")
        with pytest.raises(ConfigError, match="needs a source checkout of lean-engine"):
            EmulatedKernels()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="the CUDA emulator needs"):
        EmulatedKernels()
