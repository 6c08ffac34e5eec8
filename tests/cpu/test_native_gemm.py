"""Products with packed matrices against float64, on every kind of processor that this one can play."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from native_running import IS_X86, MACHINES, library_path
from native_weights import Store, random_blocks
from numpy.typing import NDArray

from lean_engine.checkpoint.demo_model import cache_directory
from lean_engine.ir.sources import Concat, Tensor
from lean_engine.runtime.cpu.native import gemm
from lean_engine.runtime.cpu.native.compiler import find_compiler
from lean_engine.runtime.cpu.native.launches import NativeLaunch, Precision, Scope, address
from lean_engine.runtime.cpu.native.library import Library, Native, build_library
from lean_engine.runtime.cpu.native.matrices import (
    BLOCKS,
    FLOATS,
    FORMATS,
    EmbeddingArgs,
    Matrix,
    load_matrix,
    matrix_of,
)
from lean_engine.runtime.cpu.native.sources import Sources, kernel_sources
from lean_engine.runtime.device import LaunchArgs

GUARD = 77  # elements after each output that must stay as they are
POISON = np.float32(-1234.5)
ODD_SHAPES = [(1, 1), (15, 31), (17, 33), (49, 577), (130, 300)]
ODD_ROWS = (1, 2, 3, 5, 7, 8, 9, 15, 16, 17, 33, 70)
NO_TILES = ("-march=native", "-mno-amx-tile", "-mno-amx-bf16", "-mno-amx-int8")
Float32 = NDArray[np.float32]


@cache
def native(machine: str = "native", num_threads: int = 2) -> Native:
    if machine != "no_tiles":
        return Native(Library(library_path(machine), gemm.ARGUMENTS), num_threads)
    sources = kernel_sources()  # only what this file is about, for the sake of time
    own = [path for path in sources.files if path.stem.startswith(("gemm", "pack", "pool"))]
    compiler = find_compiler(NO_TILES if IS_X86 else None, extra=("-Werror",))
    path = build_library(compiler, Sources(own, sources.include), cache_directory() / "cpu")
    return Native(Library(path, gemm.ARGUMENTS), num_threads)


@cache
def modes(machine: str = "native") -> gemm.Modes:
    return gemm.Modes.of(native(machine).library)


def random_matrix(
    format: str, shape: tuple[int, int], machine: str, products: str = "float32", seed: int = 0
) -> Matrix:
    """GGUF's types in as many columns as they need."""
    rows, depth = shape
    if format in BLOCKS:
        block = 256 if format.endswith("k") else 32
        raw = random_blocks(rows, -(-depth // block) * block, format, seed)
        return matrix_of(raw, native(machine), Precision("stored", products), format)
    weights = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    return matrix_of(weights, native(machine), Precision(format, products))


def random_rows(rows: int, matrix: Matrix, seed: int = 1) -> Float32:
    return np.random.default_rng(seed).normal(size=(rows, matrix.shape[1])).astype(np.float32)


def guarded(num_elements: int, offset: int = 3) -> Float32:
    """Poisoned memory of a size, at an address that is no multiple of a vector, with a guard zone behind."""
    return np.full(offset + num_elements + GUARD, POISON, np.float32)[offset:]


def scratch(num_bytes: int) -> NDArray[np.uint8]:
    """Undefined memory that begins at a cache line."""
    memory = np.empty(num_bytes + 64, np.uint8)
    return memory[-memory.ctypes.data % 64 :][:num_bytes]


def product(
    x: Float32,
    matrix: Matrix,
    bias: Float32 | None = None,
    machine: str = "native",
    num_threads: int = 2,
    processor: gemm.Modes | None = None,
) -> Float32:
    """x·Wᵀ + bias by the compiled kernels; what lies behind output and workspace must stay."""
    rows, outputs = len(x), matrix.shape[0]
    out = guarded(rows * outputs)
    size = gemm.workspace_bytes([x.shape, matrix.shape], {}, num_threads)
    workspace = scratch(size + GUARD)
    workspace[...] = 0xFF  # NaN, as whatever type it is read
    launches = gemm.launches(
        *(processor or modes(machine), num_threads, matrix, address(x), x.shape),
        *(address(bias), address(out), address(workspace)),
    )
    native(machine, num_threads).run(launches)
    assert (out[rows * outputs :] == POISON).all()
    assert (workspace[size:] == 0xFF).all()
    return out[: rows * outputs].reshape(rows, outputs)


def deviation(out: Float32, x: NDArray[Any], weights: NDArray[Any], bias: NDArray[Any] | float = 0.0) -> float:
    """Largest error, as a share of the sum of the magnitudes that were added."""
    x, weights = x.astype(np.float64), weights.astype(np.float64)
    size = np.abs(x) @ np.abs(weights).T + np.abs(bias) + 1e-6
    return float((np.abs(out - (x @ weights.T + bias)) / size).max())


def rounded(x: NDArray[Any]) -> NDArray[np.float64]:
    return x.astype(ml_dtypes.bfloat16).astype(np.float64)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("format", FORMATS)
def test_exact_products_agree_with_float64(machine: str, format: str) -> None:
    for shape in ODD_SHAPES:
        matrix = random_matrix(format, shape, machine)
        weights = matrix.read(native(machine))
        bias = np.random.default_rng(2).normal(size=shape[0]).astype(np.float32)
        for rows in ODD_ROWS:
            x = random_rows(rows, matrix)
            assert deviation(product(x, matrix, bias, machine), x, weights, bias) < 1e-6, (shape, rows)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("format", FORMATS)
def test_a_row_is_the_same_whatever_shares_its_step_or_the_work(machine: str, format: str) -> None:
    matrix = random_matrix(format, (100, 300), machine)
    x = random_rows(130, matrix)
    bias = np.ones(100, np.float32)
    processor = replace(modes(machine), is_batch_invariant=True)
    whole = product(x, matrix, bias, machine, processor=processor)
    for rows in (1, 3, 4, 5, 17, 64, 65):
        np.testing.assert_array_equal(product(x[:rows], matrix, bias, machine, processor=processor), whole[:rows])
    np.testing.assert_array_equal(product(x, matrix, bias, machine, 1, processor), whole)


@pytest.mark.parametrize("is_batch_invariant", [False, True])
@pytest.mark.parametrize("format", FLOATS)
def test_a_row_is_the_same_in_a_step_of_any_size(format: str, is_batch_invariant: bool) -> None:
    """Depths of several chains of sums; panels that make whole groups and pairs, and some that do not."""
    is_split = format == "float32" and not is_batch_invariant  # with many rows, which are the same among themselves
    processor = replace(modes(), is_batch_invariant=is_batch_invariant)
    for shape in [(16, 800), (100, 1601), (192, 96)]:
        matrix = random_matrix(format, shape, "native")
        x = random_rows(600, matrix)
        whole = product(x, matrix, processor=processor)
        for rows in (*range(gemm.MAX_FMA_ROWS + 1 if is_split else 1, 71), 257):
            np.testing.assert_array_equal(product(x[-rows:], matrix, processor=processor), whole[-rows:])
        for threads in (1, 7):
            np.testing.assert_array_equal(product(x, matrix, num_threads=threads, processor=processor), whole)


@pytest.mark.parametrize("format", FLOATS)
def test_products_in_parts_are_as_accurate_as_multiply_adds(format: str) -> None:
    """With terms of one sign too, whose sums are largest; and with numbers of very different sizes."""
    if not modes().has_tiles:
        pytest.skip("needs AMX")
    no_tiles = replace(modes(), has_tiles=False)
    random = np.random.default_rng(4)
    for depth in (64, 577, 4096):
        signed = random.normal(size=(60, depth)).astype(np.float32)
        for weights in (signed, np.abs(signed), signed * np.exp2(random.integers(-12, 4, signed.shape))):
            matrix = matrix_of(weights.astype(np.float32), native(), Precision(format))
            x = random_rows(50, matrix) if weights is signed else np.abs(random_rows(50, matrix))
            x *= np.exp2(random.integers(-30, 30, x.shape)).astype(np.float32) if weights is not signed else 1
            exact = x.astype(np.float64) @ matrix.read(native()).astype(np.float64).T
            size = np.abs(x).astype(np.float64) @ np.abs(matrix.read(native())).astype(np.float64).T
            errors = [(product(x, matrix, processor=p) - exact) / size for p in (modes(), no_tiles)]
            parts, multiply_adds = (float(np.sqrt((e**2).mean())) for e in errors)
            assert parts < max(1.5 * multiply_adds, 3e-8), depth
            assert deviation(product(x, matrix), x, matrix.read(native())) < 1e-6


@pytest.mark.parametrize("format", FLOATS)
@pytest.mark.parametrize("rows", [1, 2, 20, 50])
def test_nan_and_inf_among_the_weights_reach_their_output_and_no_other(format: str, rows: int) -> None:
    weights = np.random.default_rng(5).normal(size=(40, 70)).astype(np.float32)
    weights[3, 69], weights[20, 1] = np.nan, np.inf
    if format == "float32":
        weights[:, 5].view(np.uint32)[30] = 0x7F800001  # a NaN whose upper half is infinity
    matrix = matrix_of(weights, native(), Precision(format))
    out = product(random_rows(rows, matrix), matrix)
    affected = [3, 20, 30] if format == "float32" else [3, 20]
    assert np.isnan(out[:, np.setdiff1d(affected, [20])]).all()
    assert not np.isfinite(out[:, 20]).any()
    assert np.isfinite(np.delete(out, affected, axis=1)).all()


@pytest.mark.parametrize("format", FLOATS)
@pytest.mark.parametrize("rows", [2, 20, 50])
def test_the_largest_numbers_stay_finite(format: str, rows: int) -> None:
    """Rounded to bfloat16 they would be infinite."""
    largest = np.finfo(np.float32).max
    weights = np.zeros((20, 64), np.float32)
    weights[:, 7], weights[:, 8] = 0.5, -0.25
    x = np.zeros((rows, 64), np.float32)
    x[:, 7], x[:, 8], x[1, 7] = largest, largest, -largest
    out = product(x, matrix_of(weights, native(), Precision(format)))
    np.testing.assert_allclose(out[0], largest / 4, rtol=1e-6)
    np.testing.assert_allclose(out[1], largest * -0.75, rtol=1e-6)
    if format == "float32":
        weights[:, 7:9] = [[largest, -largest]]
        x[:, 7], x[:, 8], x[1, 7] = 0.5, 0.25, -0.5
        np.testing.assert_allclose(product(x, matrix_of(weights, native()))[:2, 0], out[:2, 0], rtol=1e-6)


@pytest.mark.parametrize("format", FLOATS)
def test_small_numbers_keep_their_precision(format: str) -> None:
    """Their last part is still a normal number."""
    matrix = random_matrix(format, (20, 100), "native")
    x = random_rows(50, matrix) * np.float32(2.0**-100)
    assert deviation(product(x, matrix) * np.float32(2.0**100), x * np.float32(2.0**100), matrix.read(native())) < 1e-6


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("format", ["float32", "bfloat16", "float16", "int8"])
@pytest.mark.parametrize("rows", [1, 4, 9])
def test_what_lies_behind_x_is_not_read(machine: str, format: str, rows: int) -> None:
    matrix = random_matrix(format, (17, 33), machine)
    memory = np.full(rows * 33 + 64, np.inf, np.float32)
    x = memory[: rows * 33].reshape(rows, 33)
    x[...] = random_rows(rows, matrix)
    assert np.isfinite(product(x, matrix, machine=machine)).all()


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("products", ["float32", "bfloat16"])
@pytest.mark.parametrize("format", FORMATS)
def test_nan_and_inf_reach_their_row_and_no_other(machine: str, products: str, format: str) -> None:
    for rows in (3, 20, 50):
        matrix = random_matrix(format, (20, 64), machine, products)
        x = random_rows(rows, matrix)
        x[1, 5], x[2, 7] = np.nan, np.inf
        out = product(x, matrix, machine=machine)
        assert np.isnan(out[1]).all()
        assert not np.isfinite(out[2]).all()
        assert np.isfinite(np.delete(out, [1, 2], axis=0)).all()


@pytest.mark.parametrize("machine", ["native", "no_tiles"])
@pytest.mark.parametrize("format", FORMATS)
def test_bfloat16_products_are_those_of_rounded_operands(machine: str, format: str) -> None:
    for shape in [*ODD_SHAPES, (40, 1600)]:
        matrix = random_matrix(format, shape, machine, "bfloat16")
        weights = matrix.read(native(machine))
        for rows in (1, 2, 4, 5, 8, 15, 16, 17, 33, 70, 150):
            x = random_rows(rows, matrix)
            is_rounded = modes(machine).choose(matrix, rows) == gemm.BF16
            assert is_rounded == (modes(machine).has_bf16 and (format == "bfloat16" or rows > gemm.MAX_EXACT_ROWS))
            operands = (rounded(x), weights if format == "int8" else rounded(weights)) if is_rounded else (x, weights)
            assert deviation(product(x, matrix, machine=machine), *operands) < 2e-6, (shape, rows)


@pytest.mark.parametrize("format", FORMATS[3:])
def test_digits_give_the_same_bits_in_tiles_and_without(format: str) -> None:
    """Sums of integers are exact; what follows them has one order."""
    if not modes("no_tiles").has_digits:
        pytest.skip("needs products of bytes")
    for shape in [(15, 31), (33, 600), (49, 2500)]:
        here, there = (random_matrix(format, shape, machine) for machine in ("native", "no_tiles"))
        for rows in (1, 2, 3, 4, 11, 12, 40, 300):
            x = random_rows(rows, here)
            np.testing.assert_array_equal(product(x, here), product(x, there, machine="no_tiles"))


@pytest.mark.parametrize("machine", ["native", "no_tiles"])
@pytest.mark.parametrize("format", FORMATS[3:])
def test_digits_of_whole_numbers_leave_nothing_but_the_order_of_sums(machine: str, format: str) -> None:
    matrix = random_matrix(format, (40, 512), machine)
    for largest in (1, 127, 1 << 21):
        x = np.random.default_rng(3).integers(-largest, largest + 1, (30, 512)).astype(np.float32)
        assert deviation(product(x, matrix, machine=machine), x, matrix.read(native(machine))) < 2e-7


@pytest.mark.parametrize("format", FORMATS[3:])
def test_digits_are_as_accurate_as_multiply_adds(format: str) -> None:
    """Measured by a row of outputs. Where one element is 1000 times the others they keep 10 bits less."""
    if not modes().has_digits:
        pytest.skip("needs products of bytes")
    multiply_adds = gemm.Modes(has_bf16=False, has_tiles=False, has_digits=False)
    for depth in (64, 577, 4096):
        matrix = random_matrix(format, (60, depth), "native")
        weights = matrix.read(native()).astype(np.float64)
        x = random_rows(40, matrix)
        outlier = x * np.where(np.arange(x.shape[1]) == 5, np.float32(1000), np.float32(1))
        for rows, bound in ((x, 2), (x * np.float32(1e-20), 2), (np.abs(x), 2), (outlier, 10)):
            exact = rows.astype(np.float64) @ weights.T
            errors = [product(rows, matrix, processor=p) - exact for p in (modes(), multiply_adds)]
            digits, others = (float(np.sqrt((e**2).mean() / (exact**2).mean())) for e in errors)
            assert digits < max(bound * others, 1.5e-7), depth


def test_parts_of_several_formats_write_their_columns() -> None:
    tensors = {"q": ("q4_k", 32), "k": ("q4_k", 16), "v": ("q6_k", 20), "w": ("bfloat16", 9)}
    store = Store(**{n: (t, random_blocks(rows, 256, t)) for n, (t, rows) in tensors.items() if t != "bfloat16"})
    store.tensors["w"] = np.random.default_rng(0).normal(size=(9, 256)).astype(ml_dtypes.bfloat16)
    source = Concat(tuple(Tensor(name, (rows, 256)) for name, (_, rows) in tensors.items()))
    bias = np.random.default_rng(1).normal(size=77).astype(np.float32)
    for products, bound in (("float32", 1e-6), ("bfloat16", 0.01)):
        matrix = load_matrix(source, store, native(), Precision("stored", products))
        for rows in (1, 6, 40):
            x = random_rows(rows, matrix)
            assert deviation(product(x, matrix, bias), x, matrix.read(native()), bias) < bound


def test_a_processor_without_the_instructions_computes_exactly() -> None:
    if not IS_X86:
        pytest.skip("needs a narrower version of the processor")
    assert modes("sse2") == gemm.Modes(has_bf16=False, has_tiles=False, has_digits=False)
    for products in ("bfloat16", "float32"):
        matrix = random_matrix("q8_0", (20, 64), "sse2", products)
        assert modes("sse2").choose(matrix, 20) == gemm.EXACT


def test_exact_products_have_one_mode_for_all_numbers_of_rows() -> None:
    full, none = gemm.Modes(True, True, True), gemm.Modes(False, False, False)
    invariant = replace(full, is_batch_invariant=True)
    for format in FORMATS:
        matrix = random_matrix(format, (20, 64), "native")
        wanted = gemm.PARTS if format in FLOATS[1:] else gemm.EXACT if format == "float32" else gemm.DIGITS
        assert {full.choose(matrix, rows) for rows in range(1, gemm.MAX_FMA_ROWS + 1)} == {wanted}
        assert {invariant.choose(matrix, rows) for rows in range(1, 100)} == {wanted}
        assert {none.choose(matrix, rows) for rows in range(1, 100)} == {gemm.EXACT}
        many = gemm.PARTS if format == "float32" else wanted
        assert {full.choose(matrix, rows) for rows in range(gemm.MAX_FMA_ROWS + 1, 100)} == {many}


def test_bfloat16_products_have_one_mode_for_all_numbers_of_rows_where_that_is_asked_for() -> None:
    invariant = gemm.Modes(True, True, True, is_batch_invariant=True)
    for format in FORMATS:
        matrix = random_matrix(format, (20, 64), "native", "bfloat16")
        assert len({invariant.choose(matrix, rows) for rows in range(1, 100)}) == 1
        assert (invariant.choose(matrix, 1) == gemm.BF16) == (format == "bfloat16")


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("format", FORMATS)
def test_embedding_gathers_scaled_rows(machine: str, format: str) -> None:
    table = random_matrix(format, (70, 100), machine)
    weights = table.read(native(machine))
    ids = np.array([69, 0, 16, 15, 16], np.int32)
    out = guarded(5 * table.shape[1])
    args = LaunchArgs("embedding", [ids, table], [out[:-GUARD].reshape(5, -1)], {"scale": np.float32(2.5)}, np.empty(0))
    native(machine).run(gemm.embedding(Scope(native(machine).library, 2, {}), args))
    np.testing.assert_allclose(out[:-GUARD].reshape(5, -1), weights[ids] * np.float32(2.5), rtol=3e-7)
    assert (out[-GUARD:] == POISON).all()


def test_embedding_finds_the_part_of_each_row() -> None:
    store = Store(a=("q4_0", random_blocks(16, 64, "q4_0")), b=("q8_0", random_blocks(10, 64, "q8_0")))
    table = load_matrix(Concat((Tensor("a", (16, 64)), Tensor("b", (10, 64)))), store, native(), Precision())
    ids, out = np.array([25, 3, 16, 15], np.int32), np.empty((4, 64), np.float32)
    args = EmbeddingArgs(table.c_address, address(ids), address(out), len(table.parts), 4, 3, 1.0)
    native().run([NativeLaunch("embedding", args, 2)])
    np.testing.assert_array_equal(out, np.concatenate([store.tensor("a"), store.tensor("b")])[ids])


def test_capture_makes_one_launch_of_an_exact_product_and_one_to_split_x_for_tiles() -> None:
    matrix = random_matrix("bfloat16", (48, 64), "native")
    x, bias, out = random_rows(6, matrix), np.ones(48, np.float32), np.empty((6, 48), np.float32)
    scope = Scope(native().library, 2, {})
    workspace = scratch(gemm.workspace_bytes([x.shape, matrix.shape], {}, 2))
    launches = gemm.gemm(scope, LaunchArgs("gemm", [x, matrix, bias], [out], {}, workspace))
    assert [launch.kernel for launch in launches] == ["split_rows", "gemm"][not modes().has_tiles :]
    native().run(launches)
    assert deviation(out, x, matrix.read(native()), bias) < 1e-6


@pytest.mark.parametrize("mode", [gemm.EXACT, gemm.BF16, gemm.DIGITS, gemm.PARTS])
@pytest.mark.parametrize("num_threads", [1, 2, 16])
def test_tasks_are_equal_blocks_of_rows_and_groups_of_panels(mode: int, num_threads: int) -> None:
    for rows in (1, 5, 64, 65, 129, 512):
        for panels, depth in ((1, 64), (36, 576), (3072, 576), (256, 4096)):
            block, group = gemm.cut(mode, rows, depth, panels, panels * 64 * depth, num_threads)
            assert 1 <= block <= gemm.BLOCK_ROWS[mode]
            assert group % gemm.GROUP == 0
            assert mode == gemm.EXACT or block == rows or block % 16 == 0


def test_a_large_product_is_cut_for_all_threads() -> None:
    block, group = gemm.cut(gemm.EXACT, 1, 576, 3072, 3072 * 64 * 576, 16)
    assert block == 1
    assert 3072 // group >= 4 * 16
