"""`lean-engine run-batch`: one line out for each line in, in order, whatever the lines hold and however it ends."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from live_server import MODEL

from lean_engine import LLM, SamplingParams
from lean_engine.cli import run
from lean_engine.cli import run_batch as command_module
from lean_engine.cli.run_batch import OrderedWriter
from lean_engine.engine.core import Engine
from lean_engine.server.batch import BatchOutput, read_items, run_batch
from lean_engine.server.config import ServerConfig

Capture = pytest.CaptureFixture[str]
ENGINE = {"threads": 1, "kv_cache_memory_bytes": 8 * 2**20, "cpu_kernels": "numpy"}
FLAGS = ["--threads", "1", "--kv-cache-memory-bytes", "8MiB", "--cpu-kernels", "numpy"]
GREEDY = {"temperature": 0, "ignore_eos": True}


def completion(custom_id: str, prompt: str = "hello", **body: Any) -> dict[str, Any]:
    return {
        "custom_id": custom_id,
        "method": "POST",
        "url": "/v1/completions",
        "body": {"prompt": prompt, **GREEDY, "max_tokens": 8, **body},
    }


def chat(custom_id: str, content: str, **body: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": content}]
    line = completion(custom_id, **body) | {"url": "/v1/chat/completions"}
    del line["body"]["prompt"]
    return line | {"body": {"messages": messages, **line["body"]}}


def write(path: Path, lines: list[Any]) -> Path:
    """Strings stand as they are."""
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def read(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def batch(tmp_path: Path) -> Callable[..., tuple[int, list[Any]]]:
    """Runs lines; the exit code and what came out."""

    def go(lines: list[Any], *flags: str) -> tuple[int, list[Any]]:
        source, target = write(tmp_path / "in.jsonl", lines), tmp_path / "out.jsonl"
        code = run(["run-batch", str(MODEL), "-i", str(source), "-o", str(target), *FLAGS, *flags])
        assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]
        return code, read(target)

    return go


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(MODEL, **ENGINE) as made:
        yield made


def text_of(output: Any) -> str:
    choice = output["response"]["body"]["choices"][0]
    text: str = choice["text"] if "text" in choice else choice["message"]["content"]
    return text


def test_answers_are_those_of_the_library_in_the_order_of_the_input(
    batch: Callable[..., tuple[int, list[Any]]], llm: LLM, capsys: Capture
) -> None:
    lines = [
        completion("long", "hello world", max_tokens=60),
        chat("chat", "hi"),
        completion("short", "a", max_tokens=2),
    ]
    code, outputs = batch(lines)
    assert code == 0
    assert [output["custom_id"] for output in outputs] == ["long", "chat", "short"]
    params = [SamplingParams(**GREEDY, max_tokens=n) for n in (60, 2, 8)]
    expected = [output.outputs[0].text for output in llm.generate(["hello world", "a"], params[:2])]
    answered = llm.chat([{"role": "user", "content": "hi"}], params[2])[0].outputs[0].text
    assert [text_of(output) for output in outputs] == [expected[0], answered, expected[1]]
    assert [output["response"]["body"]["object"] for output in outputs] == [
        "text_completion", "chat.completion", "text_completion",
    ]  # fmt: skip
    for output in outputs:
        assert output["error"] is None
        assert output["response"]["status_code"] == 200
        assert output["id"].startswith("batch_req_")
        assert output["response"]["request_id"] in output["response"]["body"]["id"]
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("3 lines, 70 tokens in ")
    assert len({output["id"] for output in outputs}) == 3


@pytest.mark.parametrize(
    ("line", "custom_id", "param", "message"),
    [
        ("garbage", None, None, "line 2: the line is not JSON"),
        ('{"custom_id": "x", "method"', None, None, "line 2: the line is not JSON"),
        ("[]", None, None, "line 2: the line: expected object, got array"),
        ('{"custom_id": "x", "body": ' + "[" * 100_000, None, None, "line 2: the line is"),
        ('{"custom_id": "x", "method": "POST", "url": "/v1/completions"}', "x", "body", "line 2: body is missing"),
        (completion("x") | {"custom_id": ""}, "", "custom_id", "line 2: custom_id is empty"),
        (completion("x") | {"custom_id": 5}, None, "custom_id", "line 2: custom_id: expected str, got int"),
        (completion("first"), "first", "custom_id", "line 2: custom_id 'first' stands in line 1 already"),
        (completion("x") | {"method": "GET"}, "x", "method", "line 2: method is 'GET', must be 'POST'"),
        (
            completion("x") | {"url": "/v1/embeddings"}, "x", "url",
            "line 2: url is '/v1/embeddings', must be one of: /v1/chat/completions, /v1/completions",
        ),
        (completion("x") | {"extra": 1}, "x", "extra", "line 2: extra is not a field that is known here"),
        (completion("x", stream=True), "x", "body.stream", "line 2: body.stream is true; a batch has no streams"),
    ],
)  # fmt: skip
def test_a_line_that_is_no_request_names_its_number(
    line: Any, custom_id: str | None, param: str | None, message: str
) -> None:
    text = line if isinstance(line, str) else json.dumps(line)
    first, item, last = read_items(f"{json.dumps(completion('first'))}\n{text}\n{json.dumps(completion('z'))}".encode())
    assert first.error is last.error is None
    assert (item.number, item.custom_id) == (2, custom_id)
    assert item.error is not None
    assert item.error.param == param
    assert f"line {item.number}: {item.error}".startswith(message)


def test_lines_are_numbered_with_empty_ones_and_line_ends_of_windows_and_a_byte_order_mark() -> None:
    text = json.dumps(completion("a")) + "\r\n\r\n   \r\n" + json.dumps(completion("b"))
    items = read_items(b"\xef\xbb\xbf" + text.encode())
    assert [(item.number, item.custom_id, item.error) for item in items] == [(1, "a", None), (4, "b", None)]


def test_wrong_lines_and_refused_requests_leave_the_others_alone(
    batch: Callable[..., tuple[int, list[Any]]], capsys: Capture
) -> None:
    lines = [
        completion("good"),
        "nonsense",
        completion("negative", max_tokens=-1),
        completion("elsewhere", model="other"),
        completion("long", "word " * 500),
        completion("unknown", wishes=3),
        completion("no body") | {"body": [1]},
        chat("last", "hi"),
    ]
    code, outputs = batch(lines)
    assert code == 1
    assert [output["custom_id"] for output in outputs] == [
        "good", None, "negative", "elsewhere", "long", "unknown", "no body", "last",
    ]  # fmt: skip
    assert [output["response"] and output["response"]["status_code"] for output in outputs] == [
        200, None, 400, 404, 400, 400, 400, 200,
    ]  # fmt: skip
    codes = [output["error"] and output["error"]["code"] for output in outputs]
    assert codes == [None, "invalid_line"] + ["invalid_request"] * 5 + [None]
    for number, output in enumerate(outputs, 1):
        if output["error"] is not None:
            assert output["error"]["line"] == number
            assert output["error"]["message"].startswith(f"line {number}: ")
    assert outputs[2]["response"]["body"]["error"]["param"] == outputs[2]["error"]["param"] == "max_tokens"
    assert "8 lines, 6 with an error, 16 tokens in " in capsys.readouterr().err


def test_names_and_defaults_of_the_server_count(batch: Callable[..., tuple[int, list[Any]]]) -> None:
    line = completion("a", model="mine")
    del line["body"]["max_tokens"]
    code, (output,) = batch([line], "--served-model-name", "mine", "--override-generation-config", '{"max_tokens": 5}')
    assert code == 0
    assert output["response"]["body"]["model"] == "mine"
    assert output["response"]["body"]["usage"]["completion_tokens"] == 5


def test_standard_streams(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    data = json.dumps(completion("a", max_tokens=3)).encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
    assert run(["run-batch", str(MODEL), "-i", "-", "-o", "-", *FLAGS]) == 0
    (output,) = [json.loads(line) for line in capfdbinary.readouterr().out.splitlines()]
    assert (output["custom_id"], output["response"]["body"]["usage"]["completion_tokens"]) == ("a", 3)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-i", "{dir}/none.jsonl", "-o", "{dir}/o"], "-i {dir}/none.jsonl: cannot be read: No such file or directory"),
        (["-i", "{dir}", "-o", "{dir}/o"], "-i {dir}: cannot be read: Is a directory"),
        (["-i", "{dir}/in.jsonl", "-o", "{dir}/no/o"], "-o {dir}/no/o: cannot be written: No such file or directory"),
        (["-i", "{dir}/in.jsonl", "-o", "{dir}"], "-o {dir}: cannot be written: Is a directory"),
        (["-i", "{dir}/in.jsonl", "-o", "{dir}/in.jsonl"], "-o {dir}/in.jsonl: the output would replace the input"),
        (["-i", "{dir}/empty.jsonl", "-o", "{dir}/o"], "-i {dir}/empty.jsonl: holds no request"),
        (["-i", "{dir}/in.jsonl", "-o", "{dir}/o", "--max-num-seqs", "0"], "max_num_seqs"),
        (["-i", "{dir}/in.jsonl"], "Missing option '-o'"),
    ],
)
def test_a_wrong_flag_is_one_line_and_no_model_is_loaded(
    tmp_path: Path, capsys: Capture, flags: list[str], message: str
) -> None:
    write(tmp_path / "in.jsonl", [completion("a")])
    (tmp_path / "empty.jsonl").write_text("\n  \n")
    before = sorted(tmp_path.iterdir())
    code = run(["run-batch", "no/such-model", *(flag.format(dir=tmp_path) for flag in flags)])
    out, err = capsys.readouterr()
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message.format(dir=tmp_path) in err
    assert sorted(tmp_path.iterdir()) == before


def test_a_model_that_cannot_be_loaded_leaves_an_earlier_output_alone(tmp_path: Path, capsys: Capture) -> None:
    source, target = write(tmp_path / "in.jsonl", [completion("a")]), tmp_path / "out.jsonl"
    target.write_text("earlier\n")
    assert run(["run-batch", str(tmp_path / "nothing"), "-i", str(source), "-o", str(target)]) == 1
    assert capsys.readouterr().err.startswith("Error: ")
    assert target.read_text() == "earlier\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_output_goes_through_links_and_into_pipes_and_replaces_neither(tmp_path: Path) -> None:
    source, real, link, pipe = (tmp_path / name for name in ("in.jsonl", "real.jsonl", "link.jsonl", "pipe"))
    write(source, [completion("a", max_tokens=1)])
    real.write_text("earlier\n")
    link.symlink_to(real)
    assert run(["run-batch", str(MODEL), "-i", str(source), "-o", str(link), *FLAGS]) == 0
    assert link.is_symlink()
    assert read(real)[0]["custom_id"] == "a"
    assert real.stat().st_mode & 0o777 == source.stat().st_mode & 0o777
    os.mkfifo(pipe)
    received: list[str] = []
    reader = threading.Thread(target=lambda: received.append(pipe.read_text()))
    reader.start()
    assert run(["run-batch", str(MODEL), "-i", str(source), "-o", str(pipe), *FLAGS]) == 0
    reader.join(10)
    assert json.loads(received[0])["custom_id"] == "a"
    assert pipe.is_fifo()


def test_ctrl_c_keeps_what_is_answered_and_marks_the_rest(
    batch: Callable[..., tuple[int, list[Any]]], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    put = OrderedWriter.put

    def put_and_press(writer: OrderedWriter, index: int, output: BatchOutput) -> None:
        put(writer, index, output)
        if output.custom_id == "short":
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(command_module.OrderedWriter, "put", put_and_press)
    lines = [completion(str(n), max_tokens=100) for n in range(300)]
    lines.insert(5, completion("short", max_tokens=1))
    code, outputs = batch(lines, "--max-num-seqs", "8")
    assert code == 130
    assert [output["custom_id"] for output in outputs] == [line["custom_id"] for line in lines]
    assert outputs[5]["response"]["status_code"] == 200
    rest = [output for output in outputs if output["error"] is not None]
    assert len(rest) > 280
    assert {output["error"]["code"] for output in rest} == {"batch_cancelled"}
    assert "(interrupted)" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_engine_that_fails_is_told_in_every_open_line(
    batch: Callable[..., tuple[int, list[Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    step = Engine.step
    num_steps = 0

    def step_until(engine: Engine) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps > 10:
            raise RuntimeError("the device is gone")
        return step(engine)

    monkeypatch.setattr(Engine, "step", step_until)
    code, outputs = batch([completion("short", max_tokens=2), *(completion(str(n), max_tokens=50) for n in range(3))])
    assert code == 1
    assert outputs[0]["response"]["status_code"] == 200
    for output in outputs[1:]:
        assert (output["response"]["status_code"], output["error"]["code"]) == (500, "server_error")
        assert "the device is gone" in output["error"]["message"]


def test_all_requests_are_in_the_engine_together() -> None:
    items = read_items("\n".join(json.dumps(completion(str(n), max_tokens=40 - 2 * n)) for n in range(12)).encode())
    order: list[int] = []
    done = asyncio.run(
        run_batch(lambda: LLM(MODEL, **ENGINE), ServerConfig(), items, lambda index, output: order.append(index))
    )
    assert sum(order[:6]) > sum(order[6:]), "the shortest answers, which stand last, come first"
    assert (done.num_failed, done.num_tokens) == (0, sum(40 - 2 * n for n in range(12)))
    assert done.has_ended


def test_writer_writes_each_line_when_all_before_it_are_there() -> None:
    file, told = io.BytesIO(), list[int]()
    writer = OrderedWriter(file, told.append)
    written = []
    for index in (2, 0, 3, 1):
        writer.put(index, BatchOutput(str(index), None, None, None))
        written.append([json.loads(line)["id"] for line in file.getvalue().splitlines()])
    assert written == [[], ["0"], ["0"], ["0", "1", "2", "3"]]
    assert told == [1, 2, 3, 4]
