"""Every kernel instantiation there is, from the tables of all op families; and what each needs of a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain

from lean_engine.runtime.cuda.attention import attention_instances
from lean_engine.runtime.cuda.cubin_cache import CubinCache
from lean_engine.runtime.cuda.gemm_kernels import gemm_instances
from lean_engine.runtime.cuda.instances import Instance, instances_for
from lean_engine.runtime.cuda.moe_kernels import moe_instances
from lean_engine.runtime.cuda.nvrtc import Resources
from lean_engine.runtime.cuda.sampling import sampling_instances
from lean_engine.runtime.cuda.sources import kernel_source


def every_instance(arch: str) -> list[Instance]:
    """All that an architecture can be asked for, sorted."""
    families = (instances_for(arch), attention_instances(arch), gemm_instances(arch), moe_instances(arch))
    return sorted({*chain(*families), *sampling_instances()})


def by_source(instances: Iterable[Instance]) -> dict[str, list[str]]:
    """Source file → the expressions to compile from it."""
    expressions: dict[str, list[str]] = {}
    for instance in sorted(set(instances)):
        expressions.setdefault(instance.source, []).append(instance.expression)
    return expressions


def kernel_resources(
    arch: str, cubins: CubinCache, on_progress: Callable[[int, int], None] = lambda done, total: None
) -> dict[Instance, Resources]:
    """Compile everything for an architecture, through the cache; no GPU is needed.

    Args:
        on_progress: told of (sources compiled, sources in all).

    Raises:
        CompileError: a source does not compile.
    """
    sources = by_source(every_instance(arch))
    found: dict[Instance, Resources] = {}
    for number, (source, expressions) in enumerate(sources.items(), 1):
        cubin = cubins.get(kernel_source(source), expressions, arch)
        found |= {Instance(source, expression): cubin.resources[expression] for expression in expressions}
        on_progress(number, len(sources))
    return found
