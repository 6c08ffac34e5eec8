"""`lean-engine bench kernels`: every kernel of the kernel table against what the device can do at most."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

from lean_engine.checkpoint import DEFAULT_MODEL
from lean_engine.cli.bench_offline_options import keep, output_options
from lean_engine.cli.options import ENGINE_FLAGS, Command, Option, engine_options, model_argument, tokens
from lean_engine.cli.terminal import progress_bar
from lean_engine.config import EngineConfig
from lean_engine.errors import ConfigError

if TYPE_CHECKING:
    from lean_engine.bench.kernel_cases import Step
    from lean_engine.bench.kernels import Ceilings, KernelFigures

DEFAULT_STEPS = "1x1,16x16,512x1"
DEFAULT_CONTEXT = 1024
ENGINE = [
    name
    for name in (
        "device",
        "threads",
        "cpu_kernels",
        "dtype",
        "quantization",
        "kv_cache_dtype",
        "batch_invariant",
        "block_size",
        "revision",
    )
    if name in ENGINE_FLAGS
]
EXAMPLES = (
    "lean-engine bench kernels",
    "lean-engine bench kernels llama-3.1-8b --step 1x1 --context 4K --only gemm,paged_attention",
)


@click.command("kernels", cls=Command, examples=EXAMPLES)
@model_argument
@click.option(
    "--step",
    "steps",
    default=DEFAULT_STEPS,
    show_default=True,
    metavar="TxB,...",
    cls=Option,
    section="Sizes",
    help="Steps of T tokens of B requests, T a multiple of B: 1x1 decodes one request, 512x1 is a chunk of a prompt.",
)
@click.option(
    "--context",
    type=tokens,
    default=DEFAULT_CONTEXT,
    show_default=True,
    cls=Option,
    section="Sizes",
    help="Tokens of each request once the step is done.",
)
@click.option("--only", metavar="KERNEL,...", cls=Option, section="Sizes", help="These kernels alone.")
@output_options
@engine_options(*ENGINE)
def command(
    model: str | None,
    steps: str,
    context: int,
    only: str | None,
    as_json: bool,
    output_json: str | None,
    result_dir: str | None,
    engine: dict[str, Any],
) -> None:
    """Time every kernel in the sizes of MODEL, of which only the configuration is read.

    Prints for each kernel the bytes it must move, its operations, its time, and its share of the ceiling that binds,
    of two that are measured in the same run: memory bandwidth and the rate of a large matrix product. Kernels that the
    model's own program does not launch are timed in its sizes too.
    """
    from lean_engine import models
    from lean_engine.bench.kernel_cases import Cases
    from lean_engine.bench.kernels import Bench
    from lean_engine.cli.footprint import config_source, weight_store
    from lean_engine.engine.start import make_device

    wanted = read_kernels(only)
    config = EngineConfig(**engine)
    parsed = read_steps(steps, context)
    name = model or DEFAULT_MODEL
    checkpoint = weight_store(name, config_source(name, config), config)
    model_config = models.configure(checkpoint.config)
    logging.getLogger("lean_engine").setLevel(logging.WARNING)
    device = make_device(config, model_config, checkpoint)
    try:
        bench = Bench(device, model_config.dtype)
        cases = [c for step in parsed for c in Cases(model_config, step, config.block_size).all() if c.kernel in wanted]
        with progress_bar("kernels") as on_progress:
            ceilings = bench.ceilings()
            found = []
            for i, case in enumerate(cases, 1):
                found.append(bench.measure(case))
                if on_progress is not None:
                    on_progress(i, len(cases))
        name = f"{device.name}, {getattr(device, 'num_threads', 1)} threads" if device.name == "cpu" else device.name
    finally:
        device.close()
    figures = {
        "device": name,
        "bytes_per_second": ceilings.bytes_per_second,
        "flops_per_second": ceilings.flops_per_second,
        "kernels": [one.figures(ceilings) for one in found],
    }
    click.echo(json.dumps(figures) if as_json else text(name, ceilings, found))
    configuration = {"model": model or DEFAULT_MODEL, "step": steps, "context": context, **engine}
    keep("kernels", figures, configuration, output_json, result_dir)


def read_steps(text: str, context: int) -> list[Step]:
    from lean_engine.bench.kernel_cases import Step

    steps = []
    for part in text.split(","):
        tokens_, _, requests = part.partition("x")
        numbers = [int(n) if n.isascii() and n.isdigit() else 0 for n in (tokens_, requests)]
        if min(numbers) < 1 or numbers[0] % numbers[1]:
            raise ConfigError(f"step is {part!r}, must be TxB, such as 16x16 or 512x1, T a multiple of B")
        if numbers[0] // numbers[1] > context:
            raise ConfigError(f"step is {part!r}: more tokens per request than the context, {context}")
        steps.append(Step(numbers[0], numbers[1], context))
    return steps


def read_kernels(only: str | None) -> Sequence[str]:
    from lean_engine.runtime.kernels import KERNELS

    names = list(KERNELS) if only is None else only.split(",")
    for name in names:
        if name not in KERNELS:
            raise ConfigError(f"only has {name!r}, must be of: {', '.join(KERNELS)}")
    return names


def text(name: str, ceilings: Ceilings, found: Sequence[KernelFigures]) -> str:
    """The ceilings, and a line per kernel."""
    rows = [["kernel", "sizes", "weights", "MB", "GFLOP", "µs", "GB/s", "GFLOP/s", "of", "share"]]
    for one in found:
        f = one.figures(ceilings)
        numbers = [f["bytes"] / 1e6, f["flops"] / 1e9, 1e6 * f["seconds"], f["gb_per_second"], f["gflop_per_second"]]
        rows.append([one.kernel, one.shape, one.weights, *(f"{n:.4g}" for n in numbers), f["bound"]])
        rows[-1].append(f"{100 * f['share']:.0f} %")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(c.ljust(w) if i < 3 or i == 8 else c.rjust(w) for i, (c, w) in enumerate(zip(r, widths, strict=True)))
        for r in rows
    ]
    about = f"{ceilings.bytes_per_second / 1e9:.1f} GB/s, {ceilings.flops_per_second / 1e9:.0f} GFLOP/s"
    return "\n".join([f"{name}; ceilings measured: {about}", "", *(line.rstrip() for line in lines)])
