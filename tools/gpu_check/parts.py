"""The parts in their order, and how long each may take, seconds; the last one gets what the others leave."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """A part.

    Attributes:
        target: "module:function", called with a Context in a process of its own.
        seconds: its time limit.
        is_correctness: whether the exit code depends on it.
    """

    name: str
    target: str
    seconds: float
    is_correctness: bool = False


PARTS = (
    Part("environment", "gpu_check.environment:run", 30),
    Part("compile", "gpu_check.compiling:run", 110, is_correctness=True),
    Part("kernels", "gpu_check.kernels:run", 75, is_correctness=True),
    Part("models", "gpu_check.tiny_models:run", 90, is_correctness=True),
    Part("ceilings", "gpu_check.ceilings:run", 30),
    Part("gemm", "gpu_check.gemm:run", 120),
    Part("attention", "gpu_check.attention:run", 45),
    Part("sampler", "gpu_check.sampler:run", 30),
    Part("decode", "gpu_check.decode:run", 170),
    Part("peers", "gpu_check.peers:run", 300),
)
