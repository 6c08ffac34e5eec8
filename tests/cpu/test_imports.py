"""The import rules of the architecture: one way, and heavy packages only where they belong."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "lean_engine"

# part of the package → the parts it may import
ALLOWED = {
    "errors": set(),
    "units": {"errors"},
    "dtypes": {"errors"},
    "config": {"errors"},
    "text": {"errors"},
    "checkpoint": {"errors", "dtypes", "units"},
    "ir": {"errors", "dtypes", "config"},
    "models": {"errors", "config", "ir"},
    "passes": {"errors", "ir"},
    "memory": {"errors", "config", "units", "histogram"},
    "scheduling": {"errors", "config", "memory"},
    "sampling": {"errors"},
    "runtime": {"errors", "dtypes", "units", "config", "ir", "passes", "memory"},
}
ALLOWED["engine"] = set(ALLOWED)
ALLOWED["llm"] = ALLOWED["engine"] | {"engine"}
ALLOWED["bench"] = ALLOWED["llm"] | {"llm", "__version__"}
ALLOWED["server"] = ALLOWED["llm"] | {"llm", "histogram", "__version__"}
ALLOWED["cli"] = ALLOWED["llm"] | {"llm", "server", "bench", "__version__"}
MODULES = sorted(PACKAGE.rglob("*.py"))


def imports_of(path: Path) -> set[str]:
    """Dotted names of everything a module imports, at whatever depth."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found.add(node.module or "")
            if node.module == "lean_engine":
                found |= {f"lean_engine.{alias.name}" for alias in node.names}
    return found


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_one_way(path: Path) -> None:
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if part.startswith("__"):
        return
    for name in imports_of(path):
        if name.startswith("lean_engine."):
            target = name.split(".")[1]
            assert target == part or target in ALLOWED[part], f"{part} must not import {target}"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_heavy_packages_stay_where_they_belong(path: Path) -> None:
    relative = path.relative_to(PACKAGE).as_posix()
    roots = {name.split(".")[0] for name in imports_of(path)}
    assert not roots & {"torch", "transformers"}
    if not relative.startswith("runtime/cuda/"):
        assert "cupy" not in roots
    if relative.startswith(("memory/", "scheduling/")):
        assert not roots & {"numpy", "ml_dtypes"}


def test_importing_the_package_imports_nothing_heavy() -> None:
    code = "import sys, lean_engine; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"numpy", "tokenizers", "gguf", "huggingface_hub", "jinja2", "click"} & set(loaded)


def test_every_public_name_can_be_imported() -> None:
    import lean_engine

    assert all(getattr(lean_engine, name) is not None for name in lean_engine.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        _ = lean_engine.Nothing
