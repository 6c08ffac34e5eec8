"""The commands as their users meet them: what is printed where, exit codes, and one line for every mistake.

One file, though long: every command is run through the same few calls, and the error lines are one table.
"""

from __future__ import annotations

import io
import json
import math
import os
import pty
import re
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny import directory

from lean_engine import cli
from lean_engine.cli import COMMANDS, chat, options, run
from lean_engine.cli.bench import SUBCOMMANDS
from lean_engine.cli.demo import QUESTIONS, SYSTEM
from lean_engine.cli.generate import to_json
from lean_engine.cli.terminal import progress_bar
from lean_engine.config import EngineConfig
from lean_engine.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from lean_engine.llm import LLM
from lean_engine.sampling.logprobs import Logprob
from lean_engine.sampling.params import SamplingParams

MODEL = str(directory("llama-gqa-tied"))
GOLDEN = json.loads((directory("llama-gqa-tied") / "golden.json").read_text())["sequences"]
PROMPT = "The quick brown fox"
GREEDY = SamplingParams(temperature=0, max_tokens=12)
ROOT = Path(__file__).resolve().parents[2]
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(MODEL) as loaded:
        yield loaded


def succeed(capsys: Capture, *args: str) -> str:
    code = run(args)
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    return out


def fail(capsys: Capture, code: int, *args: str) -> str:
    """The one line on stderr."""
    assert run(args) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("Error: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    return err


def type_in(monkeypatch: pytest.MonkeyPatch, data: str | bytes) -> None:
    raw = data.encode() if isinstance(data, str) else data
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(raw), encoding="utf-8"))


def start(*args: str, **streams: Any) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen([sys.executable, "-m", "lean_engine", *args], env=environment, **streams)


def copy_model(target: Path, **changes: Any) -> Path:
    """The tiny model with other values in its config.json."""
    shutil.copytree(MODEL, target)
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, **changes}))
    return target


# --- the group


def test_help_imports_neither_numpy_nor_tokenizers() -> None:
    code = f"""
import sys
from lean_engine.cli import run
assert run(["--help"]) == run(["--version"]) == 0
for name in {list(COMMANDS)}:
    assert run([name, "--help"]) == 0
heavy = {{"numpy", "tokenizers", "jinja2", "huggingface_hub", "gguf"}}
print("loaded:", *sorted(heavy & set(sys.modules)))
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "loaded:"


def test_version_and_bare_call(capsys: Capture) -> None:
    from lean_engine import __version__

    assert succeed(capsys, "--version") == f"lean-engine {__version__}\n"
    assert succeed(capsys) == succeed(capsys, "--help")


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "bench"])
def test_every_command_says_what_it_does_with_an_example_and_defaults(name: str, capsys: Capture) -> None:
    out = succeed(capsys, name, "--help")
    assert "Examples:\n  lean-engine " + name in out
    assert "smollm2-135m-instruct" in out
    group_help = succeed(capsys, "--help")
    command = cli.CommandGroup("x").get_command(click.Context(cli.cli), name)
    assert command.get_short_help_str(60) in " ".join(group_help.split())
    for option in command.params:
        has_default = not (option.is_flag or option.required) if isinstance(option, options.Option) else False
        if has_default and option.section != "Prompts":
            assert option.show_default or "efault" in (option.help or ""), f"--{option.name} states no default"


def test_bench_lists_its_benchmarks_and_each_says_what_it_does(capsys: Capture) -> None:
    assert succeed(capsys, "bench") == succeed(capsys, "bench", "--help")
    for name in SUBCOMMANDS:
        assert name in succeed(capsys, "bench", "--help")
        assert f"Examples:\n  lean-engine bench {name}" in succeed(capsys, "bench", name, "--help")
    assert "unknown benchmark 'memry'; there are: serve, latency, " in fail(capsys, 2, "bench", "memry")


def test_engine_flags_are_the_fields_of_engine_config() -> None:
    assert list(options.ENGINE_FLAGS) == [f.name for f in fields(EngineConfig)]
    group = cli.CommandGroup("x")
    bench = group.get_command(click.Context(cli.cli), "bench")
    assert isinstance(bench, click.Group)
    commands = [
        group.get_command(click.Context(cli.cli), "generate"),
        bench.get_command(click.Context(bench), "memory"),
    ]
    flags = {flag for command in commands if command is not None for option in command.params for flag in option.opts}
    assert {options.flag(name) for name in options.ENGINE_FLAGS} <= flags


def test_sampling_flags_are_fields_of_sampling_params() -> None:
    assert set(options.SAMPLING_FLAGS) <= {f.name for f in fields(SamplingParams)}


def test_flags_left_out_leave_the_engine_s_defaults() -> None:
    values: dict[str, Any] = {}

    @options.engine_options(*options.ENGINE_FLAGS)
    def command(engine: dict[str, Any]) -> None:
        values.update(engine)

    click.command()(command).main([], standalone_mode=False)
    assert EngineConfig(**values) == EngineConfig()


def test_engine_flags_reach_the_engine(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    seen: dict[str, Any] = {}
    load = LLM.__init__

    def spy(self: LLM, model: str | None, **given: Any) -> None:
        seen.update(given)
        load(self, model, **given)

    monkeypatch.setattr(LLM, "__init__", spy)
    flags = ["--max-model-len", "0.25K", "--kv-cache-memory-bytes", "1MiB", "--no-enable-chunked-prefill"]
    succeed(capsys, "generate", MODEL, "--raw", "--prompt", "a", "--max-tokens", "1", *flags)
    assert (seen["max_model_len"], seen["kv_cache_memory_bytes"]) == (256, 2**20)
    assert seen["enable_chunked_prefill"] is False


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4096", 4096),
        ("32k", 32_000),
        ("32K", 32_768),
        ("1M", 2**20),
        ("1.5k", 1500),
        (" 2 ", 2),
        ("-1", -1),
        ("9" * 20, 10**20 - 1),
    ],
)
def test_numbers_of_tokens_are_read_as_in_vllm(text: str, expected: int) -> None:
    assert options.tokens(text) == expected


@pytest.mark.parametrize("text", ["", "k", "32x", "32KiB", "1.5", "0x10", "1e3", "٣", "9" * 5000])
def test_what_is_no_number_of_tokens_is_quoted(text: str) -> None:
    with pytest.raises(click.BadParameter, match=re.escape(repr(text))):
        options.tokens(text)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_full_disk_is_one_line_that_says_what_could_not_be_written() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "lean_engine", "plan", "llama-3.1-8b", "--gpu-memory", "24GiB"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (1, "Error: standard input or output: No space left on device\n")


def test_ctrl_c_ends_with_130_and_no_traceback(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "generate", interrupt)
    assert run(["generate", MODEL, "--raw", "--prompt", "a", "--json"]) == 130
    assert capsys.readouterr().err.strip() == ""


def test_a_reader_that_goes_away_ends_the_command_silently() -> None:
    with start("inspect", MODEL, "--full", stdout=subprocess.PIPE, stderr=subprocess.PIPE) as command:
        assert command.stdout is not None
        assert command.stderr is not None
        command.stdout.close()
        assert command.stderr.read() == b""
    assert command.returncode == 1


def test_a_terminal_sees_a_progress_bar_and_a_file_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    with progress_bar("loading") as advance:
        assert advance is None
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with progress_bar("loading") as advance:
        assert advance is not None
        advance(10, 40)
        advance(40, 40)
    shown = terminal.getvalue()
    assert " 25%" in shown
    assert "100%" in shown


# --- generate


def test_generate_prints_the_completion(llm: LLM, capsys: Capture) -> None:
    expected = llm.generate(PROMPT, GREEDY)[0].outputs[0].text
    assert succeed(capsys, "generate", MODEL, "--raw", "--prompt", PROMPT, "--max-tokens", "12") == expected + "\n"


def test_a_prompt_comes_unchanged_from_a_file_or_standard_input(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    prompt = f"{PROMPT}\njumps\n"
    expected = llm.generate(prompt, GREEDY)[0].outputs[0].text + "\n"
    (tmp_path / "prompt.txt").write_text(prompt)
    flags = ["--max-tokens", "12"]
    assert (
        succeed(capsys, "generate", MODEL, "--raw", "--prompt-file", str(tmp_path / "prompt.txt"), *flags) == expected
    )
    for words in (["-", MODEL], [MODEL, "-"]):
        type_in(monkeypatch, prompt)
        assert succeed(capsys, "generate", "--raw", *words, *flags) == expected


def test_several_prompts_are_answered_in_order(llm: LLM, tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "third.txt").write_text("three")
    texts = [o.outputs[0].text.rstrip("\n") for o in llm.generate(["one", "two", "three"], GREEDY)]
    flags = ["--prompt", "one", "--prompt-file", str(tmp_path / "third.txt"), "--prompt", "two", "--max-tokens", "12"]
    assert succeed(capsys, "generate", MODEL, "--raw", *flags) == "\n\n".join(texts) + "\n"


def test_json_is_the_request_output_of_each_prompt_on_a_line(llm: LLM, capsys: Capture) -> None:
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=2)
    expected = llm.generate(["one", "two"], params)
    out = succeed(
        capsys,
        "generate",
        MODEL,
        "--raw",
        "--prompt",
        "one",
        "--prompt",
        "two",
        "--max-tokens",
        "4",
        "--logprobs",
        "2",
        "--json",
    )
    found = [json.loads(line) for line in out.splitlines()]
    assert len(found) == 2
    for output, value in zip(expected, found, strict=True):
        wanted = json.loads(json.dumps(asdict(output)))
        for entry in (wanted, value):
            entry.pop("metrics")
            entry.pop("request_id")
        assert value == wanted
        assert set(value["outputs"][0]["logprobs"][0]) >= {str(output.outputs[0].token_ids[0])}


def test_json_has_no_infinities() -> None:
    entry = {7: Logprob(-math.inf, 1, "x"), 8: Logprob(-0.5, 2, "é")}
    answer = CompletionOutput(0, "x", [7], -math.inf, [entry], "stop", None)
    metrics = RequestMetrics(0.0, None, None, None, 0)
    text = to_json(RequestOutput("0", "p", [1], [None, entry], [answer], True, 0, metrics))
    value = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert value["outputs"][0]["logprobs"][0] == {
        "7": {"logprob": None, "rank": 1, "decoded_token": "x"},
        "8": {"logprob": -0.5, "rank": 2, "decoded_token": "é"},
    }
    assert "\n" not in text


@pytest.mark.parametrize("system", [None, "Be brief."])
def test_chat_flag_puts_the_prompt_into_the_template(system: str | None, llm: LLM, capsys: Capture) -> None:
    messages = [{"role": "user", "content": "Hello"}]
    flags = ["--chat", "--prompt", "Hello", "--max-tokens", "12"]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
        flags += ["--system", system]
    expected = llm.chat(messages, GREEDY)[0]
    assert succeed(capsys, "generate", MODEL, "--raw", *flags) == expected.outputs[0].text + "\n"
    value = json.loads(succeed(capsys, "generate", MODEL, "--raw", *flags, "--json"))
    assert (value["prompt"], value["prompt_token_ids"]) == (expected.prompt, expected.prompt_token_ids)


def test_rendered_chat_prompt_sent_raw_gives_the_chat_s_ids(llm: LLM, capsys: Capture) -> None:
    prompt = llm.render([{"role": "user", "content": "Hello"}])
    expected = llm.chat([{"role": "user", "content": "Hello"}], GREEDY)[0]
    value = json.loads(succeed(capsys, "generate", MODEL, "--raw", "--prompt", prompt, "--max-tokens", "12", "--json"))
    assert value["prompt_token_ids"] == expected.prompt_token_ids
    assert value["outputs"][0]["token_ids"] == expected.outputs[0].token_ids


def test_same_seed_gives_the_same_answers(capsys: Capture) -> None:
    def answers(seed: str) -> list[str]:
        flags = ["--temperature", "1", "--n", "3", "--max-tokens", "8", "--json", "--seed", seed]
        value = json.loads(succeed(capsys, "generate", MODEL, "--raw", "--prompt", PROMPT, *flags))
        return [answer["text"] for answer in value["outputs"]]

    first = answers("1")
    assert len(set(first)) == 3
    assert answers("1") == first
    assert answers("2") != first


def test_n_answers_stand_apart_in_plain_text(capsys: Capture) -> None:
    flags = ["--temperature", "1", "--n", "2", "--seed", "1", "--max-tokens", "3"]
    value = json.loads(succeed(capsys, "generate", MODEL, "--raw", "--prompt", PROMPT, *flags, "--json"))
    out = succeed(capsys, "generate", MODEL, "--raw", "--prompt", PROMPT, *flags)
    assert out == "\n\n".join(a["text"].rstrip("\n") for a in value["outputs"]) + "\n"


def test_stop_strings_end_the_answer(llm: LLM, capsys: Capture) -> None:
    text = llm.generate(PROMPT, GREEDY)[0].outputs[0].text
    stops = [text[3:5], text[8:10]]
    flags = ["--max-tokens", "12", "--stop", stops[1], "--stop", stops[0]]
    out = succeed(capsys, "generate", MODEL, "--raw", "--prompt", PROMPT, *flags)
    assert out == text[: text.index(stops[0])] + "\n"


def test_default_max_tokens_is_256_or_what_the_context_leaves(tmp_path: Path, capsys: Capture) -> None:
    long = copy_model(tmp_path / "long", max_position_embeddings=512)
    for model, expected in ((MODEL, None), (str(long), 256)):
        flags = ["--prompt", PROMPT, "--ignore-eos", "--json"]
        value = json.loads(succeed(capsys, "generate", model, *flags))
        num_output = len(value["outputs"][0]["token_ids"])
        assert num_output == (expected or 256 - len(value["prompt_token_ids"]))


def test_a_damaged_answer_ends_with_its_reason_and_code_1(tmp_path: Path, capsys: Capture) -> None:
    model = copy_model(tmp_path / "nan")
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"] = np.full_like(tensors["model.norm.weight"], np.nan)
    save_file(tensors, model / "model.safetensors")
    assert "logits are NaN" in fail(capsys, 1, "generate", str(model), "--prompt", "a")
    assert run(["generate", str(model), "--prompt", "a", "--json"]) == 1
    out, err = capsys.readouterr()
    assert json.loads(out)["outputs"][0]["finish_reason"] == "error"
    assert err.startswith("Error: prompt 1: ")


def test_a_prompt_is_a_message_unless_it_has_been_through_the_template(llm: LLM, capsys: Capture) -> None:
    message = [{"role": "user", "content": PROMPT}]
    (chat,), (raw,) = llm.chat(message, GREEDY), llm.generate(PROMPT, GREEDY)
    assert chat.outputs[0].text != raw.outputs[0].text
    limit = ("--max-tokens", str(GREEDY.max_tokens))
    for flags in ([], ["--chat"]):
        out = succeed(capsys, "generate", MODEL, "--prompt", PROMPT, *flags, *limit)
        assert out.rstrip("\n") == chat.outputs[0].text.rstrip("\n")
    out = succeed(capsys, "generate", MODEL, "--prompt", llm.render(message), *limit)
    assert out.rstrip("\n") == chat.outputs[0].text.rstrip("\n")
    out = succeed(capsys, "generate", MODEL, "--raw", "--prompt", PROMPT, *limit)
    assert out.rstrip("\n") == raw.outputs[0].text.rstrip("\n")


# --- mistakes


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (
            ["genrate"],
            "unknown command 'genrate'; there are: serve, run-batch, generate, chat, inspect, plan, bench, demo",
        ),
        (["--bogus"], "--bogus"),
        (["generate", MODEL, "--raw", "--prompt", "a", "--bogus"], "--bogus"),
        (["generate", MODEL], "no prompt: give --prompt TEXT, --prompt-file FILE, or - for standard input"),
        (["generate", MODEL, "--raw", "b", "--prompt", "a"], "one MODEL at most, found 2"),
        (["generate", MODEL, "--raw", "--prompt", ""], "the prompt is empty"),
        (["generate", MODEL, "--raw", "--prompt", "x" * 300], "the prompt has 300 tokens; with max_model_len=256"),
        (
            ["generate", MODEL, "--raw", "--prompt", "a", "--max-tokens", "256"],
            "max_tokens is 256 and the prompt has 1 tokens",
        ),
        (
            ["generate", MODEL, "--raw", "--prompt", "a", "--temperature", "x"],
            "'--temperature': 'x' is not a valid float",
        ),
        (["generate", MODEL, "--raw", "--prompt", "a", "--temperature", "nan"], "temperature must be a finite number"),
        (
            ["generate", MODEL, "--raw", "--prompt", "a", "--temperature=-1"],
            "temperature must be a finite number of at least 0",
        ),
        (
            ["generate", MODEL, "--raw", "--prompt", "a", "--top-p", "1.5"],
            "top_p must be a finite number above 0 and at most 1",
        ),
        (
            ["generate", MODEL, "--raw", "--prompt", "a", "--top-k", "-2"],
            "top_k must be an integer of at least -1, found -2",
        ),
        (["generate", MODEL, "--raw", "--prompt", "a", "--seed", str(2**70)], "seed must be an integer"),
        (["generate", MODEL, "--raw", "--prompt", "a", "--stop", ""], "stop must be"),
        (["generate", MODEL, "--raw", "--prompt", "a", "--n", "2"], "n must be 1 when temperature is 0"),
        (["generate", MODEL, "--raw", "--prompt", "a", "--logprobs", "2"], "--logprobs needs --json"),
        (["generate", MODEL, "--raw", "--prompt", "a", "--json", "--logprobs", "30"], "logprobs must be at most 20"),
        (["generate", MODEL, "--raw", "--prompt", "a", "--system", "s"], "--system contradicts --raw"),
        (
            ["generate", MODEL, "--raw", "--prompt", "a", "--chat-template", "{{ x }}"],
            "--chat-template contradicts --raw",
        ),
        (
            ["generate", MODEL, "--raw", "--prompt-file", "/no/such"],
            "--prompt-file /no/such: cannot be read: No such file",
        ),
        (["generate", MODEL, "--raw", "--prompt-file", f"{MODEL}/model.safetensors"], "is not UTF-8 text: byte 0x"),
        (
            ["generate", MODEL, "--raw", "--prompt", "a", "--max-model-len", "1x"],
            "'--max-model-len': '1x' is not a number",
        ),
        (
            ["generate", MODEL, "--raw", "--prompt", "a", "--max-model-len", "1k"],
            "max_model_len is 1000, the model's context",
        ),
        (
            ["generate", MODEL, "--raw", "--prompt", "a", "--kv-cache-memory-bytes", "4X"],
            "'4X' is not a number of bytes",
        ),
        (
            ["generate", MODEL, "--raw", "--prompt", "a", "--threads", "0"],
            "threads is 0, must be an integer of at least 1",
        ),
        (
            ["generate", MODEL, "--raw", "--prompt", "a", "--load-format", "gguf"],
            "load_format is 'gguf', must be one of",
        ),
        (["generate", MODEL, "--raw", "--prompt", "a", "--revision", "v1"], "revision is 'v1', but"),
        (["chat", MODEL, "--top-p", "0"], "top_p must be"),
        (["chat", MODEL, "--n", "2"], "--n"),
        (["demo", MODEL, "--max-tokens", "-3"], "max_tokens must be an integer of at least 0, found -3"),
        (["demo", MODEL, "--max-model-len", "64"], "with max_model_len=64"),
    ],
)
def test_wrong_usage_is_one_line_and_code_2(args: list[str], expected: str, capsys: Capture) -> None:
    if args[0] == "demo" and "--max-model-len" in args:  # the start-up line is out by then
        assert run(args) == 2
        assert expected in capsys.readouterr().err
        return
    assert expected in fail(capsys, 2, *args)


def test_prompt_that_is_not_utf8_is_refused(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    type_in(monkeypatch, b"caf\xe9")
    error = fail(capsys, 2, "generate", MODEL, "--raw", "-")
    assert "the prompt from standard input is not UTF-8 text: byte 0xe9 at 3" in error


def break_config(model: Path, **changes: Any) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, **changes}))


def shard(model: Path) -> None:
    """Two shards and their index in place of the one file."""
    tensors = load_file(model / "model.safetensors")
    names = sorted(tensors)
    parts = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, members in parts.items():
        save_file({name: tensors[name] for name in members}, model / file)
    weight_map = {name: file for file, members in parts.items() for name in members}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (model / "model.safetensors").unlink()


def lose_shard(model: Path) -> None:
    shard(model)
    (model / "b.safetensors").unlink()


def truncate_shard(model: Path) -> None:
    shard(model)
    path = model / "b.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


BROKEN: dict[str, tuple[Callable[[Path], object], int, list[str]]] = {
    "config contradicts the weights": (lambda m: break_config(m, intermediate_size=96), 1, ["gate_proj", "96"]),
    "missing shard": (lose_shard, 1, ["b.safetensors", "is missing"]),
    "truncated shard": (truncate_shard, 1, ["b.safetensors"]),
    "unknown architecture": (lambda m: break_config(m, architectures=["FooModel"]), 2, ["'FooModel'", "LlamaFor"]),
    "unknown rope type": (
        lambda m: break_config(m, rope_parameters={"rope_type": "spiral", "rope_theta": 1e4}),
        2,
        ["'spiral'", "llama3"],
    ),
    "unreadable tokenizer": (lambda m: (m / "tokenizer.json").write_text("{"), 1, ["tokenizer.json"]),
    "no tokenizer": (lambda m: (m / "tokenizer.json").unlink(), 1, ["tokenizer"]),
    "damaged config": (lambda m: (m / "config.json").write_text("{"), 1, ["config.json", "not valid JSON"]),
    "no config": (lambda m: (m / "config.json").unlink(), 1, ["it has no config.json"]),
    "no weights": (lambda m: (m / "model.safetensors").unlink(), 1, ["has no weights"]),
}


@pytest.mark.parametrize("damage", BROKEN)
def test_broken_checkpoint_is_one_line(damage: str, tmp_path: Path, capsys: Capture) -> None:
    model = copy_model(tmp_path / "model")
    spoil, code, parts = BROKEN[damage]
    spoil(model)
    error = fail(capsys, code, "generate", str(model), "--prompt", "a")
    assert all(part in error for part in parts), error


def test_what_is_no_checkpoint_is_one_line(tmp_path: Path, capsys: Capture) -> None:
    text, gguf = tmp_path / "notes.txt", tmp_path / "bad.gguf"
    text.write_text("hello")
    gguf.write_bytes(b"GGUF\x03\x00")
    for name, expected in (
        (str(text), "is not a checkpoint"),
        (str(gguf), "bad.gguf"),
        (str(tmp_path), "it has no config.json"),
        (str(tmp_path / "nowhere"), "no such file or directory"),
        ("some name", "'some name' is not a model: give a directory"),
    ):
        for command in (["generate", name, "--prompt", "a"], ["chat", name], ["inspect", name], ["demo", name]):
            assert expected in fail(capsys, 1, *command)


def test_error_message_of_several_lines_is_joined(tmp_path: Path, capsys: Capture) -> None:
    template = "{{ raise_exception('no\nsystem\nhere') }}"
    error = fail(capsys, 2, "generate", MODEL, "--chat", "--prompt", "a", "--chat-template", template)
    assert "no system here" in error
    cli.print_error("one\ntwo")
    assert capsys.readouterr().err == "Error: one two\n"


# --- chat


def converse(llm: LLM, *turns: str, system: str | None = None, max_tokens: int = 8) -> list[str]:
    """What LLM.chat answers, turn by turn."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    answers = []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        text = llm.chat(messages, SamplingParams(temperature=0, max_tokens=max_tokens))[0].outputs[0].text
        messages.append({"role": "assistant", "content": text})
        answers.append(text)
    return answers


def test_chat_answers_each_line_and_keeps_the_history(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    type_in(monkeypatch, "Hello\n\nHow are you?\n")
    answers = converse(llm, "Hello", "How are you?", system="Be kind.")
    assert succeed(capsys, "chat", MODEL, "--max-tokens", "8", "--system", "Be kind.") == "".join(
        f"{answer}\n" for answer in answers
    )


def test_chat_reset_forgets_all_but_the_system_message(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    type_in(monkeypatch, "Hello\n/reset\nHow are you?\n/help\n/nope\n/exit\nnever read\n")
    assert run(["chat", MODEL, "--max-tokens", "8", "--system", "Be kind."]) == 0
    out, err = capsys.readouterr()
    expected = [*converse(llm, "Hello", system="Be kind."), *converse(llm, "How are you?", system="Be kind.")]
    assert out == "".join(f"{answer}\n" for answer in expected)
    assert "The conversation starts over." in err
    assert chat.HELP in err
    assert "unknown command /nope" in err


def test_chat_that_outgrows_the_context_says_so(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    type_in(monkeypatch, "Hello\nHow are you?\n")
    assert run(["chat", MODEL, "--max-tokens", "8", "--max-model-len", "48"]) == 2
    assert re.search(r"Error: the prompt has \d+ tokens; with max_model_len=48", capsys.readouterr().err)


def test_chat_takes_the_model_s_recommendation_and_is_greedy_without_one(tmp_path: Path, llm: LLM) -> None:
    assert chat.chat_params(llm, {"top_k": 5}) == SamplingParams(temperature=0, max_tokens=None, top_k=5)
    model = copy_model(tmp_path / "model")
    (model / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "top_p": 0.9, "max_new_tokens": 9}))
    with LLM(model) as other:
        found = chat.chat_params(other, {"top_p": 0.5})
    assert found == SamplingParams(temperature=0.6, top_p=0.5, max_tokens=None)


def test_ctrl_c_stops_the_answer_and_not_the_chat(tmp_path: Path) -> None:
    model = copy_model(tmp_path / "model", max_position_embeddings=8192)
    tensors = load_file(model / "model.safetensors")
    tensors["model.embed_tokens.weight"][1] = 0  # the end-of-text token is never the likeliest: 8,000 tokens follow
    save_file(tensors, model / "model.safetensors")
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with start("chat", str(model), "--max-model-len", "8K", **streams) as command:
        assert command.stdin is not None
        assert command.stdout is not None
        assert command.stderr is not None
        command.stdin.write(b"Hello\n")
        command.stdin.flush()
        answer = command.stdout.read(10)  # it has begun
        command.send_signal(signal.SIGINT)
        command.stdin.write(b"/help\n/exit\n")
        command.stdin.close()
        answer += command.stdout.read()
        assert chat.HELP.encode() in command.stderr.read()
    assert command.returncode == 0
    assert len(answer) < 8000


class Terminal:
    """The user's end of a pseudo terminal."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.unread = b""

    def read_until(self, expected: bytes, timeout_s: float = 20.0) -> bytes:
        """What is shown, up to and with the expected text."""
        deadline = time.monotonic() + timeout_s
        while expected not in self.unread:
            is_ready, _, _ = select.select([self.descriptor], [], [], max(0.0, deadline - time.monotonic()))
            assert is_ready, f"no {expected!r} in {self.unread!r}"
            self.unread += os.read(self.descriptor, 1000)
        end = self.unread.index(expected) + len(expected)
        shown, self.unread = self.unread[:end], self.unread[end:]
        return shown


def test_chat_in_a_terminal_greets_hints_at_ctrl_c_and_leaves_at_the_second() -> None:
    parent, child = pty.openpty()
    command = start("chat", MODEL, "--max-tokens", "4", stdin=child, stdout=child, stderr=child)
    try:
        user = Terminal(parent)
        assert b"100%" in user.read_until(b"context of 256 tokens. /help shows the commands.")
        user.read_until(b"> ")
        os.write(parent, b"Hello\n")
        user.read_until(b"[ended after 4 tokens: --max-tokens]")
        user.read_until(b"> ")
        time.sleep(0.3)  # readline misses a signal that comes while it is setting up
        command.send_signal(signal.SIGINT)
        user.read_until(b"Ctrl-C once more")
        user.read_until(b"> ")
        time.sleep(0.3)
        command.send_signal(signal.SIGINT)
        assert command.wait(timeout=20) == 130
    finally:
        command.kill()
        command.wait()
        os.close(parent)
        os.close(child)


# --- demo


def test_demo_answers_eight_requests_and_counts_them(llm: LLM, capsys: Capture) -> None:
    out = succeed(capsys, "demo", MODEL)
    conversations = [
        [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}] for question in QUESTIONS
    ]
    outputs = llm.chat(conversations, SamplingParams(temperature=0, max_tokens=64))
    assert len(outputs) == 8
    for number, (question, output) in enumerate(zip(QUESTIONS, outputs, strict=True), 1):
        shown = "".join(line.removeprefix(f"[{number}]") for line in out.splitlines() if line.startswith(f"[{number}]"))
        assert squeeze(shown.removesuffix(" …")) == squeeze(f"Q: {question}{output.outputs[0].text}")
    num_prompt = sum(len(o.prompt_token_ids) for o in outputs)
    num_output = sum(len(o.outputs[0].token_ids) for o in outputs)
    num_blocks = sum(-(-(len(o.prompt_token_ids) + len(o.outputs[0].token_ids) - 1) // 16) for o in outputs)
    table = dict(re.split(r"  +", line, maxsplit=1) for line in out.splitlines()[-7:])
    assert table["requests"].startswith("8, answered in ")
    prompt = re.fullmatch(r"([\d,]+), (\d+) of them found in the prefix cache", table["prompt tokens"])
    assert prompt is not None
    assert int(prompt[1].replace(",", "")) == num_prompt
    num_shared_blocks, rest = divmod(int(prompt[2]), 16)
    assert num_shared_blocks > 0, "the beginning that they share is computed once"
    assert rest == 0
    assert table["output tokens"] == f"{num_output:,}"
    blocks = re.fullmatch(r"(\d+) at most of 2,048 \([\d.]+ %\), 16 tokens each", table["KV blocks"])
    assert blocks is not None
    assert 0 < int(blocks[1]) <= num_blocks - num_shared_blocks
    assert float(table["first token"].split()[0]) <= float(re.findall(r"[\d.]+", table["first token"])[1])


def squeeze(text: str) -> str:
    return "".join(text.split())
