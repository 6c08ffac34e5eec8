"""Weight matrices packed for the compiled kernels, and kept in few bits where the checkpoint has few.

A Matrix is one or more parts below each other, each in a format of its own (cpu/matrix.h says how a format lies in
memory): query and key rows of a GGUF file may be Q4_K and the value rows merged with them Q6_K. A stack of experts has
the same parts for every expert. Packing runs on all threads, one tensor of the checkpoint at a time.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lean_engine.errors import CheckpointError
from lean_engine.ir.sources import Concat, Rows, Source, Stack, Tensor
from lean_engine.runtime.cpu.native.launches import NativeLaunch, Pointer, Precision, address
from lean_engine.runtime.cpu.native.library import Library, Native
from lean_engine.runtime.device import TensorStore

# In the order of cpu/matrix.h.
FORMATS = ("float32", "bfloat16", "float16", "int8", "q8_0", "q4_0", "q4_1", "q4_k", "q6_k")
FLOATS = FORMATS[:3]  # types of elements that a checkpoint's rows can be packed from
BLOCKS = FORMATS[4:]  # GGUF's
PANEL = 16  # outputs
EXACT = Precision()
TASK_BYTES = 1 << 18  # packed by a task
Int, Float = ctypes.c_int64, ctypes.c_float


class MatrixFields(ctypes.Structure):
    """struct matrix of cpu/matrix.h."""

    _fields_ = (
        *((name, Pointer) for name in ("panels", "scales")),
        *((name, Int) for name in ("format", "num_outputs", "depth", "panel_bytes")),
    )


class GemmPart(ctypes.Structure):
    _fields_ = (("w", MatrixFields), ("first", Int))


class PackArgs(ctypes.Structure):
    _fields_ = (
        ("w", MatrixFields),
        ("scales", Pointer),
        ("source", Pointer),
        *((name, Int) for name in ("row_bytes", "type", "first_panel", "stop_panel", "panels_per_task")),
    )


class EmbeddingArgs(ctypes.Structure):
    """struct embedding_args of cpu/gemm.c: rows of a matrix, by their index."""

    _fields_ = (
        *((name, Pointer) for name in ("parts", "ids", "out")),
        *((name, Int) for name in ("num_parts", "num_rows", "rows_per_task")),
        ("scale", Float),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Rows first … first + num_outputs of every matrix of a stack, in one format."""

    format: str
    first: int
    num_outputs: int
    depth: int
    panel_bytes: int
    panels: NDArray[np.uint8]  # [E, panels, panel_bytes]
    scales: NDArray[np.float32] | None  # int8: [E, panels, 16]

    @property
    def nbytes(self) -> int:
        return self.panels.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def fields(self, expert: int = 0) -> MatrixFields:
        scales = 0 if self.scales is None else address(self.scales[expert])
        number = FORMATS.index(self.format)
        return MatrixFields(
            address(self.panels[expert]), scales, number, self.num_outputs, self.depth, self.panel_bytes
        )


class Matrix:
    """A packed matrix (O, C), or a stack of them (E, O, C).

    Attributes:
        products: what products with it are computed in: "float32" is exact; with "bfloat16" x is rounded, where the
            processor has instructions for it.
        c_parts: struct gemm_part [E, len(parts)], for kernels; lives as long as the matrix.
    """

    def __init__(self, shape: Sequence[int], parts: Sequence[Part], products: str) -> None:
        self.shape = tuple(shape)
        self.parts = tuple(parts)
        self.products = products
        num_experts = self.shape[0] if len(self.shape) == 3 else 1
        fields = [GemmPart(part.fields(e), part.first) for e in range(num_experts) for part in self.parts]
        self.c_parts = (GemmPart * len(fields))(*fields)
        self.c_address = ctypes.addressof(self.c_parts)
        self.num_panels = sum(part.panels.shape[1] for part in self.parts)  # of one expert
        self.is_quantised = any(part.format not in FLOATS for part in self.parts)
        self.has_short_floats = any(part.format in FLOATS[1:] for part in self.parts)

    @property
    def format(self) -> str:
        formats = {part.format for part in self.parts}
        return formats.pop() if len(formats) == 1 else "mixed"

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def read(self, native: Native) -> NDArray[np.float32]:
        """The weights as the exact product sees them, row by row."""
        *stack, rows, depth = self.shape
        out = np.empty((*(stack or [1]), rows, depth), np.float32)
        ids = np.arange(rows, dtype=np.int32)
        for expert, place in enumerate(out):
            start = self.c_address + expert * len(self.parts) * ctypes.sizeof(GemmPart)
            args = EmbeddingArgs(start, address(ids), address(place), len(self.parts), rows, PANEL, 1.0)
            native.run([NativeLaunch("embedding", args, -(-rows // PANEL))])
        return out.reshape(self.shape)


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows of a checkpoint's tensor and what they are packed into; expert and first row say where."""

    tensor: Tensor
    rows: slice
    expert: int
    first: int
    type: str  # that is packed: an element type, or the block type of the format
    format: str

    @property
    def num_rows(self) -> int:
        return int(self.rows.stop - self.rows.start)


def load_matrix(source: Source, store: TensorStore, native: Native, precision: Precision) -> Matrix:
    """Pack what a recipe names. Pages of the checkpoint are given back tensor by tensor."""
    pieces = pieces_of(source, store, precision)

    def array(piece: Piece) -> NDArray[Any]:
        name = piece.tensor.name
        whole = store.stored(name) if piece.type == store.stored_type(name) else store.tensor(name)
        return (whole if whole.ndim == 2 else whole[piece.expert])[piece.rows]

    return pack_pieces(source.shape, pieces, array, lambda piece: store.release(piece.tensor.name), native, precision)


def matrix_bytes(source: Source, store: TensorStore, precision: Precision, library: Library) -> int:
    """What load_matrix will take; no tensor is read."""
    total = 0
    for part in part_shapes(pieces_of(source, store, precision)):
        panels = -(-part.num_outputs // PANEL)
        scales = 4 * PANEL if part.format == "int8" else 0
        total += panels * (panel_bytes(library, part.format, source.shape[-1]) + scales)
    return total * (source.shape[0] if len(source.shape) == 3 else 1)


def matrix_of(
    array: NDArray[Any], native: Native, precision: Precision = EXACT, block_type: str | None = None
) -> Matrix:
    """A plain array as a matrix.

    Args:
        array: [O, C] or [E, O, C]: float32, bfloat16 or float16; or rows of GGUF blocks, uint8 [O, bytes].
        block_type: of those.
    """
    stack = array if array.ndim == 3 else array[None]
    stored = block_type or array.dtype.name
    tensor = Tensor("array", array.shape)
    format = chosen_format(stored, precision)
    pieces = [Piece(tensor, slice(0, stack.shape[1]), e, 0, stored, format) for e in range(len(stack))]
    depth = array.shape[-1] if block_type is None else elements_of(block_type, array.shape[-1])
    return pack_pieces(
        (*array.shape[:-1], depth), pieces, lambda piece: stack[piece.expert], lambda piece: None, native, precision
    )


def elements_of(block_type: str, num_bytes: int) -> int:
    """Elements of a row of blocks."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    elements, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType[block_type.upper()]]
    return num_bytes // block_bytes * elements


def chosen_format(stored: str, precision: Precision) -> str:
    if precision.weights != "stored":
        return precision.weights
    return stored if stored in FORMATS else "float32"


def pieces_of(source: Source, store: TensorStore, precision: Precision) -> list[Piece]:
    """A recipe's rows in order, expert by expert."""
    if isinstance(source, Stack):
        experts = [place_rows(part, expert) for expert, part in enumerate(source.parts)]
    elif isinstance(source, Tensor) and len(source.shape) == 3:
        experts = [[(source, slice(0, source.shape[1]), expert, 0)] for expert in range(source.shape[0])]
    else:
        experts = [place_rows(source, 0)]
    columns = zip(*experts, strict=True)  # the same rows of every expert
    formats = [common_format([store.stored_type(t.name) for t, *_ in column], precision) for column in columns]
    pieces = []
    for rows in experts:
        for (tensor, part, expert, first), format in zip(rows, formats, strict=True):
            stored = store.stored_type(tensor.name)
            is_kept = stored in FLOATS or stored == format
            pieces.append(Piece(tensor, part, expert, first, stored if is_kept else "float32", format))
    return pieces


def common_format(stored: Sequence[str], precision: Precision) -> str:
    """The format of rows that experts may store in different types: theirs if they agree."""
    formats = {chosen_format(one, precision) for one in stored}
    return formats.pop() if len(formats) == 1 else "float32"


def place_rows(source: Source, expert: int) -> list[tuple[Tensor, slice, int, int]]:
    """Tensor, its rows, expert, first row within the expert."""
    placed, first = [], 0
    for part in source.parts if isinstance(source, Concat) else (source,):
        if isinstance(part, Rows):
            placed.append((part.tensor, slice(part.start, part.stop), expert, first))
        elif isinstance(part, Tensor):
            placed.append((part, slice(0, part.shape[0]), expert, first))
        else:
            raise CheckpointError(f"{part} cannot be part of a weight matrix")
        first += part.shape[0]
    return placed


@dataclass(slots=True)
class PartShape:
    format: str
    first: int
    num_outputs: int


def part_shapes(pieces: Sequence[Piece]) -> list[PartShape]:
    """The parts of each expert: neighbours of one format join where a panel ends between them."""
    parts: list[PartShape] = []
    for piece in pieces:
        if piece.expert != 0:
            break
        if parts and parts[-1].format == piece.format and parts[-1].num_outputs % PANEL == 0:
            parts[-1].num_outputs += piece.num_rows
        else:
            parts.append(PartShape(piece.format, piece.first, piece.num_rows))
    return parts


def panel_bytes(library: Library, format: str, depth: int) -> int:
    return int(library.function("panel_bytes_of", Int, Int, Int)(FORMATS.index(format), depth))


def allocate_part(native: Native, shape: PartShape, num_experts: int, depth: int) -> Part:
    panels, size = -(-shape.num_outputs // PANEL), panel_bytes(native.library, shape.format, depth)
    take = native.weight_memory.take
    scales = take((num_experts, panels, PANEL), np.float32) if shape.format == "int8" else None
    memory = take((num_experts, panels, size), np.uint8)
    return Part(shape.format, shape.first, shape.num_outputs, depth, size, memory, scales)


def pack_pieces(
    shape: Sequence[int],
    pieces: Sequence[Piece],
    array: Callable[[Piece], NDArray[Any]],
    release: Callable[[Piece], None],
    native: Native,
    precision: Precision,
) -> Matrix:
    num_experts = shape[0] if len(shape) == 3 else 1
    parts = [allocate_part(native, p, num_experts, shape[-1]) for p in part_shapes(pieces)]
    for _, group in groupby(pieces, lambda piece: piece.tensor.name):
        for piece in group:
            part = next(p for p in reversed(parts) if p.first <= piece.first)
            native.run([pack_launch(part, piece, array(piece))])
        release(piece)
    return Matrix(shape, parts, precision.products)


def pack_launch(part: Part, piece: Piece, rows: NDArray[Any]) -> NativeLaunch:
    if rows.strides[-1] != rows.itemsize or rows.strides[0] < 0:
        rows = np.ascontiguousarray(rows)
    first = (piece.first - part.first) // PANEL
    stop = first + -(-piece.num_rows // PANEL)
    per_task = max(1, TASK_BYTES // part.panel_bytes)
    scales = 0 if part.scales is None else address(part.scales[piece.expert])
    source_type = FORMATS.index(piece.type)
    row_bytes = rows.strides[0] if len(rows) > 1 else rows.nbytes
    fields = (part.fields(piece.expert), scales, address(rows), row_bytes, source_type, first, stop, per_task)
    return NativeLaunch("pack", PackArgs(*fields), -(-(stop - first) // per_task), keeps=(rows,))
