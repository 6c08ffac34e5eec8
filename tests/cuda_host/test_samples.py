"""The sample kernels are right and clean, plain and checked, in every order; test_mutants breaks them."""

from __future__ import annotations

import pytest
from sample_runs import RUNS, relative_error

ORDERS = [(0, 0), (1, 0), (2, 0), (3, 40)]


@pytest.mark.parametrize("is_checked", [False, True], ids=["unchecked", "checked"])
@pytest.mark.parametrize("name", RUNS)
def test_sample(name: str, is_checked: bool) -> None:
    from host_running import kernel

    for order, preempt in ORDERS if is_checked else ORDERS[:3]:
        assert relative_error(RUNS[name](kernel("samples.cu", name, is_checked), order, preempt)) < 1e-5
