"""The costs of a step against sums by hand, and what `lean-engine inspect` shows of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Type
from test_gguf_model import Original
from test_plan import bytes_held, held_bytes
from tiny import NAMES, directory, optimized, plain

from lean_engine.checkpoint import open_checkpoint
from lean_engine.cli import run
from lean_engine.cli.inspect import describe_layers, fold_layers, format_flops
from lean_engine.engine.cpu_device import compiled_kernels
from lean_engine.errors import ConfigError
from lean_engine.ir.text import format_graph
from lean_engine.llm import LLM
from lean_engine.passes.report import Step, layer_of, measure, num_parameters, weight_bytes

LLAMA = "llama-gqa-tied"  # H 64, I 128, 3 layers, 8 heads (2 KV) of 8, V 512, tied
DECODE = Step(num_tokens=1, num_requests=1, context=100)


def inspect(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    code = run(["inspect", *args])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    return out


def figures(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(inspect(capsys, *args, "--json"))
    return found


def test_weights_of_a_gguf_file_are_counted_as_stored_and_as_the_cpu_holds_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        compiled_kernels(progress=False)
    except ConfigError as error:
        pytest.skip(str(error))
    path = str(Original(LLAMA).write(tmp_path / "model.gguf", Type.Q8_0))
    found, plain_weights = figures(capsys, path), figures(capsys, path, "--dtype", "float32")
    num_norms = 7 * 64
    assert found["checkpoint_bytes"] == (found["num_parameters"] - num_norms) // 32 * 34 + 4 * num_norms
    assert (
        found["parameter_bytes"] == sum(bytes_held(path, found["max_model_len"])) < plain_weights["parameter_bytes"] / 2
    )
    assert "as stored: float32, q8_0" in inspect(capsys, path)


def test_weights_that_stay_packed_are_read_packed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        compiled_kernels(progress=False)
    except ConfigError as error:
        pytest.skip(str(error))
    path = str(Original(LLAMA).write(tmp_path / "model.gguf", Type.Q8_0))
    for num_tokens in ("1", "4"):
        found, wide = (
            figures(capsys, path, "--num-tokens", num_tokens, *options) for options in ([], ["--dtype", "float32"])
        )
        held, _ = bytes_held(path, found["max_model_len"])
        row = 64 // 32 * 34  # of the embedding, which is also the head
        assert found["cost"]["weight_bytes"] == held + int(num_tokens) * row
        assert wide["cost"]["weight_bytes"] > 3 * found["cost"]["weight_bytes"]


# --- the costs


def test_matmul_flops_are_two_per_weight_of_a_dense_model() -> None:
    layer = 64 * (64 + 16 + 16) + 64 * 64 + 3 * 64 * 128
    assert measure(plain(LLAMA), DECODE).matmul_flops == 2 * (3 * layer + 512 * 64)


def test_last_layer_and_head_are_computed_for_sampled_rows_only_after_the_passes() -> None:
    prefill = Step(num_tokens=50, num_requests=2, context=25)
    in_attention = 64 * (64 + 16 + 16)
    behind_attention = 64 * 64 + 3 * 64 * 128
    expected = 2 * (50 * (3 * in_attention + 2 * behind_attention) + 2 * (behind_attention + 512 * 64))
    assert measure(optimized(LLAMA), prefill).matmul_flops == expected


def test_weights_read_are_all_matrices_norms_and_one_embedding_row_per_token() -> None:
    layer = 64 * (64 + 16 + 16) + 64 * 64 + 3 * 64 * 128 + 2 * 64
    expected = 4 * (3 * layer + 64 + 512 * 64 + 7 * 64)
    assert weight_bytes(optimized(LLAMA), Step(7, 1, 100)) == expected


def test_of_experts_only_those_that_tokens_can_choose_are_read() -> None:
    graph = optimized("mixtral")  # the last layer's experts see R rows
    one, two, many = (measure(graph, Step(n, n, 64)).weight_bytes for n in (1, 2, 64))
    experts = [op for op in graph.ops if op.kind == "moe_experts"]
    one_expert = sum(sum(v.type.num_bytes({}) for v in op.inputs[3:]) // 4 for op in experts)
    embedding_row = 4 * graph.ops[0].outputs[0].columns
    assert two - one == 2 * one_expert + embedding_row  # 2 of 4 experts per token
    assert many - two == 62 * embedding_row


def test_kv_bytes_are_those_of_the_context() -> None:
    cost = measure(optimized(LLAMA), Step(num_tokens=4, num_requests=4, context=100))
    per_token = 2 * 3 * 2 * 8 * 4
    assert (cost.kv_bytes_per_token, cost.kv_read_bytes) == (per_token, 400 * per_token)
    assert cost.kv_written_bytes == 4 * per_token


def test_a_window_bounds_what_is_read_and_computed() -> None:
    graph = optimized("mistral-swa")
    attentions = [op for op in graph.ops if op.kind == "paged_attention"]
    window = attentions[0].attrs["window"]
    assert all(op.attrs["window"] == window for op in attentions)
    decode, chunk = measure(graph, Step(1, 1, 200)), measure(graph, Step(3, 1, 200))
    assert decode.kv_read_bytes == decode.kv_bytes_per_token * window
    assert chunk.kv_read_bytes == decode.kv_bytes_per_token * (window + 2)
    assert decode.attention_flops == len(attentions) * 4 * attentions[0].inputs[0].columns * window
    assert chunk.attention_flops == 3 * decode.attention_flops


def test_attention_flops_of_a_whole_prompt_are_causal() -> None:
    cost = measure(optimized(LLAMA), Step(num_tokens=10, num_requests=1, context=10))
    assert cost.attention_flops == 3 * 4 * 64 * (10 * 11 // 2)


def test_tokens_are_shared_out_over_the_requests() -> None:
    assert list(Step(7, 3, 10).chunks()) == [3, 2, 2]


@pytest.mark.parametrize("name", NAMES)
def test_launches_per_layer_and_outside_make_up_all(name: str) -> None:
    graph = optimized(name)
    cost = measure(graph, DECODE)
    num_outside = sum(layer_of(op) is None for op in graph.ops)
    assert len(cost.launches_per_layer) == len(graph.caches) // 2
    assert sum(cost.launches_per_layer) + num_outside == cost.num_launches == len(graph.ops)


def test_rows_gathered_from_the_layer_below_count_where_they_are_needed() -> None:
    assert measure(optimized(LLAMA), DECODE).launches_per_layer == [9, 9, 11]


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_the_elements_of_the_checkpoint(name: str) -> None:
    checkpoint = open_checkpoint(str(directory(name)))
    stored = {n: checkpoint.shape(n) for n in checkpoint.names()}
    count = 0
    for shape in stored.values():
        size = 1
        for n in shape:
            size *= n
        count += size
    assert num_parameters(plain(name)) == count


# --- the command


@pytest.mark.parametrize("kernels", ["auto", "numpy"])
def test_arena_of_the_largest_step_is_the_engine_s(kernels: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--max-num-seqs", "8", "--max-num-batched-tokens", "32", "--threads", "1", "--cpu-kernels", kernels]
    found = figures(capsys, str(directory(LLAMA)), *options)
    with LLM(directory(LLAMA), max_num_seqs=8, max_num_batched_tokens=32, threads=1, cpu_kernels=kernels) as llm:
        program = llm.engine.runner.program
        assert found["largest_arena_bytes"] == program.plan.arena_bytes
        assert found["largest_step"] == {name: program.max_dims[name] for name in ("T", "B", "R")}
        assert found["parameter_bytes"] == held_bytes(program)
    assert found["arena_bytes"] < found["largest_arena_bytes"]
    assert found["threads"] == 1


def test_json_holds_every_figure_and_programs_only_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    found = figures(capsys, str(directory(LLAMA)), "--num-requests", "2", "--num-tokens", "6", "--context", "50")
    assert found["step"] == {"num_tokens": 6, "num_requests": 2, "context": 50}
    assert found["cost"]["num_launches"] == found["num_ops_after"] == sum(found["cost"]["launches"].values())
    assert found["cost"]["flops"] == found["cost"]["matmul_flops"] + found["cost"]["attention_flops"]
    assert found["checkpoint_bytes"] == 2 * found["num_parameters"]
    assert found["num_ops_before"] > found["num_ops_after"]
    assert "program_after" not in found
    full = figures(capsys, str(directory(LLAMA)), "--full", "--max-model-len", "128")
    assert full["program_before"] == format_graph(plain(LLAMA))
    assert full["program_after"] == format_graph(optimized(LLAMA))


def test_text_shows_programs_and_figures(capsys: pytest.CaptureFixture[str]) -> None:
    out = inspect(capsys, str(directory(LLAMA)), "--full", "--max-model-len", "128")
    assert format_graph(plain(LLAMA)) in out
    assert format_graph(optimized(LLAMA)) in out
    figures_shown = out.rsplit("outputs", 1)[1]
    assert "llama, 3 layers, hidden 64" in figures_shown
    for name in ("parameters", "launches", "per layer", "arena", "weights read", "KV cache", "arithmetic"):
        assert f"\n{name} " in figures_shown


def test_no_weight_is_needed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = json.loads((directory(LLAMA) / "config.json").read_text())
    config |= {"num_hidden_layers": 30, "hidden_size": 16384, "vocab_size": 200_000}  # fits into no memory here
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert figures(capsys, str(tmp_path))["num_parameters"] > 10**9


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--num-tokens", "1", "--num-requests", "2"], "--num-tokens is 1, must be at least --num-requests, 2"),
        (["--num-requests", "0"], "'--num-requests': 0 is not in the range"),
        (["--num-requests", "99999999999"], "--num-requests is 99999999999; a step of at most 262144 tokens can be"),
        (["--num-tokens", "8M", "--num-requests", "65536"], "--num-tokens is 8388608; a step of at most 262144"),
        (["--context", "257"], "--context is 257, the model's context has 256 tokens"),
        (["--num-tokens", "5", "--context", "4"], "--context is 4, but the step alone computes 5 tokens of a request"),
        (["--num-tokens", "257"], "--num-tokens per request is 257, the model's context has 256 tokens"),
        (["--max-model-len", "1k"], "max_model_len is 1000, the model's context has 256 tokens"),
        (["--dtype", "int8"], "dtype is 'int8', must be one of: auto, float32, float16, bfloat16"),
    ],
)
def test_impossible_step_is_refused_in_one_line(
    args: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["inspect", str(directory(LLAMA)), *args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("Error: ")
    assert err.count("\n") == 1
    assert expected in err


# --- the folded program


def graph_text(num_layers: int, kinds: list[str]) -> str:
    lines = ["graph g", "ops", "  embed_tokens: f32[T, 4] = embedding(ids, table)"]
    previous = "embed_tokens"
    for i in range(num_layers):
        lines.append(f"  layers.{i}.x: f32[T, 4] = {kinds[i % len(kinds)]}({previous})")
        previous = f"layers.{i}.x"
    return "\n".join([*lines, f"  norm: f32[T, 4] = rms_norm({previous})", "outputs", "  norm", ""])


def test_layers_that_repeat_are_folded_and_the_ends_stay() -> None:
    folded = fold_layers(graph_text(9, ["a"]))
    assert "  … layers 2 to 8 as layer 1\n" in folded
    assert "layers.1.x: f32[T, 4] = a(layers.0.x)" in folded  # layer 0 reads the embedding and is of its own kind
    assert "layers.2.x:" not in folded
    assert "norm: f32[T, 4] = rms_norm(layers.8.x)" in folded


def test_layers_of_alternating_kinds_name_both() -> None:
    folded = fold_layers(graph_text(9, ["local", "full"]))
    assert "  … layers 3 to 8 as layers 1, 2\n" in folded


def test_nothing_is_folded_where_no_layer_repeats() -> None:
    text = graph_text(2, ["a"])
    assert fold_layers(text) == text


@pytest.mark.parametrize("name", NAMES)
def test_folding_keeps_every_line_of_a_layer_it_shows(name: str) -> None:
    lines = format_graph(optimized(name)).splitlines()
    kept = fold_layers(format_graph(optimized(name))).splitlines()
    assert [line for line in lines if line in set(kept)] == [line for line in kept if not line.startswith("  …")]
    assert len(kept) < len(lines)  # the caches are alike at least


def test_launch_counts_are_written_as_runs() -> None:
    assert describe_layers([9, 9, 9, 11]) == "9 in layers 0 to 2, 11 in layer 3"
    assert describe_layers([5]) == "5 in layer 0"


def test_flops_are_written_in_the_largest_unit_that_fits() -> None:
    assert [format_flops(n) for n in (0, 999, 1500, 269_030_016, 4 * 10**18)] == [
        "0 FLOP",
        "999 FLOP",
        "1.5 kFLOP",
        "269 MFLOP",
        "4e+03 PFLOP",
    ]


def test_figures_are_of_the_type_that_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    model = str(directory("qwen3"))
    float32, bfloat16 = (figures(capsys, model, "--dtype", dtype) for dtype in ("float32", "bfloat16"))
    tables = 2 * float32["parameter_bytes"] - 8 * float32["num_parameters"]  # rope tables stay float32
    assert 2 * bfloat16["parameter_bytes"] - 4 * bfloat16["num_parameters"] == tables > 0
    kv_bytes = [found["cost"]["kv_written_bytes"] for found in (float32, bfloat16)]
    assert kv_bytes[0] == 2 * kv_bytes[1]
