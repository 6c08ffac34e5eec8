"""Decode steps of torch at the same shapes: transformers with a static cache and torch.compile, and a model written for
speed (static cache, compiled layers, one CUDA graph). Each model and peer is a process with a time limit.

Ratios are tokens per second of this engine over the peer's: of whole steps, and of the graphs alone.
"""

from __future__ import annotations

from typing import Any

from gpu_check.context import Context, SkippedError
from gpu_check.shapes import CONFIGS, shape_of
from gpu_check.torch_process import torch_rows

CONTEXT_LEN = 1024
# subject, model, batches, seconds: the most telling first, since the time may end
QUESTIONS = (
    ("static", "qwen3-0.6b", (1, 32, 8, 128), 70.0),
    ("static", "llama-3.1-8b", (1, 32, 8, 128), 70.0),
    ("transformers", "qwen3-0.6b", (1, 32), 75.0),
    ("static", "llama-3.2-1b", (1, 32, 8, 128), 60.0),
    ("transformers", "llama-3.1-8b", (1, 32), 90.0),
    ("transformers", "llama-3.2-1b", (1, 32), 75.0),
    ("static", "smollm2-135m", (1, 32, 8, 128), 60.0),
)


def run(context: Context) -> None:
    if context.is_emulated:
        raise SkippedError("peers need a GPU and torch")
    own = [*context.rows_of("decode-8b"), *context.rows_of("decode")]
    for subject, model, batches, seconds in QUESTIONS:
        asked = [question(model, batch, CONTEXT_LEN) for batch in batches]
        for row in torch_rows(context, subject, asked, min(seconds, context.seconds_left() - 3)):
            if "tok_s" in row:
                context.row(f"ratio to {row['title']}", **ratios(own, row))


def question(model: str, batch: int, context_len: int) -> dict[str, Any]:
    c = shape_of(model).config
    return {
        "model": model,
        "batch": batch,
        "context": context_len,
        "config": {k: v for k, v in CONFIGS[model].items() if k not in ("rope_scaling", "torch_dtype")},
        "hidden": c.hidden_size,
        "intermediate": c.intermediate_size,
        "layers": c.num_layers,
        "q_heads": c.num_q_heads,
        "kv_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "vocab": c.vocab_size,
        "has_qk_norm": c.model_type == "qwen3",
    }


def ratios(own: list[dict[str, Any]], peer: dict[str, Any]) -> dict[str, Any]:
    """This engine's rate over the peer's; what was not measured is left out."""

    def rate(kind: str) -> float | None:
        found = [
            row["tok_s"]
            for row in own
            if row["title"].endswith(kind) and (row.get("model"), row.get("batch")) == (peer["model"], peer["batch"])
        ]
        return found[-1] if found else None

    engine, graph = rate("engine"), rate("graph")
    peer_graph = peer.get("graph_tok_s")
    return {
        "engine": None if engine is None else engine / peer["tok_s"],
        "graph": None if graph is None or peer_graph is None else graph / peer_graph,
    }
