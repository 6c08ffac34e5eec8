"""The op table: what each kind accepts, what it gives, what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
from graph_writing import GraphWriter

from lean_engine.errors import VerifyError
from lean_engine.ir import reference
from lean_engine.ir.graph import Dim, Op, TensorType, Value
from lean_engine.ir.ops import OPS, infer_types, num_flops

F32, I32 = "float32", "int32"


def f(*shape: Dim) -> TensorType:
    return TensorType(shape, F32)


def i(*shape: Dim) -> TensorType:
    return TensorType(shape, I32)


CACHE = f("N", 2, "S", 4)
NORM = {"eps": 1e-6, "unit_offset": False}
ATTENTION = {"head_dim": 4, "scale": 0.5, "window": None, "softcap": None}
FUSED = {"num_q_heads": 4, "num_kv_heads": 2, "head_dim": 4, **NORM}
STEP = (i("B", "M"), i("B+1"), i("B"))

ACCEPTED: list[tuple[str, list[TensorType], dict[str, Any], list[TensorType]]] = [
    ("embedding", [i("T"), f(9, 8)], {"scale": 1.0}, [f("T", 8)]),
    ("rms_norm", [f("T", 8), f(8)], NORM, [f("T", 8)]),
    ("rms_norm", [f("T", 8), f(4)], NORM, [f("T", 8)]),
    ("linear", [f("T", 8), f(3, 8)], {"dtype": F32}, [f("T", 3)]),
    ("linear", [f("R", 8), f(3, 8), f(3)], {"dtype": "bfloat16"}, [TensorType(("R", 3), "bfloat16")]),
    ("slice_columns", [f("T", 8)], {"start": 2, "stop": 8}, [f("T", 6)]),
    ("rope", [f("T", 8), i("T"), f(16, 4)], {"head_dim": 4}, [f("T", 8)]),
    ("rope", [f("T", 8), i("T"), f(16, 2)], {"head_dim": 4}, [f("T", 8)]),
    ("write_kv", [f("T", 8), f("T", 8), i("T"), CACHE, CACHE], {}, [CACHE, CACHE]),
    ("paged_attention", [f("T", 16), CACHE, CACHE, *STEP], ATTENTION, [f("T", 16)]),
    ("silu", [f("T", 8)], {}, [f("T", 8)]),
    ("gelu_tanh", [f("T", 8)], {}, [f("T", 8)]),
    ("mul", [f("T", 8), f("T", 8)], {}, [f("T", 8)]),
    ("add", [f("R", 8), f("R", 8)], {}, [f("R", 8)]),
    ("softcap", [f("T", 8)], {"cap": 30.0}, [f("T", 8)]),
    ("gather_rows", [f("T", 8), i("R")], {}, [f("R", 8)]),
    ("moe_route", [f("T", 5)], {"top_k": 5, "normalize": True}, [f("T", 5), i("T", 5)]),
    (
        "moe_experts",
        [f("T", 8), f("T", 2), i("T", 2), f(5, 6, 8), f(5, 8, 3)],
        {"activation": "silu"},
        [f("T", 8)],
    ),
    ("add_rms_norm", [f("T", 8), f("T", 8), f(8)], NORM, [f("T", 8), f("T", 8)]),
    (
        "qk_norm_rope_write_kv",
        [f("T", 32), i("T"), i("T"), f(16, 4), CACHE, CACHE],
        FUSED,
        [f("T", 16), CACHE, CACHE],
    ),
    (
        "qk_norm_rope_write_kv",
        [f("T", 32), i("T"), i("T"), f(16, 4), CACHE, CACHE, f(4), f(4)],
        FUSED,
        [f("T", 16), CACHE, CACHE],
    ),
    ("act_and_mul", [f("T", 8)], {"activation": "silu"}, [f("T", 4)]),
]


@pytest.mark.parametrize(("kind", "inputs", "attrs", "outputs"), ACCEPTED, ids=[case[0] for case in ACCEPTED])
def test_output_types_follow_from_the_inputs(
    kind: str, inputs: list[TensorType], attrs: dict[str, Any], outputs: list[TensorType]
) -> None:
    assert infer_types(kind, tuple(inputs), attrs) == tuple(outputs)


REFUSED: list[tuple[str, list[TensorType], dict[str, Any]]] = [
    ("embedding", [i("T", 2), f(9, 8)], {"scale": 1.0}),
    ("embedding", [i("T"), f(9)], {"scale": 1.0}),
    ("rms_norm", [f("T", 8), f(3)], NORM),
    ("rms_norm", [f("T", 8), f(8, 1)], NORM),
    ("linear", [f("T", 8), f(3, 7)], {"dtype": F32}),
    ("linear", [f("T", 8), f(3, 8), f(4)], {"dtype": F32}),
    ("linear", [f("T"), f(3, 8)], {"dtype": F32}),
    ("slice_columns", [f("T", 8)], {"start": 2, "stop": 9}),
    ("slice_columns", [f("T", 8)], {"start": 3, "stop": 3}),
    ("slice_columns", [f("T", 8)], {"start": -1, "stop": 3}),
    ("rope", [f("T", 9), i("T"), f(16, 4)], {"head_dim": 4}),
    ("rope", [f("T", 8), i("R"), f(16, 4)], {"head_dim": 4}),
    ("rope", [f("T", 8), i("T"), f(16, 8)], {"head_dim": 4}),
    ("write_kv", [f("T", 8), f("T", 4), i("T"), CACHE, CACHE], {}),
    ("write_kv", [f("T", 4), f("T", 4), i("T"), CACHE, CACHE], {}),
    ("write_kv", [f("T", 8), f("T", 8), i("R"), CACHE, CACHE], {}),
    ("write_kv", [f("T", 8), f("T", 8), i("T"), CACHE, f("N", 2, "S", 8)], {}),
    ("paged_attention", [f("T", 12), CACHE, CACHE, *STEP], ATTENTION),
    ("paged_attention", [f("T", 16), CACHE, CACHE, *STEP], {**ATTENTION, "head_dim": 8}),
    ("paged_attention", [f("T", 16), CACHE, CACHE, i("B", "M"), i("B"), i("B")], ATTENTION),
    ("paged_attention", [f("T", 16), CACHE, f("N", 1, "S", 4), *STEP], ATTENTION),
    ("silu", [f("T", 8, 2)], {}),
    ("mul", [f("T", 8), f("R", 8)], {}),
    ("add", [f("T", 8), f("T", 4)], {}),
    ("gather_rows", [f("T", 8), i("R", 1)], {}),
    ("moe_route", [f("T", 5)], {"top_k": 6, "normalize": True}),
    ("moe_experts", [f("T", 8), f("T", 2), i("T", 2), f(5, 6, 8), f(5, 8, 4)], {"activation": "silu"}),
    ("moe_experts", [f("T", 8), f("T", 2), i("T", 2), f(5, 6, 8), f(4, 8, 3)], {"activation": "silu"}),
    ("moe_experts", [f("T", 8), f("T", 2), i("T", 3), f(5, 6, 8), f(5, 8, 3)], {"activation": "silu"}),
    ("moe_experts", [f("T", 8), f("T", 2), i("T", 2), f(5, 6, 7), f(5, 8, 3)], {"activation": "silu"}),
    ("add_rms_norm", [f("T", 8), f("R", 8), f(8)], NORM),
    ("add_rms_norm", [f("T", 8), f("T", 8), f(4)], NORM),
    ("qk_norm_rope_write_kv", [f("T", 28), i("T"), i("T"), f(16, 4), CACHE, CACHE], FUSED),
    ("qk_norm_rope_write_kv", [f("T", 32), i("T"), i("R"), f(16, 4), CACHE, CACHE], FUSED),
    ("qk_norm_rope_write_kv", [f("T", 32), i("T"), i("T"), f(16, 4), CACHE, CACHE, f(4), f(8)], FUSED),
    ("act_and_mul", [f("T", 7)], {"activation": "silu"}),
]


@pytest.mark.parametrize(("kind", "inputs", "attrs"), REFUSED, ids=[case[0] for case in REFUSED])
def test_shapes_that_do_not_fit_are_refused_with_what_was_found(
    kind: str, inputs: list[TensorType], attrs: dict[str, Any]
) -> None:
    with pytest.raises(VerifyError, match=r"inputs are .*; must be") as error:
        infer_types(kind, tuple(inputs), attrs)
    assert "float32['T'" in str(error.value) or "int32['T'" in str(error.value)


def test_every_kind_is_covered_here_and_has_a_meaning() -> None:
    assert {case[0] for case in ACCEPTED} == set(OPS) == set(reference.OPS)


def test_unknown_kind_is_refused_with_the_known_ones() -> None:
    with pytest.raises(VerifyError, match=r"unknown op 'conv'; known: embedding, rms_norm, linear"):
        infer_types("conv", (), {})


def test_wrong_number_of_inputs_is_refused() -> None:
    with pytest.raises(VerifyError, match=r"linear has 4 inputs, must have 2 or 3"):
        infer_types("linear", (f("T", 8),) * 4, {"dtype": F32})
    with pytest.raises(VerifyError, match=r"qk_norm_rope_write_kv has 7 inputs, must have 6 or 8"):
        infer_types("qk_norm_rope_write_kv", (f("T", 8),) * 7, FUSED)


@pytest.mark.parametrize("attrs", [{}, {"eps": 1e-6}, {**NORM, "scale": 1.0}])
def test_missing_and_extra_attributes_are_refused(attrs: dict[str, Any]) -> None:
    with pytest.raises(VerifyError, match=r"rms_norm has attributes .*, must have \['eps', 'unit_offset'\]"):
        infer_types("rms_norm", (f("T", 8), f(8)), attrs)


def test_outputs_that_may_take_over_storage_have_the_size_of_that_input() -> None:
    for kind, inputs, attrs, _ in ACCEPTED:
        outputs = infer_types(kind, tuple(inputs), attrs)
        for output, source in [*OPS[kind].inplace.items(), *OPS[kind].aliases.items()]:
            assert outputs[output] == inputs[source]


def test_flops_of_products_and_of_nothing_else() -> None:
    w = GraphWriter()
    w.linear("y", w.x("x", 8), 3)
    w.op("silu", "z", w.x("x", 8))
    dims = {"T": 5}
    assert [num_flops(op, dims) for op in w.all_ops] == [2 * 5 * 8 * 3, 0]


def test_flops_of_experts_count_the_chosen_ones_only() -> None:
    types = [f("T", 8), f("T", 2), i("T", 2), f(5, 6, 8), f(5, 8, 3)]
    values = tuple(Value(str(n), t) for n, t in enumerate(types))
    op = Op("moe_experts", values, values[:1], {"activation": "silu"})
    assert num_flops(op, {"T": 7}) == 7 * 2 * 3 * (2 * 8 * 3)
