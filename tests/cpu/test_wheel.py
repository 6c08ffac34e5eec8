"""The wheel holds what an installation needs, and the kernels' sources are found in a wheel and in a checkout."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from lean_engine.errors import ConfigError
from lean_engine.runtime import source_files
from lean_engine.runtime.source_files import source_directory

HEADERS = {"cuda": "common.cuh", "cpu": "common.h"}
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    (built,) = out.glob("*.whl")
    return built


def test_wheel_holds_the_sources_the_type_marker_and_the_licence(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    for kind in HEADERS:
        sources = [path for path in (ROOT / kind).rglob("*") if path.is_file()]
        assert len(sources) > 5
        assert {f"lean_engine/_{kind}/{path.relative_to(ROOT / kind).as_posix()}" for path in sources} <= set(names)
    assert "lean_engine/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.startswith(("tests/", "bench/", "tools/"))]


def test_locator_finds_the_sources_in_an_unpacked_wheel(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    calls = ", ".join(f"d({kind!r}, {header!r})" for kind, header in HEADERS.items())
    code = f"from lean_engine.runtime.source_files import source_directory as d; print({calls}, sep='\\n')"
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}, capture_output=True, text=True,
        check=True,
    )  # fmt: skip
    assert result.stdout.splitlines() == [str(tmp_path / "lean_engine" / f"_{kind}") for kind in HEADERS]


def test_locator_finds_the_sources_in_a_checkout() -> None:
    assert [source_directory(kind, header) for kind, header in HEADERS.items()] == [ROOT / kind for kind in HEADERS]


def test_installation_without_sources_says_where_they_were_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source_files, "PACKAGE", tmp_path / "lean_engine")
    with pytest.raises(ConfigError, match=r"the CPU sources are in neither .*_cpu nor .*cpu; install"):
        source_directory("cpu", "common.h")
