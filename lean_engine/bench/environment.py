"""What a measurement was made on, and where results are kept: one JSON line per run, appended."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import lean_engine
from lean_engine.errors import ConfigError

SECRETS = ("api_key", "hf_token", "header")


def environment() -> dict[str, Any]:
    """Program, machine and versions."""
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "lean_engine": lean_engine.__version__,
        "commit": commit(),
        "machine": machine(),
        "python": platform.python_version(),
        "numpy": version_of("numpy"),
        "command": [Path(sys.argv[0]).name, *without_secrets(sys.argv[1:])],
    }


def commit() -> str | None:
    """The checkout's commit, with + where files differ from it; None outside of a checkout."""
    root = Path(lean_engine.__file__).resolve().parents[1]
    if not (root / ".git").exists() or shutil.which("git") is None:
        return None
    name = output_of("git", "-C", str(root), "rev-parse", "--short", "HEAD")
    is_changed = output_of("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no")
    return None if name is None else name + ("+" if is_changed else "")


def machine() -> dict[str, Any]:
    """CPU, cores, memory, GPUs."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpus = None
    if shutil.which("nvidia-smi") is not None:
        gpus = output_of("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": usable,
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "gpus": [] if not gpus else gpus.splitlines(),
        "system": platform.platform(),
    }


def cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def output_of(*command: str) -> str | None:
    """What a command prints; None where it fails."""
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return ran.stdout.strip()


def without_secrets(arguments: list[str]) -> list[str]:
    """A command line as it may be kept."""
    kept: list[str] = []
    hides_next = False
    for argument in arguments:
        name = argument.partition("=")[0].removeprefix("--").replace("-", "_")
        is_secret = argument.startswith("--") and name in SECRETS
        if hides_next and not argument.startswith("--"):
            kept.append("***")
            continue
        kept.append(f"{argument.partition('=')[0]}=***" if is_secret and "=" in argument else argument)
        hides_next = is_secret and "=" not in argument
    return kept


def append_result(directory: str | Path, benchmark: str, result: Mapping[str, Any]) -> Path:
    """Add a run to DIRECTORY/BENCHMARK.jsonl, beside its environment; the file's path.

    Raises:
        ConfigError: it cannot be written.
    """
    path = Path(directory) / f"{benchmark}.jsonl"
    line = {"benchmark": benchmark, "environment": environment(), **result}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from None
    return path
