"""Random well-formed graphs, rich in what the passes look for and in what only resembles it."""

from __future__ import annotations

from graph_writing import GraphWriter
from hypothesis import strategies as st

from lean_engine.ir.graph import Graph, Value

HEAD_DIM = 4
WIDTHS = (8, 16)  # columns of the values that later steps may read
VOCAB_SIZE = 11


class GrowingGraph:
    """Starts with an embedding; each method adds ops and offers their result to later ones."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.w = GraphWriter()
        ids, table = self.w.input("input_ids", "T"), self.w.weight("table", VOCAB_SIZE, 8)
        self.values = [self.w.op("embedding", "embedded", ids, table, scale=1.5)]
        self.num_names = 0

    def name(self, kind: str) -> str:
        self.num_names += 1
        return f"{kind}{self.num_names}"

    def coin(self) -> bool:
        return self.draw(st.booleans())

    def pick(self, columns: int | None = None) -> Value:
        fitting = [v for v in self.values if columns in (None, v.columns)]
        return self.draw(st.sampled_from(fitting[-3:]))

    def project(self, x: Value, num_out: int) -> Value:
        """A linear; now and then its weight is one that another linear has."""
        shared = self.coin() and self.coin()
        weight = f"shared.{num_out}.{x.columns}" if shared else None
        return self.w.linear(self.name("linear"), x, num_out, bias=self.coin() and self.coin(), weight=weight)

    def linear(self) -> None:
        self.values.append(self.project(self.pick(), self.draw(st.sampled_from(WIDTHS))))

    def norm(self) -> None:
        x = self.pick()
        self.values.append(self.w.norm(self.name("norm"), x, HEAD_DIM if self.coin() and self.coin() else None))

    def binary(self) -> None:
        a = self.pick()
        kind = self.draw(st.sampled_from(("add", "add", "mul")))
        result = self.w.op(kind, self.name(kind), a, self.pick(a.columns))
        if kind == "mul":  # or repeated squares overflow
            result = self.w.op("softcap", self.name("tamed"), result, cap=3.0)
        self.values.append(result)

    def unary(self) -> None:
        kind = self.draw(st.sampled_from(("silu", "gelu_tanh", "softcap")))
        attrs = {"cap": 3.0} if kind == "softcap" else {}
        self.values.append(self.w.op(kind, self.name(kind), self.pick(), **attrs))

    def slice(self) -> None:
        x = self.pick(16) if any(v.columns == 16 for v in self.values) else self.project(self.pick(), 16)
        start = self.draw(st.sampled_from((0, 8, 4)))
        self.values.append(self.w.slice(self.name("slice"), x, start, start + 8))

    def gated_mlp(self) -> None:
        x = self.pick()
        gate, up = self.project(x, 16), self.project(x, 16)
        activated = self.w.op(self.draw(st.sampled_from(("silu", "gelu_tanh"))), self.name("activated"), gate)
        factors = (up, activated) if self.coin() and self.coin() else (activated, up)
        self.values.append(self.w.op("mul", self.name("product"), *factors))
        if self.coin() and self.coin():
            self.values.append(self.draw(st.sampled_from((gate, up, activated))))

    def attention(self) -> None:
        x, w, number = self.pick(), self.w, len(self.w.caches)
        q, k, v = self.project(x, 8), self.project(x, HEAD_DIM), self.project(x, HEAD_DIM)
        norms = self.draw(st.sampled_from(("neither", "both", "q")))
        if norms != "neither":
            q = w.norm(self.name("norm"), q, HEAD_DIM)
        if norms == "both":
            k = w.norm(self.name("norm"), k, HEAD_DIM)
        q, k = w.rope(self.name("rope"), q, HEAD_DIM), w.rope(self.name("rope"), k, HEAD_DIM)
        caches = w.cache(f"k_cache.{number}", 1, HEAD_DIM), w.cache(f"v_cache.{number}", 1, HEAD_DIM)
        names = (self.name("k_written"), self.name("v_written"))
        written = w.ops("write_kv", names, k, v, w.input("slot_mapping", "T"), *caches)
        window = self.draw(st.sampled_from((None, 3)))
        self.values.append(w.attend(self.name("mixed"), q, written, HEAD_DIM, window=window))
        if self.coin() and self.coin():
            self.values.append(self.draw(st.sampled_from((q, self.project(k, 8), self.project(v, 8)))))

    def experts(self) -> None:
        x, w = self.pick(8), self.w
        logits = self.project(x, 3)
        names = (self.name("weights"), self.name("ids"))
        weights, ids = w.ops("moe_route", names, logits, top_k=2, normalize=self.coin())
        stacks = w.weight(self.name("gate_up"), 3, 10, 8), w.weight(self.name("down"), 3, 8, 5)
        self.values.append(w.op("moe_experts", self.name("experts"), x, weights, ids, *stacks, activation="silu"))

    def graph(self) -> Graph:
        """Outputs: one to three values, most of them gathered."""
        outputs: list[Value] = []
        for _ in range(self.draw(st.integers(1, 3))):
            x = self.pick()
            outputs.append(self.w.gather(self.name("gathered"), x) if self.coin() or self.coin() else x)
        return self.w.graph(*dict.fromkeys(outputs))


STEPS = tuple(vars(GrowingGraph)[name] for name in ("linear", "norm", "binary", "unary", "slice", "gated_mlp"))
STEPS += (GrowingGraph.attention, GrowingGraph.experts, GrowingGraph.binary, GrowingGraph.norm)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    growing = GrowingGraph(draw)
    for step in draw(st.lists(st.sampled_from(STEPS), min_size=2, max_size=9)):
        step(growing)
    return growing.graph()
