"""`lean-engine inspect --kernels`: every CUDA kernel compiled for the architectures that are named, without a GPU."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from lean_engine.errors import ConfigError


def list_kernels(archs: str | None, as_json: bool) -> str:
    """The table, or its JSON.

    Args:
        archs: "sm_80,sm_90"; None = all that are supported.

    Raises:
        ConfigError: no such architecture, or NVRTC is not installed.
        CompileError: a kernel does not compile.
    """
    from lean_engine.checkpoint.demo_model import cache_directory
    from lean_engine.cli.terminal import progress_bar
    from lean_engine.runtime.cuda.catalogue import kernel_resources
    from lean_engine.runtime.cuda.cubin_cache import CubinCache
    from lean_engine.runtime.cuda.instances import ARCHITECTURES
    from lean_engine.runtime.cuda.nvrtc import Nvrtc

    wanted = ARCHITECTURES if archs is None else tuple(arch.strip() for arch in archs.split(","))
    for arch in wanted:
        if arch not in ARCHITECTURES:
            raise ConfigError(f"--arch has {arch!r}; supported: {', '.join(ARCHITECTURES)}")
    cubins = CubinCache(cache_directory() / "cubin", Nvrtc())
    rows: list[dict[str, Any]] = []
    for arch in wanted:
        with progress_bar(f"compiling for {arch}") as on_progress:
            resources = kernel_resources(arch, cubins, on_progress or (lambda done, total: None))
        rows += [
            {"name": instance.expression, "source": instance.source, "arch": arch, **dataclasses.asdict(needs)}
            for instance, needs in resources.items()
        ]
    return json.dumps(rows) if as_json else table(rows)


def table(rows: list[dict[str, Any]]) -> str:
    width = max(len(row["name"]) for row in rows)
    lines = [f"{'kernel':<{width}}  arch    registers  shared  spills  stack"]
    lines += [
        f"{row['name']:<{width}}  {row['arch']:<6}  {row['registers']:>9}  {row['shared_bytes']:>6}  "
        f"{row['spill_bytes']:>6}  {row['stack_bytes']:>5}"
        for row in rows
    ]
    lines.append(f"\n{len(rows):,} kernels; shared memory, spills and stack in bytes; shared memory is the static part")
    return "\n".join(lines)
