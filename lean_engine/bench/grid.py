"""Sweeps: one setting after another, or every combination of several."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from lean_engine.config import EngineConfig
from lean_engine.errors import ConfigError

SWITCHES = {"on": True, "off": False}
Point = Mapping[str, Any]  # swept name → value


def number(name: str, text: str, minimum: int = 1) -> int:
    value = int(text) if text.isascii() and text.isdigit() else -1
    if value < minimum:
        raise ConfigError(f"sweep {name}: {text!r} is not an integer of at least {minimum}")
    return value


def count(name: str, text: str) -> int:
    return number(name, text, minimum=0)


def switch(name: str, text: str) -> bool:
    if text not in SWITCHES:
        raise ConfigError(f"sweep {name}: {text!r} is neither on nor off")
    return SWITCHES[text]


SWEPT: dict[str, tuple[str, Callable[[str, str], Any]]] = {  # name → field of EngineConfig, how a value is read
    "block-size": ("block_size", number),
    "num-blocks": ("num_gpu_blocks_override", number),
    "prefix-caching": ("enable_prefix_caching", switch),
    "chunked-prefill": ("enable_chunked_prefill", switch),
    "max-num-batched-tokens": ("max_num_batched_tokens", number),
}
SWEPT_STEADY: dict[str, tuple[str, Callable[[str, str], Any]]] = {  # of a steady state; the last two are its own
    **{name: SWEPT[name] for name in ("block-size", "num-blocks", "prefix-caching")},
    "running": ("", number),
    "waiting": ("", count),
}


def parse_sweeps(texts: Sequence[str], is_steady: bool = False) -> list[Point]:
    """Every combination of what NAME=V1,V2,... name; the last one changes fastest.

    Raises:
        ConfigError: there is no such name, it is given twice, or a value is wrong.
    """
    swept = SWEPT_STEADY if is_steady else SWEPT
    values: dict[str, list[Any]] = {}
    for text in texts:
        name, _, listed = text.partition("=")
        if name not in swept:
            names = ", ".join(swept)
            raise ConfigError(f"sweep {text!r}: {name!r} cannot be swept; write NAME=V1,V2,... with one of: {names}")
        if name in values:
            raise ConfigError(f"sweep {name} is given twice")
        values[name] = [swept[name][1](name, value) for value in listed.split(",")]
    return [dict(zip(values, point, strict=True)) for point in product(*values.values())]


def config_at(config: EngineConfig, point: Point) -> EngineConfig:
    """The config with a point's values. A pool whose blocks change size keeps its tokens, unless its blocks are swept.

    Raises:
        ConfigError: the values contradict the rest of the config.
    """
    changes = {SWEPT[name][0]: value for name, value in point.items() if name in SWEPT}
    num_blocks = config.num_gpu_blocks_override
    if "block-size" in point and "num-blocks" not in point and num_blocks is not None:
        changes["num_gpu_blocks_override"] = max(1, num_blocks * config.block_size // point["block-size"])
    return replace(config, **changes)
