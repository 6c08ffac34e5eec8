"""The compiled CPU device as a whole: its options, what they store, the same answers for any number of threads."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
from gguf import GGMLQuantizationType as Type
from native_running import MACHINES, cpu_device, library_path
from numpy.typing import NDArray
from test_gguf_model import Original
from test_program import Runner, golden, poison

from lean_engine import LLM, SamplingParams, models, passes
from lean_engine.checkpoint import open_checkpoint
from lean_engine.checkpoint.base import Checkpoint
from lean_engine.checkpoint.gguf_model import GgufCheckpoint
from lean_engine.config import EngineConfig
from lean_engine.engine import cpu_device as cpu_device_module
from lean_engine.engine.cpu_device import make_cpu_device, precision_of
from lean_engine.errors import ConfigError, LaunchError
from lean_engine.runtime.cpu.device import CpuDevice
from lean_engine.runtime.cpu.native.compiler import CompilationError
from lean_engine.runtime.cpu.native.launches import Precision
from lean_engine.runtime.program import Program
from lean_engine.runtime.weights import load_weights, weight_bytes

Array = NDArray[Any]
SEQUENCES = ("a", "b0", "b1", "b2")


def load(device: Any, checkpoint: Checkpoint, dims: dict[str, int] | None = None) -> Program:
    config = models.configure(checkpoint.config)
    lowered = passes.lower(passes.optimize(models.build(config, "float32", tiny.MAX_POSITIONS)))
    sizes = {"T": 80, "B": 4, "R": 80, "M": 12, "N": 49, "S": 4, **(dims or {})}
    program = Program(lowered, device, sizes, load_weights(lowered.parameters, checkpoint, device))
    poison(program)
    return program


def tiny_checkpoint(name: str) -> Checkpoint:
    return open_checkpoint(str(tiny.directory(name)))


def logits(device: Any, checkpoint: Checkpoint, name: str) -> Array:
    """Of the golden sequences in one step, and of a decode step after it."""
    runner = Runner(load(device, checkpoint))
    first = runner.step([(request, golden(name, key)[0]) for request, key in enumerate(SEQUENCES)])
    second = runner.step([(request, [7]) for request in range(4)])
    return np.concatenate([first, second])


def wanted(name: str) -> Array:
    return np.concatenate([golden(name, key)[1] for key in SEQUENCES])


def worst(found: Array, expected: Array) -> float:
    """Largest difference, relative to the largest logit."""
    return float(np.abs(found[: len(expected)] - expected).max() / np.abs(expected).max())


def mean_error(found: Array, expected: Array) -> float:
    """Root mean square of the differences, relative to that of the logits."""
    return float(np.sqrt(np.square(found[: len(expected)] - expected).mean() / np.square(expected).mean()))


@pytest.fixture
def device() -> Iterator[Any]:
    device = cpu_device("native")
    yield device
    device.close()


# ---- the same answers


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("name", ["gemma3", "qwen3-moe", "llama-bias-linear"])
def test_logits_are_those_of_transformers_for_every_kind_of_processor(machine: str, name: str) -> None:
    device = cpu_device(machine)
    assert worst(logits(device, tiny_checkpoint(name), name), wanted(name)) < 2e-4
    device.close()


@pytest.mark.parametrize("precision", [Precision(), Precision("bfloat16", "bfloat16"), Precision("int8")], ids=str)
@pytest.mark.parametrize("name", ["gemma2", "mixtral"])
def test_logits_are_the_same_bit_for_bit_for_any_number_of_threads(name: str, precision: Precision) -> None:
    found = []
    for threads in (1, 2, 3):
        device = cpu_device("native", threads, precision=precision)
        found.append(logits(device, tiny_checkpoint(name), name))
        device.close()
    assert np.array_equal(found[0], found[1])
    assert np.array_equal(found[0], found[2])


def test_a_replay_gives_the_same_bits_again(device: Any) -> None:
    program = load(device, tiny_checkpoint("qwen3"))
    runner = Runner(program)
    runner.step([(r, golden("qwen3", key)[0]) for r, key in enumerate(SEQUENCES)], rows=[])
    runner.step([(r, [5 + r]) for r in range(4)])
    first = program.run(4, 4, 4)["logits"].copy()
    for _ in range(20):
        assert np.array_equal(program.run(4, 4, 4)["logits"], first)


# ---- types of weights and caches


@pytest.mark.parametrize(
    ("precision", "bound"),
    [
        (Precision("float32"), 1e-4),
        (Precision("bfloat16"), 0.03),
        (Precision("bfloat16", "bfloat16"), 0.04),
        (Precision("float16"), 2e-3),
        (Precision("int8"), 0.1),
        (Precision("int8", "bfloat16"), 0.1),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["llama-gqa-tied", "gemma3"])
def test_reduced_precision_stays_near_the_logits_of_transformers(name: str, precision: Precision, bound: float) -> None:
    """Random weights amplify what is rounded, trained ones do not; a wrong scale or order would give errors near 1."""
    device = cpu_device("native", precision=precision)
    assert mean_error(logits(device, tiny_checkpoint(name), name), wanted(name)) < bound
    device.close()


@pytest.mark.parametrize(("kv_cache_dtype", "bound"), [("bfloat16", 0.02), ("float16", 3e-3)])
def test_cache_of_sixteen_bits_is_kept_in_them_and_near(kv_cache_dtype: str, bound: float) -> None:
    device = cpu_device("native", kv_cache_dtype=kv_cache_dtype)
    program = load(device, tiny_checkpoint("gemma3"))
    assert {cache.dtype.name for cache in program.caches.values()} == {kv_cache_dtype}
    found = logits(device, tiny_checkpoint("gemma3"), "gemma3")
    assert 1e-5 < mean_error(found, wanted("gemma3")) < bound
    device.close()


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.F16, Type.BF16], ids=lambda k: k.name)
@pytest.mark.parametrize("family", ["llama-gqa-tied", "mixtral"])
def test_gguf_stays_packed_and_gives_what_its_float32_values_give(family: str, kind: Type, tmp_path: Path) -> None:
    """The Q and K rows that llama.cpp has permuted among them."""
    path = Original(family).write(tmp_path / "model.gguf", kind)
    exact, packed = CpuDevice(2), cpu_device("native")
    expected = logits(exact, GgufCheckpoint(path), family)
    assert worst(logits(packed, GgufCheckpoint(path), family), expected) < 1e-4
    parameters = passes.lower(tiny.optimized(family)).parameters
    sizes = [weight_bytes(parameters, GgufCheckpoint(path), device) for device in (exact, packed)]
    assert sizes[1] < sizes[0] * {Type.Q8_0: 0.45, Type.Q4_0: 0.32, Type.Q4_1: 0.34}.get(kind, 0.65)
    for device in (exact, packed):
        device.close()


def test_bytes_foretold_are_those_taken(device: Any) -> None:
    for name in ("phi3", "qwen3-moe"):
        parameters = passes.lower(tiny.optimized(name)).parameters
        checkpoint = tiny_checkpoint(name)
        sizes: list[int] = []
        load_weights([p for p in parameters if "rope" not in p.value.name], checkpoint, device, sizes.append)
        assert weight_bytes(parameters, checkpoint, device) == sum(sizes)


def test_a_matrix_where_an_array_is_wanted_is_refused(device: Any) -> None:
    lowered = passes.lower(tiny.optimized("qwen2"))
    weights = load_weights(lowered.parameters, tiny_checkpoint("qwen2"), device)
    matrix = next(weight for weight in weights.values() if hasattr(weight, "format"))
    dims = {"T": 4, "B": 1, "R": 4, "M": 2, "N": 3, "S": 4}
    with pytest.raises(LaunchError, match=r"weight is a matrix in \w+, must be an array"):
        Program(lowered, device, dims, {**weights, "model.norm.weight": matrix})
    with pytest.raises(LaunchError, match=r"in \w+, must be a plain array"):
        Program(lowered, CpuDevice(1), dims, weights)


# ---- options


@pytest.mark.parametrize(
    ("options", "precision"),
    [
        ({}, Precision("stored", "float32")),
        ({"dtype": "float32"}, Precision("float32", "float32")),
        ({"dtype": "bfloat16"}, Precision("bfloat16", "bfloat16")),
        ({"dtype": "float16"}, Precision("float16", "float32")),
        ({"quantization": "int8"}, Precision("int8", "float32")),
        ({"quantization": "int8", "dtype": "float32"}, Precision("int8", "float32")),
        ({"quantization": "int8", "dtype": "bfloat16"}, Precision("int8", "bfloat16")),
        ({"batch_invariant": True}, Precision("stored", "float32", is_batch_invariant=True)),
    ],
    ids=str,
)
def test_options_decide_what_weights_are_kept_in(options: dict[str, Any], precision: Precision) -> None:
    assert precision_of(EngineConfig(**options)) == precision


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"dtype": "bfloat16"},
            r"dtype is 'bfloat16'; the NumPy kernels compute in float32 \(cpu_kernels is 'numpy'\)",
        ),
        ({"kv_cache_dtype": "float16"}, "kv_cache_dtype is 'float16'; the NumPy kernels compute in float32"),
        ({"quantization": "int8"}, "quantization is 'int8', which the NumPy kernels have not"),
        ({"batch_invariant": True}, "batch_invariant is set, which the NumPy kernels cannot promise"),
    ],
)
def test_numpy_refuses_what_it_cannot_honour(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_cpu_device(EngineConfig(cpu_kernels="numpy", **options))


@pytest.mark.parametrize("error", [ConfigError("no C compiler is installed"), CompilationError("rows.c:3: bad: x")])
def test_without_compiled_kernels_auto_says_so_once_and_takes_numpy(
    error: ConfigError, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(progress: bool) -> Path:
        raise error

    monkeypatch.setattr(cpu_device_module, "compiled_kernels", refuse)
    with caplog.at_level(logging.WARNING, "lean_engine"):
        device = make_cpu_device(EngineConfig(threads=1))
    assert isinstance(device, CpuDevice)
    device.close()
    assert caplog.messages == [f"the CPU computes with NumPy, several times slower: {error}"]
    with pytest.raises(ConfigError, match=f"cpu_kernels is 'compiled', but {error}"):
        make_cpu_device(EngineConfig(cpu_kernels="compiled"))
    with pytest.raises(ConfigError, match=rf"quantization is 'int8', which the NumPy kernels have not \({error}\)"):
        make_cpu_device(EngineConfig(quantization="int8"))


def test_auto_takes_the_compiled_kernels() -> None:
    library_path()  # skips where there is no compiler
    device = make_cpu_device(EngineConfig(threads=1))
    assert not isinstance(device, CpuDevice)
    device.close()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "float32"),
        ({"dtype": "float16"}, "float32"),
        ({"quantization": "int8"}, "float16"),
        ({"quantization": "int8", "kv_cache_dtype": "float32"}, "float32"),
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"dtype": "bfloat16", "quantization": "int8"}, "bfloat16"),
        ({"dtype": "bfloat16", "kv_cache_dtype": "float32"}, "float32"),
    ],
)
def test_keys_and_values_are_kept_as_they_are_computed(options: dict[str, str], expected: str) -> None:
    library_path()
    device = make_cpu_device(EngineConfig(threads=1, **options))  # type: ignore[arg-type]
    assert device.kv_cache_dtype == expected
    device.close()


@pytest.mark.parametrize(
    ("options", "file_type", "expected"),
    [
        ({}, Type.Q8_0, "float16"),
        ({}, Type.Q5_0, "float16"),
        ({}, Type.F32, "float32"),
        ({"dtype": "float32"}, Type.Q8_0, "float32"),
        ({"dtype": "bfloat16"}, Type.Q8_0, "bfloat16"),
    ],
)
def test_keys_and_values_beside_a_file_s_quantised_weights(
    tmp_path: Path, options: dict[str, str], file_type: Type, expected: str
) -> None:
    library_path()
    checkpoint = GgufCheckpoint(Original("llama-gqa-tied").write(tmp_path / "model.gguf", file_type))
    device = make_cpu_device(EngineConfig(threads=1, **options), checkpoint)  # type: ignore[arg-type]
    assert device.kv_cache_dtype == expected
    device.close()


def test_half_the_bytes_per_key_are_twice_the_blocks() -> None:
    library_path()
    sizes = {}
    for kv_cache_dtype in ("auto", "bfloat16"):
        options = {"kv_cache_memory_bytes": 100_000, "kv_cache_dtype": kv_cache_dtype, "max_num_seqs": 4}
        with LLM(tiny.directory("qwen3"), device="cpu", threads=1, cpu_kernels="compiled", **options) as llm:
            sizes[kv_cache_dtype] = llm._started.pool_size.num_usable_blocks
            output = llm.generate({"prompt_token_ids": [1, 2, 3]}, SamplingParams(temperature=0, max_tokens=3))
            assert len(output[0].outputs[0].token_ids) == 3
    assert sizes["bfloat16"] >= 2 * sizes["auto"]
