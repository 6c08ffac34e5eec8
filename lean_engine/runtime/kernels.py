"""The kernel table: the signature every device implements under the kernel's name, checked before a launch is bound.

A signature reads `inputs -> outputs; scalars`. An array is name:dtype[shape]; `real` stands for the program's element
type, `real/f32` for that or float32 (logits), `kv` for what the KV cache holds; `matrix` is a weight matrix in a form
of the device's own (runtime/device.Matrix), or a plain array of `real`. Equal letters in one launch must be equal
numbers, and products such as Q*D are checked once Q and D are known. `?` marks inputs that may be absent, all together.
Scalars are wrapped in the declared type here, since devices check nothing.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lean_engine.dtypes import DTYPES
from lean_engine.errors import LaunchError
from lean_engine.runtime.device import Matrix, Operand

Array = NDArray[Any]

SIGNATURES = {
    "embedding": "ids:i32[T] table:matrix[V,H] -> out:real[T,H]; scale:f32",
    "rms_norm": "x:real[T,C] weight:real[G] -> out:real[T,C]; eps:f32 unit_offset:bool",
    "add_rms_norm": "x:real[T,H] residual:real[T,H] weight:real[H] -> out:real[T,H] sum:real[T,H];"
    " eps:f32 unit_offset:bool",
    "gemm": "x:real[T,C] weight:matrix[O,C] bias?:real[O] -> out:real/f32[T,O];",
    "slice_columns": "x:real[T,C] -> out:real[T,W]; start:i32 stop:i32",
    "rope": "x:real[T,C] positions:i32[T] table:f32[P,E] -> out:real[T,C]; head_dim:i32",
    "write_kv": "k:real[T,K*D] v:real[T,K*D] slots:i32[T] k_cache:kv[N,K,S,D] v_cache:kv[N,K,S,D]"
    " -> k_out:kv[N,K,S,D] v_out:kv[N,K,S,D];",
    "qk_norm_rope_write_kv": "qkv:real[T,C] positions:i32[T] slots:i32[T] table:f32[P,E] k_cache:kv[N,K,S,D]"
    " v_cache:kv[N,K,S,D] q_norm?:real[D] k_norm?:real[D] -> q:real[T,X] k_out:kv[N,K,S,D] v_out:kv[N,K,S,D];"
    " num_q_heads:i32 num_kv_heads:i32 head_dim:i32 eps:f32 unit_offset:bool",
    "paged_attention": "q:real[T,X] k_cache:kv[N,K,S,D] v_cache:kv[N,K,S,D] block_tables:i32[B,M]"
    " cu_seqlens_q:i32[L] seq_lens:i32[B] -> out:real[T,X]; head_dim:i32 scale:f32 window:i32? softcap:f32?",
    "silu": "x:real[T,C] -> out:real[T,C];",
    "gelu_tanh": "x:real[T,C] -> out:real[T,C];",
    "act_and_mul": "gate_up:real[T,2*I] -> out:real[T,I]; activation:str",
    "mul": "a:real[T,C] b:real[T,C] -> out:real[T,C];",
    "add": "a:real[T,C] b:real[T,C] -> out:real[T,C];",
    "softcap": "x:real/f32[T,C] -> out:real/f32[T,C]; cap:f32",
    "gather_rows": "x:real[T,C] rows:i32[R] -> out:real[R,C];",
    "moe_route": "logits:real[T,E] -> weights:f32[T,A] ids:i32[T,A]; top_k:i32 normalize:bool",
    "moe_experts": "x:real[T,H] weights:f32[T,A] ids:i32[T,A] gate_up:matrix[E,2*I,H] down:matrix[E,H,I]"
    " -> out:real[T,H]; activation:str",
}
SHORT = {d.short: d.name for d in DTYPES.values()}
SCALARS: dict[str, tuple[Any, Any]] = {  # kind → the Python types accepted, the type passed on
    "f32": (int | float, np.float32),
    "i32": (int, np.int32),
    "bool": (bool, bool),
    "str": (str, str),
}


@dataclass(frozen=True, slots=True)
class Param:
    name: str
    dtype: str  # a short name, "real", "real/f32", "kv" or "matrix"
    shape: tuple[str, ...]
    is_optional: bool


@dataclass(frozen=True, slots=True)
class Kernel:
    name: str
    inputs: tuple[Param, ...]
    outputs: tuple[Param, ...]
    scalars: Mapping[str, str]  # name → f32, i32, bool, str; "?" at the end allows None

    def check(
        self,
        inputs: Sequence[Operand],
        outputs: Sequence[Array],
        scalars: Mapping[str, Any],
        real: str,
        kv: str | None = None,
        matrix_formats: Collection[str] = (),
    ) -> dict[str, Any]:
        """Check a launch against the signature; return the scalars in their declared types.

        Args:
            real, kv: the dtypes that these stand for; kv is as real by default.
            matrix_formats: of matrices in a form of the device's own.

        Raises:
            LaunchError: naming the kernel, the argument, what was found and what the signature wants.
        """
        num_required = sum(not p.is_optional for p in self.inputs)
        if len(inputs) not in (num_required, len(self.inputs)) or len(outputs) != len(self.outputs):
            raise LaunchError(f"{self.name}: {len(inputs)} inputs and {len(outputs)} outputs do not fit its signature")
        letters: dict[str, int] = {}
        types = {"real": real, "kv": kv or real, **SHORT}
        operands = [*zip(self.inputs, inputs, strict=False), *zip(self.outputs, outputs, strict=True)]
        for param, operand in operands:
            if hasattr(operand, "format"):
                self._check_matrix(param, operand, matrix_formats)
            else:
                self._check_array(param, operand, types)
            self._check_shape(param, operand, letters)
        for param, operand in operands:
            self._check_products(param, operand, letters)
        return self._wrap(scalars)

    def _check_array(self, param: Param, array: Array, types: Mapping[str, str]) -> None:
        shorts = ["real"] if param.dtype == "matrix" else param.dtype.split("/")
        wanted = [types[short] for short in shorts]
        if array.dtype.name not in wanted:
            raise LaunchError(f"{self.name}: {param.name} is {array.dtype.name}, must be {' or '.join(wanted)}")
        if not array.flags.c_contiguous:
            raise LaunchError(f"{self.name}: {param.name} is not contiguous")

    def _check_matrix(self, param: Param, matrix: Matrix, formats: Collection[str]) -> None:
        if param.dtype != "matrix":
            raise LaunchError(f"{self.name}: {param.name} is a matrix in {matrix.format}, must be an array")
        if matrix.format not in formats:
            known = " or ".join(formats) or "a plain array"
            raise LaunchError(f"{self.name}: {param.name} is in {matrix.format}, must be {known}")

    def _check_shape(self, param: Param, array: Operand, letters: dict[str, int]) -> None:
        if len(array.shape) != len(param.shape):
            raise LaunchError(f"{self.name}: {param.name} has shape {array.shape}, must be {list(param.shape)}")
        for dim, size in zip(param.shape, array.shape, strict=True):
            if "*" not in dim and letters.setdefault(dim, size) != size:
                raise LaunchError(f"{self.name}: {param.name} has {dim} = {size}, elsewhere {dim} is {letters[dim]}")

    def _check_products(self, param: Param, array: Operand, letters: Mapping[str, int]) -> None:
        for dim, size in zip(param.shape, array.shape, strict=True):
            if "*" not in dim and not dim.isdigit():
                continue  # a letter, which _check_shape has compared
            factors = dim.split("*")
            wanted = math.prod(int(f) if f.isdigit() else letters[f] for f in factors)
            if size != wanted:
                raise LaunchError(f"{self.name}: {param.name} has {dim} = {size}, must be {wanted}")

    def _wrap(self, scalars: Mapping[str, Any]) -> dict[str, Any]:
        if set(scalars) != set(self.scalars):
            raise LaunchError(f"{self.name}: scalars are {sorted(scalars)}, must be {sorted(self.scalars)}")
        wrapped: dict[str, Any] = {}
        for name, kind in self.scalars.items():
            value = scalars[name]
            if value is None:
                if not kind.endswith("?"):
                    raise LaunchError(f"{self.name}: scalar {name} is None, must be {kind}")
                wrapped[name] = None
                continue
            accepted, wrap = SCALARS[kind.rstrip("?")]
            if not isinstance(value, accepted) or (accepted is not bool and isinstance(value, bool)):
                raise LaunchError(f"{self.name}: scalar {name} is {value!r}, must be {kind}")
            wrapped[name] = wrap(value)
        return wrapped


def parse(name: str, signature: str) -> Kernel:
    arrays, _, scalars = signature.partition(";")
    inputs, outputs = arrays.split("->")
    kinds = dict(scalar.split(":") for scalar in scalars.split())
    return Kernel(name, parse_params(inputs), parse_params(outputs), kinds)


def parse_params(text: str) -> tuple[Param, ...]:
    found = re.findall(r"(\w+)(\??):([\w/]+)\[([^\]]*)\]", text)
    return tuple(Param(name, dtype, tuple(shape.split(",")), bool(optional)) for name, optional, dtype, shape in found)


KERNELS = {name: parse(name, signature) for name, signature in SIGNATURES.items()}
