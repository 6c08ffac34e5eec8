"""The driver over CuPy: a whole engine through a fake of it. test_cupy_calls.py looks at CuPy itself."""

from __future__ import annotations

import json
import tempfile
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_cupy import FREE_BYTES, TOTAL_BYTES, CUDARuntimeError, FakeCubins, FakeCuda
from tiny import raw_config

from lean_engine import LLM, SamplingParams
from lean_engine.engine import start
from lean_engine.errors import ConfigError, LaunchError, OutOfMemory
from lean_engine.runtime.cuda import cupy_driver, cupy_module
from lean_engine.runtime.cuda.cublaslt import WORKSPACE_BYTES
from lean_engine.runtime.cuda.cupy_driver import CupyDriver, nearest_architecture
from lean_engine.runtime.cuda.device import CudaDevice
from lean_engine.runtime.cuda.emulated_driver import NUMPY, EmulatedDriver
from lean_engine.runtime.cuda.gemm_kernels import Problem, skinny_ways
from lean_engine.runtime.cuda.instances import Instance

SIZES = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}


def make_driver(**options: Any) -> CupyDriver:
    try:
        cuda = FakeCuda(**options)
    except ConfigError as error:
        pytest.skip(str(error))
    return CupyDriver(FakeCubins(), Path(tempfile.mkdtemp()), cuda.make_blas, cuda)  # type: ignore[arg-type]


def test_whole_engine_gives_bit_for_bit_what_the_emulated_driver_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(raw_config("qwen3") | SIZES))
    prompts = [{"prompt_token_ids": list(range(5, 5 + n))} for n in (3, 40, 17)]
    params = SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=1)
    logprobs = []
    real, emulated = make_driver(), EmulatedDriver()
    monkeypatch.setattr(real, "choose_gemm", emulated.choose_gemm)  # timing them takes the emulator long
    for driver in (emulated, real):
        device = CudaDevice(driver, "bfloat16")  # type: ignore[arg-type]
        monkeypatch.setattr(start, "make_device", lambda *_, device=device: device)
        with LLM(tmp_path, load_format="dummy", num_gpu_blocks_override=20, max_model_len=64, max_num_seqs=4) as llm:
            outputs = llm.generate(prompts, params)
        answers = [output.outputs[0] for output in outputs]
        logprobs.append([e[t].logprob for a in answers for t, e in zip(a.token_ids, a.logprobs, strict=True)])
    assert logprobs[0] == logprobs[1]
    assert np.isfinite(logprobs[1]).all()


def test_kernels_are_compiled_once_and_for_the_gpu_s_architecture() -> None:
    driver = make_driver(capability=(8, 9))
    instance = Instance("norm.cu", "rms_norm<half, 8, 1>")
    driver.prepare([instance, instance])
    driver.prepare([instance])
    assert driver._cubins.compiled == [("rms_norm<half, 8, 1>", "sm_89")]  # type: ignore[attr-defined]


def test_memory_is_counted_and_a_lack_of_it_is_an_error_with_the_numbers() -> None:
    driver = make_driver(max_bytes=WORKSPACE_BYTES)
    assert driver.memory_bytes() == (FREE_BYTES, TOTAL_BYTES)
    assert driver.name == "Fake GPU"
    driver.allocate((250,), "float32")
    with pytest.raises(OutOfMemory, match=r"cannot allocate 32\.00 MiB on Fake GPU; 3\.00 GiB of 4\.00 GiB are free"):
        driver.allocate((WORKSPACE_BYTES + 1,), "uint8")


def test_products_compete_once_and_the_choice_is_kept() -> None:
    driver = make_driver()
    problem = Problem(1, 8, 16, "float16", "float16")
    chosen = driver.choose_gemm(problem)
    assert chosen.name in [*(way.name for way in skinny_ways(problem, "sm_90")), NUMPY.name]
    driver._choices.stopwatch = None  # type: ignore[assignment]  # nothing is timed again
    assert driver.choose_gemm(problem) == chosen


def test_copies_go_both_ways_and_only_between_equal_sizes() -> None:
    driver = make_driver()
    host, device = driver.allocate_host((3, 2), "int32"), driver.allocate((3, 2), "int32")
    host[...] = [[1, 2], [3, 4], [5, 6]]
    driver.upload(host, device)
    back = driver.allocate_host((2, 2), "int32")
    driver.download(device[1:], back)
    driver.synchronize()
    assert back.tolist() == [[3, 4], [5, 6]]
    with pytest.raises(LaunchError, match="24 bytes do not fill 16"):
        driver.download(device, back)


def test_corner_of_an_array_is_uploaded_and_nothing_beside_it() -> None:
    driver = make_driver()
    host, device = driver.allocate_host((3, 4), "int32"), driver.allocate((3, 4), "int32")
    host[...] = np.arange(12).reshape(3, 4)
    driver.upload_corner(host, device, 2, 3)
    back = driver.allocate_host((3, 4), "int32")
    driver.download(device, back)
    driver.synchronize()
    assert back.tolist() == [[0, 1, 2, -1], [4, 5, 6, -1], [-1] * 4]
    with pytest.raises(LaunchError, match=r"2 × 5 of \(3, 4\) are copied"):
        driver.upload_corner(host, device, 2, 5)


def test_mark_waits_for_what_came_before_it() -> None:
    driver = make_driver()
    is_done = driver.mark()
    driver.capture(lambda: None)()
    is_done()


def test_arguments_of_unknown_size_are_refused() -> None:
    with pytest.raises(LaunchError, match="a kernel's argument is 3, must be a device array, None or a NumPy scalar"):
        cupy_driver.kernel_argument(3)


def test_failed_capture_leaves_the_stream_usable() -> None:
    driver = make_driver()

    def fail() -> None:
        raise LaunchError("no such kernel")

    with pytest.raises(LaunchError, match="no such kernel"):
        driver.capture(fail)
    driver.capture(lambda: None)()


@pytest.mark.parametrize(
    ("capability", "arch"),
    [
        ((7, 5), "sm_75"),
        ((8, 0), "sm_80"),
        ((8, 6), "sm_86"),
        ((8, 7), "sm_86"),
        ((8, 9), "sm_89"),
        ((9, 0), "sm_90"),
        ((10, 3), "sm_100"),
        ((12, 1), "sm_120"),
    ],
)
def test_nearest_architecture_runs_on_the_gpu(capability: tuple[int, int], arch: str) -> None:
    assert nearest_architecture(*capability, "a GPU") == arch


@pytest.mark.parametrize("capability", [(6, 1), (7, 0), (11, 0), (13, 0)])
def test_gpus_without_kernels_are_refused(capability: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match=rf"a GPU has compute capability {capability[0]}\.{capability[1]}; supported"):
        nearest_architecture(*capability, "a GPU")


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(name: str) -> Any:
        raise ImportError("No module named 'cupy'")

    cuda = make_driver()._cuda
    monkeypatch.setattr(cupy_module.importlib, "import_module", broken)
    with pytest.raises(ConfigError, match=r"CuPy cannot be imported .*; install lean-engine\[cuda12\]"):
        cupy_module.import_cupy()

    def no_driver() -> int:
        raise CUDARuntimeError("cudaErrorInsufficientDriver")

    cuda.runtime.getDeviceCount = no_driver
    monkeypatch.setattr(cupy_module.importlib, "import_module", lambda name: cuda)
    with pytest.raises(ConfigError, match="no usable CUDA driver: cudaErrorInsufficientDriver"):
        cupy_module.import_cupy()
    cuda.runtime.getDeviceCount = lambda: 0
    with pytest.raises(ConfigError, match="the CUDA driver shows no GPU"):
        cupy_module.import_cupy()


def test_fake_has_exactly_the_names_that_are_used() -> None:
    cuda = make_driver()._cuda
    for name in cupy_driver.CUPY_NAMES:
        reduce(getattr, name.split("."), cuda)
