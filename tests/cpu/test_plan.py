"""`lean-engine plan`: presets against published figures, where the memory goes, and what wrong input gets."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Type
from test_gguf_model import Original
from tiny import directory

from lean_engine import EngineConfig, cli, models
from lean_engine.checkpoint.gguf_model import GgufCheckpoint
from lean_engine.cli import run
from lean_engine.cli.plan import BLOCK_SIZES
from lean_engine.dtypes import dtype
from lean_engine.engine.cpu_device import compiled_kernels, make_cpu_device
from lean_engine.engine.start import compile_model
from lean_engine.errors import ConfigError
from lean_engine.ir.sources import RopeTable
from lean_engine.llm import LLM
from lean_engine.models.presets import PRESETS
from lean_engine.passes import plan_memory
from lean_engine.passes.report import num_parameters
from lean_engine.runtime.program import Program
from lean_engine.runtime.weights import load_weights

TINY = str(directory("llama-gqa-tied"))  # H 64, 3 layers, 2 KV heads of 8, context 256: 96 elements of KV per token
THIRTEEN = ["llama-2-13b", "--gpu-memory", "40GiB", "--max-model-len", "2048"]
LENGTHS = ["--prompt-tokens", "200", "--output-tokens", "300"]
PUBLISHED = {  # parameters, tensors that are shared counted once; bytes of K and V per token in the type of the weights
    "llama-2-7b": (6_738_415_616, 524_288),
    "llama-2-13b": (13_015_864_320, 819_200),
    "llama-3.1-8b": (8_030_261_248, 131_072),
    "llama-3.1-70b": (70_553_706_496, 327_680),
    "llama-3.2-1b": (1_235_814_400, 32_768),
    "qwen3-0.6b": (596_049_920, 114_688),
    "qwen3-8b": (8_190_735_360, 147_456),
    "mistral-7b": (7_248_023_552, 131_072),
}
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cli.COMMANDS, "plan", "lean_engine.cli.plan")


def plan(capsys: Capture, *args: str) -> str:
    code = run(["plan", *args])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    return out


def figures(capsys: Capture, *args: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(plan(capsys, *args, "--json"))
    return found


def fail(capsys: Capture, code: int, *args: str) -> str:
    assert run(["plan", *args]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("Error: ")
    assert err.count("\n") == 1
    return err


def write_trace(path: Path, *pairs: tuple[int, int]) -> str:
    path.write_text("".join(json.dumps({"prompt_len": p, "output_len": o}) + "\n" for p, o in pairs))
    return str(path)


# --- GGUF files


@pytest.fixture
def gguf_model(tmp_path: Path) -> str:
    try:
        compiled_kernels(progress=False)
    except ConfigError as error:
        pytest.skip(str(error))
    return str(Original("llama-gqa-tied").write(tmp_path / "model.gguf", Type.Q8_0))


def bytes_held(path: str, max_model_len: int) -> tuple[int, int]:
    """What the CPU device loads: weights, and rope tables."""
    config = EngineConfig(device="cpu", cpu_kernels="compiled")
    checkpoint, device = GgufCheckpoint(Path(path)), make_cpu_device(config)
    lowered = compile_model(models.configure(checkpoint.config), device, max_model_len)
    loaded = load_weights(lowered.parameters, checkpoint, device)
    tables = {p.value.name for p in lowered.parameters if isinstance(p.source, RopeTable)}
    device.close()
    of_tables = sum(array.nbytes for name, array in loaded.items() if name in tables)
    return sum(array.nbytes for array in loaded.values()) - of_tables, of_tables


def test_weights_of_a_gguf_file_count_on_this_machine_as_its_cpu_holds_them(gguf_model: str, capsys: Capture) -> None:
    found = figures(capsys, gguf_model, "--max-model-len", "64")
    held, tables = bytes_held(gguf_model, 64)
    assert (found["weights_bytes"], found["workspace"]["rope_table_bytes"]) == (held, tables)
    assert found["kv_bytes_per_token"] == 2 * 3 * 16 * 2, "float16"
    assert held < 1.2 * found["num_parameters"], "about a byte each"
    assert "as stored: float32, q8_0" in plan(capsys, gguf_model)


def test_weights_of_a_gguf_file_count_on_a_gpu_as_its_loader_widens_them(gguf_model: str, capsys: Capture) -> None:
    found = figures(capsys, gguf_model, "--gpu-memory", "1GiB")
    assert (found["weights_bytes"], found["dtype"]) == (2 * found["num_parameters"], "float16")


def test_a_dtype_that_is_given_is_what_a_gguf_file_s_weights_become(gguf_model: str, capsys: Capture) -> None:
    assert figures(capsys, gguf_model, "--dtype", "bfloat16")["dtype"] == "bfloat16"


# --- presets


def test_every_preset_is_checked_here_and_named_in_the_help(capsys: Capture) -> None:
    assert set(PRESETS) == set(PUBLISHED)
    text = " ".join(plan(capsys, "--help").split())
    assert all(name in text for name in PRESETS)


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_published_parameters_and_kv_bytes(name: str) -> None:
    config = models.configure(PRESETS[name])
    count = num_parameters(models.build(config, config.dtype, 128))
    assert (count, config.kv_bytes_per_token * dtype(config.dtype).num_bytes) == PUBLISHED[name]


def test_a_directory_with_a_preset_s_name_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    (tmp_path / "llama-2-13b").mkdir()
    (tmp_path / "llama-2-13b" / "config.json").write_text((directory("llama-gqa-tied") / "config.json").read_text())
    monkeypatch.chdir(tmp_path)
    assert figures(capsys, "llama-2-13b", "--gpu-memory", "1GiB")["num_parameters"] < 10**6


# --- the 13B model on a card of 40 GiB


def test_memory_of_13b_adds_up(capsys: Capture) -> None:
    found = figures(capsys, *THIRTEEN, *LENGTHS)
    assert found["weights_bytes"] == 26_031_728_640
    assert found["kv_bytes_per_token"] == 819_200
    assert found["usable_bytes"] == int(0.9 * 40 * 2**30)
    assert found["workspace_bytes"] == sum(found["workspace"].values())
    assert found["workspace"]["rope_table_bytes"] == 2048 * 128 * 4
    assert found["workspace"]["input_bytes"] == 4 * (3 * 512 + 128 * 128 + 128 + 129 + 128)
    left = found["usable_bytes"] - found["weights_bytes"] - found["workspace_bytes"]
    assert found["num_blocks"] == left // (16 * 819_200)
    assert found["kv_bytes"] == found["num_blocks"] * 16 * 819_200
    assert found["kv_bytes"] + found["unused_bytes"] == left
    assert found["num_tokens"] == found["num_usable_blocks"] * 16 == (found["num_blocks"] - 1) * 16


def test_contiguous_slabs_of_13b_waste_most_of_the_memory_and_pages_under_4_percent(capsys: Capture) -> None:
    found = figures(capsys, *THIRTEEN, *LENGTHS)
    slabs, paged = found["contiguous"], found["paged"]
    assert slabs["num_requests"] == found["num_tokens"] // 2048 == 7
    assert slabs["waste_ratio"] == 1 - 499 / 2048
    assert 0.6 < slabs["waste_ratio"] < 0.8 < slabs["waste_ratio_mean"]
    assert paged["num_requests"] == found["num_usable_blocks"] // 32 == 29
    assert paged["waste_ratio"] == 1 - 499 / 512
    assert max(paged["waste_ratio"], paged["waste_ratio_mean"]) < 0.04
    assert paged["num_requests"] < paged["num_requests_mean"] == 42


def test_the_null_block_holds_no_request(capsys: Capture) -> None:
    found = figures(capsys, *THIRTEEN, "--prompt-tokens", "1", "--output-tokens", "1")
    assert found["paged"]["num_requests"] == found["num_usable_blocks"] == found["num_blocks"] - 1
    by_size = {row["block_size"]: row["num_requests"] for row in found["by_block_size"]}
    assert by_size[256] == found["num_blocks"] // 16 - 1


def test_larger_blocks_waste_more_on_average_and_hold_fewer_requests(capsys: Capture) -> None:
    found = figures(capsys, *THIRTEEN, *LENGTHS, "--block-size", "24")
    rows = found["by_block_size"]
    assert [row["block_size"] for row in rows] == sorted([*BLOCK_SIZES, 24])
    for name, is_descending in (("waste_ratio_mean", False), ("num_requests_mean", True)):
        values = [row[name] for row in rows]
        assert values == sorted(values, reverse=is_descending)
        assert values[0] != values[-1]
    (row,) = [row for row in rows if row["block_size"] == 24]
    assert {"block_size": 24, **found["paged"]} == row


def test_text_shows_the_division_and_ends_with_the_comparison(capsys: Capture) -> None:
    lines = plan(capsys, *THIRTEEN, *LENGTHS).splitlines()
    begins = [line.split("  ")[0] for line in lines]
    for name in ("model", "device", "weights", "workspace", "KV cache", "context", "requests", "waste"):
        assert name in begins
    assert "13,015,864,320 parameters" in lines[0]
    assert "40.00 GiB; 36.00 GiB to use at 0.9" in lines[1]
    assert lines[-2] == "paged: 29 requests at once, 2.5 % waste; contiguous: 7 requests at once, 75.6 % waste"
    assert lines[-1] == "on average: 42 requests at once, 2.1 % waste; contiguous: 7 requests at once, 82.9 % waste"
    (row,) = [line for line in lines if line.split()[:1] == ["256"]]
    assert row.split() == ["256", "29", "2.5", "%", "32", "24.6", "%"]


def test_fewer_requests_run_than_fit_when_max_num_seqs_says_so(capsys: Capture) -> None:
    args = ["llama-3.2-1b", "--gpu-memory", "8GiB", "--max-num-seqs", "64"]
    assert plan(capsys, *args).splitlines()[-1] == "the engine runs 64 of them at most (--max-num-seqs)"
    capped = plan(capsys, *args, "--max-model-len", "512")
    assert "stay free: 64 requests (--max-num-seqs) of the whole context can use no more" in capped


# --- the same figures as the engine's


def test_weights_workspace_and_pool_are_the_engine_s(capsys: Capture) -> None:
    options = {"max_model_len": 250, "max_num_seqs": 8, "max_num_batched_tokens": 32, "block_size": 4}
    flags = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", str(value))]
    found = figures(capsys, TINY, "--dtype", "float32", "--gpu-memory", "10MiB", *flags)
    with LLM(TINY, **options, threads=1) as llm:
        program = llm.engine.runner.program
        parameters = sum(p.value.type.num_bytes({}) for p in program.lowered.parameters)
        assert found["weights_bytes"] + found["workspace"]["rope_table_bytes"] == parameters
        inputs = sum(value.type.num_bytes(program.max_dims) for value in program.lowered.inputs)
        assert found["workspace"]["input_bytes"] == inputs
        without_scratch = plan_memory(program.lowered, program.max_dims, lambda launch, dims: 0)
        assert found["workspace"]["arena_bytes"] == without_scratch.arena_bytes < program.plan.arena_bytes
        caches = sum(value.type.num_bytes({"N": 1, "S": 4}) for value in program.lowered.caches)
        assert found["kv_bytes_per_token"] * 4 == caches


def held_bytes(program: Program) -> int:
    """What its parameters take, rope tables included."""
    return sum(program._fixed[p.value.name].nbytes for p in program.lowered.parameters)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"dtype": "float32"},
        {"dtype": "bfloat16"},
        {"dtype": "float16"},
        {"kv_cache_dtype": "float16"},
        {"quantization": "int8"},
        {"quantization": "int8", "dtype": "bfloat16"},
    ],
    ids=str,
)
def test_on_this_machine_every_figure_is_that_of_its_cpu(options: dict[str, Any], capsys: Capture) -> None:
    try:
        compiled_kernels(progress=False)
    except ConfigError as error:
        pytest.skip(str(error))
    sizes = {"max_model_len": 128, "max_num_seqs": 8, "max_num_batched_tokens": 32}
    flags = [text for name, value in (sizes | options).items() for text in (f"--{name.replace('_', '-')}", str(value))]
    found = figures(capsys, TINY, *flags)
    with LLM(TINY, device="cpu", **sizes, **options) as llm:
        program = llm.engine.runner.program
        device = program.device
        assert found["kv_cache_dtype"] == device.kv_cache_dtype
        in_blocks = sum(array.nbytes for array in program.caches.values()) // program.max_dims["N"]
        assert found["kv_bytes_per_token"] * 16 == in_blocks
        assert found["weights_bytes"] + found["workspace"]["rope_table_bytes"] == held_bytes(program)
        assert found["workspace"]["arena_bytes"] == program.plan.arena_bytes
    assert f" as {device.kv_cache_dtype}, " in plan(capsys, TINY, *flags)


def test_without_a_compiler_the_cpu_widens_weights(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def none(progress: bool) -> Path:
        raise ConfigError("there is no compiler")

    monkeypatch.setattr("lean_engine.engine.cpu_device.compiled_kernels", none)
    found = figures(capsys, TINY)
    assert found["weights_bytes"] == 4 * found["num_parameters"]
    assert "no compiler" in fail(capsys, 2, TINY, "--dtype", "bfloat16")


def test_a_gpu_gets_16_bits_of_a_float32_checkpoint(tmp_path: Path, capsys: Capture) -> None:
    config = json.loads((directory("llama-gqa-tied") / "config.json").read_text())
    config.pop("torch_dtype", None)
    (tmp_path / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    found = figures(capsys, str(tmp_path), "--gpu-memory", "1GiB")
    assert (found["dtype"], found["weights_bytes"]) == ("bfloat16", 2 * found["num_parameters"])
    assert figures(capsys, str(tmp_path))["kv_cache_dtype"] == "float32"


def test_an_open_context_is_fitted_to_the_pool(capsys: Capture) -> None:
    assert figures(capsys, TINY, "--gpu-memory", "2MiB")["max_model_len"] == 256
    small = figures(capsys, "llama-3.1-8b", "--gpu-memory", "20GiB")
    assert 16 < small["max_model_len"] <= small["num_tokens"] < 131_072
    assert small["num_tokens"] - small["max_model_len"] < 100  # near all of it
    assert small["weights_bytes"] + small["workspace_bytes"] + small["kv_bytes"] <= small["usable_bytes"]
    assert "all that fits the KV cache" in plan(capsys, "llama-3.1-8b", "--gpu-memory", "20GiB")


def test_dtype_sets_the_size_of_weights_and_kv(capsys: Capture) -> None:
    half, single = (figures(capsys, TINY, "--gpu-memory", "16MiB", "--dtype", name) for name in ("bfloat16", "float32"))
    for name in ("weights_bytes", "kv_bytes_per_token"):
        assert single[name] == 2 * half[name]
    assert (half["kv_bytes_per_token"], half["dtype"]) == (2 * 96, "bfloat16")


def test_int8_and_the_type_of_the_kv_cache_are_counted(capsys: Capture) -> None:
    arguments = ("llama-3.2-1b", "--gpu-memory", "8GiB")
    plain, small = figures(capsys, *arguments), figures(capsys, *arguments, "--quantization", "int8")
    assert (plain["quantization"], small["quantization"]) == (None, "int8")
    assert 0.5 < small["weights_bytes"] / plain["weights_bytes"] < 0.51  # and a scale per output channel
    assert small["kv_bytes_per_token"] == plain["kv_bytes_per_token"]
    wide = figures(capsys, *arguments, "--kv-cache-dtype", "float32")
    assert wide["kv_cache_dtype"] == "float32"
    assert wide["kv_bytes_per_token"] == 2 * plain["kv_bytes_per_token"]
    assert " as int8" in plan(capsys, *arguments, "--quantization", "int8")


def test_without_a_size_the_machine_s_free_memory_is_planned(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    monkeypatch.setattr("lean_engine.cli.plan.available_memory_bytes", lambda: 2**30)
    assert figures(capsys, TINY)["device_bytes"] == 2**30
    assert "1.00 GiB (what this machine has free)" in plan(capsys, TINY)
    assert figures(capsys, TINY, "--gpu-memory", "2GB")["device_bytes"] == 2 * 10**9


def test_no_weight_is_needed(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "config.json").write_text((directory("llama-gqa-tied") / "config.json").read_text())
    assert figures(capsys, str(tmp_path), "--gpu-memory", "1GiB")["num_parameters"] > 0


# --- shapes of requests


def test_default_lengths_shrink_to_the_context(capsys: Capture) -> None:
    shape = figures(capsys, TINY, "--gpu-memory", "1GiB")["requests"]
    assert shape["mean_prompt_len"] + shape["mean_output_len"] == 256
    shape = figures(capsys, TINY, "--gpu-memory", "1GiB", "--output-tokens", "250")["requests"]
    assert (shape["mean_prompt_len"], shape["mean_output_len"]) == (6, 250)
    shape = figures(capsys, *THIRTEEN)["requests"]
    assert (shape["mean_prompt_len"], shape["mean_output_len"]) == (200, 300)


def test_a_trace_of_equal_requests_is_the_shape_itself(tmp_path: Path, capsys: Capture) -> None:
    trace = write_trace(tmp_path / "t.jsonl", *[(200, 300)] * 3)
    from_trace, from_flags = figures(capsys, *THIRTEEN, "--trace", trace), figures(capsys, *THIRTEEN, *LENGTHS)
    assert from_trace.pop("requests")["num_shapes"] == 3
    del from_flags["requests"]
    assert from_trace == from_flags


def test_a_trace_is_averaged_by_the_lives_of_its_requests(tmp_path: Path, capsys: Capture) -> None:
    trace = write_trace(tmp_path / "t.jsonl", (1000, 100), (100, 900))
    found = figures(capsys, *THIRTEEN, "--trace", trace)
    assert found["contiguous"]["waste_ratio"] == pytest.approx(1 - (0.1 * 1099 + 0.9 * 999) / 2048)
    assert found["paged"]["num_requests"] == int(found["num_usable_blocks"] / (0.1 * 69 + 0.9 * 63))
    assert "2 of " in plan(capsys, *THIRTEEN, "--trace", trace)


# --- mistakes


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--gpu-memory", "40 apples"], "'40 apples' is not a number of bytes"),
        (["--gpu-memory-utilization", "0"], "'0' is not a share above 0 and at most 1"),
        (["--gpu-memory-utilization", "1.01"], "'1.01' is not a share above 0 and at most 1"),
        (["--gpu-memory-utilization", "nan"], "'nan' is not a share above 0 and at most 1"),
        (["--gpu-memory-utilization", "90%"], "'90%' is not a share above 0 and at most 1"),
        (["--dtype", "int8"], "'int8' is not one of 'auto', 'float32', 'float16', 'bfloat16'"),
        (["--prompt-tokens", "0"], "'0' must be at least 1"),
        (["--output-tokens", "many"], "'many' is not a number of tokens"),
        (["--block-size", "0"], "block_size is 0, must be an integer of at least 1"),
        (["--max-model-len", "257"], "max_model_len is 257, the model's context has 256 tokens"),
        (
            ["--prompt-tokens", "200", "--output-tokens", "57"],
            "--prompt-tokens 200 and --output-tokens 57 are 257 tokens, more than the context of 256 tokens",
        ),
        (["--prompt-tokens", "256"], "--prompt-tokens is 256; in a context of 256 at most 255"),
        (["--output-tokens", "300"], "--output-tokens is 300; in a context of 256 at most 255"),
        (["--max-model-len", "1"], "the context is 1; a request needs a token of prompt and one of output"),
        (["--trace", "t.jsonl", "--prompt-tokens", "5"], "--trace tells the lengths of the requests"),
        (["--trace", "no/such/file"], "no/such/file: cannot be read: No such file or directory"),
    ],
)
def test_wrong_usage_is_refused_in_one_line(args: list[str], expected: str, capsys: Capture) -> None:
    assert expected in fail(capsys, 2, TINY, "--gpu-memory", "1GiB", *args)


def test_a_wrong_line_of_a_trace_is_named(tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"prompt_len": 5, "output_len": 3}\n{"prompt_len": 5}\n')
    assert f"{path}:2: output_len is missing" in fail(capsys, 2, TINY, "--trace", str(path))


def test_a_trace_longer_than_the_context_is_refused_with_the_numbers(tmp_path: Path, capsys: Capture) -> None:
    trace = write_trace(tmp_path / "t.jsonl", (200, 56), (200, 57), (10, 290))
    expected = f"{trace}: 2 of 3 requests are longer than the context of 256 tokens; the longest has 300"
    assert expected in fail(capsys, 2, TINY, "--gpu-memory", "1GiB", "--trace", trace)


def test_what_does_not_fit_says_the_numbers(capsys: Capture) -> None:
    weights = fail(capsys, 1, "llama-3.1-70b", "--gpu-memory", "80GiB")
    assert "the weights need 131.42 GiB as bfloat16 and the workspace" in weights
    assert "0.9 of the device's 80.00 GiB are 72.00 GiB" in weights
    context = fail(capsys, 1, "llama-2-13b", "--gpu-memory", "28GiB", "--max-model-len", "4096")
    assert "one request of max_model_len=4096 needs 256 KV blocks" in context
    nothing = fail(capsys, 1, "llama-2-13b", "--gpu-memory", "26.03GB", "--gpu-memory-utilization", "1")
    assert "the weights need 24.24 GiB" in nothing


def test_an_unknown_model_is_answered_with_the_presets(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    message = fail(capsys, 1, "llama-9-1b")
    assert "'llama-9-1b' is not a model" in message
    assert all(name in message for name in PRESETS)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "presets" not in fail(capsys, 1, "./llama-2-13b")
    assert "revision is 'main', but llama-2-13b is a preset" in fail(capsys, 2, "llama-2-13b", "--revision", "main")
