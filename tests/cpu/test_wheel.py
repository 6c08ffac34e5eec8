"""The wheel holds what an installation needs, and the CUDA sources are found in a wheel and in a checkout."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from lean_engine.runtime.cuda.sources import cuda_source_directory

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    (built,) = out.glob("*.whl")
    return built


def test_wheel_holds_the_cuda_sources_the_type_marker_and_the_licence(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    expected = {f"lean_engine/_cuda/{p.relative_to(ROOT / 'cuda').as_posix()}" for p in (ROOT / "cuda").rglob("*.cu*")}
    assert expected
    assert expected <= set(names)
    assert "lean_engine/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests/", "bench/", "tools/"))]


def test_locator_finds_the_sources_in_an_unpacked_wheel(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = "from lean_engine.runtime.cuda.sources import cuda_source_directory as d; print(d())"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert Path(result.stdout.strip()) == tmp_path / "lean_engine" / "_cuda"


def test_locator_finds_the_sources_in_a_checkout() -> None:
    assert cuda_source_directory() == ROOT / "cuda"
