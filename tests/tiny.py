"""The tiny checkpoints of tests/data: small random models of each family with logits computed by transformers.

tests/data/tiny covers the families, tests/data/tiny_extra (tools/make_tiny_goldens.py) their switches.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from lean_engine import models, passes
from lean_engine.ir.graph import Graph

DATA = Path(__file__).parent / "data"
NAMES = sorted(p.name for p in (DATA / "tiny").iterdir())
EXTRA_NAMES = sorted(p.name for p in (DATA / "tiny_extra").iterdir())
MAX_POSITIONS = 128
REMOVED = object()  # as a value: the key is left out


def directory(name: str) -> Path:
    return DATA / ("tiny" if name in NAMES else "tiny_extra") / name


def raw_config(name: str, file: str = "config.json") -> dict[str, Any]:
    config: dict[str, Any] = json.loads((directory(name) / file).read_text())
    return config


def version_4_spelling(raw: dict[str, Any]) -> dict[str, Any]:
    """config.json as transformers 4 wrote it: rope_theta, rope_scaling and rope_local_base_freq in the open."""
    config = {k: v for k, v in raw.items() if k not in ("rope_parameters", "dtype")}
    rope = dict(raw["rope_parameters"])
    if "sliding_attention" in rope:
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = dict(rope["full_attention"])
    config["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        config["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    config["rope_scaling"] = None if rope["rope_type"] == "default" else rope
    return config | {"torch_dtype": raw["dtype"]}


@cache
def plain(name: str) -> Graph:
    """The family's unfused graph."""
    return models.build(models.configure(raw_config(name)), "float32", MAX_POSITIONS)


@cache
def optimized(name: str) -> Graph:
    return passes.optimize(plain(name))


def minimal_config(model_type: str, **changes: Any) -> dict[str, Any]:
    """A config.json with nothing but sizes: the rest are the family's defaults, or what `changes` says."""
    sizes = {"vocab_size": 100, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    raw = {"model_type": model_type, **sizes, **heads, **changes}
    return {k: v for k, v in raw.items() if v is not REMOVED}
