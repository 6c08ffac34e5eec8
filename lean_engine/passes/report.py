"""What a step of a compiled program costs, from the program alone: launches, bytes and floating-point operations.

Counted for an ideal device: a matrix is read once per step whatever the number of rows, a request's keys and values
once per layer. Activations are left out; they are small and mostly stay in caches.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from lean_engine.ir.graph import Graph, Op, evaluate
from lean_engine.ir.ops import num_flops
from lean_engine.ir.sources import RopeTable
from lean_engine.passes.lower import lower_op

_LAYER = re.compile(r"(?:layers|[kv]_cache)\.(\d+)\b")


@dataclass(frozen=True, slots=True)
class Step:
    """A step in which every request samples one token."""

    num_tokens: int  # T, shared out evenly
    num_requests: int  # B
    context: int  # tokens of each request once the step is done

    @property
    def dims(self) -> dict[str, int]:
        return {"T": self.num_tokens, "B": self.num_requests, "R": self.num_requests}

    def chunks(self) -> Iterator[int]:
        """New tokens of each request."""
        for i in range(self.num_requests):
            yield self.num_tokens // self.num_requests + (i < self.num_tokens % self.num_requests)


@dataclass(frozen=True, slots=True)
class Cost:
    """What a step costs; bytes as the program holds its values."""

    launches: dict[str, int]  # kernel → launches
    launches_per_layer: list[int]
    weight_bytes: int  # read
    kv_bytes_per_token: int  # K and V of one token in all layers
    kv_read_bytes: int
    kv_written_bytes: int
    matmul_flops: int  # a multiply-add counts as two
    attention_flops: int

    @property
    def num_launches(self) -> int:
        return sum(self.launches.values())

    @property
    def flops(self) -> int:
        return self.matmul_flops + self.attention_flops


def measure(graph: Graph, step: Step) -> Cost:
    """The cost of one step of a graph, as it is or after the passes."""
    attentions = [op for op in graph.ops if op.kind == "paged_attention"]
    return Cost(
        launches=dict(Counter(lower_op(op).kernel for op in graph.ops).most_common()),
        launches_per_layer=launches_per_layer(graph),
        weight_bytes=weight_bytes(graph, step),
        kv_bytes_per_token=sum(kv_bytes(op) for op in attentions),
        kv_read_bytes=sum(kv_bytes(op) * num_keys_read(op, step) for op in attentions),
        kv_written_bytes=sum(kv_bytes(op) for op in attentions) * step.num_tokens,
        matmul_flops=sum(num_flops(op, step.dims) for op in graph.ops),
        attention_flops=sum(attention_flops(op, step) for op in attentions),
    )


def layer_of(op: Op) -> int | None:
    """The layer an op belongs to, by its first output's name; None for the embedding, the last norm and the head."""
    match = _LAYER.search(op.outputs[0].name)
    return None if match is None else int(match[1])


def launches_per_layer(graph: Graph) -> list[int]:
    """A row gathered out of an earlier layer's output counts where it is needed: names only go up."""
    counts: Counter[int] = Counter()
    current = 0
    for op in graph.ops:
        layer = layer_of(op)
        if layer is not None:
            current = max(current, layer)
            counts[current] += 1
    return [counts[layer] for layer in range(max(counts, default=-1) + 1)]


def num_parameters(graph: Graph) -> int:
    """Elements of all tensors that the checkpoint must hold; a shared one counts once."""
    tensors = {t.name: t.shape for p in graph.parameters for t in p.source.tensors()}
    return sum(product(shape) for shape in tensors.values())


def parameter_bytes(graph: Graph) -> int:
    """Device memory of all parameters, rope tables included."""
    return sum(p.value.type.num_bytes({}) for p in graph.parameters)


def weight_bytes(graph: Graph, step: Step) -> int:
    """Bytes of weights a step reads: matrices whole, embedding rows by token, of experts those that can be chosen."""
    weights = {p.value.name: p for p in graph.parameters if not isinstance(p.source, RopeTable)}
    total = 0
    for op in graph.ops:
        rows = evaluate(op.inputs[0].type.shape[0], step.dims)
        for value in op.inputs:
            if value.name not in weights:
                continue
            num_bytes = value.type.num_bytes({})
            num_parts = int(value.type.shape[0])
            if op.kind == "embedding":
                num_bytes = num_bytes // num_parts * rows
            elif op.kind == "moe_experts":
                num_bytes = num_bytes // num_parts * min(num_parts, rows * op.inputs[2].columns)
            total += num_bytes
    return total


def kv_bytes(attention: Op) -> int:
    """K and V of one token in this layer."""
    return 2 * attention.inputs[1].type.num_bytes({"N": 1, "S": 1})  # its cache with room for one token


def num_keys_read(attention: Op, step: Step) -> int:
    """Tokens whose K and V the layer reads: a request's context, or what its new tokens' windows cover."""
    window = attention.attrs["window"]
    reach = (step.context if window is None else min(step.context, window + chunk - 1) for chunk in step.chunks())
    return sum(reach)


def attention_flops(attention: Op, step: Step) -> int:
    """q·K and weights·V over the keys each query sees."""
    window = attention.attrs["window"] or step.context
    num_pairs = 0
    for chunk in step.chunks():
        num_pairs += sum(min(position + 1, window) for position in range(step.context - chunk, step.context))
    return 4 * attention.inputs[0].columns * num_pairs


def product(shape: tuple[int, ...]) -> int:
    result = 1
    for n in shape:
        result *= n
    return result
