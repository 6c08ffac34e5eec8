"""Program: a lowered model with its weights, arena and caches on a device; it runs steps of any size up to a limit.

Every launch is checked against the kernel table when the program is made. For each combination of sizes the launches
are bound to addresses and captured once; the most recent captures are kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from lean_engine.dtypes import numpy_dtype
from lean_engine.ir.graph import Dims, TensorType, Value
from lean_engine.passes import Launch, Lowered, plan_memory
from lean_engine.runtime.device import Array, Device, LaunchArgs, Operand, Replay
from lean_engine.runtime.kernels import KERNELS

MAX_CAPTURES = 64


class Program:
    """A model that is ready to run.

    Args:
        max_dims: the largest T, B, R and M of a step; N and S of the KV cache.
        weights: parameter name → buffer or matrix.

    Attributes:
        inputs: step input name → int32 array of the largest size, in host memory. A step of smaller sizes reads the
            head of each; block_tables keeps its row length M.
        input_sets: these inputs, and their twin where the device has one.
    """

    def __init__(self, lowered: Lowered, device: Device, max_dims: Dims, weights: Mapping[str, Operand]) -> None:
        self.lowered = lowered
        self.device = device
        self.max_dims = dict(max_dims)
        self.plan = plan_memory(lowered, max_dims, device.workspace_bytes)
        self.arena = device.allocate((self.plan.arena_bytes,), "uint8")
        self._inputs = device.make_inputs({v.name: v.type.concrete_shape(max_dims) for v in lowered.inputs})
        self.input_sets = [self._inputs] if self._inputs.twin is None else [self._inputs, self._inputs.twin]
        self.inputs = self._inputs.host
        self.caches = {v.name: self._allocate_cache(v) for v in lowered.caches}
        self._fixed: dict[str, Operand] = {**weights, **self.caches}
        self._places = self._share_places()
        self._aliases = self._cache_aliases()
        self._scalars = self._check_launches()  # per launch, in their declared types
        self._captures: OrderedDict[tuple[int, int, int], tuple[Replay, dict[str, Array]]] = OrderedDict()

    def _allocate_cache(self, value: Value) -> Array:
        return self.device.allocate(value.type.concrete_shape(self.max_dims), self.device.kv_cache_dtype)

    @property
    def device_inputs(self) -> Mapping[str, Array]:
        """Where launches read the inputs, each of the largest size."""
        return self._inputs.device

    def upload(self, input_set: int = 0, num_requests: int | None = None, num_blocks: int | None = None) -> None:
        """Make one of the input sets the next step's; of block_tables so many requests and blocks of each, or all."""
        b, m = self.max_dims["B"], self.max_dims["M"]
        self.input_sets[input_set].upload(
            b if num_requests is None else num_requests, m if num_blocks is None else num_blocks
        )

    def run(self, num_tokens: int, num_requests: int, num_rows: int) -> dict[str, Array]:
        """`upload` what `inputs` hold and `launch` a step of these sizes over it."""
        self.upload()
        return self.launch(num_tokens, num_requests, num_rows)

    def launch(self, num_tokens: int, num_requests: int, num_rows: int) -> dict[str, Array]:
        """Run one step over what was uploaded, or begin to.

        Args:
            num_tokens, num_requests, num_rows: T, B and R of this step.

        Returns:
            Output name → its array on the device (logits [R, V] float32), valid until the next run.
        """
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

    def _arrays(self, dims: Dims) -> dict[str, Any]:
        """Every value's array in a step of these sizes."""
        arrays: dict[str, Any] = dict(self._fixed)
        for value in self.lowered.inputs:
            arrays[value.name] = self._inputs.device[value.name][: value.type.concrete_shape(dims)[0]]
        for (offset, element_type), names in self._places.items():
            shape = element_type.concrete_shape(dims)
            raw = self.arena[offset : offset + element_type.num_bytes(dims)]
            arrays.update(dict.fromkeys(names, raw.view(numpy_dtype(element_type.dtype)).reshape(shape)))
        for name, cache in self._aliases.items():
            arrays[name] = arrays[cache]
        return arrays

    def _share_places(self) -> dict[tuple[int, TensorType], list[str]]:
        """Offset in the arena and type → the values that are there: those of one layer lie where another's did."""
        places: dict[tuple[int, TensorType], list[str]] = {}
        for launch in self.lowered.launches:
            for position, value in enumerate(launch.outputs):
                if position in launch.aliases:
                    continue
                places.setdefault((self.plan.slots[value.name].offset, value.type), []).append(value.name)
        return places

    def _cache_aliases(self) -> dict[str, str]:
        """Output → the cache that it is, updated."""
        aliases: dict[str, str] = {}
        for launch in self.lowered.launches:
            for position, taken in launch.aliases.items():
                cache = launch.inputs[taken].name
                aliases[launch.outputs[position].name] = aliases.get(cache, cache)
        return aliases

    def _check_launches(self) -> list[dict[str, Any]]:
        arrays = self._arrays(self.max_dims)
        return [
            KERNELS[launch.kernel].check(
                [arrays[v.name] for v in launch.inputs],
                [arrays[v.name] for v in launch.outputs],
                launch.scalars,
                self.device.compute_dtype,
                self.device.kv_cache_dtype,
                self.device.matrix_formats,
            )
            for launch in self.lowered.launches
        ]

    def _arguments(self, index: int, launch: Launch, arrays: Mapping[str, Any]) -> LaunchArgs:
        inputs = [arrays[v.name] for v in launch.inputs]
        outputs = [arrays[v.name] for v in launch.outputs]
        slot = self.plan.workspaces.get(index)
        workspace = self.arena[slot.offset : slot.offset + slot.num_bytes] if slot else self.arena[:0]
        return LaunchArgs(launch.kernel, inputs, outputs, self._scalars[index], workspace)
