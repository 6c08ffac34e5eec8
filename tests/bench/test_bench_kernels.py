"""`lean-engine bench kernels`: a case for every kernel, its bytes and operations by hand, shares of the ceilings."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from tiny import directory, raw_config

from lean_engine import models
from lean_engine.bench import kernels
from lean_engine.bench.kernel_cases import Case, Cases, Step
from lean_engine.bench.kernels import Bench, Ceilings, KernelFigures, num_bytes
from lean_engine.cli import run
from lean_engine.runtime.cpu.device import CpuDevice
from lean_engine.runtime.kernels import KERNELS

MODEL = str(directory("qwen3"))
CONFIG = models.configure(raw_config("qwen3"))
STEP = Step(num_tokens=6, num_requests=2, context=20)
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("COLD_BYTES", 2**20), ("CEILING_BYTES", 2**16), ("CEILING_SIZE", 32), ("NUM_SAMPLES", 2)):
        monkeypatch.setattr(kernels, name, value)
    monkeypatch.setattr(kernels, "SAMPLE_SECONDS", 1e-4)
    monkeypatch.setattr(kernels, "NUM_WARMUPS", 2)


@pytest.fixture
def bench() -> Iterator[Bench]:
    device = CpuDevice(1)
    yield Bench(device, "float32")
    device.close()


def cases(kernel: str, step: Step = STEP) -> list[Case]:
    return [case for case in Cases(CONFIG, step, block_size=8).all() if case.kernel == kernel]


def test_every_kernel_has_a_case_that_runs(bench: Bench) -> None:
    assert {case.kernel for case in Cases(CONFIG, STEP, 8).all()} == set(KERNELS)
    for case in Cases(CONFIG, STEP, 8).all():
        found = bench.measure(case)
        assert found.seconds > 0
        assert found.num_bytes > 0
        assert found.weights == ("float32" if any(o.kind == "matrix" for o in case.inputs) else "")


def test_bytes_and_operations_by_hand(bench: Bench) -> None:
    hidden, vocab = CONFIG.hidden_size, CONFIG.vocab_size
    head = cases("gemm")[-1]
    assert head.flops == 2 * 2 * hidden * vocab  # the rows that are sampled
    assert bench.measure(head).num_bytes == 4 * (2 * hidden + hidden * vocab + 2 * vocab)
    add = cases("add")[0]
    assert bench.measure(add).num_bytes == 3 * 4 * 6 * hidden
    embedding = cases("embedding")[0]
    assert bench.measure(embedding).num_bytes == 4 * 6 + 2 * 4 * 6 * hidden
    write = cases("write_kv")[0]
    kv = CONFIG.num_kv_heads * CONFIG.head_dim
    assert bench.measure(write).num_bytes == pytest.approx(2 * 2 * 4 * 6 * kv + 4 * 6, abs=2)
    attention = cases("paged_attention")[0]
    q = CONFIG.num_q_heads * CONFIG.head_dim
    assert attention.flops == 4 * q * 2 * (18 + 19 + 20)
    tables = 4 * (2 * 3 + 3 + 2)
    assert bench.measure(attention).num_bytes == pytest.approx(4 * (2 * 6 * q + 2 * 2 * 20 * kv) + tables, abs=2)


def test_tokens_are_the_last_of_their_requests() -> None:
    requests, positions, slots = Cases(CONFIG, STEP, 8).at_end()
    assert requests.tolist() == [0, 0, 0, 1, 1, 1]
    assert positions.tolist() == [17, 18, 19] * 2
    assert slots.tolist() == [8 + 17, 8 + 18, 8 + 19, 32 + 17, 32 + 18, 32 + 19]  # blocks 1 to 3 and 4 to 6


def test_weights_are_cold_and_activations_are_not(bench: Bench) -> None:
    case = cases("gemm")[0]
    inputs = [bench.make(operand) for operand in case.inputs]
    copies = list(bench.copies(case, inputs, most=1e9))
    assert 1 + len(copies) == -(-(2**20) // inputs[1].nbytes)
    assert len({copy[1].ctypes.data for copy in copies}) == len(copies)
    assert all(copy[0] is inputs[0] for copy in copies)
    assert len(list(bench.copies(case, inputs, most=3.0))) == 2


def test_a_share_is_of_the_ceiling_that_binds() -> None:
    ceilings = Ceilings(bytes_per_second=100.0, flops_per_second=1000.0)
    slow = KernelFigures("add", "", 50, 10, seconds=1.0, weights="")
    assert (slow.share(ceilings), slow.is_memory_bound(ceilings)) == (0.5, True)
    product = KernelFigures("gemm", "", 50, 800, seconds=1.0, weights="")
    assert (product.share(ceilings), product.is_memory_bound(ceilings)) == (0.8, False)
    assert num_bytes(cases("silu")[0], [memoryview(bytes(8))], [memoryview(bytes(4))]) == 12


def test_the_table_and_the_json(capsys: Capture) -> None:
    args = ["bench", "kernels", MODEL, "--step", "2x2,8x1", "--context", "16", "--only", "gemm,silu"]
    args += ["--cpu-kernels", "numpy", "--threads", "2"]
    assert run(args) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("cpu, 2 threads; ceilings measured: ")
    assert lines[2].split()[:4] == ["kernel", "sizes", "weights", "MB"]
    assert len(lines) == 3 + 2 * 6
    assert all(line.endswith(" %") for line in lines[3:])
    assert run([*args, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {one["kernel"] for one in found["kernels"]} == {"gemm", "silu"}
    assert {"bytes", "flops", "seconds", "gb_per_second", "gflop_per_second", "bound", "share"} <= set(
        found["kernels"][0]
    )


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (["--step", "3x2"], "step is '3x2', must be TxB"),
        (["--step", "1"], "step is '1', must be TxB"),
        (["--step", "8x1", "--context", "4"], "more tokens per request than the context, 4"),
        (["--only", "gemv"], "only has 'gemv', must be of: embedding"),
    ],
)
def test_what_is_wrong_is_one_line(capsys: Capture, args: list[str], expected: str) -> None:
    assert run(["bench", "kernels", MODEL, *args]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert expected in err
