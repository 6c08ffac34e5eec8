"""What is here: the machine, the GPU, the driver and the versions of everything that numbers depend on."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from typing import Any

from gpu_check.context import Context
from gpu_check.wiring import num_processors, root

PACKAGES = (
    "numpy", "ml-dtypes", "cupy-cuda13x", "cupy-cuda12x", "nvidia-cublas", "nvidia-cublas-cu12", "nvidia-cuda-nvrtc",
    "nvidia-cuda-nvrtc-cu12", "torch", "triton", "transformers", "tokenizers", "safetensors", "gguf",
)  # fmt: skip
QUERY = "name,driver_version,memory.total,memory.used,clocks.sm,clocks.mem,clocks.max.sm,power.limit,temperature.gpu"


def run(context: Context) -> None:
    context.row("machine", **machine())
    context.row("packages", **{name: version_of(name) for name in PACKAGES})
    context.row("checkout", **checkout())
    context.row("nvidia-smi", **smi())
    if not context.is_emulated:
        for title, find in (("gpu", gpu), ("libraries", libraries)):
            context.row(title, **guarded(find))


def guarded(find: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What is absent is recorded, and stops nothing."""
    try:
        return find()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}


def machine() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "processors": num_processors(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "gxx": shutil.which("g++") or "none",
    }


def version_of(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def checkout() -> dict[str, Any]:
    import lean_engine

    return {"lean_engine": lean_engine.__version__, "commit": said_by("git", "-C", str(root()), "rev-parse", "HEAD")}


def smi() -> dict[str, Any]:
    said = said_by("nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader")
    values = (said or "").splitlines()[0].split(", ") if said else []
    return dict(zip(QUERY.split(","), values, strict=False)) or {"error": "nvidia-smi says nothing"}


def said_by(*command: str) -> str | None:
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def gpu() -> dict[str, Any]:
    from lean_engine.runtime.cuda.cupy_driver import as_text, import_cupy, nearest_architecture

    cuda = import_cupy()
    properties = cuda.runtime.getDeviceProperties(cuda.Device().id)
    name, free_and_total = as_text(properties["name"]), cuda.runtime.memGetInfo()
    capability = (int(properties["major"]), int(properties["minor"]))
    return {
        "name": name,
        "arch": nearest_architecture(*capability, name),
        "capability": ".".join(map(str, capability)),
        "num_sms": properties.get("multiProcessorCount"),
        "l2_mib": properties.get("l2CacheSize", 0) / 2**20,
        "shared_per_sm_kib": properties.get("sharedMemPerMultiprocessor", 0) / 2**10,
        "free_gib": free_and_total[0] / 2**30,
        "total_gib": free_and_total[1] / 2**30,
        "driver": cuda.runtime.driverGetVersion(),
        "runtime": cuda.runtime.runtimeGetVersion(),
    }


def libraries() -> dict[str, Any]:
    import cupy

    from lean_engine.runtime.cuda.cublaslt import load
    from lean_engine.runtime.cuda.nvrtc import Nvrtc

    nvrtc = Nvrtc()
    cublaslt = guarded(lambda: {"cublaslt": int(load(None).cublasLtGetVersion())})
    return {"cupy": cupy.__version__, "nvrtc": ".".join(map(str, nvrtc.version)), "nvrtc_path": nvrtc.path, **cublaslt}
