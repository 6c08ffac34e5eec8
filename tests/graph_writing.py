"""GraphWriter: small graphs by hand, for the tests of passes and rules."""

from __future__ import annotations

from typing import Any

from lean_engine.config import RopeConfig
from lean_engine.ir.graph import Dim, Graph, Op, Parameter, TensorType, Value
from lean_engine.ir.ops import infer_types
from lean_engine.ir.sources import RopeTable, Source, Tensor
from lean_engine.ir.text import format_op
from lean_engine.ir.verify import verify


class GraphWriter:
    """Collects values and ops; an op's output types come from the op table. The same name is the same value."""

    def __init__(self) -> None:
        self.values: dict[str, Value] = {}
        self.parameters: dict[str, Parameter] = {}
        self.caches: list[Value] = []
        self.all_ops: list[Op] = []

    def input(self, name: str, *shape: Dim, dtype: str = "int32") -> Value:
        return self.values.setdefault(name, Value(name, TensorType(shape, dtype)))

    def x(self, name: str, columns: int) -> Value:
        """An activation [T, columns] that comes from outside."""
        return self.input(name, "T", columns, dtype="float32")

    def parameter(self, name: str, source: Source) -> Value:
        value = Value(name, TensorType(source.shape, "float32"))
        return self.parameters.setdefault(name, Parameter(value, source)).value

    def weight(self, name: str, *shape: int) -> Value:
        return self.parameter(name, Tensor(name, shape))

    def cache(self, name: str, num_kv_heads: int, head_dim: int) -> Value:
        self.caches.append(Value(name, TensorType(("N", num_kv_heads, "S", head_dim), "float32")))
        return self.caches[-1]

    def ops(self, kind: str, names: tuple[str, ...], *inputs: Value, **attrs: Any) -> tuple[Value, ...]:
        types = infer_types(kind, tuple(v.type for v in inputs), attrs)
        outputs = tuple(Value(name, t) for name, t in zip(names, types, strict=True))
        self.all_ops.append(Op(kind, inputs, outputs, attrs))
        return outputs

    def op(self, kind: str, name: str, *inputs: Value, **attrs: Any) -> Value:
        return self.ops(kind, (name,), *inputs, **attrs)[0]

    def linear(self, name: str, x: Value, num_out: int, bias: bool = False, weight: str | None = None) -> Value:
        inputs = [x, self.weight(weight or f"{name}.w", num_out, x.columns)]
        if bias:
            inputs.append(self.weight(f"{name}.b", num_out))
        return self.op("linear", name, *inputs, dtype="float32")

    def norm(self, name: str, x: Value, width: int | None = None, eps: float = 1e-6) -> Value:
        weight = self.weight(f"{name}.w", width or x.columns)
        return self.op("rms_norm", name, x, weight, eps=eps, unit_offset=False)

    def slice(self, name: str, x: Value, start: int, stop: int) -> Value:
        return self.op("slice_columns", name, x, start=start, stop=stop)

    def rope(self, name: str, x: Value, head_dim: int, table: str = "rope_table") -> Value:
        weights = self.parameter(table, RopeTable(RopeConfig(theta=100.0, rotary_dim=head_dim), 128))
        return self.op("rope", name, x, self.input("positions", "T"), weights, head_dim=head_dim)

    def attend(self, name: str, q: Value, caches: tuple[Value, ...], head_dim: int, **attrs: Any) -> Value:
        inputs = (self.input("block_tables", "B", "M"), self.input("cu_seqlens_q", "B+1"), self.input("seq_lens", "B"))
        options = {"scale": 0.5, "window": None, "softcap": None, **attrs}
        return self.op("paged_attention", name, q, *caches, *inputs, head_dim=head_dim, **options)

    def gather(self, name: str, x: Value, rows: str = "sample_rows") -> Value:
        return self.op("gather_rows", name, x, self.input(rows, "R"))

    def graph(self, *outputs: Value) -> Graph:
        inputs, parameters = tuple(self.values.values()), tuple(self.parameters.values())
        graph = Graph("test", inputs, parameters, tuple(self.caches), tuple(self.all_ops), outputs)
        return verify(graph, "GraphWriter")


def printed_ops(graph: Graph) -> list[str]:
    return [format_op(op) for op in graph.ops]


def lines(text: str) -> list[str]:
    """The lines of an indented block, for comparison with printed_ops."""
    return [line.strip() for line in text.strip().splitlines()]
