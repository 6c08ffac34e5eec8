"""The kernel table: what check() lets through, the scalars it wraps, and every error it raises."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lean_engine.errors import LaunchError
from lean_engine.runtime.cpu.device import KERNELS as CPU_KERNELS
from lean_engine.runtime.cpu.native.device import KERNELS as NATIVE_KERNELS
from lean_engine.runtime.kernels import KERNELS, SIGNATURES, Kernel, Param, parse

Array = NDArray[Any]


def f(*shape: int) -> Array:
    return np.zeros(shape, np.float32)


def i(*shape: int) -> Array:
    return np.zeros(shape, np.int32)


def check(name: str, inputs: list[Array], outputs: list[Array], **scalars: Any) -> dict[str, Any]:
    return KERNELS[name].check(inputs, outputs, scalars, "float32")


def test_signature_is_parsed_into_parameters_and_scalars() -> None:
    kernel = parse("k", "x:real[T,2*I] bias?:f32[I] -> out:i32[T];  scale:f32 window:i32?")
    assert kernel == Kernel(
        "k",
        (Param("x", "real", ("T", "2*I"), False), Param("bias", "f32", ("I",), True)),
        (Param("out", "i32", ("T",), False),),
        {"scale": "f32", "window": "i32?"},
    )


def test_every_signature_parses_and_every_kernel_is_on_the_cpu() -> None:
    assert set(SIGNATURES) == set(KERNELS) == set(CPU_KERNELS) == set(NATIVE_KERNELS)
    for name, kernel in KERNELS.items():
        assert kernel.inputs, name
        assert kernel.outputs, name
        assert SIGNATURES[name].count("[") == len(kernel.inputs) + len(kernel.outputs)


def test_launch_that_fits_returns_its_scalars_in_their_types() -> None:
    found = check("rms_norm", [f(3, 8), f(8)], [f(3, 8)], eps=1, unit_offset=True)
    assert found == {"eps": 1.0, "unit_offset": True}
    assert (type(found["eps"]), type(found["unit_offset"])) == (np.float32, bool)
    cache = f(5, 2, 4, 8)
    inputs = [f(3, 32), cache, cache, i(2, 6), i(3), i(2)]
    found = check("paged_attention", inputs, [f(3, 32)], head_dim=8, scale=0.5, window=16, softcap=None)
    assert (type(found["head_dim"]), type(found["window"]), found["softcap"]) == (np.int32, np.int32, None)


@pytest.mark.parametrize(
    ("scalars", "message"),
    [
        ({"eps": "abc", "unit_offset": True}, "rms_norm: scalar eps is 'abc', must be f32"),
        ({"eps": 1e-6, "unit_offset": 1}, "rms_norm: scalar unit_offset is 1, must be bool"),
        ({"eps": True, "unit_offset": True}, "rms_norm: scalar eps is True, must be f32"),
    ],
)
def test_scalar_of_another_type_is_refused(scalars: dict[str, object], message: str) -> None:
    with pytest.raises(LaunchError, match=message):
        check("rms_norm", [f(3, 8), f(8)], [f(3, 8)], **scalars)


def test_fractional_integer_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"slice_columns: scalar start is 1\.5, must be i32"):
        check("slice_columns", [f(3, 8)], [f(3, 2)], start=1.5, stop=3)


def test_optional_inputs_may_be_absent() -> None:
    assert check("gemm", [f(3, 8), f(5, 8)], [f(3, 5)]) == {}
    assert check("gemm", [f(3, 8), f(5, 8), f(5)], [f(3, 5)]) == {}


def test_real_stands_for_the_programs_type() -> None:
    half = [np.zeros((3, 8), np.float16), np.zeros((5, 8), np.float16)]
    KERNELS["gemm"].check(half, [np.zeros((3, 5), np.float16)], {}, "float16")
    with pytest.raises(LaunchError, match="gemm: x is float16, must be float32"):
        check("gemm", half, [f(3, 5)])


NORM = {"eps": 1e-6, "unit_offset": False}


@pytest.mark.parametrize(
    ("name", "inputs", "outputs", "scalars", "message"),
    [
        ("gemm", [f(3, 8)], [f(3, 5)], {}, "gemm: 1 inputs and 1 outputs do not fit its signature"),
        ("gemm", [f(3, 8), f(5, 8), f(5), f(5)], [f(3, 5)], {}, "gemm: 4 inputs and 1 outputs do not fit"),
        ("gemm", [f(3, 8), f(5, 8)], [], {}, "gemm: 2 inputs and 0 outputs do not fit its signature"),
        ("gemm", [i(3, 8), f(5, 8)], [f(3, 5)], {}, "gemm: x is int32, must be float32"),
        (
            "embedding",
            [np.zeros(3, np.int64), f(9, 8)],
            [f(3, 8)],
            {"scale": 1.0},
            "embedding: ids is int64, must be int32",
        ),
        ("gemm", [f(3, 8), f(5, 8)], [np.zeros((3, 5))], {}, "gemm: out is float64, must be float32"),
        ("gemm", [f(3, 8, 1), f(5, 8)], [f(3, 5)], {}, r"gemm: x has shape \(3, 8, 1\), must be \['T', 'C'\]"),
        ("gemm", [f(8, 3).T, f(5, 8)], [f(3, 5)], {}, "gemm: x is not contiguous"),
        ("gemm", [f(3, 16)[:, :8], f(5, 8)], [f(3, 5)], {}, "gemm: x is not contiguous"),
        ("gemm", [f(3, 8), f(5, 7)], [f(3, 5)], {}, "gemm: weight has C = 7, elsewhere C is 8"),
        ("gemm", [f(3, 8), f(5, 8), f(4)], [f(3, 5)], {}, "gemm: bias has O = 4, elsewhere O is 5"),
        ("gemm", [f(3, 8), f(5, 8)], [f(4, 5)], {}, "gemm: out has T = 4, elsewhere T is 3"),
        ("act_and_mul", [f(3, 9)], [f(3, 4)], {"activation": "silu"}, r"act_and_mul: gate_up has 2\*I = 9, must be 8"),
        (
            "rms_norm",
            [f(3, 8), f(8)],
            [f(3, 8)],
            {"eps": 1e-6},
            r"rms_norm: scalars are \['eps'\], must be \['eps', 'unit_",
        ),
        (
            "rms_norm",
            [f(3, 8), f(8)],
            [f(3, 8)],
            {**NORM, "x": 1},
            r"rms_norm: scalars are \['eps', 'unit_offset', 'x'\], must",
        ),
        ("rms_norm", [f(3, 8), f(8)], [f(3, 8)], {**NORM, "eps": None}, "rms_norm: scalar eps is None, must be f32"),
    ],
)
def test_launch_that_does_not_fit_is_refused_by_name(
    name: str, inputs: list[Array], outputs: list[Array], scalars: dict[str, Any], message: str
) -> None:
    with pytest.raises(LaunchError, match=f"^{message}"):
        check(name, inputs, outputs, **scalars)


def test_products_are_checked_once_their_letters_are_known() -> None:
    cache = f(5, 2, 4, 8)
    check("write_kv", [f(3, 16), f(3, 16), i(3), cache, cache], [cache, cache])
    with pytest.raises(LaunchError, match=r"write_kv: k has K\*D = 15, must be 16"):
        check("write_kv", [f(3, 15), f(3, 16), i(3), cache, cache], [cache, cache])


class Packed:
    """A matrix in a form of a device's own."""

    def __init__(self, format: str, *shape: int) -> None:
        self.format, self.shape, self.nbytes = format, shape, 0


def check_gemm(weight: Any, formats: tuple[str, ...]) -> dict[str, Any]:
    inputs = [f(3, 8), weight]
    return KERNELS["gemm"].check(inputs, [f(3, 5)], {}, "float32", matrix_formats=formats)


def test_a_matrix_is_checked_by_its_format_and_its_shape() -> None:
    assert check_gemm(Packed("q4_1", 5, 8), ("int8", "q4_1")) == {}
    assert check_gemm(f(5, 8), ("int8", "q4_1")) == {}
    with pytest.raises(LaunchError, match="gemm: weight is in q4_1, must be int8 or q8_0"):
        check_gemm(Packed("q4_1", 5, 8), ("int8", "q8_0"))
    with pytest.raises(LaunchError, match="gemm: weight is in q4_1, must be a plain array"):
        check_gemm(Packed("q4_1", 5, 8), ())
    with pytest.raises(LaunchError, match="gemm: weight has C = 7, elsewhere C is 8"):
        check_gemm(Packed("q4_1", 5, 7), ("q4_1",))
    with pytest.raises(LaunchError, match="rms_norm: weight is a matrix in int8, must be an array"):
        KERNELS["rms_norm"].check(
            [f(3, 8), Packed("int8", 8)], [f(3, 8)], {"eps": 1e-6, "unit_offset": False}, "float32"
        )


def test_keys_and_values_have_a_type_of_their_own() -> None:
    cache = np.zeros((5, 2, 4, 8), np.float16)
    inputs = [f(3, 32), cache, cache, i(2, 6), i(3), i(2)]
    scalars = {"head_dim": 8, "scale": 0.5, "window": None, "softcap": None}
    assert KERNELS["paged_attention"].check(inputs, [f(3, 32)], scalars, "float32", "float16")["head_dim"] == 8
    with pytest.raises(LaunchError, match="paged_attention: k_cache is float16, must be float32"):
        KERNELS["paged_attention"].check(inputs, [f(3, 32)], scalars, "float32")
