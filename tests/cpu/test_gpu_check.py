"""tools/gpu_check: the whole script on the emulated device, and that no part costs the others what they found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_cupy import FakeCubins, FakeCuda

from lean_engine.errors import ConfigError
from lean_engine.runtime.cuda.cupy_driver import CupyDriver
from lean_engine.runtime.cuda.emulator import load_emulator
from lean_engine.runtime.cuda.instances import kernel_calls
from lean_engine.runtime.device import LaunchArgs

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "gpu_check"
KERNEL_PARTS = ["kernels", "k-attention", "k-gemm", "k-moe", "k-sampler"]
PARTS = ["environment", "compile", *KERNEL_PARTS, "models", "ceilings", "decode-8b", "decode", "gemm", "attention",
         "sampler", "peers"]  # fmt: skip
ABSENT = ("gguf", "hypothesis", "llguidance", "msgspec", "prometheus_client", "starlette", "uvicorn", "click", "jinja2")
BLOCKER = f"""
import sys

class Blocker:
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in {ABSENT}:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Blocker)
"""
FAKE_PARTS = """
import os, sys, time
from gpu_check.context import CheckError, SkippedError

def fine(context):
    context.row("a row", number=1.5, nothing=None)

def raises(context):
    context.row("before", number=1)
    raise ValueError("no such thing")

def check_fails(context):
    raise CheckError("2 cases are wrong")

def skips(context):
    raise SkippedError("nothing to do")

def hangs(context):
    context.row("before", number=1)
    os.system("sleep 60 & echo $! > " + str(context.out / "sleeper"))
    time.sleep(60)

def dies(context):
    print("last words", flush=True)
    os._exit(3)

def tells_its_time(context):
    context.row("time", seconds=context.seconds_left())

def reads(context):
    context.row("read", rows=len(context.rows_of("fine")))
"""


@pytest.fixture(scope="module", autouse=True)
def _gpu_check_is_on_the_path() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SCRIPT.parent))
        yield


@pytest.fixture
def run_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[int, list[dict[str, Any]]]]:
    """Run functions of FAKE_PARTS as parts; the exit code and the records."""
    from gpu_check import main
    from gpu_check.parts import Part

    (tmp_path / "fake_parts.py").write_text(FAKE_PARTS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(main, "MIN_SECONDS", 0.5)

    def run(*names: str, seconds: float = 30, time_limit: float = 60, correctness: tuple[str, ...] = ()) -> Any:
        parts = [Part(name, f"fake_parts:{name}", seconds, name in correctness) for name in names]
        code = main.run_parts(parts, tmp_path, True, time_limit)
        return code, lines(tmp_path / "results.jsonl")

    return run


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def start(out: Path, *options: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}  # the script finds the checkout itself
    if path is not None:
        environment["PYTHONPATH"] = str(path)
    command = [sys.executable, str(SCRIPT), "--out", str(out), *options]
    return subprocess.run(command, cwd=out, env=environment, capture_output=True, text=True, check=False, timeout=300)


def test_every_part_runs_on_the_emulated_device(tmp_path: Path) -> None:
    try:
        load_emulator()
    except ConfigError as error:
        pytest.skip(str(error))
    (tmp_path / "sitecustomize.py").write_text(BLOCKER)
    result = start(tmp_path, "--emulated", path=tmp_path)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-2000:]
    records = lines(tmp_path / "results.jsonl")
    assert [record["part"] for record in records] == PARTS
    assert {record["part"]: record["status"] for record in records if record["status"] != "ok"} == {"peers": "skipped"}
    rows = {record["part"]: record["rows"] for record in records}
    assert all("error" not in row for of_part in rows.values() for row in of_part if row["title"] != "nvidia-smi")
    checked = [row for part in KERNEL_PARTS for row in rows[part]]
    assert {row["title"].split()[0] for row in checked} > {"rms_norm", "gemm", "paged_attention", "sampling"}
    assert all(row["cases"] > 0 for row in checked)
    assert {row["title"].split()[0] for row in rows["models"]} == {"llama", "qwen3-moe"}
    assert all(row["us"] > 0 for part in ("ceilings", "gemm", "sampler") for row in rows[part])
    assert {"graph_ms", "wall_ms", "idle_percent"} <= {name for row in rows["decode"] for name in row}
    assert {row["is_ahead"] for row in rows["decode"] if "is_ahead" in row} == {True, False}
    assert [row for row in rows["decode"] if "roofline" in row], "the bandwidth was not handed on"
    assert len(lines(tmp_path / "rows.jsonl")) == sum(map(len, rows.values()))
    for part in PARTS:
        assert f"\n{part} " in (tmp_path / "summary.txt").read_text()
        assert f"== {part}" in result.stdout
    assert "correctness: ok" in result.stdout


def test_part_that_fails_in_any_way_stops_no_other(run_parts: Any) -> None:
    code, records = run_parts("raises", "dies", "skips", "fine", "reads")
    assert code == 0, "none of them is about correctness"
    assert [record["status"] for record in records] == ["failed", "failed", "skipped", "ok", "ok"]
    raised, died = records[0], records[1]
    assert raised["rows"] == [{"title": "before", "number": 1}]
    assert (raised["error"]["type"], raised["error"]["message"]) == ("ValueError", "no such thing")
    assert raised["error"]["traceback"][-1] == "ValueError: no such thing"
    assert "ended with code 3" in died["error"]["message"]
    assert died["error"]["traceback"] == ["last words"]
    assert records[3]["rows"] == [{"title": "a row", "number": 1.5}]
    assert records[4]["rows"] == [{"title": "read", "rows": 1}]


def test_failed_check_is_in_the_exit_code(run_parts: Any, capsys: pytest.CaptureFixture[str]) -> None:
    code, records = run_parts("check_fails", "fine", correctness=("check_fails", "fine"))
    assert (code, records[0]["status"], records[1]["status"]) == (1, "failed", "ok")
    assert "correctness: NOT shown by check_fails" in capsys.readouterr().out


def test_time_limit_of_a_part_ends_it_and_what_it_started(run_parts: Any, tmp_path: Path) -> None:
    begin = time.monotonic()
    code, records = run_parts("hangs", "fine", seconds=1.5, time_limit=3.0, correctness=("hangs",))
    assert time.monotonic() - begin < 20
    assert (code, [record["status"] for record in records]) == (1, ["cut", "ok"])
    assert records[0]["rows"] == [{"title": "before", "number": 1}], "rows before the end are kept"
    sleeper = int((tmp_path / "sleeper").read_text())
    state = Path(f"/proc/{sleeper}/stat")
    assert not state.exists() or state.read_text().split(")")[1].split()[0] == "Z"


def test_time_limit_in_all_skips_what_is_left(run_parts: Any) -> None:
    code, records = run_parts("hangs", "fine", time_limit=1.5, correctness=("fine",))
    assert [record["status"] for record in records] == ["cut", "skipped"]
    assert code == 1, "a check that was never run shows nothing"


def test_a_part_may_use_what_those_before_it_left_and_nothing_of_those_behind_it(run_parts: Any) -> None:
    _, records = run_parts("fine", "tells_its_time", "hangs", "fine", seconds=4, time_limit=18)
    assert [record["status"] for record in records] == ["ok", "ok", "cut", "ok"]
    (row,) = records[1]["rows"]
    assert 4.5 < row["seconds"] < 10, "18 less two parts behind it and the part before"


def test_parts_have_time_for_all_of_them() -> None:
    from gpu_check.main import parse
    from gpu_check.parts import PARTS as PARTS_OF_THE_SCRIPT

    limit = parse(["--out", "there"]).time_limit
    assert sum(part.seconds for part in PARTS_OF_THE_SCRIPT) <= limit <= 540


def test_products_that_no_time_is_left_for_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from gpu_check import gemm
    from gpu_check.context import MARK, Context

    try:
        load_emulator()
    except ConfigError as error:
        pytest.skip(str(error))
    gemm.run(Context(tmp_path, is_emulated=True, deadline=time.monotonic() + gemm.KEPT_SECONDS - 1))
    (text,) = capsys.readouterr().out.split(MARK)[1:]
    row = json.loads(text)["row"]
    assert (row["title"], len(row["left_out"])) == ("no time was left", 8)


def test_unknown_parts_are_refused(tmp_path: Path) -> None:
    result = start(tmp_path, "--emulated", "--only", "gemm,gems")
    assert result.returncode == 1
    assert "--only has gems; the parts are environment, compile" in result.stderr


def test_parts_that_need_kernels_compile_them_first_on_a_gpu() -> None:
    from gpu_check.main import choose

    assert [part.name for part in choose("decode,peers", is_emulated=False)] == ["compile", "decode", "peers"]
    assert [part.name for part in choose("decode,peers", is_emulated=True)] == ["decode", "peers"]
    assert [part.name for part in choose("environment", is_emulated=False)] == ["environment"]


# -- the GPU's side of it over a fake CuPy


class Event:
    """The n-th record is at n milliseconds."""

    count = 0

    def record(self, stream: Any) -> None:
        Event.count += 1
        self.time = Event.count

    def synchronize(self) -> None:
        pass


@pytest.fixture
def driver(tmp_path: Path) -> CupyDriver:
    try:
        cuda = FakeCuda()
    except ConfigError as error:
        pytest.skip(str(error))
    timing: Any = SimpleNamespace(Event=Event, get_elapsed_time=lambda begin, end: end.time - begin.time)
    vars(cuda).update(vars(timing))
    cuda.runtime.memcpyDeviceToDevice = 3
    no_blas: Any = lambda workspace: SimpleNamespace(version=0, algorithms=lambda problem: [])  # noqa: E731
    return CupyDriver(FakeCubins(), tmp_path, no_blas, cuda)


def test_times_are_those_of_events_and_are_divided_among_launches(driver: CupyDriver) -> None:
    from gpu_check.timing import MAX_LAUNCHES, Stopwatch

    launched: list[int] = []
    us = Stopwatch(driver).median_us(lambda: launched.append(1), parts=2)
    times = (len(launched) - 4) // 5  # two to warm up, two to find out how many fill a round
    assert us == 1000 / times / 2
    assert 1 < times <= MAX_LAUNCHES


def test_graph_times_are_of_one_of_its_launches(driver: CupyDriver) -> None:
    from gpu_check.arrays import fetch, place
    from gpu_check.timing import Stopwatch

    a, b = place(driver, [[1.0, 2.0]], "float16"), place(driver, [[3.0, 4.0]], "float16")
    outs = [driver.allocate((1, 2), "float16") for _ in range(4)]
    calls = [call for out in outs for call in kernel_calls(LaunchArgs("add", [a, b], [out], {}, a))]
    driver.prepare(call.instance for call in calls)
    watch = Stopwatch(driver)
    us = watch.graph_us([partial(driver.launch, call) for call in calls])
    assert us == pytest.approx(watch.median_us(lambda: None) / 4)
    assert [fetch(driver, out).tolist() for out in outs] == [[[4, 6]]] * 4


def test_copies_noise_and_guards_work_on_device_arrays(driver: CupyDriver) -> None:
    from gpu_check.arrays import Guarded, fetch, noise, overwrite
    from gpu_check.wiring import copy_on_device

    source, target = noise(driver, 5000, "bfloat16"), driver.allocate((5000,), "bfloat16")
    copy_on_device(driver, source, target)
    assert fetch(driver, target).tobytes() == fetch(driver, source).tobytes()
    assert 0.9 < float(fetch(driver, target).astype("float64").std()) < 1.1
    guarded = Guarded(driver, (3, 2), "float32")
    overwrite(driver, guarded.array, [[1, 2], [3, 4], [5, 6]])
    assert guarded.content().tolist() == [[1, 2], [3, 4], [5, 6]]
    overwrite(driver, guarded._raw[:300], [0] * 300)
    with pytest.raises(AssertionError, match="wrote beside its output"):
        guarded.content()


def test_wrong_results_are_seen(driver: CupyDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    from gpu_check import kernels
    from gpu_check.kernel_cases import Case, normal

    case = Case("add", [normal(3, 19), normal(3, 19, seed=1)])
    assert kernels.count([("add", lambda: kernels.check_launch(driver, case, "float16"))]).wrong == []
    true_meaning = kernels.meaning
    monkeypatch.setattr(kernels, "meaning", lambda *args: [1.002 * array for array in true_meaning(*args)])
    (wrong,) = kernels.count([("add", lambda: kernels.check_launch(driver, case, "float16"))]).wrong
    assert "times the error that is allowed" in wrong


def test_bytes_of_a_decode_step_are_weights_once_and_all_keys_and_values() -> None:
    from gpu_check.shapes import shape_of

    shape = shape_of("llama-3.1-8b")
    assert shape.weight_bytes == pytest.approx(15.01e9, rel=1e-3)
    assert shape.kv_bytes_per_token == 128 * 1024
    assert shape.decode_bytes(128, 1024) == pytest.approx(32.19e9, rel=1e-3)
    assert shape_of("smollm2-135m").weight_bytes == pytest.approx(0.269e9, rel=2e-3)
    assert shape_of("llama-3.2-1b").weight_bytes == pytest.approx(2.471e9, rel=1e-3)


def test_torch_process_is_cut_and_its_rows_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from gpu_check import torch_process
    from gpu_check.context import MARK, Context

    script = tmp_path / "peer.py"
    script.write_text(
        "import json, sys, time\n"
        "for question in json.loads(sys.argv[2]):\n"
        f"    print({MARK!r} + json.dumps({{'title': sys.argv[1], 'n': question['n']}}), flush=True)\n"
        "print('a warning', flush=True)\n"
        "time.sleep(60)\n"
    )
    monkeypatch.setattr(torch_process, "SCRIPT", script)
    monkeypatch.setattr(torch_process, "MIN_SECONDS", 0.5)
    monkeypatch.setattr(torch_process.importlib.util, "find_spec", lambda name: name)
    context = Context(tmp_path, False, time.monotonic() + 60)
    assert torch_process.torch_rows(context, "gemm", [{"n": 1}, {"n": 2}], 1.5) == [
        {"title": "gemm", "n": 1},
        {"title": "gemm", "n": 2},
    ]
    last = json.loads(capsys.readouterr().out.strip().split("\n")[-1].partition(MARK)[2])["row"]
    assert last == {"title": "torch gemm", "error": "cut after 1.5 s", "said": ["a warning"]}


def test_ratios_are_of_the_same_model_and_batch() -> None:
    from gpu_check.peers import ratios

    own = [
        {"title": "m B=1 graph", "model": "m", "batch": 1, "tok_s": 300.0},
        {"title": "m B=1 engine", "model": "m", "batch": 1, "tok_s": 200.0},
        {"title": "m B=8 engine", "model": "m", "batch": 8, "tok_s": 9000.0},
    ]
    peer = {"model": "m", "batch": 1, "tok_s": 100.0, "graph_tok_s": 150.0}
    assert ratios(own, peer) == {"engine": 2.0, "graph": 2.0}
    assert ratios(own, {"model": "m", "batch": 32, "tok_s": 1.0}) == {"engine": None, "graph": None}
