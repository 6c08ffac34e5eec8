"""The parts in their order, what tells most first, and the seconds that are kept for each.

What a kernel does wrong may end all work of its process on the GPU, so kernels are checked in several.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """A part.

    Attributes:
        target: "module:function", called with a Context in a process of its own.
        seconds: its time limit, but for what the parts before it leave of theirs.
        is_correctness: whether the exit code depends on it.
    """

    name: str
    target: str
    seconds: float
    is_correctness: bool = False


PARTS = (
    Part("environment", "gpu_check.environment:run", 15),
    Part("compile", "gpu_check.compiling:run", 45, is_correctness=True),
    Part("kernels", "gpu_check.kernels:run_table", 30, is_correctness=True),
    Part("k-attention", "gpu_check.kernels:run_attention", 20, is_correctness=True),
    Part("k-gemm", "gpu_check.kernels:run_gemm", 20, is_correctness=True),
    Part("k-moe", "gpu_check.kernels:run_moe", 15, is_correctness=True),
    Part("k-sampler", "gpu_check.kernels:run_sampler", 15, is_correctness=True),
    Part("models", "gpu_check.tiny_models:run", 50, is_correctness=True),
    Part("ceilings", "gpu_check.ceilings:run", 20),
    Part("decode-8b", "gpu_check.decode:run_largest", 75),
    Part("decode", "gpu_check.decode:run", 75),
    Part("gemm", "gpu_check.gemm:run", 45),
    Part("attention", "gpu_check.attention:run", 25),
    Part("sampler", "gpu_check.sampler:run", 15),
    Part("peers", "gpu_check.peers:run", 75),
)
