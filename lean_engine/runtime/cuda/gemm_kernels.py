"""The kernels of skinny_gemm.cu: the ways to compute a gemm of few rows, their instances, grids and arguments.

Which way is fastest depends on the GPU; gemm_choice measures them beside cuBLASLt. The first way offered is a fair
guess. At least one is offered for every gemm, whatever its shape, so that none depends on cuBLASLt alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lean_engine.dtypes import DTYPES
from lean_engine.errors import LaunchError
from lean_engine.runtime.cuda.instances import (
    ACTIVATIONS,
    ARCHITECTURES_WITHOUT_BFLOAT16,
    REAL_DTYPES,
    WARP,
    Instance,
    KernelCall,
    ceil_div,
    i32,
)
from lean_engine.runtime.device import Array, LaunchArgs

SOURCE = "skinny_gemm.cu"
PLAIN = "Plain"
ARCHITECTURES_WITHOUT_TENSOR_PATH = ("sm_75",)  # no cp.async, no m16n8k16
FEW_ROWS_WARPS = 4  # of a block
FEW_ROWS_WIDTH = 8  # elements of an access where the depth allows it
MAX_FEW_ROWS = 8
ODD_ROWS = 4  # rows of a block where an access is one element
TENSOR_THREADS = 128
TENSOR_STAGES = 4
# Tokens of a tile → weight rows of a tile. The wider tiles read x less often, the narrower ones occupy more SMs where
# there are few weight rows; only the wider ones have epilogues and float32 results.
TENSOR_WEIGHTS = {8: (16, 32), 16: (16, 64), 32: (32, 64), 64: (32, 64)}


@dataclass(frozen=True, slots=True, order=True)
class Problem:
    """What decides how a gemm is best computed; no addresses."""

    num_rows: int  # T, as padded
    num_out: int  # columns of the result
    depth: int
    dtype: str
    out_dtype: str
    has_bias: bool = False
    has_residual: bool = False
    activation: str | None = None  # weights are a gate's rows and then its partner's


@dataclass(frozen=True, slots=True, eq=False)
class Gemm:
    """out = epilogue(x · weightᵀ), see skinny_gemm.cu.

    out [T, O] in x's type or float32; x [T, C]; weight [O, C], with an activation [2·O, C]; bias, one number per row of
    weight; residual [T, O].
    """

    out: Array
    x: Array
    weight: Array
    bias: Array | None = None
    residual: Array | None = None
    activation: str | None = None

    @property
    def problem(self) -> Problem:
        num_rows, depth = self.x.shape
        has_bias, has_residual = self.bias is not None, self.residual is not None
        types = (self.x.dtype.name, self.out.dtype.name)
        return Problem(num_rows, self.out.shape[1], depth, *types, has_bias, has_residual, self.activation)


def gemm_of(launch: LaunchArgs) -> Gemm:
    """A launch of the kernel table's gemm."""
    x, weight, *bias = launch.inputs
    return Gemm(launch.outputs[0], x, weight, bias[0] if bias else None)


@dataclass(frozen=True, slots=True)
class FewRows:
    """few_rows_gemm: multiply-adds in float, weights read once per `rows` rows."""

    rows: int
    split: int  # warps that share the depth
    width: int  # elements of an access

    @property
    def name(self) -> str:
        return f"few_rows {self.rows} {self.split} {self.width}"

    def instance(self, problem: Problem) -> Instance:
        return instance("few_rows_gemm", problem, self.width, self.rows)

    def call(self, gemm: Gemm) -> KernelCall:
        p = gemm.problem
        columns = few_rows_columns(self.rows, p.activation) * (FEW_ROWS_WARPS // self.split)
        grid = (ceil_div(p.num_out, columns), ceil_div(p.num_rows, self.rows))
        return KernelCall(self.instance(p), grid, few_rows_block(self.split), arguments(gemm))


@dataclass(frozen=True, slots=True)
class TensorCores:
    """skinny_gemm: tiles of `weights` weight rows times `tokens` rows on the tensor cores."""

    weights: int
    tokens: int

    @property
    def name(self) -> str:
        return f"skinny {self.weights} {self.tokens}"

    def instance(self, problem: Problem) -> Instance:
        return instance("skinny_gemm", problem, self.weights, self.tokens)

    def call(self, gemm: Gemm) -> KernelCall:
        p = gemm.problem
        columns = self.weights // 2 if p.activation else self.weights
        grid = (ceil_div(p.num_out, columns), ceil_div(p.num_rows, self.tokens))
        shared_bytes = tensor_shared_bytes(self.weights, self.tokens)
        return KernelCall(self.instance(p), grid, (TENSOR_THREADS,), arguments(gemm), shared_bytes)


Way = FewRows | TensorCores


def skinny_ways(problem: Problem, arch: str) -> list[Way]:
    """The ways to try, the likeliest first; the same list for the same arguments.

    Raises:
        LaunchError: the kernels have no such types or activation.
    """
    check(problem, arch)
    width = FEW_ROWS_WIDTH if problem.depth % FEW_ROWS_WIDTH == 0 else 1
    rows = few_rows_of(problem.num_rows) if width > 1 else ODD_ROWS
    few: list[Way] = [FewRows(rows, split, width) for split in splits(problem.depth, width)]
    tensor = tensor_ways(problem, arch)
    if problem.num_rows <= MAX_FEW_ROWS:
        return few + tensor if problem.num_rows <= MAX_FEW_ROWS // 2 else tensor + few
    return tensor or few[:1]


def tensor_ways(problem: Problem, arch: str) -> list[Way]:
    if arch in ARCHITECTURES_WITHOUT_TENSOR_PATH or problem.depth % FEW_ROWS_WIDTH:
        return []
    tokens = next((n for n in TENSOR_WEIGHTS if problem.num_rows <= n), max(TENSOR_WEIGHTS))
    narrow, wide = TENSOR_WEIGHTS[tokens]
    is_plain = problem.activation is None and problem.out_dtype == problem.dtype
    return [TensorCores(wide, tokens), *([TensorCores(narrow, tokens)] if is_plain else [])]


def check(problem: Problem, arch: str) -> None:
    missing = ARCHITECTURES_WITHOUT_BFLOAT16 if problem.dtype == "bfloat16" else ()
    if problem.dtype not in REAL_DTYPES or arch in missing:
        raise LaunchError(f"gemm: x is {problem.dtype}, which the kernels for {arch} do not multiply")
    if problem.activation is None and problem.out_dtype in (problem.dtype, "float32"):
        return
    if problem.activation not in ACTIVATIONS or problem.out_dtype != problem.dtype:
        kind = "no activation" if problem.activation is None else f"activation {problem.activation!r}"
        raise LaunchError(f"gemm: no kernel has {kind} and results in {problem.out_dtype}")


def gemm_instances(arch: str, dtypes: Iterable[str] = REAL_DTYPES) -> list[Instance]:
    """Every instantiation that skinny_ways can lead to on an architecture, sorted."""
    found = set()
    for dtype in dtypes:
        if dtype == "bfloat16" and arch in ARCHITECTURES_WITHOUT_BFLOAT16:
            continue
        endings: list[tuple[str, str | None]] = [(dtype, None), ("float32", None)]
        for out_dtype, activation in endings + [(dtype, activation) for activation in ACTIVATIONS]:
            for num_rows in (1, 2, 4, 8, 16, 32, 64):
                for depth in (FEW_ROWS_WIDTH, 1):
                    p = Problem(num_rows, 1, depth, dtype, out_dtype, activation=activation)
                    found |= {way.instance(p) for way in skinny_ways(p, arch)}
    return sorted(found)


# ---- geometry; moe_kernels has the same


def few_rows_of(num_rows: int) -> int:
    """Rows of a block: a power of two."""
    return min(MAX_FEW_ROWS, 1 << (num_rows - 1).bit_length())


def few_rows_columns(rows: int, activation: str | None) -> int:
    """Columns that a group of threads computes: FEW_ROWS_OUTS weight rows in gemm.cuh, a pair for each with a gate."""
    outs = 2 if rows <= 2 else 4
    return outs // 2 if activation else outs


def few_rows_block(split: int) -> tuple[int, int]:
    return (WARP * split, FEW_ROWS_WARPS // split)


def splits(depth: int, width: int) -> Sequence[int]:
    """How many warps may share a depth, the likeliest first: as many as have a few loads each, and then the others."""
    likeliest = next((s for s in (4, 2) if depth >= 4 * WARP * width * s), 1)
    return [likeliest, *(s for s in (1, 2, 4) if s != likeliest and (s == 1 or depth >= WARP * width * s))]


def tensor_shared_bytes(weights: int, tokens: int) -> int:
    """TensorPart::SHARED_BYTES in gemm.cuh."""
    rows = weights + tokens
    depth = 256 if rows <= 32 else 128 if rows <= 80 else 64
    return TENSOR_STAGES * rows * (depth + 8) * 2


def instance(kernel: str, problem: Problem, *sizes: int) -> Instance:
    types = (DTYPES[problem.dtype].cuda, DTYPES[problem.out_dtype].cuda)
    activation = ACTIVATIONS[problem.activation] if problem.activation else PLAIN
    return Instance(SOURCE, f"{kernel}<{', '.join([*types, *map(str, sizes), activation])}>")


def arguments(gemm: Gemm) -> tuple[object, ...]:
    p = gemm.problem
    return (gemm.out, gemm.x, gemm.weight, gemm.bias, gemm.residual, *i32(p.num_rows, p.num_out, p.depth))
