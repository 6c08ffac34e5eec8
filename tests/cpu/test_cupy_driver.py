"""The driver over CuPy: a whole engine through a fake of it, and the fake's names against an installed CuPy."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import tempfile
from collections.abc import Iterable
from functools import reduce
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_cupy
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


def test_names_are_those_of_an_installed_cupy() -> None:
    cuda = pytest.importorskip("cupy.cuda")
    for name in cupy_driver.CUPY_NAMES:
        reduce(getattr, name.split("."), cuda)


CALLS: dict[str, tuple[int, tuple[str, ...]]] = {  # what the driver calls → positional arguments, and named ones
    "Device": (0, ()),
    "Event": (0, ("disable_timing",)),
    "Event.record": (1, ()),
    "Event.synchronize": (0, ()),
    "Graph.launch": (1, ()),
    "Graph.upload": (1, ()),
    "Module": (0, ()),
    "Module.load": (1, ()),
    "Module.get_function": (1, ()),
    "Stream": (0, ("non_blocking",)),
    "Stream.begin_capture": (1, ()),
    "Stream.end_capture": (0, ()),
    "Stream.synchronize": (0, ()),
    "alloc": (1, ()),
    "alloc_pinned_memory": (1, ()),
    "driver.funcSetAttribute": (3, ()),
    "runtime.getDeviceCount": (0, ()),
    "runtime.getDeviceProperties": (1, ()),
    "runtime.memGetInfo": (0, ()),
    "runtime.memcpyAsync": (5, ()),
    "runtime.memcpy2DAsync": (8, ()),
}
CLASSES = ("Event", "Graph", "Module", "Stream", "Device")


def signature_of(function: Any, is_method: bool) -> inspect.Signature | None:
    """As Python knows it, or as Cython writes it into a docstring; None where neither tells."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        pass
    match = re.match(r"[\w.]+\((.*?)\)", (function.__doc__ or "").strip())
    if match is None:
        return None
    names = [part.strip() for part in match[1].split(",") if part.strip()]
    has_self = bool(names) and names[0].split()[-1] == "self"
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [
        inspect.Parameter(
            name.split("=")[0].split()[-1], kind, default=None if "=" in name else inspect.Parameter.empty
        )
        for name in ([] if has_self or not is_method else ["self"]) + names
    ]
    return inspect.Signature(parameters)


def check_calls(cuda: Any, names: Iterable[str]) -> list[str]:
    """Bind these calls of CALLS; the names whose signatures could be found."""
    checked = []
    for name in names:
        num_positional, named = CALLS[name]
        owner, _, _ = name.partition(".")
        is_method = owner in CLASSES and "." in name
        found = signature_of(reduce(getattr, name.split("."), cuda), is_method)
        if found is not None:
            has_self = is_method and next(iter(found.parameters), "") == "self"
            found.bind(*[None] * (num_positional + has_self), **dict.fromkeys(named))
            checked.append(name)
    return checked


def test_calls_fit_the_signatures_of_an_installed_cupy() -> None:
    cuda = pytest.importorskip("cupy.cuda", reason="CuPy is not installed, so its signatures cannot be seen")
    cuda = SimpleNamespace(**{**vars(cuda), "Graph": importlib.import_module("cupy.cuda.graph").Graph})
    checked = check_calls(cuda, CALLS)
    assert {"runtime.memcpyAsync", "runtime.memcpy2DAsync"} <= set(checked), "CuPy tells no signatures any more"


def test_calls_fit_the_signatures_of_the_fake() -> None:
    cuda = make_driver()._cuda
    methods = [name for name in CALLS if "." in name and name.split(".")[0] in CLASSES]
    others = [name for name in CALLS if name not in methods]
    assert [*check_calls(fake_cupy, methods), *check_calls(cuda, others)] == [*methods, *others]


def test_signatures_are_read_from_docstrings_where_python_has_none() -> None:
    class Compiled:
        __doc__ = "memcpyAsync(intptr_t dst, intptr_t src, size_t size, int kind, intptr_t stream=0)"
        __call__ = None

    found = signature_of(Compiled(), is_method=False)
    assert found is not None
    assert list(found.parameters) == ["dst", "src", "size", "kind", "stream"]
    found.bind(1, 2, 3, 4)
    with pytest.raises(TypeError):
        found.bind(1, 2, 3)


def test_fake_has_exactly_the_names_that_are_used() -> None:
    cuda = make_driver()._cuda
    for name in cupy_driver.CUPY_NAMES:
        reduce(getattr, name.split("."), cuda)
