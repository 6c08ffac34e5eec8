"""The binding of cuBLASLt against a library that multiplies on the CPU and keeps a log (tests/fake_cublaslt.c)."""

from __future__ import annotations

import ctypes
import importlib.machinery
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuda_kernel_running import Array, GuardedMemory, assert_rounded

from lean_engine.errors import ConfigError, LaunchError
from lean_engine.runtime.cuda import cublaslt, libraries
from lean_engine.runtime.cuda.cublaslt import Addresses, Algorithm, CublasLt
from lean_engine.runtime.cuda.device_array import DeviceArray
from lean_engine.runtime.cuda.gemm_kernels import Gemm, Problem

SOURCE = Path(__file__).parents[1] / "fake_cublaslt.c"
WORKSPACE = 0x7F0000000000  # never read here; more than 32 bits, which a plain int argument would cut


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if (compiler := shutil.which("gcc")) is None:
        pytest.skip("the fake library needs gcc")
    path = tmp_path_factory.mktemp("cublaslt") / "libcublasLt.so.12"
    subprocess.run([compiler, "-O1", "-Wall", "-Werror", "-shared", "-fPIC", "-o", path, SOURCE], check=True)
    return path


@pytest.fixture
def fake(library: Path) -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(library))
    loaded.fake_events.restype = ctypes.c_char_p
    loaded.fake_reset()
    return loaded


@pytest.fixture
def blas(library: Path, fake: ctypes.CDLL) -> Iterator[CublasLt]:
    made = CublasLt(WORKSPACE, 5000, library)
    yield made
    made.close()
    assert fake.fake_live() == 0, "a descriptor was not given back"


def events(fake: ctypes.CDLL) -> list[str]:
    return fake.fake_events().decode().splitlines()


def problem(num_rows: int = 3, num_out: int = 8, depth: int = 16, dtype: str = "bfloat16", **options: Any) -> Problem:
    return Problem(num_rows, num_out, depth, dtype, options.pop("out_dtype", dtype), **options)


class Product:
    """Host arrays of a problem, and their addresses."""

    def __init__(self, p: Problem) -> None:
        self.memory = GuardedMemory()
        shapes = {"x": (p.num_rows, p.depth), "weight": (p.num_out, p.depth)}
        shapes |= {"bias": (p.num_out,)} if p.has_bias else {}
        shapes |= {"residual": (p.num_rows, p.num_out)} if p.has_residual else {}
        rng = np.random.default_rng(0)
        self.arrays = {name: self.memory.allocate(shape, p.dtype) for name, shape in shapes.items()}
        for array in self.arrays.values():
            array[...] = rng.standard_normal(array.shape).astype(array.dtype)
        self.out = self.memory.allocate((p.num_rows, p.num_out), p.out_dtype)
        self.out[...] = np.nan
        addresses = {name: array.ctypes.data for name, array in self.arrays.items()}
        self.addresses = Addresses(out=self.out.ctypes.data, **addresses)

    def expected(self) -> Array:
        a = {name: array.astype(np.float64) for name, array in self.arrays.items()}
        return a["x"] @ a["weight"].T + a.get("bias", 0) + a.get("residual", 0)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("options", [{}, {"has_bias": True}, {"has_residual": True}, {"out_dtype": "float32"},
                                     {"has_bias": True, "has_residual": True}], ids=str)  # fmt: skip
@pytest.mark.parametrize("num_rows", [1, 5])
def test_row_major_product_with_weights_as_checkpoints_have_them(
    blas: CublasLt, num_rows: int, options: dict[str, Any], dtype: str
) -> None:
    p = problem(num_rows, 6, 9, dtype, **options)
    product = Product(p)
    with blas.bind(p, blas.algorithms(p)[0], product.addresses) as run:
        run(0)
    product.memory.assert_guards_are_whole()
    assert_rounded(product.out, product.expected())


def test_algorithms_are_those_that_can_run_in_the_order_of_the_heuristic(blas: CublasLt, fake: ctypes.CDLL) -> None:
    found = blas.algorithms(problem())
    assert [a.workspace_bytes for a in found] == [0, 2000]
    assert found[1].data == b"".join((200 + j).to_bytes(8, "little") for j in range(8))
    assert found[1].name == f"cublaslt {found[1].data.hex()} 2000"
    fake.fake_results(0)
    assert blas.algorithms(problem()) == []


def test_heuristic_is_asked_for_float32_sums_and_for_parts_in_float32(blas: CublasLt, fake: ctypes.CDLL) -> None:
    blas.algorithms(problem(has_bias=True), 5)
    alignments = [f"preference {attribute} 16" for attribute in (5, 6, 7, 8)]
    assert events(fake) == ["desc 68 0", "preference 1 5000", "preference 3 2", *alignments, "heuristic 5, bias at 16"]


def test_launch_passes_algorithm_workspace_and_stream(blas: CublasLt, fake: ctypes.CDLL) -> None:
    p = problem()
    product = Product(p)
    algorithm = blas.algorithms(p)[1]
    with blas.bind(p, algorithm, product.addresses) as run:
        fake.fake_reset()
        run(0x7F1234567890)
        run(0)
    launch = "matmul algorithm 207 workspace 7f0000000000 5000 stream"
    assert events(fake) == [f"{launch} 7f1234567890", f"{launch} 0"]


def test_gemm_over_device_arrays(blas: CublasLt, fake: ctypes.CDLL) -> None:
    p = problem(5, 6, 9, has_bias=True, has_residual=True)
    product = Product(p)
    arrays: dict[str, Any] = {"out": product.out, **product.arrays}
    on_device: dict[str, Any] = {n: DeviceArray(a, a.ctypes.data, a.shape, a.dtype) for n, a in arrays.items()}
    gemm = Gemm(**on_device)
    assert gemm.problem == p
    num_live = fake.fake_live()
    blas.multiply(gemm, blas.algorithms(p)[0], 0)
    assert_rounded(product.out, product.expected())
    assert fake.fake_live() == num_live


@pytest.mark.parametrize(
    "options",
    [
        {"activation": "silu"},
        {"has_bias": True, "out_dtype": "float32"},
        {"has_residual": True, "out_dtype": "float32"},
    ],
    ids=str,
)
def test_epilogues_that_cublaslt_lacks_have_no_algorithm(blas: CublasLt, options: dict[str, Any]) -> None:
    p = problem(**options)
    assert blas.algorithms(p) == []
    with pytest.raises(LaunchError, match="cuBLASLt computes no Problem"):
        blas.bind(p, Algorithm(bytes(64), 0), Product(p).addresses)


# ---- errors


@pytest.mark.parametrize(
    ("name", "status", "message"),
    [
        ("cublasLtMatmulDescCreate", 7, r"cublasLtMatmulDescCreate failed: CUBLAS_STATUS_INVALID_VALUE \(7\)"),
        ("cublasLtMatmulDescSetAttribute", 7, "cublasLtMatmulDescSetAttribute failed: CUBLAS_STATUS_INVALID_VALUE"),
        ("cublasLtMatrixLayoutCreate", 7, "cublasLtMatrixLayoutCreate failed"),
        ("cublasLtMatmulPreferenceCreate", 7, "cublasLtMatmulPreferenceCreate failed"),
        (
            "cublasLtMatmulAlgoGetHeuristic",
            14,
            r"cublasLtMatmulAlgoGetHeuristic for Problem\(num_rows=3, .*\) failed: unknown status \(14\)",
        ),
    ],
)
def test_status_of_a_query_becomes_an_error(
    blas: CublasLt, fake: ctypes.CDLL, name: str, status: int, message: str
) -> None:
    fake.fake_fail(name.encode(), status)
    with pytest.raises(LaunchError, match=message):
        blas.algorithms(problem())


def test_status_of_a_launch_becomes_an_error(blas: CublasLt, fake: ctypes.CDLL) -> None:
    p = problem()
    product = Product(p)
    with blas.bind(p, blas.algorithms(p)[0], product.addresses) as run:
        fake.fake_fail(b"cublasLtMatmul", 13)
        with pytest.raises(LaunchError, match=r"cublasLtMatmul for Problem.* failed: CUBLAS_STATUS_EXECUTION_FAILED"):
            run(0)


def test_no_device_is_an_error(library: Path, fake: ctypes.CDLL) -> None:
    fake.fake_fail(b"cublasLtCreate", 1)
    with pytest.raises(LaunchError, match="cublasLtCreate failed: CUBLAS_STATUS_NOT_INITIALIZED"):
        CublasLt(WORKSPACE, 5000, library)
    assert fake.fake_live() == 0


def test_addresses_and_workspaces_that_do_not_fit_are_refused(blas: CublasLt, library: Path) -> None:
    p = problem()
    product, algorithm = Product(p), blas.algorithms(p)[0]
    a = product.addresses
    with pytest.raises(LaunchError, match="bias and residual of Addresses"):
        blas.bind(p, algorithm, Addresses(a.out, a.x, a.weight, bias=16))
    with pytest.raises(LaunchError, match="x is at 0x7, must be at a multiple of 16"):
        blas.bind(p, algorithm, Addresses(a.out, 7, a.weight))
    with pytest.raises(LaunchError, match="needs a workspace of 5001 bytes, this one has 5000"):
        blas.bind(p, Algorithm(bytes(64), 5001), a)
    with pytest.raises(LaunchError, match="workspace is at 0x7f0000000010, must be at a multiple of 256"):
        CublasLt(WORKSPACE + 16, 5000, library)


def test_handle_may_be_closed_twice(library: Path, fake: ctypes.CDLL) -> None:
    made = CublasLt(WORKSPACE, library=library)
    assert (made.version, made.workspace_bytes, fake.fake_live()) == (120903, 32 << 20, 1)
    made.close()
    made.close()
    assert fake.fake_live() == 0


# ---- finding it


def test_absent_library_is_one_line_that_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cublaslt, "library_paths", lambda name: iter(()))
    with pytest.raises(ConfigError, match=r"cuBLASLt.* is not installed; pip install nvidia-cublas-cu12"):
        CublasLt(WORKSPACE)
    broken = tmp_path / "libcublasLt.so.12"
    broken.write_bytes(b"not a library")
    with pytest.raises(ConfigError, match=r"libcublasLt\.so\.12 cannot be loaded"):
        CublasLt(WORKSPACE, library=broken)


@pytest.mark.skipif(sys.platform == "win32", reason="libraries have other names on Windows")
def test_oldest_wheel_comes_before_the_toolkit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    places = [
        "nvidia/cu13/lib/libcublasLt.so.13",
        "nvidia/cublas/lib/libcublasLt.so.12",
        "toolkit/lib64/libcublasLt.so.11",
    ]
    for place in places:
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).touch()
    (tmp_path / "nvidia/cublas/lib/libcublas.so.12").touch()
    spec = importlib.machinery.ModuleSpec("nvidia", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path / "nvidia")]
    monkeypatch.setattr(libraries.importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setenv("CUDA_PATH", str(tmp_path / "toolkit"))
    found = [path for path in libraries.library_paths("cublasLt") if path.is_relative_to(tmp_path)]
    assert [path.relative_to(tmp_path).as_posix() for path in found] == [places[1], places[0], places[2]]
