"""Program on the CPU devices: the goldens of transformers, in one shot, in chunks, in batches, over poisoned memory."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from meaning import RandomTensors, Step, assert_close, run_exact, step_values
from native_running import cpu_device
from numpy.typing import NDArray
from random_graphs import graphs

from lean_engine import models, passes
from lean_engine.checkpoint import open_checkpoint
from lean_engine.errors import LaunchError
from lean_engine.ir.graph import Graph
from lean_engine.runtime import program as program_module
from lean_engine.runtime.device import LaunchArgs, Replay
from lean_engine.runtime.program import Program
from lean_engine.runtime.weights import load_weights

Array = NDArray[Any]
AnyDevice = Any  # CpuDevice or NativeCpuDevice
KERNELS = ("numpy", "native")
ALL_NAMES = [*tiny.NAMES, *tiny.EXTRA_NAMES]
TOLERANCE = 2e-4  # of the largest logit
MAX_BLOCKS = 12  # per request


@pytest.fixture(scope="module", params=KERNELS)
def device(request: pytest.FixtureRequest) -> Iterator[AnyDevice]:
    device = cpu_device(request.param)
    yield device
    device.close()


def load(device: AnyDevice, name: str, block_size: int = 4, config_file: str = "config.json") -> Program:
    """A tiny model for up to 80 tokens of 4 requests, its arena and caches full of NaN."""
    config = models.configure(tiny.raw_config(name, config_file))
    lowered = passes.lower(passes.optimize(models.build(config, "float32", tiny.MAX_POSITIONS)))
    weights = load_weights(lowered.parameters, open_checkpoint(str(tiny.directory(name))), device)
    dims = {"T": 80, "B": 4, "R": 80, "M": MAX_BLOCKS, "N": 4 * MAX_BLOCKS + 1, "S": block_size}
    program = Program(lowered, device, dims, weights)
    poison(program)
    return program


def poison(program: Program) -> None:
    program.arena[...] = 0xFF  # NaN as float32
    for cache in program.caches.values():
        cache[...] = np.nan


class Runner:
    """Requests on a program: each has a row of blocks dealt out in random order; block 0 belongs to nobody."""

    def __init__(self, program: Program, seed: int = 0) -> None:
        self.program = program
        d = program.max_dims
        self.block_size = d["S"]
        self.tables = 1 + np.random.default_rng(seed).permutation(d["N"] - 1).reshape(d["B"], d["M"])
        self.lengths = [0] * d["B"]

    def step(self, new: Sequence[tuple[int, Sequence[int]]], rows: Sequence[int] | None = None) -> Array:
        """Run new tokens of some requests; return the logits of `rows` of the step, or of all."""
        inputs = self.program.inputs
        ids, positions, slots, starts = [], [], [], [0]
        for row, (request, tokens) in enumerate(new):
            p = np.arange(self.lengths[request], self.lengths[request] + len(tokens))
            ids += list(tokens)
            positions += p.tolist()
            slots += (self.tables[request, p // self.block_size] * self.block_size + p % self.block_size).tolist()
            starts.append(len(ids))
            self.lengths[request] += len(tokens)
            inputs["block_tables"][row] = self.tables[request]
            inputs["seq_lens"][row] = self.lengths[request]
        sampled = list(range(len(ids))) if rows is None else list(rows)
        arrays = {"input_ids": ids, "positions": positions, "slot_mapping": slots, "cu_seqlens_q": starts}
        for name, values in {**arrays, "sample_rows": sampled}.items():
            inputs[name][: len(values)] = values
        return self.program.run(len(ids), len(new), len(sampled))["logits"].copy()


def golden(name: str, sequence: str) -> tuple[list[int], Array]:
    arrays = np.load(tiny.directory(name) / "golden.npz")
    return arrays[f"{sequence}_ids"].tolist(), arrays[f"{sequence}_logits"]


# ---- goldens


@pytest.mark.parametrize("name", ALL_NAMES)
def test_one_shot_and_chunks_give_the_logits_of_transformers(device: AnyDevice, name: str) -> None:
    ids, wanted = golden(name, "a")
    for block_size in (4, 16):
        program = load(device, name, block_size)
        for chunk in (len(ids), 1, 5, 8):
            poison(program)
            runner = Runner(program, seed=chunk)
            parts = [runner.step([(2, ids[i : i + chunk])]) for i in range(0, len(ids), chunk)]
            assert_close(np.concatenate(parts), wanted, TOLERANCE)


@pytest.mark.parametrize("name", ALL_NAMES)
def test_requests_of_different_lengths_in_one_batch(device: AnyDevice, name: str) -> None:
    sequences = {1: golden(name, "b0"), 0: golden(name, "b1"), 3: golden(name, "b2"), 2: golden(name, "a")}
    runner = Runner(load(device, name))
    whole = runner.step([(request, ids) for request, (ids, _) in sequences.items()])
    assert_close(whole, np.concatenate([logits for _, logits in sequences.values()]), TOLERANCE)


@pytest.mark.parametrize("name", ALL_NAMES)
def test_prompts_chunks_and_decodes_share_steps(device: AnyDevice, name: str) -> None:
    """Requests begin at different steps and advance by different numbers of tokens; sometimes one sits a step out."""
    sequences = [golden(name, key) for key in ("a", "b0", "b1", "b2")]
    strides = [(9, 1, 4), (1,), (0, 13, 1), (0, 0, 5, 1, 1)]
    runner, found = Runner(load(device, name)), [np.empty((0, sequences[0][1].shape[1]))] * 4
    for step in range(60):
        new = []
        for request, (ids, _) in enumerate(sequences):
            size = strides[request][min(step, len(strides[request]) - 1)]
            tokens = ids[runner.lengths[request] : runner.lengths[request] + size]
            new += [(request, tokens)] if tokens else []
        if not new:
            break
        logits, start = runner.step(new[::-1]), 0
        for request, tokens in new[::-1]:
            found[request] = np.concatenate([found[request], logits[start : start + len(tokens)]])
            start += len(tokens)
    for array, (_, wanted) in zip(found, sequences, strict=True):
        assert_close(array, wanted, TOLERANCE)


@pytest.mark.parametrize("name", tiny.NAMES)
def test_the_spelling_of_transformers_4_gives_the_same_logits(device: AnyDevice, name: str) -> None:
    ids, wanted = golden(name, "b1")
    assert_close(Runner(load(device, name, config_file="config.v4.json")).step([(0, ids)]), wanted, TOLERANCE)


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("name", ["gemma3", "qwen3-moe", "llama-bias-linear"])
def test_other_numbers_of_threads_give_the_same_logits(name: str, num_threads: int, kernels: str) -> None:
    device = cpu_device(kernels, num_threads)
    sequences = [golden(name, key) for key in ("a", "b0", "b1", "b2")]
    runner = Runner(load(device, name))
    found = runner.step([(request, ids) for request, (ids, _) in enumerate(sequences)])
    assert_close(found, np.concatenate([logits for _, logits in sequences]), TOLERANCE)
    device.close()


@pytest.mark.parametrize("name", ["llama3-rope", "gemma2", "mixtral"])
def test_plain_program_gives_the_same_logits_without_any_fusion(device: AnyDevice, name: str) -> None:
    lowered = passes.lower(tiny.plain(name))
    weights = load_weights(lowered.parameters, open_checkpoint(str(tiny.directory(name))), device)
    dims = {"T": 80, "B": 4, "R": 80, "M": MAX_BLOCKS, "N": 4 * MAX_BLOCKS + 1, "S": 4}
    program = Program(lowered, device, dims, weights)
    poison(program)
    ids, wanted = golden(name, "a")
    assert_close(Runner(program).step([(1, ids)]), wanted, TOLERANCE)


# ---- rows


def test_only_the_rows_asked_for_come_back_in_the_order_asked(device: AnyDevice) -> None:
    ids, wanted = golden("qwen2", "a")
    found = Runner(load(device, "qwen2")).step([(0, ids)], rows=[36, 0, 36, 5])
    assert_close(found, wanted[[36, 0, 36, 5]], TOLERANCE)


@pytest.mark.parametrize("name", ALL_NAMES)
def test_a_step_that_samples_nothing_fills_the_caches_all_the_same(device: AnyDevice, name: str) -> None:
    ids, wanted = golden(name, "a")
    runner = Runner(load(device, name))
    assert runner.step([(0, ids[:20])], rows=[]).shape == (0, wanted.shape[1])
    assert_close(runner.step([(0, ids[20:])]), wanted[20:], TOLERANCE)


def test_no_slot_but_those_of_the_step_is_written(device: AnyDevice) -> None:
    program = load(device, "gemma3")
    runner = Runner(program)
    runner.step([(0, golden("gemma3", "b1")[0]), (1, golden("gemma3", "b0")[0])])
    for cache in program.caches.values():
        written = np.logical_and.reduce(np.isfinite(cache), axis=(1, 3))  # [N, S]
        assert written.sum() == 21 + 5
        assert not written[0].any()


def test_inputs_of_a_larger_step_before_do_not_leak_into_a_smaller_one(device: AnyDevice) -> None:
    program = load(device, "mistral-swa")
    ids, wanted = golden("mistral-swa", "b0")
    runner = Runner(program)
    runner.step([(1, golden("mistral-swa", "a")[0]), (2, golden("mistral-swa", "b1")[0])])
    assert_close(runner.step([(0, ids)]), wanted, TOLERANCE)


# ---- captures and memory


def test_captures_are_kept_by_size_and_the_oldest_goes_first(
    device: AnyDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_module, "MAX_CAPTURES", 2)
    program = load(device, "qwen2")
    captured: list[int] = []
    capture = device.capture

    def count(launches: Sequence[LaunchArgs]) -> Replay:
        captured.append(len(launches))
        return capture(launches)

    monkeypatch.setattr(device, "capture", count)
    ids, wanted = golden("qwen2", "a")
    for size in (1, 2, 1, 3, 1, 2):  # 2 is the least recent when 3 comes
        assert_close(Runner(program).step([(0, ids[:size])]), wanted[:size], TOLERANCE)
    assert len(captured) == 4


def test_a_step_allocates_nothing_of_the_size_of_an_activation(device: AnyDevice) -> None:
    """A decode step of 4 requests: Python's objects, attention's schedule, and no growth from step to step."""
    program = load(device, "qwen3")
    runner = Runner(program)
    for key, request in (("a", 0), ("b0", 1), ("b1", 2), ("b2", 3)):
        runner.step([(request, golden("qwen3", key)[0])], rows=[])
    runner.step([(request, [7]) for request in range(4)])
    tracemalloc.start()

    def traced_after(num_steps: int) -> int:
        for _ in range(num_steps):
            program.run(4, 4, 4)
        return tracemalloc.get_traced_memory()[0]

    before = traced_after(40)
    tracemalloc.reset_peak()
    after = traced_after(20)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak - before < 3 * 4 * 512 * 4  # three times the logits
    assert after - before < 1024


def test_a_prefill_step_allocates_far_less_than_its_activations(device: AnyDevice) -> None:
    program = load(device, "llama-gqa-untied")
    runner = Runner(program)
    runner.step([(0, golden("llama-gqa-untied", "a")[0])], rows=[0])
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    program.run(37, 1, 1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak - before < 37 * 256 * 4  # the gate and up of one layer


def test_arena_is_what_the_plan_says_and_no_activation_lies_outside(device: AnyDevice) -> None:
    program = load(device, "phi3")
    assert program.arena.nbytes == program.plan.arena_bytes
    logits = Runner(program).program.run(3, 1, 3)["logits"]
    assert np.shares_memory(logits, program.arena)


def test_weights_of_a_wrong_type_are_refused_before_anything_runs(device: AnyDevice) -> None:
    lowered = passes.lower(tiny.optimized("qwen2"))
    weights = load_weights(lowered.parameters, open_checkpoint(str(tiny.directory("qwen2"))), device)
    weights["model.norm.weight"] = weights["model.norm.weight"].astype(np.float64)
    with pytest.raises(LaunchError, match="add_rms_norm: weight is float64, must be float32"):
        Program(lowered, device, {"T": 4, "B": 1, "R": 4, "M": 2, "N": 3, "S": 4}, weights)


# ---- random programs

# The CPU pads no step. From some number of rows on its threads share them.
STEPS = (Step(num_padded=0), Step(((3, 1),), num_padded=0), Step(((0, 66), (5, 1), (2, 9)), num_padded=0))


@pytest.mark.parametrize("kernels", KERNELS)
@settings(max_examples=60, deadline=None)
@given(graphs(), st.booleans(), st.integers(1, 3), st.sampled_from(STEPS))
def test_random_program_computes_what_the_oracle_says(
    kernels: str, graph: Graph, fused: bool, num_threads: int, step: Step
) -> None:
    """Finds a plan or a kernel that writes over what is still needed."""
    device = cpu_device(kernels, num_threads)
    lowered = passes.lower(passes.optimize(graph) if fused else graph)
    values = step_values(graph, step, seed=4)
    program = Program(
        lowered,
        device,
        {**step.dims, "T": 100, "R": 9},
        load_weights(lowered.parameters, RandomTensors(graph, 4), device),
    )
    program.arena[...] = 0xFF
    for name, array in {**program.inputs, **program.caches}.items():
        array[...] = 0
        array[tuple(slice(n) for n in values[name].shape)] = values[name]
    found = program.run(step.dims["T"], step.dims["B"], step.dims["R"])
    outputs, caches = run_exact(graph, values)
    for value, wanted in zip(graph.outputs, outputs, strict=True):
        assert_close(found[value.name], wanted, 2e-4)
    for name, cache in program.caches.items():
        assert_close(cache, caches[name], 2e-4)
    device.close()
