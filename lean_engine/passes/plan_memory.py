"""plan_memory: lifetimes → offsets of every activation in one arena.

Values are placed in the order they are defined, each at the lowest offset that is free for its whole lifetime (first
fit over a linear scan). An output takes over an input's storage where the launch allows it and the input dies there.
Step inputs, parameters and caches live outside the arena. `check_plan` proves independently that no two live values
overlap; it runs whenever a plan is made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from lean_engine.errors import VerifyError
from lean_engine.ir.graph import Dims
from lean_engine.passes.lower import Launch, Lowered

ALIGNMENT = 64  # bytes: a cache line, and what vector loads want
Workspace = Callable[[Launch, Dims], int]  # bytes of scratch that a launch needs


@dataclass(frozen=True, slots=True)
class Slot:
    """A range of the arena and the launches during which it is held, first and last included."""

    offset: int  # bytes
    num_bytes: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Plan:
    dims: Dims  # the largest step the plan is for; smaller steps use the heads of its slots
    slots: dict[str, Slot]  # value name → its place
    workspaces: dict[int, Slot]  # launch index → its scratch
    arena_bytes: int


def plan_memory(lowered: Lowered, dims: Dims, workspace: Workspace) -> Plan:
    """Place every activation of a program whose symbolic dimensions are at most `dims`."""
    last_use = last_uses(lowered)
    owners: dict[str, str] = {}  # value → the value whose storage it has
    slots: dict[str, Slot] = {}
    workspaces: dict[int, Slot] = {}
    live: list[Slot] = []
    for index, launch in enumerate(lowered.launches):
        live = [slot for slot in live if slot.last >= index]
        num_bytes = workspace(launch, dims)
        outputs = []
        for position, value in enumerate(launch.outputs):
            if position in launch.aliases:
                continue
            taken = launch.inplace.get(position)
            source = launch.inputs[taken].name if taken is not None else None
            root = owners.get(source) if source is not None else None
            if root is not None and can_take_over(
                launch, index, source, value.type.num_bytes(dims), slots, root, last_use
            ):
                owners[value.name] = root
                old = slots[root]
                slots[root] = slots[value.name] = Slot(old.offset, old.num_bytes, old.first, last_use[value.name])
                live = [s for s in live if s.offset != old.offset] + [slots[root]]
            else:
                outputs.append(value)
        for value in outputs:
            slot = place(live, align(value.type.num_bytes(dims)), index, last_use[value.name])
            slots[value.name] = slot
            owners[value.name] = value.name
            live.append(slot)
        if num_bytes:
            workspaces[index] = place(live, align(num_bytes), index, index)
    arena_bytes = max((s.offset + s.num_bytes for s in (*slots.values(), *workspaces.values())), default=0)
    plan = Plan(dims, slots, workspaces, arena_bytes)
    check_plan(lowered, plan, workspace)
    return plan


def can_take_over(
    launch: Launch,
    index: int,
    source: str | None,
    num_bytes: int,
    slots: dict[str, Slot],
    root: str,
    last_use: dict[str, int],
) -> bool:
    """Whether the input dies at this launch, is read once by it, and is large enough."""
    reads = sum(v.name == source for v in launch.inputs)
    return reads == 1 and source is not None and last_use[source] == index and num_bytes <= slots[root].num_bytes


def last_uses(lowered: Lowered) -> dict[str, int]:
    """Value name → index of the last launch that touches it; outputs live past the end."""
    last: dict[str, int] = {}
    for index, launch in enumerate(lowered.launches):
        for value in (*launch.outputs, *launch.inputs):
            last[value.name] = index
    last.update((v.name, len(lowered.launches)) for v in lowered.outputs)
    return last


def place(live: list[Slot], num_bytes: int, first: int, last: int) -> Slot:
    """The lowest gap of num_bytes between the live slots."""
    offset = 0
    for slot in sorted(live, key=lambda s: s.offset):
        if slot.offset - offset >= num_bytes:
            break
        offset = max(offset, slot.offset + slot.num_bytes)
    return Slot(offset, num_bytes, first, last)


def align(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def check_plan(lowered: Lowered, plan: Plan, workspace: Workspace) -> None:
    """Replay the launches over an empty arena: whatever a launch writes must not be a value still to be read.

    Raises VerifyError naming the launch and both values. Shares no code with the planner's lifetimes.
    """
    holders: dict[str, tuple[int, int]] = {}  # live value → byte range
    num_readers = Counter(v.name for launch in lowered.launches for v in {*launch.inputs})  # launches still to come
    num_readers.update(v.name for v in lowered.outputs)
    for index, launch in enumerate(lowered.launches):
        num_readers.subtract(v.name for v in {*launch.inputs})
        for value in launch.inputs:
            if value.name in plan.slots and value.name not in holders:
                raise VerifyError(f"plan: {launch.kernel} #{index} reads {value.name}, which is not in the arena")
        written = {v.name: v.type.num_bytes(plan.dims) for i, v in enumerate(launch.outputs) if i not in launch.aliases}
        inplace = {launch.outputs[o].name: launch.inputs[i].name for o, i in launch.inplace.items()}
        still_read = {name for name in (*holders, *written) if num_readers[name]}
        check_launch(plan, launch, index, written, inplace, holders, still_read, workspace(launch, plan.dims))
        holders = {name: span for name, span in holders.items() if name in still_read}
        for name, num_bytes in written.items():
            holders[name] = (plan.slots[name].offset, plan.slots[name].offset + num_bytes)


def check_launch(
    plan: Plan,
    launch: Launch,
    index: int,
    written: dict[str, int],
    inplace: dict[str, str],
    holders: dict[str, tuple[int, int]],
    still_read: set[str],
    workspace_bytes: int,
) -> None:
    spans = {name: (plan.slots[name].offset, plan.slots[name].offset + size) for name, size in written.items()}
    if workspace_bytes:
        offset = plan.workspaces[index].offset
        spans["workspace"] = (offset, offset + workspace_bytes)
    reads = {v.name for v in launch.inputs}
    for name, (start, stop) in spans.items():
        if start % ALIGNMENT or stop > plan.arena_bytes:
            raise VerifyError(f"plan: {launch.kernel} #{index}: {name} at {start}:{stop} of {plan.arena_bytes} bytes")
        others = {**holders, **{n: s for n, s in spans.items() if n != name}}
        for other, (low, high) in others.items():
            is_needed = other in reads or other in still_read or other in spans
            is_taken_over = inplace.get(name) == other and other not in still_read and start == low
            if is_needed and not is_taken_over and start < high and low < stop:
                raise VerifyError(f"plan: {launch.kernel} #{index} writes {name} over {other}, which is still needed")
