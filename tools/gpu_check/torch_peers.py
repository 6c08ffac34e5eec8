"""torch beside this engine. Run by torch_process.py: SUBJECT QUESTIONS(JSON) DEVICE; imports nothing of this project.

Subjects: gemm (torch.matmul), static (a decoder with a static cache, compiled layer by layer, a step being one CUDA
graph) and transformers (generate with cache_implementation="static", which compiles its decode step). Answers are lines
of JSON behind a mark.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as nnf

MARK = "\x1e"
ROTATION_BYTES = 256 << 20
NEW_TOKENS = 64
Question = dict[str, Any]


def main() -> None:
    subject, questions, device = sys.argv[1], json.loads(sys.argv[2]), sys.argv[3]
    torch.manual_seed(0)
    answer: Callable[[Question, str], Question] = {"gemm": gemm, "static": static, "transformers": hugging_face}[
        subject
    ]
    for question in questions:
        try:
            with torch.inference_mode():
                row = answer(question, device)
        except Exception as error:
            last = traceback.format_exc().splitlines()[-6:]
            row = {
                "title": f"torch {subject} {name_of(question)}",
                "error": f"{type(error).__name__}: {error}",
                "at": last,
            }
        print(f"{MARK}{json.dumps(row)}", flush=True)
        if device == "cuda":
            torch.cuda.empty_cache()


def name_of(q: Question) -> str:
    return f"{q['model']} B={q['batch']}" if "model" in q else f"N={q['columns']} K={q['depth']} T={q['rows']}"


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


# ---- time


def graph_of(run: Callable[[], Any], device: str) -> Callable[[], Any]:
    """A replay of what `run` launches, after it has run; on a CPU `run` itself."""
    if device != "cuda":
        run()
        return run
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    replay: Callable[[], Any] = graph.replay
    return replay


def median_us(replay: Callable[[], Any], device: str, rounds: int = 5) -> float:
    """Microseconds of a replay, by events around as many as fill 3 ms."""
    if device != "cuda":
        begin = time.perf_counter()
        replay()
        return 1e6 * (time.perf_counter() - begin)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def measure(times: int) -> float:
        begin.record()
        for _ in range(times):
            replay()
        end.record()
        end.synchronize()
        return 1000.0 * float(begin.elapsed_time(end)) / times

    replay()
    times = int(min(50, max(1.0, 3000.0 / max(measure(2), 1.0))))
    return statistics.median(measure(times) for _ in range(rounds))


# ---- torch.matmul


def gemm(q: Question, device: str) -> Question:
    columns, depth, rows = q["columns"], q["depth"], q["rows"]
    copies = max(2, min(64, ROTATION_BYTES // (2 * columns * depth)))
    weights = [torch.randn(columns, depth, device=device, dtype=torch.bfloat16) * 0.02 for _ in range(copies)]
    x = torch.randn(rows, depth, device=device, dtype=torch.bfloat16)

    def run() -> None:
        for weight in weights:
            torch.matmul(x, weight.t())

    us = median_us(graph_of(run, device), device) / copies
    num_bytes = 2 * (columns * depth + rows * depth + rows * columns)
    return {"title": f"torch.matmul {name_of(q)}", **q, "us": us, "gb_s": 1e-3 * num_bytes / us}


# ---- a decoder in torch, for a fixed batch at a fixed length


def layer(x: Any, w: Any, cos: Any, sin: Any, k_cache: Any, v_cache: Any, at: Any, length: int, group: int) -> Any:
    """x [B, 1, H]. The cache [B, K, length, D] is read whole, without a mask: the fastest that torch can be asked."""
    batch, _, hidden = x.shape
    num_kv, head_dim = k_cache.shape[1], k_cache.shape[3]
    h = nnf.rms_norm(x, (hidden,), w["norm"])
    heads = nnf.linear(h, w["qkv"]).view(batch, group * num_kv + 2 * num_kv, 1, head_dim)
    q, k, v = heads.split([group * num_kv, num_kv, num_kv], dim=1)
    if "q_norm" in w:
        q, k = nnf.rms_norm(q, (head_dim,), w["q_norm"]), nnf.rms_norm(k, (head_dim,), w["k_norm"])
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    k_cache.index_copy_(2, at, k)
    v_cache.index_copy_(2, at, v)
    y = nnf.scaled_dot_product_attention(q, k_cache, v_cache, enable_gqa=group > 1)
    x = x + nnf.linear(y.transpose(1, 2).reshape(batch, 1, -1), w["o"])
    gate, up = nnf.linear(nnf.rms_norm(x, (hidden,), w["norm_2"]), w["gate_up"]).chunk(2, dim=-1)
    return x + nnf.linear(nnf.silu(gate) * up, w["down"])


def rotate(x: Any, cos: Any, sin: Any) -> Any:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def static(q: Question, device: str) -> Question:
    batch, length, group = q["batch"], q["context"], q["q_heads"] // q["kv_heads"]

    def random(*shape: int) -> Any:
        return torch.randn(*shape, device=device, dtype=torch.bfloat16) * shape[-1] ** -0.5

    layers = [layer_weights(q, random) for _ in range(q["layers"])]
    caches = [[random(batch, q["kv_heads"], length, q["head_dim"]) for _ in range(2)] for _ in layers]
    embedding = random(q["vocab"], q["hidden"])
    head = embedding if q["config"].get("tie_word_embeddings") else random(q["vocab"], q["hidden"])
    angles = torch.arange(q["head_dim"] // 2, device=device) * 0.01
    cos, sin = torch.cos(angles).bfloat16(), torch.sin(angles).bfloat16()
    ids, at = torch.zeros(batch, 1, dtype=torch.long, device=device), torch.tensor([length - 1], device=device)
    ones = torch.ones(q["hidden"], device=device, dtype=torch.bfloat16)
    compiled = torch.compile(layer, dynamic=False)

    def step() -> None:
        x = nnf.embedding(ids, embedding)
        for w, (k_cache, v_cache) in zip(layers, caches, strict=True):
            x = compiled(x, w, cos, sin, k_cache, v_cache, at, length, group)
        logits = nnf.linear(nnf.rms_norm(x, (q["hidden"],), ones), head)
        ids.copy_(logits.float().argmax(-1))

    began = time.perf_counter()
    replay = graph_of(step, device)
    compile_seconds = time.perf_counter() - began
    us = median_us(replay, device)
    wall_ms = 1000 * wall_seconds(replay, ids)
    return {
        "title": f"torch static {name_of(q)}", "model": q["model"], "batch": batch, "graph_ms": us / 1000,
        "graph_tok_s": 1e6 * batch / us, "wall_ms": wall_ms, "tok_s": 1000 * batch / wall_ms,
        "compile_seconds": compile_seconds,
        "measured": "compiled layers in one graph, length fixed, greedy; wall: replay and read of the tokens",
    }  # fmt: skip


def layer_weights(q: Question, random: Callable[..., Any]) -> Question:
    hidden, head_dim = q["hidden"], q["head_dim"]
    weights = {
        "norm": random(hidden),
        "qkv": random((q["q_heads"] + 2 * q["kv_heads"]) * head_dim, hidden),
        "o": random(hidden, q["q_heads"] * head_dim),
        "norm_2": random(hidden),
        "gate_up": random(2 * q["intermediate"], hidden),
        "down": random(hidden, q["intermediate"]),
    }
    return {**weights, **({"q_norm": random(head_dim), "k_norm": random(head_dim)} if q["has_qk_norm"] else {})}


def wall_seconds(replay: Callable[[], Any], ids: Any, steps: int = 30) -> float:
    times = []
    for _ in range(steps):
        begin = time.perf_counter()
        replay()
        ids.tolist()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)


# ---- transformers


class Stamps:
    """A stopping criterion that stops nothing and notes when it is asked."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Any, scores: Any, **options: Any) -> Any:
        self.times.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)


def hugging_face(q: Question, device: str) -> Question:
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, StoppingCriteriaList

    options = {k: v for k, v in q["config"].items() if k not in ("architectures", "model_type")}
    config = AutoConfig.for_model(q["config"]["model_type"], **options)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
    new_tokens = min(NEW_TOKENS, q["context"] // 2)
    ids = torch.randint(5, q["vocab"], (q["batch"], q["context"] - new_tokens // 2), device=device)
    fixed = {"do_sample": False, "max_new_tokens": new_tokens, "pad_token_id": 0}
    model.generation_config.eos_token_id = None
    seconds = []
    stamps = Stamps()
    for _ in range(2):  # the first compiles
        stamps.times.clear()
        began = time.perf_counter()
        model.generate(
            ids, attention_mask=torch.ones_like(ids), cache_implementation="static", **fixed,
            stopping_criteria=StoppingCriteriaList([stamps]),
        )  # fmt: skip
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    half = stamps.times[len(stamps.times) // 2 :]
    wall_ms = 1000 * statistics.median(b - a for a, b in pairwise(half))
    return {
        "title": f"transformers static {name_of(q)}", "model": q["model"], "batch": q["batch"], "wall_ms": wall_ms,
        "tok_s": 1000 * q["batch"] / wall_ms, "compile_seconds": seconds[0] - seconds[1],
        "is_compiled": getattr(model, "_compiled_call", None) is not None,
        "measured": f"transformers {transformers.__version__}, generate with a static cache, median step of the end",
    }  # fmt: skip


if __name__ == "__main__":
    main()
