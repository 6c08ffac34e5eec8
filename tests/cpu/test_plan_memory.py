"""plan_memory: no two values that are needed at once share a byte, and the arena is no larger than it must be.

`conflicts` is a checker of its own: it compares lifetimes, whereas plan_memory's check_plan replays the launches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from typing import Any, NamedTuple

import pytest
import tiny
from graph_writing import GraphWriter
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from random_graphs import graphs

from lean_engine.errors import VerifyError
from lean_engine.ir.graph import Dims, Graph
from lean_engine.passes import lower, optimize
from lean_engine.passes.lower import Launch, Lowered
from lean_engine.passes.plan_memory import ALIGNMENT, Plan, Slot, align, check_plan, plan_memory
from lean_engine.runtime.cpu.device import CpuDevice

DIMS = {"T": 33, "B": 5, "R": 7, "M": 8, "N": 40, "S": 4}
ALL_NAMES = [*tiny.NAMES, *tiny.EXTRA_NAMES]


def no_workspace(launch: Launch, dims: Dims) -> int:
    return 0


def some_workspace(launch: Launch, dims: Dims) -> int:
    """Odd numbers of bytes for every other kernel."""
    return 0 if len(launch.kernel) % 2 else 37 * len(launch.kernel) + 8 * dims["T"]


def a_line(launch: Launch, dims: Dims) -> int:
    return ALIGNMENT


# ---- the independent checker


class Piece(NamedTuple):
    """A byte range and the launches during which it must not change but by its own launch."""

    name: str
    start: int
    stop: int
    first: int  # the launch that writes it
    last: int  # the last launch that reads it


def pieces(lowered: Lowered, plan: Plan, workspace: Any) -> Iterator[Piece]:
    num_launches = len(lowered.launches)
    outputs = {v.name for v in lowered.outputs}
    for first, launch in enumerate(lowered.launches):
        for position, value in enumerate(launch.outputs):
            if position in launch.aliases:
                continue
            readers = [i for i in range(num_launches) if value in lowered.launches[i].inputs]
            last = num_launches if value.name in outputs else max(readers, default=first)
            start = plan.slots[value.name].offset
            yield Piece(value.name, start, start + value.type.num_bytes(plan.dims), first, last)
        if num_bytes := workspace(launch, plan.dims):
            start = plan.workspaces[first].offset
            yield Piece(f"workspace {first}", start, start + num_bytes, first, first)


def is_handed_over(old: Piece, new: Piece, lowered: Lowered) -> bool:
    """Whether `new` is written over `old` in place, by the last launch that reads `old`."""
    launch = lowered.launches[new.first]
    allowed = {(launch.inputs[i].name, launch.outputs[o].name) for o, i in launch.inplace.items()}
    return (old.name, new.name) in allowed and old.last == new.first and old.start == new.start and old.stop >= new.stop


def conflicts(lowered: Lowered, plan: Plan, workspace: Any) -> list[str]:
    """Pairs of pieces that share bytes while both are needed, and pieces out of place."""
    found = []
    all_pieces = list(pieces(lowered, plan, workspace))
    for piece in all_pieces:
        if piece.start % ALIGNMENT or piece.start < 0 or piece.stop > plan.arena_bytes:
            found.append(f"{piece.name} out of place")
    for a, b in combinations(all_pieces, 2):
        shares_bytes = a.start < b.stop and b.start < a.stop
        shares_time = a.first <= b.last and b.first <= a.last
        old, new = (a, b) if a.first < b.first else (b, a)
        if shares_bytes and shares_time and not is_handed_over(old, new, lowered):
            found.append(f"{a.name} and {b.name}")
    return found


def live_bytes(lowered: Lowered, dims: Dims, workspace: Any) -> int:
    """No plan is smaller: the most bytes that a launch's inputs, its outputs that take over nothing, its workspace and
    what later launches read need together."""
    defined = {v.name: i for i, launch in enumerate(lowered.launches) for v in launch.outputs}
    cached = {launch.outputs[o].name for launch in lowered.launches for o in launch.aliases}
    values = {v.name: v for launch in lowered.launches for v in launch.outputs if v.name not in cached}
    most = 0
    for index, launch in enumerate(lowered.launches):
        needed = {v.name for later in lowered.launches[index:] for v in later.inputs} | {
            v.name for v in lowered.outputs
        }
        live = [v for v in values.values() if v.name in needed and defined[v.name] < index]
        written = [v for o, v in enumerate(launch.outputs) if o not in launch.aliases and o not in launch.inplace]
        total = sum(align(v.type.num_bytes(dims)) for v in [*live, *written])
        most = max(most, total + align(workspace(launch, dims)))
    return most


# ---- every family, random programs


@pytest.mark.parametrize("workspace", [no_workspace, some_workspace])
@pytest.mark.parametrize("name", ALL_NAMES)
@pytest.mark.parametrize("graph_of", [tiny.plain, tiny.optimized])
def test_no_live_values_of_any_family_overlap(name: str, graph_of: Any, workspace: Any) -> None:
    lowered = lower(graph_of(name))
    plan = plan_memory(lowered, DIMS, workspace)
    assert conflicts(lowered, plan, workspace) == []


@pytest.mark.parametrize("name", ALL_NAMES)
def test_arena_of_any_family_is_close_to_what_is_live_at_once(name: str) -> None:
    lowered = lower(tiny.optimized(name))
    for workspace in (no_workspace, some_workspace):
        least = live_bytes(lowered, DIMS, workspace)
        assert least <= plan_memory(lowered, DIMS, workspace).arena_bytes <= 1.4 * least


@pytest.mark.parametrize("name", tiny.NAMES)
def test_plan_holds_with_the_cpu_devices_workspaces(name: str) -> None:
    device = CpuDevice(2)
    lowered = lower(tiny.optimized(name))
    plan = plan_memory(lowered, DIMS, device.workspace_bytes)
    assert conflicts(lowered, plan, device.workspace_bytes) == []
    device.close()


sizes = st.fixed_dictionaries({letter: st.integers(1, 40) for letter in "TBRMNS"})


@settings(max_examples=60, deadline=None)
@given(graphs(), sizes, st.booleans(), st.sampled_from([no_workspace, some_workspace]))
def test_no_live_values_of_a_random_program_overlap(graph: Graph, dims: Dims, fused: bool, workspace: Any) -> None:
    lowered = lower(optimize(graph) if fused else graph)
    plan = plan_memory(lowered, dims, workspace)
    assert conflicts(lowered, plan, workspace) == []
    assert plan.arena_bytes >= live_bytes(lowered, dims, workspace)


@settings(max_examples=150, deadline=None)
@given(graphs(), st.data())
def test_check_plan_finds_whatever_fault_is_planted_in_a_plan(graph: Graph, data: st.DataObject) -> None:
    lowered = lower(optimize(graph))
    plan = plan_memory(lowered, DIMS, some_workspace)
    assume(len(plan.slots) > 1)
    name = data.draw(st.sampled_from(sorted(plan.slots)))
    offset = data.draw(
        st.one_of(
            st.sampled_from(sorted({s.offset for s in (*plan.slots.values(), *plan.workspaces.values())})),
            st.integers(0, plan.arena_bytes // ALIGNMENT).map(lambda n: n * ALIGNMENT),
            st.integers(0, plan.arena_bytes),
        )
    )
    moved = replace(plan, slots={**plan.slots, name: replace(plan.slots[name], offset=offset)})
    if faults := conflicts(lowered, moved, some_workspace):
        with pytest.raises(VerifyError, match="plan: "):
            check_plan(lowered, moved, some_workspace)
        assert faults
    else:
        check_plan(lowered, moved, some_workspace)


# ---- small plans with their offsets written out


def program(w: GraphWriter, *outputs: Any) -> Lowered:
    return lower(w.graph(*outputs))


def offsets(plan: Plan) -> dict[str, int]:
    return {name: slot.offset for name, slot in plan.slots.items()}


EIGHT = {"T": 4, "B": 1, "R": 2, "M": 1, "N": 1, "S": 1}  # [T, 8] float32 = 128 bytes


def test_a_chain_needs_two_buffers() -> None:
    w = GraphWriter()
    x = w.x("x", 8)
    for name in "abcd":
        x = w.linear(name, x, 8)
    plan = plan_memory(program(w, x), EIGHT, no_workspace)
    assert offsets(plan) == {"a": 0, "b": 128, "c": 0, "d": 128}
    assert plan.arena_bytes == 256


def test_an_elementwise_chain_stays_in_one_buffer() -> None:
    w = GraphWriter()
    x = w.linear("a", w.x("x", 8), 8)
    y = w.op("softcap", "c", w.op("silu", "b", x), cap=2.0)
    plan = plan_memory(program(w, y), EIGHT, no_workspace)
    assert offsets(plan) == {"a": 0, "b": 0, "c": 0}
    assert plan.arena_bytes == 128


def test_a_value_that_is_read_again_is_not_written_over() -> None:
    w = GraphWriter()
    a = w.linear("a", w.x("x", 8), 8)
    b = w.op("silu", "b", a)
    plan = plan_memory(program(w, w.op("add", "c", b, a)), EIGHT, no_workspace)
    assert offsets(plan) == {"a": 0, "b": 128, "c": 128}  # c takes over b, its first input


def test_an_output_of_the_program_is_not_written_over() -> None:
    w = GraphWriter()
    a = w.linear("a", w.x("x", 8), 8)
    plan = plan_memory(program(w, a, w.op("silu", "b", a)), EIGHT, no_workspace)
    assert offsets(plan) == {"a": 0, "b": 128}


def test_an_input_of_the_program_is_not_written_over() -> None:
    w = GraphWriter()
    plan = plan_memory(program(w, w.op("silu", "b", w.x("x", 8))), EIGHT, no_workspace)
    assert offsets(plan) == {"b": 0}


def test_a_value_that_one_launch_reads_twice_is_not_written_over() -> None:
    w = GraphWriter()
    a = w.linear("a", w.x("x", 8), 8)
    plan = plan_memory(program(w, w.op("mul", "b", a, a)), EIGHT, no_workspace)
    assert offsets(plan) == {"a": 0, "b": 128}


def test_sum_and_norm_take_over_both_inputs() -> None:
    w = GraphWriter()
    a, b = w.linear("a", w.x("x", 8), 8), w.linear("b", w.x("x", 8), 8)
    y, total = w.ops("add_rms_norm", ("y", "total"), a, b, w.weight("w", 8), eps=1e-6, unit_offset=False)
    plan = plan_memory(program(w, y, total), EIGHT, no_workspace)
    assert offsets(plan) == {"a": 0, "b": 128, "y": 0, "total": 128}


def test_a_freed_gap_is_filled_by_what_fits() -> None:
    w = GraphWriter()
    x = w.x("x", 8)
    wide = w.linear("wide", x, 16)  # 0:256
    kept = w.linear("kept", x, 8)  # 256:384
    small = w.linear("small", wide, 4)  # 384:448, wide dies
    first = w.linear("first", x, 8)  # 0:128
    second = w.linear("second", x, 4)  # 128:192
    outputs = kept, small, first, second
    plan = plan_memory(program(w, *outputs), EIGHT, no_workspace)
    assert offsets(plan) == {"wide": 0, "kept": 256, "small": 384, "first": 0, "second": 128}


def test_sizes_are_rounded_up_to_cache_lines() -> None:
    w = GraphWriter()
    x = w.x("x", 3)
    a, b = w.linear("a", x, 3), w.linear("b", x, 3)
    plan = plan_memory(program(w, a, b), {**EIGHT, "T": 1}, no_workspace)
    assert offsets(plan) == {"a": 0, "b": 64}
    assert plan.arena_bytes == 128


def test_caches_and_their_new_versions_have_no_slot() -> None:
    w = GraphWriter()
    caches = w.cache("k", 1, 4), w.cache("v", 1, 4)
    k = w.linear("projected", w.x("x", 8), 4)
    written = w.ops("write_kv", ("k.w", "v.w"), k, k, w.input("slot_mapping", "T"), *caches)
    plan = plan_memory(program(w, w.attend("mixed", w.x("q", 8), written, 4)), EIGHT, no_workspace)
    assert set(plan.slots) == {"projected", "mixed"}


def test_workspace_is_placed_beside_everything_its_launch_touches() -> None:
    w = GraphWriter()
    a = w.linear("a", w.x("x", 8), 8)
    b = w.linear("b", a, 8)
    c = w.linear("c", b, 8)
    plan = plan_memory(program(w, c), EIGHT, lambda launch, dims: 100)
    assert {i: s.offset for i, s in plan.workspaces.items()} == {0: 128, 1: 256, 2: 256}
    assert plan.workspaces[0].num_bytes == 128
    assert plan.arena_bytes == 384


def test_slots_are_held_from_definition_to_last_use() -> None:
    w = GraphWriter()
    a = w.linear("a", w.x("x", 8), 8)
    b = w.linear("b", a, 8)
    plan = plan_memory(program(w, w.op("add", "c", a, b)), EIGHT, no_workspace)
    assert plan.slots["b"] == Slot(128, 128, 1, 2)
    assert plan.slots["c"] == Slot(0, 128, 0, 3)  # a's storage since launch 0, held past the end


def test_program_without_launches_needs_no_arena() -> None:
    w = GraphWriter()
    plan = plan_memory(program(w, w.x("x", 8)), EIGHT, no_workspace)
    assert (plan.slots, plan.arena_bytes) == ({}, 0)


# ---- planted faults, one by one


def chain() -> tuple[Lowered, Plan]:
    """a → b → c = a + b."""
    w = GraphWriter()
    a = w.linear("a", w.x("x", 8), 8)
    b = w.linear("b", a, 8)
    lowered = program(w, w.op("add", "c", a, b))
    return lowered, plan_memory(lowered, EIGHT, some_workspace)


def moved(plan: Plan, name: str, offset: int) -> Plan:
    return replace(plan, slots={**plan.slots, name: replace(plan.slots[name], offset=offset)})


def assert_refused(lowered: Lowered, plan: Plan, message: str, workspace: Any = some_workspace) -> None:
    with pytest.raises(VerifyError, match=message):
        check_plan(lowered, plan, workspace)


def test_output_over_a_value_still_needed_is_found() -> None:
    lowered, plan = chain()
    assert_refused(
        lowered, moved(plan, "b", plan.slots["a"].offset), "plan: gemm #1 writes b over a, which is still needed"
    )


def test_takeover_of_an_input_that_is_not_offered_is_found() -> None:
    lowered, plan = chain()
    over_second = moved(plan, "c", plan.slots["b"].offset)
    assert_refused(lowered, over_second, "plan: add #2 writes c over b, which is still needed")


def test_takeover_that_is_shifted_is_found() -> None:
    lowered, plan = chain()
    plan = replace(plan, arena_bytes=4096)
    spaced = moved(moved(plan, "b", 2048), "c", plan.slots["a"].offset + ALIGNMENT)
    assert_refused(lowered, spaced, "plan: add #2 writes c over a, which is still needed")


def test_takeover_of_a_value_with_a_later_reader_is_found() -> None:
    w = GraphWriter()
    a = w.linear("a", w.x("x", 8), 8)
    b = w.op("silu", "b", a)
    lowered = program(w, w.op("add", "c", b, a))
    plan = plan_memory(lowered, EIGHT, no_workspace)
    assert_refused(lowered, moved(plan, "b", 0), "plan: silu #1 writes b over a, which is still needed", no_workspace)


def test_workspace_over_an_input_is_found() -> None:
    lowered, _ = chain()
    plan = plan_memory(lowered, EIGHT, a_line)
    place = replace(plan.workspaces[1], offset=plan.slots["a"].offset)
    wrong = replace(plan, workspaces={**plan.workspaces, 1: place})
    assert_refused(lowered, wrong, "plan: gemm #1 writes workspace over a, which is still needed", a_line)


def test_workspace_over_the_output_of_its_launch_is_found() -> None:
    lowered, plan = chain()
    place = replace(plan.workspaces[0], offset=plan.slots["a"].offset)
    wrong = replace(plan, workspaces={**plan.workspaces, 0: place})
    assert_refused(lowered, wrong, "plan: gemm #0 writes (a over workspace|workspace over a), which is still needed")


def test_workspace_over_an_output_that_nobody_reads_is_found() -> None:
    w = GraphWriter()
    w.linear("dead", w.x("x", 8), 8)
    lowered = program(w, w.linear("kept", w.x("x", 8), 8))
    plan = plan_memory(lowered, EIGHT, a_line)
    wrong = replace(plan, workspaces={**plan.workspaces, 0: plan.slots["dead"]})
    assert_refused(lowered, wrong, "plan: gemm #0 writes (dead over workspace|workspace over dead)", a_line)


def test_misaligned_slot_is_found() -> None:
    lowered, plan = chain()
    assert_refused(lowered, moved(plan, "b", plan.slots["b"].offset + 4), r"plan: gemm #1: b at \d+:\d+ of \d+ bytes")


def test_slot_beyond_the_arena_is_found() -> None:
    lowered, plan = chain()
    assert_refused(lowered, moved(plan, "b", align(plan.arena_bytes)), r"plan: gemm #1: b at \d+:\d+ of \d+ bytes")


def test_read_of_a_value_that_is_not_written_yet_is_found() -> None:
    lowered, plan = chain()
    swapped = replace(lowered, launches=(lowered.launches[1], lowered.launches[0], lowered.launches[2]))
    assert_refused(swapped, plan, "plan: gemm #0 reads a, which is not in the arena")
