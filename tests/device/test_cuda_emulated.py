"""The CUDA device's own launch code, padding and graph capture with its kernels run on the host, beside the CPU device.

Weights are rounded to the device's type first and read by both, so what differs is arithmetic in 16 bits. A greedy
answer may then leave the CPU's only where the CPU itself was undecided between two tokens. One file, though long: its
tests share that comparison.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import TINY, LoadLLM
from safetensors.numpy import load_file, save_file

from lean_engine import LLM, EngineConfig, RequestOutput, SamplingParams, models
from lean_engine.checkpoint import open_checkpoint
from lean_engine.dtypes import numpy_dtype
from lean_engine.engine import cuda_device, start
from lean_engine.engine.runner import LaunchedStep
from lean_engine.engine.start import compile_model
from lean_engine.errors import ConfigError, LaunchError, OutOfMemory
from lean_engine.runtime.cpu.device import CpuDevice
from lean_engine.runtime.cuda import cupy_module, moe_kernels
from lean_engine.runtime.cuda.device import GRAPH_SIZES, CudaDevice
from lean_engine.runtime.cuda.emulated_driver import NUMPY, EmulatedDriver
from lean_engine.runtime.cuda.gemm_kernels import Gemm
from lean_engine.runtime.cuda.gemm_timing import measuring_bytes
from lean_engine.runtime.cuda.instances import KernelCall
from lean_engine.runtime.cuda.sampling import SamplingSizes
from lean_engine.runtime.device import LaunchArgs
from lean_engine.runtime.weights import expected_shapes
from lean_engine.scheduling.plan import StepPlan

SIZES = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
FAMILIES = sorted(p.name for p in TINY.iterdir())
TOLERANCE = {"bfloat16": 0.12, "float16": 0.02}  # of log-probabilities
PROMPTS = [[(i * 7 + j * 3) % 500 + 5 for j in range(length)] for i, length in enumerate((5, 33, 18, 1))]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2)

MakeModel = Callable[[str, str], Path]


@pytest.fixture
def device_options() -> dict[str, Any]:
    """Of the CPU device beside it."""
    return {"threads": 2, "cpu_kernels": "numpy"}


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> MakeModel:
    """A family's tiny model with sizes that the CUDA kernels have, its random weights rounded to a type."""
    made: dict[tuple[str, str], Path] = {}

    def make(family: str, dtype: str) -> Path:
        if (family, dtype) not in made:
            made[family, dtype] = directory = tmp_path_factory.mktemp(f"{family}-{dtype}")
            config = json.loads((TINY / family / "config.json").read_text()) | SIZES | {"dtype": dtype}
            (directory / "config.json").write_text(json.dumps(config))
            checkpoint = open_checkpoint(str(directory), load_format="dummy")
            lowered = compile_model(models.configure(checkpoint.config), CpuDevice(1), 64)
            checkpoint.expect(expected_shapes(lowered.parameters))
            tensors = {name: checkpoint.tensor(name).astype(numpy_dtype(dtype)) for name in checkpoint.names()}
            save_file(tensors, directory / "model.safetensors")
            (directory / "tokenizer.json").write_bytes((TINY / family / "tokenizer.json").read_bytes())
        return made[family, dtype]

    return make


@pytest.fixture
def load_emulated(load_llm: LoadLLM) -> LoadLLM:
    """LLMs on the emulated GPU; skipped where it cannot be had."""

    def load(model: Path, **options: Any) -> LLM:
        try:
            return load_llm(model, **{"device": "cuda-emulated", "cpu_kernels": "auto", **options})
        except ConfigError as error:
            if "emulat" in str(error) or "g++" in str(error):
                pytest.skip(str(error))
            raise

    return load


def prompts(ids: list[list[int]]) -> list[dict[str, Any]]:
    return [{"prompt_token_ids": i} for i in ids]


def assert_close(found: list[RequestOutput], wanted: list[RequestOutput], tolerance: float) -> None:
    """Ids equal, and their log-probabilities close, up to where `wanted` was undecided."""
    for one, other in zip(found, wanted, strict=True):
        for mine, theirs in zip(one.outputs, other.outputs, strict=True):
            assert len(mine.token_ids) == len(theirs.token_ids)
            for step, token in enumerate(theirs.token_ids):
                likeliest = sorted((entry.logprob for entry in theirs.logprobs[step].values()), reverse=True)
                if mine.token_ids[step] != token:
                    assert likeliest[0] - likeliest[1] < 2 * tolerance, f"token {step} differs, and no tie explains it"
                    break
                assert abs(mine.logprobs[step][token].logprob - theirs.logprobs[step][token].logprob) < tolerance


CASES = [(family, dtype) for family in FAMILIES for dtype in ("bfloat16", "float16")]
CASES.remove(("mixtral", "bfloat16"))  # its router is undecided between two experts by less than bfloat16's rounding


@pytest.mark.parametrize(("family", "dtype"), CASES)
def test_every_family_gives_the_cpu_device_s_answers(
    load_llm: LoadLLM, load_emulated: LoadLLM, make_model: MakeModel, family: str, dtype: str
) -> None:
    model = make_model(family, dtype)
    wanted = load_llm(model).generate(prompts(PROMPTS), GREEDY)
    found = load_emulated(model).generate(prompts(PROMPTS), GREEDY)
    scale = 3 if family.startswith("gemma") else 1  # norm weights of 1 count as 2 there, and logits are larger
    assert_close(found, wanted, scale * TOLERANCE[dtype])


@pytest.mark.parametrize("family", ["llama3-rope", "gemma2"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.05), ("float16", 0.006)])
def test_logits_of_whole_prompts_are_the_cpu_device_s(
    load_llm: LoadLLM, load_emulated: LoadLLM, make_model: MakeModel, family: str, dtype: str, tolerance: float
) -> None:
    """float16 has three bits more than bfloat16: were the difference not rounding, it would not be 8 times smaller."""
    model, params = make_model(family, dtype), SamplingParams(max_tokens=0, prompt_logprobs=-1)
    pair = []
    for load in (load_llm, load_emulated):
        (output,) = load(model, max_logprobs=-1).generate(prompts(PROMPTS[1:2]), params)
        entries = [entry for entry in output.prompt_logprobs or [] if entry is not None]
        pair.append(np.array([[entry[token].logprob for token in range(512)] for entry in entries]))
    assert pair[0].shape == (32, 512)
    assert ((pair[0] - pair[1]) ** 2).mean() ** 0.5 < tolerance * pair[0].std()


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 16, "max_num_seqs": 4},
        {"block_size": 32, "max_num_seqs": 2},
        {"enable_prefix_caching": False},
    ],
    ids=["chunks", "blocks of 32", "no cache"],
)
def test_engine_runs_do_not_depend_on_how_the_work_is_cut(
    load_llm: LoadLLM, load_emulated: LoadLLM, make_model: MakeModel, options: dict[str, Any]
) -> None:
    model = make_model("llama-gqa-tied", "float16")
    shared = PROMPTS[1]
    ids = [[*shared, 9], [*shared, 10, 11], *PROMPTS, shared[:32]]
    params = [
        GREEDY,
        SamplingParams(temperature=0.8, seed=3, max_tokens=6, ignore_eos=True, logprobs=2),
        SamplingParams(temperature=0, max_tokens=6, repetition_penalty=1.3, ignore_eos=True, logprobs=2),
        *[GREEDY] * 4,
    ]
    wanted = load_llm(model, enable_prefix_caching=False).generate(prompts(ids), params)
    llm = load_emulated(model, **options)
    for _ in range(2):  # cold, then warm
        assert_close(llm.generate(prompts(ids), params), wanted, TOLERANCE["float16"])
    assert (llm.stats().num_hit_tokens > 0) == options.get("enable_prefix_caching", True)


def test_preempted_answers_go_on_as_if_nothing_had_happened(
    load_llm: LoadLLM, load_emulated: LoadLLM, make_model: MakeModel
) -> None:
    model = make_model("llama-gqa-tied", "float16")
    params = SamplingParams(temperature=0.7, seed=5, max_tokens=36, ignore_eos=True, logprobs=2)
    ids = [PROMPTS[0], PROMPTS[2], PROMPTS[3]]
    wanted = load_llm(model).generate(prompts(ids), params)
    llm = load_emulated(model, num_gpu_blocks_override=6, max_model_len=64, max_num_seqs=4)
    assert_close(llm.generate(prompts(ids), params), wanted, TOLERANCE["float16"])
    assert llm.engine.scheduler.stats.num_preemptions > 0


def test_padded_rows_write_nothing_and_nothing_unwritten_is_read(load_emulated: LoadLLM, make_model: MakeModel) -> None:
    """Three requests in a graph for four, over a cache that holds NaN wherever no token was written."""
    llm = load_emulated(make_model("qwen3", "bfloat16"), max_num_seqs=8, num_gpu_blocks_override=12, max_model_len=64)
    outputs = llm.generate(prompts(PROMPTS[:3]), GREEDY)
    assert all(
        np.isfinite(entry[t].logprob)
        for o in outputs
        for a in o.outputs
        for t, entry in zip(a.token_ids, a.logprobs, strict=True)
    )
    num_written = sum(len(o.prompt_token_ids) + len(o.outputs[0].token_ids) - 1 for o in outputs)
    for cache in llm.engine.runner.program.caches.values():
        values = cache.astype(np.float32)
        assert np.isnan(values[0]).all(), "the null block"
        slots = ~np.isnan(values).all(axis=(1, 3))  # [N, S]
        assert slots.sum() == num_written
        assert np.isfinite(values.transpose(0, 2, 1, 3)[slots]).all()


def test_steps_of_many_sizes_share_a_few_graphs(load_emulated: LoadLLM, make_model: MakeModel) -> None:
    llm = load_emulated(make_model("llama-gqa-tied", "float16"), max_num_seqs=8)
    rng = np.random.default_rng(0)
    ids = [rng.integers(5, 500, int(n)).tolist() for n in rng.integers(1, 40, 10)]
    params = [SamplingParams(temperature=0, max_tokens=int(n), ignore_eos=True) for n in rng.integers(2, 12, 10)]
    llm.generate(prompts(ids), params)
    sizes = list(llm.engine.runner.program._captures)
    assert llm.engine.num_steps > 2 * len(sizes)
    assert {size[0] for size in sizes} <= set(GRAPH_SIZES)


def test_padded_rows_are_routed_to_no_expert(
    load_emulated: LoadLLM, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    routed: list[tuple[Any, Any]] = []  # slots and ids of each launch of a captured step
    call = moe_kernels.moe_route_call

    def listening(launch: LaunchArgs, slots: Any = None) -> KernelCall:
        routed.append((slots, launch.outputs[1]))
        return call(launch, slots)

    monkeypatch.setattr(moe_kernels, "moe_route_call", listening)
    llm = load_emulated(make_model("mixtral", "float16"), max_num_seqs=4)
    llm.generate(prompts(PROMPTS[:3]), SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    slots, ids = routed[-1]
    assert (slots >= 0).tolist() == [True, True, True, False]
    assert (ids >= 0).all(axis=1).tolist() == [True, True, True, False]


# -- the device


@pytest.fixture
def device() -> CudaDevice:
    try:
        return CudaDevice(EmulatedDriver(), "bfloat16")
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(
    ("size", "padded"),
    [
        ((1, 1, 1), (1, 1, 1)),
        ((3, 3, 3), (4, 4, 4)),
        ((9, 9, 9), (16, 16, 16)),
        ((100, 100, 100), (100, 100, 64)),
        ((5, 3, 3), (8, 100, 4)),
        ((130, 1, 0), (136, 100, 1)),
        ((300, 2, 2), (300, 100, 2)),
    ],
)
def test_sizes_are_padded_within_the_limits(
    device: CudaDevice, size: tuple[int, int, int], padded: tuple[int, int, int]
) -> None:
    assert device.padded(*size, {"T": 300, "B": 100, "R": 64}) == padded


def test_capture_refuses_what_cuda_refuses(device: CudaDevice) -> None:
    driver = device.driver
    array, host = driver.allocate((4,), "float32"), driver.allocate_host((4,), "float32")
    assert np.isnan(array).all()
    refused: list[tuple[str, Callable[[], object]]] = [
        ("memory is allocated", lambda: driver.allocate((1,), "int32")),
        ("host memory is page-locked", lambda: driver.allocate_host((1,), "int32")),
        ("memory is copied", lambda: driver.upload(host, array)),
        ("memory is copied", lambda: driver.download(array, host)),
        ("the host waits", driver.synchronize),
        ("another capture begins", lambda: driver.capture(lambda: None)),
    ]
    for message, forbidden in refused:
        with pytest.raises(LaunchError, match=f"{message} while a graph is captured"):
            driver.capture(forbidden)  # type: ignore[arg-type]
    driver.upload(host, array)
    assert (array == 0).all(), "a failed capture leaves the stream usable"


def test_graph_replays_at_the_addresses_it_has_recorded(device: CudaDevice) -> None:
    driver = device.driver
    x, weight, out = (driver.allocate(shape, "bfloat16") for shape in ((2, 4), (3, 4), (2, 3)))
    weight[...] = 1
    replay = driver.capture(lambda: driver.multiply(Gemm(out, x, weight), NUMPY))
    assert np.isnan(out.astype(np.float32)).all(), "nothing runs while it is captured"
    for value in (1, 2):
        x[...] = value
        replay()
        assert (out == 4 * value).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_size": 8}, "block_size is 8; on a CUDA device it must be 16 or 32"),
        ({"dtype": "float32"}, "dtype is 'float32'; a CUDA device computes in one of: float16, bfloat16"),
        ({"batch_invariant": True}, "batch_invariant is set, which a CUDA device cannot promise"),
    ],
)
def test_what_a_cuda_device_lacks_is_refused_by_name(
    load_emulated: LoadLLM, make_model: MakeModel, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_emulated(make_model("qwen3", "bfloat16"), **options)


def test_head_dims_without_kernels_are_refused(load_emulated: LoadLLM) -> None:
    with pytest.raises(ConfigError, match="head_dim is 24; a CUDA device has kernels for 64, 80, 96, 128, 256"):
        load_emulated(TINY / "gemma3")


def test_without_a_gpu_auto_takes_the_cpu_and_says_why(
    load_llm: LoadLLM, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_gpu() -> None:
        raise ConfigError("no usable CUDA driver: cudaErrorNoDevice")

    monkeypatch.setattr(cupy_module, "import_cupy", no_gpu)
    with caplog.at_level(logging.INFO, "lean_engine"):
        llm = load_llm("gemma3", device="auto")
    assert llm.engine.runner.program.device.name == "cpu"
    assert "the model runs on the CPU: no usable CUDA driver: cudaErrorNoDevice" in caplog.messages
    with pytest.raises(ConfigError, match="no usable CUDA driver: cudaErrorNoDevice"):
        load_llm("gemma3", device="cuda")


def test_sixteen_bits_on_the_cpu_are_refused(load_llm: LoadLLM) -> None:
    with pytest.raises(ConfigError, match="dtype is 'bfloat16'; the NumPy kernels compute in float32"):
        load_llm("gemma3", device="cpu", dtype="bfloat16")


# -- tokens chosen on the device, and a step ahead of the host


MIXED = [
    GREEDY,
    SamplingParams(temperature=0.8, seed=3, max_tokens=8, stop_token_ids=list(range(100, 300)), logprobs=1),
    SamplingParams(temperature=1.0, seed=4, top_k=20, top_p=0.9, max_tokens=3, ignore_eos=True),
    SamplingParams(temperature=0.9, seed=5, min_p=0.02, repetition_penalty=1.4, max_tokens=6, ignore_eos=True),
    SamplingParams(temperature=1.2, seed=6, logit_bias={9: 5.0}, bad_words=["the"], max_tokens=7, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=7, n=2, stop=["e", "an"], max_tokens=8, ignore_eos=True),
]


def answers(outputs: list[RequestOutput]) -> list[tuple[Any, ...]]:
    return [
        (a.token_ids, a.text, a.finish_reason, a.stop_reason, a.logprobs, o.prompt_logprobs)
        for o in outputs
        for a in o.outputs
    ]


def assert_same(found: list[tuple[Any, ...]], wanted: list[tuple[Any, ...]], tolerance: float) -> None:
    """Tokens, text and ends equal, and the chosen tokens' log-probabilities close."""
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine[:4] == theirs[:4]
        for token, one, other in zip(mine[0], mine[4] or [], theirs[4] or [], strict=False):
            assert one[token].logprob == pytest.approx(other[token].logprob, abs=tolerance)


def test_one_step_ahead_gives_the_same_answers_over_a_driver_that_is_never_early(
    load_emulated: LoadLLM, make_model: MakeModel
) -> None:
    """The emulated driver runs nothing before it is waited for: what the host overwrites too early comes out wrong."""
    model, found, num_steps = make_model("qwen3", "float16"), [], []
    for is_ahead in (False, True):
        llm = load_emulated(model, async_scheduling=is_ahead, num_gpu_blocks_override=6, max_model_len=64)
        assert llm.engine.runs_ahead is is_ahead
        ids = [*PROMPTS, PROMPTS[1], PROMPTS[1][:20]]
        found.append([answers(llm.generate(prompts(ids), MIXED))])
        found[-1].append(answers(llm.generate(prompts(ids[1:2]), MIXED[1])))  # all rows of a step are too many
        growing = SamplingParams(temperature=0, max_tokens=36, ignore_eos=True)
        found[-1].append(answers(llm.generate(prompts([PROMPTS[0], PROMPTS[2], PROMPTS[3]]), growing)))
        assert llm.engine.scheduler.stats.num_preemptions > 0
        assert llm.engine.runner.chooser.num_host_rows == 0
        num_steps.append(llm.engine.num_steps)
    for one, other in zip(*found, strict=True):
        assert_same(one, other, 0.01)  # batches differ, and with them which kernels multiply
    assert num_steps[1] > num_steps[0]


def test_the_device_chooses_what_the_host_chooses(
    load_emulated: LoadLLM, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, found = make_model("llama-gqa-tied", "bfloat16"), []
    for limit in (4096, 0):  # words of a slot's lists: with none, the host samples every request that could stop
        monkeypatch.setattr(cuda_device, "LIST_WORDS", limit)
        llm = load_emulated(model)
        found.append(answers(llm.generate(prompts([*PROMPTS, PROMPTS[1], PROMPTS[1][:20]]), MIXED)))
        assert (llm.engine.runner.chooser.num_host_rows > 0) == (limit == 0)
    assert_same(*found, 1e-5)


def test_requests_beyond_the_device_s_limits_are_sampled_by_the_host_beside_the_others(
    load_llm: LoadLLM, load_emulated: LoadLLM, make_model: MakeModel
) -> None:
    model = make_model("llama-gqa-tied", "float16")
    params = [
        SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=25),
        SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, prompt_logprobs=2, logprobs=2),
        GREEDY,
    ]
    wanted = load_llm(model, max_logprobs=-1).generate(prompts(PROMPTS[:3]), params)
    llm = load_emulated(model, max_logprobs=-1)
    found = llm.generate(prompts(PROMPTS[:3]), params)
    assert_close(found, wanted, TOLERANCE["float16"])
    assert [len(entry) for entry in found[0].outputs[0].logprobs or []] == [25] * 5
    assert len(found[1].prompt_logprobs or []) == len(PROMPTS[1])
    assert llm.engine.runner.chooser.num_host_rows == 5


def test_log_probabilities_of_a_prompt_keep_only_its_own_chunks_from_being_passed(
    load_emulated: LoadLLM, make_model: MakeModel
) -> None:
    engine = load_emulated(make_model("llama-gqa-tied", "float16"), max_num_batched_tokens=16, max_num_seqs=4).engine
    engine.add("free", PROMPTS[0], replace(GREEDY, max_tokens=20))
    engine.step()
    engine.step()
    assert len(engine._in_flight) == 1
    group = engine.add("scored", PROMPTS[1], replace(GREEDY, prompt_logprobs=1))
    num_waiting = 0
    while not group.answers[0].token_ids:
        engine.step()
        num_waiting += not engine._in_flight
    assert num_waiting == 3, "chunks of 15, 15 and 3 tokens"
    engine.step()
    assert len(engine._in_flight) == 1


def test_damaged_logits_end_their_request_alone(load_emulated: LoadLLM, make_model: MakeModel, tmp_path: Path) -> None:
    source = make_model("llama-gqa-tied", "float16")
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    tensors = load_file(source / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    tensors["lm_head.weight"] = embedding.copy()
    embedding[7] = np.nan
    save_file(tensors, tmp_path / "model.safetensors")
    llm = load_emulated(tmp_path)
    bad, good = llm.generate(prompts([[5, 7, 9], [5, 8, 9]]), GREEDY)
    assert (bad.outputs[0].finish_reason, bad.outputs[0].token_ids) == ("error", [])
    assert "NaN" in (bad.outputs[0].error or "")
    assert (good.outputs[0].finish_reason, len(good.outputs[0].token_ids)) == ("length", 6)


def test_graphs_of_given_sizes_are_captured_at_start(load_emulated: LoadLLM, make_model: MakeModel) -> None:
    llm = load_emulated(make_model("llama-gqa-tied", "float16"), cudagraph_capture_sizes=[1, 3], max_num_seqs=4)
    program = llm.engine.runner.program
    assert list(program._captures) == [(1, 1, 1), (4, 4, 4)]
    assert {key[0] for key in llm.engine.runner.chooser._graphs} == {1, 4}
    found = llm.generate(prompts(PROMPTS[:3]), GREEDY)
    assert all(len(output.outputs[0].token_ids) == 6 for output in found)
    with pytest.raises(ConfigError, match=r"cudagraph_capture_sizes has 5, more than max_num_seqs \(4\)"):
        load_emulated(make_model("llama-gqa-tied", "float16"), cudagraph_capture_sizes=[5], max_num_seqs=4)


def test_eager_steps_capture_nothing_and_give_the_same(
    load_emulated: LoadLLM, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_model("llama-gqa-tied", "float16")
    wanted = answers(load_emulated(model).generate(prompts(PROMPTS), GREEDY))
    monkeypatch.setattr(EmulatedDriver, "capture", lambda *_: pytest.fail("captured"))
    assert answers(load_emulated(model, enforce_eager=True).generate(prompts(PROMPTS), GREEDY)) == wanted


@pytest.mark.parametrize(
    "options", [{"enforce_eager": True}, {"cudagraph_capture_sizes": [1]}, {"async_scheduling": True}], ids=str
)
def test_options_of_graphs_are_refused_on_the_cpu(load_llm: LoadLLM, options: dict[str, Any]) -> None:
    with pytest.raises(
        ConfigError, match=f"{next(iter(options))} is .*, which only a CUDA device has; this is the CPU"
    ):
        load_llm("gemma3", **options)


def test_what_the_device_takes_for_itself_is_counted_before_the_pool(
    load_emulated: LoadLLM, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    total = 64 << 20
    monkeypatch.setattr(EmulatedDriver, "memory_bytes", lambda self: (total, total))
    model, options = make_model("llama-gqa-tied", "float16"), {"max_model_len": 64, "max_num_seqs": 4}
    with pytest.raises(
        OutOfMemory, match=r"weights and workspace need .*; gpu_memory_utilization 0\.25 allows 16\.00 MiB"
    ):
        load_emulated(model, gpu_memory_utilization=0.25, **options)
    with pytest.raises(OutOfMemory, match=r"100001 KV blocks need .* of memory are free beside the weights"):
        load_emulated(model, num_gpu_blocks_override=100_000, **options)
    monkeypatch.setattr(start, "own_bytes", lambda *_: 0)
    load_emulated(model, gpu_memory_utilization=0.25, **options)


def test_what_sampling_graphs_and_measuring_take_is_all_in_the_count(make_model: MakeModel, device: CudaDevice) -> None:
    checkpoint = open_checkpoint(str(make_model("gemma3", "bfloat16")))
    config = EngineConfig(max_num_seqs=8)
    lowered = compile_model(models.configure(checkpoint.config), device, 64)
    sizes = SamplingSizes(512, 8, 64)
    own = cuda_device.own_bytes(device, lowered, config, 512, 64)
    eager = cuda_device.own_bytes(device, lowered, replace(config, enforce_eager=True), 512, 64)
    head = measuring_bytes(512, 256, 512)
    assert device.measuring_bytes(lowered, {"T": 512, "R": 64}) >= head
    assert own > eager > sizes.num_bytes() + head


def count_late_choices(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of every step whose tokens are chosen: whether its program was launched with another step in flight, and its
    choice when that one had been read.
    """
    engine, chooser, late = llm.engine, llm.engine.runner.chooser, []
    launch, choose = engine.runner.launch, chooser.launch_choice
    is_launching = False

    def launching(plan: StepPlan, is_ahead: bool) -> LaunchedStep:
        nonlocal is_launching
        is_launching = True
        try:
            return launch(plan, is_ahead=is_ahead)
        finally:
            is_launching = False

    def choosing(tokens: Any) -> Any:
        late.append(not is_launching)
        return choose(tokens)

    monkeypatch.setattr(engine.runner, "launch", launching)
    monkeypatch.setattr(chooser, "launch_choice", choosing)
    return late


def test_a_failed_launch_leaves_no_copy_behind_of_memory_that_is_written_again(
    load_emulated: LoadLLM, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = load_emulated(make_model("llama-gqa-tied", "float16"))
    program = llm.engine.runner.program

    def fail(*sizes: int) -> None:
        raise LaunchError("no memory for a graph")

    llm.engine.add("a", PROMPTS[1], GREEDY)
    monkeypatch.setattr(program, "launch", fail)
    with pytest.raises(LaunchError, match="no memory"):
        llm.engine.step()
    for inputs in program.input_sets:
        inputs.host["input_ids"].fill(-7)
    program.device.driver.synchronize()
    assert program.device_inputs["input_ids"][: len(PROMPTS[1])].tolist() == PROMPTS[1]


def test_a_late_choice_that_fails_loses_no_token_and_follows_no_form_twice(
    load_emulated: LoadLLM, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llguidance")
    form = {"regex": "[a-d]{3}-[0-9]{1,3}x"}
    params = [SamplingParams(temperature=0, max_tokens=20, structured_outputs=form), GREEDY]
    found = []
    for fails in (False, True):
        llm = load_emulated(make_model("llama-gqa-tied", "float16"))
        engine = llm.engine
        late = count_late_choices(llm, monkeypatch)
        graph, failures = engine.runner.chooser._graph, []

        def failing_graph(*key: Any, late: list[bool] = late, graph: Any = graph, failures: Any = failures) -> Any:
            if late[-1] and sum(late) in (1, 3) and len(failures) < sum(late):
                failures.append(LaunchError("no memory for a graph"))
                raise failures[-1]
            return graph(*key)

        if fails:
            monkeypatch.setattr(engine.runner.chooser, "_graph", failing_graph)
        groups = [engine.add(str(i), PROMPTS[i], one) for i, one in enumerate(params)]
        while engine.has_work():
            with suppress(LaunchError):
                engine.step()
        assert bool(failures) == fails
        found.append([(g.answers[0].token_ids, g.answers[0].text, g.answers[0].finish_reason) for g in groups])
    assert found[0] == found[1]
    assert re.fullmatch(form["regex"], found[0][0][1])


def test_answers_held_to_a_form_are_chosen_on_the_device_beside_free_ones(
    load_llm: LoadLLM, load_emulated: LoadLLM, make_model: MakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llguidance")
    model = make_model("llama-gqa-tied", "float16")
    form = {"regex": "[a-d]{3}-[0-9]{1,3}x"}
    params = [
        SamplingParams(temperature=0, max_tokens=20, logprobs=2, structured_outputs=form, min_tokens=15),
        SamplingParams(temperature=1.0, seed=2, max_tokens=20, logprobs=2, structured_outputs=form, ignore_eos=True),
        GREEDY,
    ]
    wanted = load_llm(model).generate(prompts(PROMPTS[:3]), params)
    llm = load_emulated(model)
    assert llm.engine.runs_ahead
    num_late = count_late_choices(llm, monkeypatch)
    found = llm.generate(prompts(PROMPTS[:3]), params)
    assert sum(num_late) > 5, "a step with forms is launched before the tokens before it are read"
    for output, other in zip(found[:2], wanted, strict=False):
        assert re.fullmatch("[a-d]{3}-[0-9]{1,3}x", output.outputs[0].text), output.outputs[0].error
        assert output.outputs[0].finish_reason == other.outputs[0].finish_reason == "stop"
    assert_close(found[2:], wanted[2:], TOLERANCE["float16"])
    assert llm.engine.runner.chooser.num_host_rows == 0
