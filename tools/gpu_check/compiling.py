"""Compiles every kernel for the GPU's architecture, side by side, reads what ptxas says, and loads all of them.

What it leaves in the cache is what the other parts load. Without a GPU it compiles a few for one architecture, where
NVRTC is installed, and builds for the host what the emulated device needs first.
"""

from __future__ import annotations

import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from typing import Any

from gpu_check.context import CheckError, Context, describe
from gpu_check.wiring import chunks, every_instance, load_all, make_cubins, num_processors, open_driver
from lean_engine.errors import ConfigError
from lean_engine.runtime.cuda.sources import kernel_source

EMULATED_SOURCES = ("plan_attention.cu",)
Chunk = tuple[str, list[str]]


def run(context: Context) -> None:
    driver = open_driver(context, loads_all=False)
    arch = driver.arch
    wanted = [c for c in chunks(every_instance(arch)) if not context.is_emulated or c[0] in EMULATED_SOURCES]
    started = time.monotonic()
    failed = compile_all(context, wanted, arch)
    context.row("compiled", chunks=len(wanted), failed=failed, seconds=time.monotonic() - started)
    if not context.is_emulated:
        started = time.monotonic()
        not_loaded = load_all(driver)
        context.row("loaded", seconds=time.monotonic() - started, failed=not_loaded or None)
        failed += len(not_loaded)
    if failed:
        raise CheckError(f"{failed} chunks of kernels do not compile or load")


def compile_all(context: Context, wanted: list[Chunk], arch: str) -> int:
    """A row for each chunk; the number of those that failed."""
    try:
        make_cubins()
    except ConfigError as error:
        if not context.is_emulated:
            raise
        context.row("nvrtc", left_out=str(error))
        return 0
    failed = 0
    workers = min(num_processors(), 16, len(wanted))
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for result in pool.map(compile_chunk, wanted, [arch] * len(wanted)):
            failed += "error" in result
            context.row(f"{result.pop('source')} ({arch})", **result)
    return failed


def compile_chunk(chunk: Chunk, arch: str) -> dict[str, Any]:
    """In a process of its own: seconds, and of each kernel the registers; spills and stack are named."""
    source, expressions = chunk
    result: dict[str, Any] = {"source": source, "kernels": len(expressions), "first": expressions[0]}
    started = time.monotonic()
    try:
        cubin = make_cubins().get(kernel_source(source), expressions, arch)
    except Exception as error:
        return {**result, "error": describe(error)["message"]}
    resources = {expression: asdict(cubin.resources[expression]) for expression in expressions}
    spilled = [name for name, r in resources.items() if r["spill_bytes"] or r["stack_bytes"]]
    return {
        **result,
        "seconds": time.monotonic() - started,
        "most_registers": max(r["registers"] for r in resources.values()),
        "spilled": spilled or None,
        "registers": {name: r["registers"] for name, r in resources.items()},
    }
