"""How the kernels touch memory, by the emulator's profile: 16 bytes a lane and no sector more than needed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuda_kernel_running import Array, CudaRun, checked_kernels, normal

from lean_engine.ir.ops import OPS


def fused(head_dim: int) -> tuple[list[Array], dict[str, Any]]:
    num_q, num_kv = 6, 2
    table = np.ones((8, head_dim))
    caches = np.zeros((2, 3, num_kv, 16, head_dim))
    arrays = [normal(2, (num_q + 2 * num_kv) * head_dim), np.array([3, 5]), np.array([20, 21]), table, *caches]
    attrs = {"num_q_heads": num_q, "num_kv_heads": num_kv, "head_dim": head_dim, "eps": 1e-6, "unit_offset": False}
    return [*arrays, normal(head_dim), normal(head_dim, seed=1)], attrs


CASES: dict[str, tuple[str, list[Array], dict[str, Any]]] = {
    "embedding": ("embedding", [np.array([3, 1]), normal(5, 2048)], {"scale": 1.0}),
    "gather_rows": ("gather_rows", [normal(5, 2048), np.array([3, 1])], {}),
    "slice_columns": ("slice_columns", [normal(2, 3072)], {"start": 1024, "stop": 3072}),
    "rms_norm": ("rms_norm", [normal(2, 4096), normal(4096)], {"eps": 1e-5, "unit_offset": False}),
    "rms_norm of heads": ("rms_norm", [normal(2, 1024), normal(128)], {"eps": 1e-5, "unit_offset": False}),
    "add_rms_norm": (
        "add_rms_norm",
        [normal(2, 2048), normal(2, 2048), normal(2048)],
        {"eps": 1e-5, "unit_offset": False},
    ),
    "rope": ("rope", [normal(2, 1024), np.array([1, 2]), np.ones((8, 128))], {"head_dim": 128}),
    "write_kv": ("write_kv", [normal(2, 256), normal(2, 256), np.array([9, 4]), *np.zeros((2, 3, 2, 16, 128))], {}),
    "fused, 64": ("qk_norm_rope_write_kv", *fused(64)),
    "fused, 128": ("qk_norm_rope_write_kv", *fused(128)),
    "fused, 256": ("qk_norm_rope_write_kv", *fused(256)),
    "act_and_mul": ("act_and_mul", [normal(2, 4096)], {"activation": "silu"}),
    "add": ("add", [normal(2, 2048), normal(2, 2048)], {}),
    "softcap": ("softcap", [normal(2, 2048)], {"cap": 30.0}),
}


@pytest.mark.parametrize("name", CASES)
def test_accesses_are_wide_and_waste_no_sector(name: str) -> None:
    kind, inputs, attrs = CASES[name]
    run = CudaRun(kind, inputs, "bfloat16", attrs)
    (call,) = run.calls()
    rows = checked_kernels().kernel(call.instance).profile(call.grid, call.block, call.args)
    rows = [row for row in rows if row.access.startswith("global")]
    wide = [row for row in rows if row.num_bytes == 16 * row.num_lanes]
    for row in rows:
        assert row.num_transactions <= row.num_ideal, f"{row.where}: {row}"
        assert row in wide or row.num_bytes == 4 * row.num_lanes, f"{row.where}: {row}"  # 4: an index, by all lanes
    written = sum(row.num_bytes for row in wide if row.access == "global write")
    if not OPS[kind].aliases:  # each element once; into a cache go the rows of this step only
        assert written == sum(output.nbytes for output in run.outputs)
