"""The launches of moe.cu: routing, and the experts' MLPs as five kernels over a workspace.

Grids follow from shapes alone: the tiles of rows by expert are listed on the device, as many as there can be, so that a
graph for a padded number of tokens serves whatever the router chooses.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from lean_engine.dtypes import DTYPES, numpy_dtype
from lean_engine.errors import LaunchError
from lean_engine.runtime.cuda.gemm_kernels import (
    ARCHITECTURES_WITHOUT_TENSOR_PATH,
    FEW_ROWS_WARPS,
    FEW_ROWS_WIDTH,
    ODD_ROWS,
    PLAIN,
    TENSOR_THREADS,
    few_rows_block,
    few_rows_columns,
    splits,
    tensor_shared_bytes,
)
from lean_engine.runtime.cuda.instances import (
    ACTIVATIONS,
    ARCHITECTURES_WITHOUT_BFLOAT16,
    REAL_DTYPES,
    WARP,
    Instance,
    KernelCall,
    ceil_div,
    i32,
    row_parts,
    vector_width,
)
from lean_engine.runtime.device import Array, LaunchArgs

SOURCE = "moe.cu"
ROUTE_ROWS = 4  # rows of a block, a warp each
EXPERTS_PER_LANE = (1, 4, 16)
MAX_TOP_K = 32
GROUP_THREADS = 256
TILE_WORDS = 4  # of ExpertTile
FEW_ROWS = (1, 4)
TENSOR_WEIGHTS = {8: 32, 16: 64, 32: 64, 64: 64}  # rows of a tile → weight rows
ALIGNMENT = 256  # bytes, of each part of the workspace


# ---- routing


def moe_route_call(launch: LaunchArgs, slots: Array | None = None) -> KernelCall:
    """The kernel table's moe_route.

    Args:
        slots: int32 [T], the step's slot mapping; rows with slot -1 are padding and get no expert: ids -1, weights 0.

    Raises:
        LaunchError: more experts, or more of them per token, than the kernel holds.
    """
    (logits,), (weights, ids) = launch.inputs, launch.outputs
    num_rows, num_experts = logits.shape
    top_k = int(launch.scalars["top_k"])
    per_lane = next((n for n in EXPERTS_PER_LANE if num_experts <= WARP * n), None)
    if per_lane is None:
        limit = WARP * EXPERTS_PER_LANE[-1]
        raise LaunchError(f"moe_route: {num_experts} experts, on a CUDA device at most {limit}")
    if top_k > MAX_TOP_K:
        raise LaunchError(f"moe_route: top_k is {top_k}, on a CUDA device at most {MAX_TOP_K}")
    args = (weights, ids, logits, slots, np.bool_(launch.scalars["normalize"]), *i32(num_rows, num_experts, top_k))
    grid, block = (ceil_div(num_rows, ROUTE_ROWS),), (WARP * ROUTE_ROWS,)
    return KernelCall(Instance(SOURCE, f"moe_route<{DTYPES[logits.dtype.name].cuda}, {per_lane}>"), grid, block, args)


# ---- experts


@dataclass(frozen=True, slots=True)
class ExpertTiles:
    """How rows are cut into tiles, and which kernels multiply them."""

    rows: int
    width: int  # elements of an access of few_rows_of_experts; 0: tensor cores

    def instance(self, dtype: str, activation: str) -> Instance:
        """activation: a functor of activation.cuh. The gated product gives the model's type, the plain one float32."""
        sizes = (self.width, self.rows) if self.width else (TENSOR_WEIGHTS[self.rows], self.rows)
        kernel = "few_rows_of_experts" if self.width else "rows_of_experts"
        types = (DTYPES[dtype].cuda, "float" if activation == PLAIN else DTYPES[dtype].cuda)
        return Instance(SOURCE, f"{kernel}<{', '.join([*types, *map(str, sizes), activation])}>")

    def columns(self, is_gated: bool) -> int:
        """Columns of a row of the grid, for a split of 1."""
        if self.width:
            return few_rows_columns(self.rows, "gated" if is_gated else None) * FEW_ROWS_WARPS
        return TENSOR_WEIGHTS[self.rows] // (2 if is_gated else 1)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a launch of moe_experts."""

    num_rows: int
    top_k: int
    num_experts: int
    hidden: int
    intermediate: int

    @property
    def num_pairs(self) -> int:
        return self.num_rows * self.top_k

    def max_tiles(self, rows: int) -> int:
        """The most tiles that any routing makes: a first one per expert, and one for every `rows` rows that remain."""
        num_groups = min(self.num_experts, self.num_pairs)
        return num_groups + (self.num_pairs - num_groups) // rows


def expert_tiles(sizes: Sizes, arch: str) -> ExpertTiles:
    """Tiles as wide as an expert can fill, or is likely to: twice the mean of its rows."""
    if sizes.hidden % FEW_ROWS_WIDTH or sizes.intermediate % FEW_ROWS_WIDTH:
        return ExpertTiles(ODD_ROWS, 1)
    few = FEW_ROWS[0] if sizes.num_rows == 1 else FEW_ROWS[1]
    if sizes.num_rows <= few or arch in ARCHITECTURES_WITHOUT_TENSOR_PATH:
        return ExpertTiles(few, FEW_ROWS_WIDTH)
    likely = min(sizes.num_rows, ceil_div(2 * sizes.num_pairs, sizes.num_experts))
    return ExpertTiles(next((n for n in TENSOR_WEIGHTS if likely <= n), max(TENSOR_WEIGHTS)), 0)


def sizes_of(shapes: Sequence[Sequence[int]]) -> Sizes:
    """From the shapes of moe_experts' inputs."""
    (num_rows, hidden), (_, top_k), _, (num_experts, _, _), (_, _, intermediate) = shapes
    return Sizes(num_rows, top_k, num_experts, hidden, intermediate)


def moe_workspace(sizes: Sizes, dtype: str, arch: str) -> dict[str, tuple[int, tuple[int, ...], str]]:
    """Part → offset in bytes, shape, dtype."""
    num_pairs, rows = sizes.num_pairs, expert_tiles(sizes, arch).rows
    parts = {
        "tiles": ((sizes.max_tiles(rows), TILE_WORDS), "int32"),
        "pairs": ((num_pairs,), "int32"),
        "hidden": ((num_pairs, sizes.intermediate), dtype),
        "results": ((num_pairs, sizes.hidden), "float32"),
    }
    placed, start = {}, 0
    for name, (shape, part_dtype) in parts.items():
        placed[name] = (start, shape, part_dtype)
        start += ceil_div(math.prod(shape) * DTYPES[part_dtype].num_bytes, ALIGNMENT) * ALIGNMENT
    return placed


def moe_workspace_bytes(sizes: Sizes, dtype: str, arch: str) -> int:
    """What launch.workspace must hold; it begins at a 16-byte boundary and may hold anything."""
    start, shape, part_dtype = moe_workspace(sizes, dtype, arch)["results"]
    return start + math.prod(shape) * DTYPES[part_dtype].num_bytes


def moe_experts_calls(launch: LaunchArgs, arch: str) -> list[KernelCall]:
    """The kernel table's moe_experts: group, gate and up with the activation, down, weighted sum.

    Raises:
        LaunchError: the workspace is too small, or there is no such activation.
    """
    x, weights, ids, gate_up, down = launch.inputs
    (out,) = launch.outputs
    sizes, dtype = sizes_of([array.shape for array in launch.inputs]), x.dtype.name
    if (activation := launch.scalars["activation"]) not in ACTIVATIONS:
        raise LaunchError(f"moe_experts: activation is {activation!r}, must be one of {', '.join(ACTIVATIONS)}")
    if len(launch.workspace) < (wanted := moe_workspace_bytes(sizes, dtype, arch)):
        raise LaunchError(f"moe_experts: the workspace has {len(launch.workspace)} bytes, must have {wanted}")
    part = carve(launch.workspace, moe_workspace(sizes, dtype, arch))
    tiles, shape = part["tiles"], expert_tiles(sizes, arch)
    group_args = (tiles, part["pairs"], ids, *i32(sizes.num_pairs, sizes.num_experts, shape.rows, len(tiles)))
    group = Instance(SOURCE, "group_by_expert")
    width = vector_width(out, sizes.hidden)
    combine_args = (out, part["results"], weights, ids, *i32(sizes.top_k, sizes.num_experts, sizes.hidden))
    combine = Instance(SOURCE, f"moe_combine<{DTYPES[dtype].cuda}, {width}>")
    return [
        KernelCall(group, (sizes.num_experts,), (GROUP_THREADS,), group_args, 4 * sizes.num_experts),
        product_call(shape, ACTIVATIONS[activation], (part["hidden"], x, gate_up), part, sizes.top_k),
        product_call(shape, PLAIN, (part["results"], part["hidden"], down), part, sizes.top_k),
        KernelCall(combine, *row_parts(sizes.num_rows, sizes.hidden // width), combine_args),
    ]


def carve(workspace: Array, parts: dict[str, tuple[int, tuple[int, ...], str]]) -> dict[str, Array]:
    arrays = {}
    for name, (start, shape, dtype) in parts.items():
        stop = start + math.prod(shape) * DTYPES[dtype].num_bytes
        arrays[name] = workspace[start:stop].view(numpy_dtype(dtype)).reshape(shape)
    return arrays


def product_call(
    shape: ExpertTiles, activation: str, arrays: tuple[Array, Array, Array], part: dict[str, Array], top_k: int
) -> KernelCall:
    """arrays: out, x, weight."""
    out, x, weight = arrays
    num_out, depth = out.shape[1], weight.shape[2]
    split = splits(depth, shape.width)[0] if shape.width else 1
    columns = shape.columns(activation != PLAIN) // split
    block = few_rows_block(split) if shape.width else (TENSOR_THREADS,)
    shared_bytes = 0 if shape.width else tensor_shared_bytes(TENSOR_WEIGHTS[shape.rows], shape.rows)
    grid = (ceil_div(num_out, columns), len(part["tiles"]))
    args = (*arrays, part["tiles"], part["pairs"], *i32(top_k, num_out, depth))
    return KernelCall(shape.instance(x.dtype.name, activation), grid, block, args, shared_bytes)


# ---- what can be needed


def moe_instances(arch: str, dtypes: Iterable[str] = REAL_DTYPES) -> list[Instance]:
    """Every instantiation on an architecture, sorted."""
    shapes = [ExpertTiles(ODD_ROWS, 1), *(ExpertTiles(rows, FEW_ROWS_WIDTH) for rows in FEW_ROWS)]
    if arch not in ARCHITECTURES_WITHOUT_TENSOR_PATH:
        shapes += [ExpertTiles(rows, 0) for rows in TENSOR_WEIGHTS]
    found = {Instance(SOURCE, "group_by_expert")}
    for dtype in dtypes:
        if dtype == "bfloat16" and arch in ARCHITECTURES_WITHOUT_BFLOAT16:
            continue
        name = DTYPES[dtype].cuda
        found |= {Instance(SOURCE, f"moe_route<{name}, {n}>") for n in EXPERTS_PER_LANE}
        found |= {Instance(SOURCE, f"moe_combine<{name}, {n}>") for n in (1, FEW_ROWS_WIDTH)}
        found |= {s.instance(dtype, activation) for s in shapes for activation in (*ACTIVATIONS.values(), PLAIN)}
    return sorted(found)
