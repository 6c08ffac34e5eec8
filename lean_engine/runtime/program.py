"""Program: a lowered model with its weights, arena and caches on a device; it runs steps of any size up to a limit.

Every launch is checked against the kernel table when the program is made. For each combination of sizes the launches
are bound to addresses and captured once; the most recent captures are kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from lean_engine.dtypes import numpy_dtype
from lean_engine.ir.graph import Dims, Value
from lean_engine.passes import Launch, Lowered, plan_memory
from lean_engine.runtime.device import Array, Device, LaunchArgs, Replay
from lean_engine.runtime.kernels import KERNELS

MAX_CAPTURES = 64


class Program:
    """A model that is ready to run.

    Args:
        max_dims: the largest T, B, R and M of a step; N and S of the KV cache.
        weights: parameter name → buffer.

    Attributes:
        inputs: step input name → int32 array of the largest size, in host memory. A step of smaller sizes reads the
            head of each; block_tables keeps its row length M.
    """

    def __init__(self, lowered: Lowered, device: Device, max_dims: Dims, weights: Mapping[str, Array]) -> None:
        self.lowered = lowered
        self.device = device
        self.max_dims = dict(max_dims)
        self.plan = plan_memory(lowered, max_dims, device.workspace_bytes)
        self.arena = device.allocate((self.plan.arena_bytes,), "uint8")
        self._inputs = device.make_inputs({v.name: v.type.concrete_shape(max_dims) for v in lowered.inputs})
        self.inputs = self._inputs.host
        self.caches = {v.name: self._allocate(v) for v in lowered.caches}
        self._fixed = {**weights, **self.caches}
        self._scalars = self._check_launches()  # per launch, in their declared types
        self._captures: OrderedDict[tuple[int, int, int], tuple[Replay, dict[str, Array]]] = OrderedDict()

    def _allocate(self, value: Value) -> Array:
        return self.device.allocate(value.type.concrete_shape(self.max_dims), value.type.dtype)

    def run(self, num_tokens: int, num_requests: int, num_rows: int) -> dict[str, Array]:
        """Run one step over what `inputs` hold.

        Args:
            num_tokens, num_requests, num_rows: T, B and R of this step.

        Returns:
            Output name → its array on the device (logits [R, V] float32), valid until the next run.
        """
        self._inputs.upload()
        key = (num_tokens, num_requests, num_rows)
        if key not in self._captures:
            self._captures[key] = self._capture({**self.max_dims, "T": num_tokens, "B": num_requests, "R": num_rows})
            if len(self._captures) > MAX_CAPTURES:
                self._captures.popitem(last=False)
        self._captures.move_to_end(key)
        replay, outputs = self._captures[key]
        replay()
        return outputs

    def _capture(self, dims: Dims) -> tuple[Replay, dict[str, Array]]:
        arrays = self._arrays(dims)
        launches = [
            self._arguments(index, launch, arrays)
            for index, launch in enumerate(self.lowered.launches)
            if all(arrays[v.name].size for v in launch.outputs)  # no row is sampled: nothing to compute for R = 0
        ]
        return self.device.capture(launches), {v.name: arrays[v.name] for v in self.lowered.outputs}

    def _arrays(self, dims: Dims) -> dict[str, Array]:
        """Every value's array in a step of these sizes."""
        arrays = dict(self._fixed)
        for value in self.lowered.inputs:
            arrays[value.name] = self._inputs.device[value.name][: value.type.concrete_shape(dims)[0]]
        for launch in self.lowered.launches:
            for position, value in enumerate(launch.outputs):
                alias = launch.aliases.get(position)
                arrays[value.name] = self._slot(value, dims) if alias is None else arrays[launch.inputs[alias].name]
        return arrays

    def _check_launches(self) -> list[dict[str, Any]]:
        arrays = self._arrays(self.max_dims)
        return [
            KERNELS[launch.kernel].check(
                [arrays[v.name] for v in launch.inputs],
                [arrays[v.name] for v in launch.outputs],
                launch.scalars,
                self.device.compute_dtype,
            )
            for launch in self.lowered.launches
        ]

    def _slot(self, value: Value, dims: Dims) -> Array:
        slot = self.plan.slots[value.name]
        shape = value.type.concrete_shape(dims)
        raw = self.arena[slot.offset : slot.offset + value.type.num_bytes(dims)]
        return raw.view(numpy_dtype(value.type.dtype)).reshape(shape)

    def _arguments(self, index: int, launch: Launch, arrays: Mapping[str, Array]) -> LaunchArgs:
        inputs = [arrays[v.name] for v in launch.inputs]
        outputs = [arrays[v.name] for v in launch.outputs]
        slot = self.plan.workspaces.get(index)
        workspace = self.arena[slot.offset : slot.offset + slot.num_bytes] if slot else self.arena[:0]
        return LaunchArgs(launch.kernel, inputs, outputs, self._scalars[index], workspace)
