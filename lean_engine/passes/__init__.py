"""The compiler's passes in order; the verifier runs after each.

To add one: write passes/<verb_object>.py with one function Graph → Graph, and name it in PIPELINE.
"""

from __future__ import annotations

from collections.abc import Callable

from lean_engine.ir.graph import Graph
from lean_engine.ir.verify import verify
from lean_engine.passes.eliminate_dead import eliminate_dead
from lean_engine.passes.fuse_act_and_mul import fuse_act_and_mul
from lean_engine.passes.fuse_add_rms_norm import fuse_add_rms_norm
from lean_engine.passes.fuse_qk_norm_rope_write_kv import fuse_qk_norm_rope_write_kv
from lean_engine.passes.hoist_gather import hoist_gather
from lean_engine.passes.lower import Launch, Lowered, lower
from lean_engine.passes.merge_linear import merge_linear
from lean_engine.passes.plan_memory import Plan, plan_memory

__all__ = ["PIPELINE", "Launch", "Lowered", "Plan", "lower", "optimize", "plan_memory"]

PIPELINE: tuple[Callable[[Graph], Graph], ...] = (
    merge_linear,
    hoist_gather,
    fuse_add_rms_norm,
    fuse_qk_norm_rope_write_kv,
    fuse_act_and_mul,
    eliminate_dead,
)


def optimize(graph: Graph) -> Graph:
    """Run PIPELINE; VerifyError names the pass that broke a rule."""
    for run in PIPELINE:
        graph = verify(run(graph), run.__name__)
    return graph
