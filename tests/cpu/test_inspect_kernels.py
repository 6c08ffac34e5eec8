"""`lean-engine inspect --kernels`: what it lists and which flags go with it. The kernels are in test_cuda_nvrtc."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lean_engine.cli import inspect_kernels, run
from lean_engine.errors import ConfigError
from lean_engine.runtime.cuda import catalogue, nvrtc
from lean_engine.runtime.cuda.instances import Instance
from lean_engine.runtime.cuda.nvrtc import Resources

Capture = pytest.CaptureFixture[str]
FOUND = {
    Instance("norm.cu", "rms_norm<half, 8, 1>"): Resources(29, 128, 0, 0),
    Instance("gather.cu", "embedding<half, 8>"): Resources(14, 0, 4, 8),
}


@pytest.fixture
def _compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "Nvrtc", lambda: None)
    monkeypatch.setattr(catalogue, "kernel_resources", lambda arch, cubins, on_progress: FOUND)


@pytest.mark.usefixtures("_compiled")
def test_json_has_a_row_per_kernel_and_architecture(capsys: Capture) -> None:
    assert run(["inspect", "--kernels", "--arch", "sm_80, sm_90", "--json"]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    assert [(row["name"], row["arch"]) for row in rows] == [
        (instance.expression, arch) for arch in ("sm_80", "sm_90") for instance in FOUND
    ]
    assert rows[1] == {
        "name": "embedding<half, 8>",
        "source": "gather.cu",
        "arch": "sm_80",
        "registers": 14,
        "shared_bytes": 0,
        "spill_bytes": 4,
        "stack_bytes": 8,
    }


@pytest.mark.usefixtures("_compiled")
def test_table_is_aligned(capsys: Capture) -> None:
    assert run(["inspect", "--kernels", "--arch", "sm_120"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "kernel                arch    registers  shared  spills  stack",
        "rms_norm<half, 8, 1>  sm_120         29     128       0      0",
        "embedding<half, 8>    sm_120         14       0       4      8",
    ]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--kernels", "--arch", "sm_91"], "--arch has 'sm_91'; supported: sm_75, sm_80, sm_86, sm_89, sm_90"),
        (["--kernels", "--context", "5"], "--context does not go with --kernels"),
        (["--kernels", "./model"], "MODEL does not go with --kernels"),
        (["--arch", "sm_80"], "--arch needs --kernels"),
    ],
)
def test_wrong_usage_is_one_line(args: list[str], message: str, capsys: Capture) -> None:
    assert run(["inspect", *args]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_compiler_that_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrtc, "library_paths", lambda: iter(()))
    with pytest.raises(ConfigError, match="NVRTC"):
        inspect_kernels.list_kernels("sm_80", as_json=False)
