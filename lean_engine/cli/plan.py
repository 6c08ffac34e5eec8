"""`lean-engine plan`: how many requests a model can serve at once on a device of a given size, and why.

Only the configuration is read, and a GGUF file's header, never a weight, and no GPU is touched. Weights, workspace and
KV cache share what --gpu-memory-utilization grants; the KV cache gets what the others leave. A device's context and
code have the rest. cli/footprint says what is counted, memory/capacity how requests and waste are.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from lean_engine.bench.trace import read_trace
from lean_engine.checkpoint import DEFAULT_MODEL
from lean_engine.cli.footprint import Footprint, footprint_of
from lean_engine.cli.options import Command, Option, engine_options, model_argument, size, tokens
from lean_engine.config import EngineConfig
from lean_engine.errors import OutOfMemory
from lean_engine.memory.budget import available_memory_bytes, fit_max_model_len, size_pool
from lean_engine.memory.capacity import Occupancy, RequestShape, contiguous, paged
from lean_engine.units import format_bytes, plural

if TYPE_CHECKING:
    from collections.abc import Sequence

    from lean_engine.engine.workspace import Workspace
    from lean_engine.memory.budget import PoolSize

DTYPES = ("auto", "float32", "float16", "bfloat16")
DEFAULT_UTILIZATION = 0.9
DEFAULT_PROMPT, DEFAULT_OUTPUT = 200, 300  # tokens, where the context allows them
BLOCK_SIZES = (8, 16, 32, 64, 128, 256)  # of the table, tokens
EXAMPLES = (
    "lean-engine plan llama-2-13b --gpu-memory 40GiB --max-model-len 2048",
    "lean-engine plan Qwen/Qwen3-0.6B --gpu-memory 8GiB --prompt-tokens 1K --output-tokens 256",
    "lean-engine plan ./model --gpu-memory 24GiB --trace requests.jsonl --json",
)
WASTE = (  # what the two figures mean, for the reader of the output
    "share of the token slots a request holds that hold no token: when it is longest, so that they never will;",
    "and on average over its life, where a slot that is filled later counts until it is. Paged and contiguous alike",
)


def share(text: str) -> float:
    """A share of the device's memory, above 0 and at most 1."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise click.BadParameter(f"{text!r} is not a share above 0 and at most 1; write for example 0.9")
    return value


def count(text: str) -> int:
    """A number of tokens of at least 1."""
    number = tokens(text)
    if number < 1:
        raise click.BadParameter(f"{text!r} must be at least 1")
    return number


@click.command("plan", cls=Command, examples=EXAMPLES)
@model_argument
@click.option(
    "--gpu-memory",
    type=size,
    cls=Option,
    section="Device",
    help="Memory of the device, such as 40GiB or 24GB.  [default: what this machine has free]",
)
@click.option(
    "--gpu-memory-utilization",
    type=share,
    default=DEFAULT_UTILIZATION,
    show_default=True,
    cls=Option,
    section="Device",
    help="Share of it for weights, workspace and KV cache together, above 0 and at most 1.",
)
@click.option(
    "--dtype",
    type=click.Choice(DTYPES),
    default="auto",
    show_default=True,
    cls=Option,
    section="Device",
    help="Type of weights and products, as the engine's option; auto with --gpu-memory: a GPU's 16 bits for all.",
)
@click.option(
    "--prompt-tokens",
    type=count,
    metavar="TOKENS",
    cls=Option,
    section="Requests",
    help=f"Tokens in each request's prompt.  [default: {DEFAULT_PROMPT}, or what fits]",
)
@click.option(
    "--output-tokens",
    type=count,
    metavar="TOKENS",
    cls=Option,
    section="Requests",
    help=f"Tokens each request generates.  [default: {DEFAULT_OUTPUT}, or what fits]",
)
@click.option(
    "--trace",
    metavar="FILE",
    cls=Option,
    section="Requests",
    help="Take requests from a file of JSON lines with prompt_len (or prompt_token_ids) and output_len; arrival_time "
    "changes nothing here, and a shared prefix counts in full.  [default: all requests alike]",
)
@click.option("--json", "as_json", is_flag=True, cls=Option, section="Output", help="Print all figures as JSON.")
@engine_options(
    "max_model_len",
    "block_size",
    "max_num_seqs",
    "max_num_batched_tokens",
    "quantization",
    "kv_cache_dtype",
    "revision",
    "hf_token",
)
def command(
    model: str | None,
    gpu_memory: int | None,
    gpu_memory_utilization: float,
    dtype: str,
    prompt_tokens: int | None,
    output_tokens: int | None,
    trace: str | None,
    as_json: bool,
    engine: dict[str, Any],
) -> None:
    """Plan how many requests fit on a device.

    Divides a device's memory into weights, workspace and KV cache, and tells how many requests then run at once: with
    paged blocks, and if each reserved memory for the whole context. Only a configuration is read, so MODEL can also be
    a preset that needs no files: llama-2-7b, llama-2-13b, llama-3.1-8b, llama-3.1-70b, llama-3.2-1b, qwen3-0.6b,
    qwen3-8b, mistral-7b.
    """
    if trace is not None and (prompt_tokens, output_tokens) != (None, None):
        raise click.UsageError("--trace tells the lengths of the requests; leave out --prompt-tokens, --output-tokens")
    device = DeviceMemory(
        available_memory_bytes() if gpu_memory is None else gpu_memory, gpu_memory_utilization, gpu_memory is None
    )
    shapes = None if trace is None else [RequestShape(r.prompt_len, r.output_len) for r in read_trace(trace)]
    footprint = footprint_of(model or DEFAULT_MODEL, EngineConfig(**engine), dtype, is_cpu=device.is_this_machine)
    max_model_len, pool = divide(device, footprint)
    if shapes is None:
        shapes = [uniform_shape(prompt_tokens, output_tokens, max_model_len)]
    else:
        check_lengths(shapes, max_model_len, trace)
    report = Report(device, footprint, max_model_len, pool, shapes, trace)
    click.echo(json.dumps(report.figures(), ensure_ascii=False) if as_json else report.text())


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """A device's memory and how much of it the engine may take."""

    total_bytes: int
    utilization: float  # above 0, at most 1
    is_this_machine: bool

    @property
    def usable_bytes(self) -> int:
        return int(self.total_bytes * self.utilization)


def divide(device: DeviceMemory, footprint: Footprint) -> tuple[int, PoolSize]:
    """The context, fitted to the KV cache where it was left open, and the pool beside weights and workspace.

    Raises:
        OutOfMemory: they leave no room for a request of max_model_len, or none at all; with the numbers.
    """
    engine = footprint.engine
    limit = footprint.limit

    def memory(max_model_len: int) -> dict[str, Any]:
        return {
            "block_bytes": footprint.kv_block_bytes(engine.block_size),
            "block_size": engine.block_size,
            "num_gpu_blocks_override": None,
            "kv_cache_memory_bytes": None,
            "available_bytes": bytes_for_kv(device, footprint, footprint.workspace(max_model_len)),
            "memory_share": 1.0,
        }

    if engine.max_model_len is None:  # the workspace grows with the context: once from below, then surely enough
        bound = fit_max_model_len(max_model_len=limit, **memory(1))
        limit = fit_max_model_len(max_model_len=bound, **memory(bound))
    return limit, size_pool(max_model_len=limit, max_num_seqs=engine.max_num_seqs, **memory(limit))


def bytes_for_kv(device: DeviceMemory, footprint: Footprint, workspace: Workspace) -> int:
    """What is left of the usable memory; OutOfMemory if weights and workspace alone are more."""
    left = device.usable_bytes - footprint.weights_bytes - workspace.num_bytes
    if left < 0:
        raise OutOfMemory(
            f"the weights need {format_bytes(footprint.weights_bytes)} as {footprint.weights_type} and the workspace "
            f"{format_bytes(workspace.num_bytes)}; {device.utilization:.4g} of the device's "
            f"{format_bytes(device.total_bytes)} are {format_bytes(device.usable_bytes)}"
        )
    return left


def uniform_shape(prompt_len: int | None, output_len: int | None, max_model_len: int) -> RequestShape:
    """The shape that the flags describe; a length that was left open shrinks to the context."""
    if max_model_len < 2:
        raise click.UsageError(f"the context is {max_model_len}; a request needs a token of prompt and one of output")
    for name, given in (("--prompt-tokens", prompt_len), ("--output-tokens", output_len)):
        if given is not None and given >= max_model_len:
            raise click.UsageError(f"{name} is {given}; in a context of {max_model_len} at most {max_model_len - 1}")
    if prompt_len is None:
        room = max_model_len - output_len if output_len is not None else max_model_len * 2 // 5
        prompt_len = min(DEFAULT_PROMPT, max(1, room))
    if output_len is None:
        output_len = min(DEFAULT_OUTPUT, max(1, max_model_len - prompt_len))
    if prompt_len + output_len > max_model_len:
        raise click.UsageError(
            f"--prompt-tokens {prompt_len} and --output-tokens {output_len} are {prompt_len + output_len} tokens, "
            f"more than the context of {max_model_len} tokens"
        )
    return RequestShape(prompt_len, output_len)


def check_lengths(shapes: Sequence[RequestShape], max_model_len: int, trace: str | None) -> None:
    longest = max(s.prompt_len + s.output_len for s in shapes)
    if longest > max_model_len:
        num_longer = sum(s.prompt_len + s.output_len > max_model_len for s in shapes)
        raise click.UsageError(
            f"{trace}: {num_longer:,} of {plural(len(shapes), 'request')} are longer than the context of "
            f"{max_model_len} tokens; the longest has {longest}"
        )


@dataclass(frozen=True, slots=True)
class Report:
    """A plan: where the memory goes and how many requests it serves."""

    device: DeviceMemory
    footprint: Footprint
    max_model_len: int  # tokens
    pool: PoolSize
    shapes: Sequence[RequestShape]
    trace: str | None

    @property
    def mean_prompt_len(self) -> float:
        return sum(s.prompt_len for s in self.shapes) / len(self.shapes)

    @property
    def mean_output_len(self) -> float:
        return sum(s.output_len for s in self.shapes) / len(self.shapes)

    def contiguous(self) -> Occupancy:
        return contiguous(self.shapes, self.pool.num_tokens, self.max_model_len)

    def paged(self, block_size: int) -> Occupancy:
        """With the pool's memory cut into blocks of another size."""
        num_usable = max(0, self.pool.kv_bytes // self.footprint.kv_block_bytes(block_size) - 1)
        return paged(self.shapes, num_usable, block_size)

    def by_block_size(self) -> dict[int, Occupancy]:
        return {s: self.paged(s) for s in sorted({*BLOCK_SIZES, self.pool.block_size})}

    def figures(self) -> dict[str, Any]:
        """Everything, for JSON."""
        f, pool = self.footprint, self.pool
        workspace = f.workspace(self.max_model_len)
        return {
            "model": f.model,
            "num_parameters": f.num_parameters,
            "dtype": f.dtype,
            "quantization": f.engine.quantization,
            "kv_cache_dtype": f.kv_cache_dtype,
            "device_bytes": self.device.total_bytes,
            "gpu_memory_utilization": self.device.utilization,
            "usable_bytes": self.device.usable_bytes,
            "weights_bytes": f.weights_bytes,
            "workspace_bytes": workspace.num_bytes,
            "workspace": dataclasses.asdict(workspace),
            "largest_step": dict(f.largest_step),
            "unused_bytes": self.unused_bytes,
            "kv_bytes_per_token": f.kv_block_bytes(1),
            "kv_bytes": pool.kv_bytes,  # the null block included
            "num_blocks": pool.num_blocks,  # the null block included
            "num_usable_blocks": pool.num_usable_blocks,
            "num_tokens": pool.num_tokens,
            "block_size": pool.block_size,
            "max_model_len": self.max_model_len,
            "max_num_seqs": f.engine.max_num_seqs,
            "requests": {
                "trace": self.trace,
                "num_shapes": len(self.shapes),
                "mean_prompt_len": self.mean_prompt_len,
                "mean_output_len": self.mean_output_len,
            },
            "contiguous": dataclasses.asdict(self.contiguous()),
            "paged": dataclasses.asdict(self.paged(pool.block_size)),
            "by_block_size": [{"block_size": s, **dataclasses.asdict(o)} for s, o in self.by_block_size().items()],
        }

    def text(self) -> str:
        """The plan, one figure a line, the table of block sizes, and the sum of it."""
        f, device, largest = self.footprint, self.device, self.footprint.largest_step
        workspace = f.workspace(self.max_model_len)
        origin = " (what this machine has free)" if device.is_this_machine else ""
        rows = {
            "model": f"{f.model}: {f.config.model_type}, {f.config.num_layers} layers, {f.num_parameters:,} parameters",
            "device": f"{format_bytes(device.total_bytes)}{origin}; {format_bytes(device.usable_bytes)} to use at "
            f"{device.utilization:.4g}",
            "weights": f"{format_bytes(f.weights_bytes)} as {f.weights_type}",
            "workspace": f"{format_bytes(workspace.num_bytes)}: activations {format_bytes(workspace.arena_bytes)} of "
            f"the largest step ({largest['T']:,} tokens, {largest['B']:,} requests, {largest['R']:,} rows of logits), "
            f"rope tables {format_bytes(workspace.rope_table_bytes)}, inputs {format_bytes(workspace.input_bytes)}",
            "KV cache": f"{format_bytes(self.pool.kv_bytes)} as {f.kv_cache_dtype}, {self.pool.num_usable_blocks:,} "
            f"blocks of {plural(self.pool.block_size, 'token')}, {self.pool.num_tokens:,} tokens; "
            f"{format_bytes(f.kv_block_bytes(1))} per token{self.what_is_left()}",
            "context": plural(self.max_model_len, "token") + self.why_this_context(),
            "requests": self.describe_requests(),
            "waste": WASTE[0],
            "": WASTE[1],
        }
        lines = [f"{name:<13} {value}" for name, value in rows.items()]
        return "\n".join([*lines, "", *self.table(), "", *self.summary()])

    @property
    def unused_bytes(self) -> int:
        """What weights, workspace and KV cache leave of the usable memory."""
        workspace = self.footprint.workspace(self.max_model_len)
        return bytes_for_kv(self.device, self.footprint, workspace) - self.pool.kv_bytes

    def what_is_left(self) -> str:
        if self.unused_bytes < self.pool.block_bytes:
            return ""
        return (
            f"; {format_bytes(self.unused_bytes)} stay free: {self.footprint.engine.max_num_seqs:,} requests "
            "(--max-num-seqs) of the whole context can use no more"
        )

    def why_this_context(self) -> str:
        if self.footprint.engine.max_model_len is not None:
            return ""
        return ", the model's" if self.max_model_len == self.footprint.limit else ", all that fits the KV cache"

    def describe_requests(self) -> str:
        if self.trace is None:
            (shape,) = self.shapes
            return (
                f"prompts of {plural(shape.prompt_len, 'token')}, outputs of {shape.output_len:,}; cached are "
                f"{shape.max_num_tokens:,} at most (the last is not fed back), "
                f"{shape.num_token_steps / shape.num_steps:,.1f} on average"
            )
        return (
            f"{len(self.shapes):,} of {self.trace}, on average prompts of {self.mean_prompt_len:,.1f} tokens, outputs "
            f"of {self.mean_output_len:,.1f}; one that runs longer counts more"
        )

    def table(self) -> list[str]:
        """How block sizes compare."""
        lines = [
            f"{'':<10}  {'when longest':>20}  {'on average':>20}",
            f"{'block size':<10}  {'requests':>10}  {'waste':>8}  {'requests':>10}  {'waste':>8}",
        ]
        for block_size, o in self.by_block_size().items():
            longest = f"{o.num_requests:>10,}  {percent(o.waste_ratio):>8}"
            average = f"{o.num_requests_mean:>10,}  {percent(o.waste_ratio_mean):>8}"
            lines.append(f"{block_size:>10,}  {longest}  {average}")
        return lines

    def summary(self) -> list[str]:
        paged, slabs = self.paged(self.pool.block_size), self.contiguous()
        longest = at_once(paged.num_requests, paged.waste_ratio), at_once(slabs.num_requests, slabs.waste_ratio)
        average = (
            at_once(paged.num_requests_mean, paged.waste_ratio_mean),
            at_once(slabs.num_requests_mean, slabs.waste_ratio_mean),
        )
        lines = [
            f"paged: {longest[0]}; contiguous: {longest[1]}",
            f"on average: {average[0]}; contiguous: {average[1]}",
        ]
        max_num_seqs = self.footprint.engine.max_num_seqs
        if paged.num_requests_mean > max_num_seqs:
            lines.append(f"the engine runs {max_num_seqs:,} of them at most (--max-num-seqs)")
        return lines


def at_once(num_requests: int, waste_ratio: float) -> str:
    return f"{plural(num_requests, 'request')} at once, {percent(waste_ratio)} waste"


def percent(ratio: float) -> str:
    return f"{100 * ratio:.1f} %"
