"""`lean-engine inspect`: a model's program before and after the passes, and what a step of it costs.

Only the configuration is read, and a GGUF file's header, never a weight, so a model that does not fit into memory can
be inspected too.
"""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from lean_engine.checkpoint import DEFAULT_MODEL, open_checkpoint
from lean_engine.cli.footprint import HeldWeights, held_weights, is_gguf, weight_store
from lean_engine.cli.inspect_kernels import list_kernels
from lean_engine.cli.options import Command, Option, engine_options, flag, is_given, model_argument, tokens
from lean_engine.config import EngineConfig
from lean_engine.units import format_bytes, plural

if TYPE_CHECKING:
    from collections.abc import Mapping

    from lean_engine.checkpoint import Checkpoint
    from lean_engine.config import ModelConfig
    from lean_engine.ir.graph import Graph
    from lean_engine.passes import Lowered
    from lean_engine.passes.report import Cost, Step

_INDEX = re.compile(r"(layers\.|[kv]_cache\.)(\d+)")
FLOP_UNITS = ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP")
DEFAULT_CONTEXT = 1024
MAX_NUM_TOKENS = 2**18  # of a step: its attention is counted token by token
MODEL_FLAGS = ("model", "num_tokens", "num_requests", "context", "full")  # what means nothing beside --kernels
EXAMPLES = (
    "lean-engine inspect",
    "lean-engine inspect ./model --num-requests 16 --num-tokens 16 --context 4K",
    "lean-engine inspect Qwen/Qwen3-0.6B --json",
)


@click.command("inspect", cls=Command, examples=EXAMPLES)
@model_argument
@click.option(
    "--num-tokens",
    type=tokens,
    cls=Option,
    section="Step",
    help="Tokens computed in the step.  [default: one per request]",
)
@click.option(
    "--num-requests",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    cls=Option,
    section="Step",
    help="Requests in the step.",
)
@click.option(
    "--context",
    type=tokens,
    cls=Option,
    section="Step",
    help=f"Tokens of each request once the step is done.  [default: {DEFAULT_CONTEXT}, or what fits]",
)
@click.option("--full", is_flag=True, cls=Option, section="Output", help="Print every layer, not one of each kind.")
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    cls=Option,
    section="Output",
    help="Print all figures as a JSON object; with --full, the programs too.",
)
@click.option(
    "--kernels",
    is_flag=True,
    cls=Option,
    section="CUDA kernels",
    help="List every CUDA kernel, compiled here without a GPU, instead of a model: registers, shared memory, spills.",
)
@click.option(
    "--arch",
    metavar="SM,SM,...",
    cls=Option,
    section="CUDA kernels",
    help="With --kernels: architectures, such as sm_80,sm_90.  [default: all that are supported]",
)
@engine_options(
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "enable_chunked_prefill",
    "block_size",
    "threads",
    "cpu_kernels",
    "dtype",
    "revision",
    "hf_token",
)
def command(
    model: str | None,
    num_tokens: int | None,
    num_requests: int,
    context: int | None,
    full: bool,
    as_json: bool,
    kernels: bool,
    arch: str | None,
    engine: dict[str, Any],
) -> None:
    """Show how a model is compiled and what a step costs.

    Prints the program as the model's family writes it and as the passes leave it, then the figures of one step:
    launches, memory, bytes moved and floating-point operations. Only the configuration is read, and of a Hugging Face
    repository nothing else is downloaded.
    """
    if kernels:
        for name in filter(is_given, MODEL_FLAGS):
            what = "MODEL" if name == "model" else flag(name)
            raise click.UsageError(f"{what} does not go with --kernels; leave out one of them")
        click.echo(list_kernels(arch, as_json))
        return
    if arch is not None:
        raise click.UsageError("--arch needs --kernels")
    report = inspect_model(model or DEFAULT_MODEL, EngineConfig(**engine), num_tokens, num_requests, context)
    if as_json:
        click.echo(json.dumps(report.figures(full), ensure_ascii=False))
        return
    for title, graph in (("before the passes", report.before), ("after the passes", report.after)):
        click.echo(f"# {title}: {len(graph.ops)} ops")
        click.echo(report.program_text(graph, full))
    click.echo(report.text())


@dataclass(frozen=True, slots=True)
class Report:
    """A compiled model and one step of it."""

    model: str
    config: ModelConfig
    max_model_len: int  # tokens
    before: Graph
    after: Graph
    num_parameters: int
    parameter_bytes: int  # on the device
    checkpoint_bytes: int  # in the dtype that the configuration names; of a GGUF file as they are stored
    checkpoint_type: str
    step: Step
    cost: Cost
    arena_bytes: int  # activations and scratch of this step
    largest_step: dict[str, int]  # the engine's, in tokens, requests and rows of logits
    largest_arena_bytes: int
    threads: int

    def figures(self, with_programs: bool) -> dict[str, Any]:
        """Everything, for JSON."""
        from lean_engine.ir.text import format_graph

        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        before, after = values.pop("before"), values.pop("after")
        for name in ("config", "step", "cost"):
            values[name] = dataclasses.asdict(values[name])
        values["cost"] |= {"num_launches": self.cost.num_launches, "flops": self.cost.flops}
        values |= {"num_ops_before": len(before.ops), "num_ops_after": len(after.ops)}
        if with_programs:
            values |= {"program_before": format_graph(before), "program_after": format_graph(after)}
        return values

    def program_text(self, graph: Graph, full: bool) -> str:
        from lean_engine.ir.text import format_graph

        return format_graph(graph) if full else fold_layers(format_graph(graph))

    def text(self) -> str:
        """The figures, one a line."""
        c, step, cost, largest = self.config, self.step, self.cost, self.largest_step
        kernels = ", ".join(f"{name} {count}" for name, count in cost.launches.items())
        experts = f", {c.num_experts} experts of which {c.num_experts_per_token} per token" if c.num_experts else ""
        rows = {
            "model": f"{self.model}: {c.model_type}, {c.num_layers} layers, hidden {c.hidden_size}, intermediate "
            f"{c.intermediate_size}, heads {c.num_q_heads} ({c.num_kv_heads} KV) of {c.head_dim}, vocabulary "
            f"{c.vocab_size:,}{experts}",
            "parameters": f"{self.num_parameters:,}: {format_bytes(self.checkpoint_bytes)} as {self.checkpoint_type}, "
            f"{format_bytes(self.parameter_bytes)} on the device with rope tables for {self.max_model_len:,} tokens",
            "step": f"{plural(step.num_tokens, 'token')} of {plural(step.num_requests, 'request')}, context "
            f"{plural(step.context, 'token')}",
            "launches": f"{cost.num_launches} of {len(self.before.ops)} ops: {kernels}",
            "per layer": describe_layers(cost.launches_per_layer),
            "arena": f"{format_bytes(self.arena_bytes)}; {format_bytes(self.largest_arena_bytes)} for the largest step "
            f"({largest['T']:,} tokens, {largest['B']:,} requests, {largest['R']:,} rows of logits); "
            f"{plural(self.threads, 'thread')}",
            "weights read": format_bytes(cost.weight_bytes),
            "KV cache": f"{format_bytes(cost.kv_bytes_per_token)} per token; read {format_bytes(cost.kv_read_bytes)}, "
            f"written {format_bytes(cost.kv_written_bytes)}",
            "arithmetic": f"{format_flops(cost.flops)}: {format_flops(cost.matmul_flops)} in matrix products, "
            f"{format_flops(cost.attention_flops)} in attention",
        }
        return "\n".join(f"{name:<13} {value}" for name, value in rows.items())


def inspect_model(
    model: str, engine: EngineConfig, num_tokens: int | None, num_requests: int, context: int | None
) -> Report:
    """Compile a model from its configuration and measure one step.

    Raises:
        CheckpointError, ConfigError: there is no model of this name, or its configuration cannot be honoured.
        click.UsageError: the step is impossible.
    """
    from lean_engine import models
    from lean_engine.dtypes import dtype
    from lean_engine.engine.cpu_device import scratch_of
    from lean_engine.engine.start import max_model_len_of
    from lean_engine.passes import lower, optimize, plan_memory
    from lean_engine.passes.report import measure, num_parameters, parameter_bytes
    from lean_engine.scheduling.setup import largest_step, step_dims

    checkpoint = open_checkpoint(model, revision=engine.revision, token=engine.hf_token, load_format="dummy")
    config = models.configure(checkpoint.config)
    limit = max_model_len_of(config, engine)
    step = make_step(num_tokens, num_requests, context, limit)
    num_threads, workspace = scratch_of(engine)
    element_type = "float32"
    if engine.dtype not in ("auto", element_type):  # another device's, whose kernels' scratch is not known here
        element_type, workspace = engine.dtype, lambda launch, dims: 0
    before = models.build(config, element_type, limit)
    after = optimize(before)
    largest = largest_step(engine, limit)
    lowered = lower(after)
    plans = [
        plan_memory(lowered, step_dims(dims, limit, engine.block_size), workspace) for dims in (step.dims, largest)
    ]
    count = num_parameters(before)
    size, checkpoint_size, checkpoint_type = parameter_bytes(after), count * dtype(config.dtype).num_bytes, config.dtype
    cost = measure(after, step)
    held = held_by_cpu(weight_store(model, checkpoint, engine), dataclasses.replace(engine, dtype="auto"), lowered)
    if is_gguf(checkpoint):
        checkpoint_size, checkpoint_type = held.file_bytes, held.stored_type
    if engine.dtype == "auto":
        size = held.num_bytes + rope_table_bytes(after)
        cost = dataclasses.replace(cost, weight_bytes=weights_read(after, step, held.held_bytes))
    return Report(
        model=model,
        config=config,
        max_model_len=limit,
        before=before,
        after=after,
        num_parameters=count,
        parameter_bytes=size,
        checkpoint_bytes=checkpoint_size,
        checkpoint_type=checkpoint_type,
        step=step,
        cost=cost,
        arena_bytes=plans[0].arena_bytes,
        largest_step=largest,
        largest_arena_bytes=plans[1].arena_bytes,
        threads=num_threads,
    )


def held_by_cpu(store: Checkpoint, engine: EngineConfig, lowered: Lowered) -> HeldWeights:
    """As the CPU device that these options make keeps them; its kernels are compiled if need be."""
    from lean_engine.engine.cpu_device import make_cpu_device

    device = make_cpu_device(engine, store, progress=True)
    try:
        return held_weights(store, lowered.parameters, device)
    finally:
        device.close()


def weights_read(graph: Graph, step: Step, held_bytes: Mapping[str, int]) -> int:
    """Bytes of weights that a step reads of parameters that a device keeps in so many bytes."""
    from lean_engine.passes.report import weight_bytes

    total = 0
    for parameter in graph.parameters:
        value = parameter.value
        read = weight_bytes(dataclasses.replace(graph, parameters=(parameter,)), step)
        total += held_bytes.get(value.name, 0) * read // value.type.num_bytes({})
    return total


def rope_table_bytes(graph: Graph) -> int:
    from lean_engine.ir.sources import RopeTable

    return sum(p.value.type.num_bytes({}) for p in graph.parameters if isinstance(p.source, RopeTable))


def make_step(num_tokens: int | None, num_requests: int, context: int | None, limit: int) -> Step:
    """The step that the flags describe; click.UsageError names the flag that makes it impossible."""
    from lean_engine.passes.report import Step

    tokens = num_requests if num_tokens is None else num_tokens
    if tokens < num_requests:
        raise click.UsageError(f"--num-tokens is {tokens}, must be at least --num-requests, {num_requests}")
    if tokens > MAX_NUM_TOKENS:
        name = "--num-requests" if num_tokens is None else "--num-tokens"
        raise click.UsageError(f"{name} is {tokens}; a step of at most {MAX_NUM_TOKENS} tokens can be shown")
    chunk = -(-tokens // num_requests)
    length = max(chunk, min(DEFAULT_CONTEXT, limit)) if context is None else context
    if length < chunk:
        raise click.UsageError(f"--context is {length}, but the step alone computes {chunk} tokens of a request")
    if length > limit:
        flag = "--num-tokens per request" if context is None else "--context"
        raise click.UsageError(f"{flag} is {length}, the model's context has {limit} tokens")
    return Step(tokens, num_requests, length)


def fold_layers(text: str) -> str:
    """A printed program with each layer that repeats an earlier one, indices apart, folded into a line."""
    lines = text.splitlines()
    starts = [i for i, line in enumerate(lines) if not line.startswith(" ")]
    sections = [lines[a:b] for a, b in zip(starts, [*starts[1:], len(lines)], strict=True)]
    return "\n".join(line for section in sections for line in fold_section(section)) + "\n"


def fold_section(lines: list[str]) -> list[str]:
    named = [i for i, line in enumerate(lines) if first_layer(line) is not None]
    if not named:
        return lines
    layers: dict[int, list[str]] = {}
    current = 0
    for line in lines[named[0] : named[-1] + 1]:  # a line of no layer (a rope table) stays where it stands
        current = max(current, first_layer(line) or 0)
        layers.setdefault(current, []).append(line)
    folded: list[str] = []
    first_of_kind: dict[str, int] = {}
    repeats: dict[int, int] = {}  # layer not shown → the layer it repeats
    for layer, body in layers.items():
        kind = relative("\n".join(body), layer)
        original = first_of_kind.setdefault(kind, layer)
        if original != layer:
            repeats[layer] = original
            continue
        folded += fold_line(repeats)
        repeats.clear()
        folded += body
    return [*lines[: named[0]], *folded, *fold_line(repeats), *lines[named[-1] + 1 :]]


def relative(text: str, layer: int) -> str:
    """The text with layer indices counted from this layer."""
    return _INDEX.sub(lambda m: f"{m[1]}{int(m[2]) - layer:+d}", text)


def fold_line(repeats: dict[int, int]) -> list[str]:
    if not repeats:
        return []
    originals = sorted(set(repeats.values()))
    return [f"  … {layer_range(min(repeats), max(repeats))} as {plural_layers(originals)}"]


def first_layer(line: str) -> int | None:
    """The layer of the first name in a line."""
    match = _INDEX.match(line.split(":")[0].strip())
    match = match or _INDEX.match(line.split(":")[0].strip().removeprefix("model."))
    return None if match is None else int(match[2])


def layer_range(first: int, last: int) -> str:
    return f"layer {first}" if first == last else f"layers {first} to {last}"


def plural_layers(layers: list[int]) -> str:
    return f"{'layer' if len(layers) == 1 else 'layers'} {', '.join(map(str, layers))}"


def describe_layers(counts: list[int]) -> str:
    """Launches per layer, equal neighbours together: "10 in layers 0 to 28, 12 in layer 29"."""
    parts: list[str] = []
    first = 0
    for layer, count in enumerate(counts):
        if layer + 1 == len(counts) or counts[layer + 1] != count:
            parts.append(f"{count} in {layer_range(first, layer)}")
            first = layer + 1
    return ", ".join(parts)


def format_flops(count: int) -> str:
    power = min((len(str(count)) - 1) // 3, len(FLOP_UNITS) - 1)
    return f"{count / 1000**power:.3g} {FLOP_UNITS[power]}"
