"""The attention kernels compiled for every architecture: no spills, and as many blocks on an SM as the grid counts on.

python tests/cpu/test_cuda_attention_resources.py     prints registers and shared memory
"""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from functools import cache

import pytest

from lean_engine.checkpoint.demo_model import cache_directory
from lean_engine.errors import ConfigError
from lean_engine.runtime.cuda.attention import (
    HEAD_DIMS,
    NARROW_ROWS,
    SHARED_KIB,
    SOURCE,
    TileShape,
    attention_instances,
    tile_shapes,
)
from lean_engine.runtime.cuda.cubin_cache import CubinCache
from lean_engine.runtime.cuda.instances import ARCHITECTURES
from lean_engine.runtime.cuda.nvrtc import Nvrtc, Resources
from lean_engine.runtime.cuda.sources import kernel_source

RESERVED_BYTES = 1024  # of shared memory, by the system, per block
REGISTERS_PER_SM = 65_536
REGISTER_UNIT = 8  # per thread


@cache
def cubins() -> CubinCache:
    try:
        return CubinCache(cache_directory() / "cubin", Nvrtc())
    except ConfigError as error:
        pytest.skip(str(error))


def expressions(arch: str, source: str = SOURCE) -> tuple[str, ...]:
    return tuple(i.expression for i in attention_instances(arch) if i.source == source)


def compiled(arch: str) -> dict[str, Resources]:
    return dict(cubins().get(kernel_source(SOURCE), expressions(arch), arch).resources)


@cache
def compile_side_by_side() -> None:
    """In processes: NVRTC lets one thread of a process compile at a time."""
    source = kernel_source(SOURCE)
    missing = [arch for arch in ARCHITECTURES if not cubins().path(source, expressions(arch), arch, ()).exists()]
    if len(missing) > 1:
        with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
            for future in [pool.submit(compiled, arch) for arch in missing]:
                future.exception()  # what does not compile is reported by the test that needs it


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_instance_compiles_without_spills_or_local_memory(arch: str) -> None:
    compile_side_by_side()
    for expression, r in compiled(arch).items():
        assert (r.spill_bytes, r.stack_bytes) == (0, 0), expression


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_the_blocks_that_the_grid_counts_on_fit_an_sm(arch: str) -> None:
    compile_side_by_side()
    total, most = (kib * 1024 for kib in SHARED_KIB[arch])
    for shape in shapes(arch):
        r = compiled(arch)[shape.instance("float16").expression]
        block_bytes = shape.shared_bytes + r.shared_bytes
        assert block_bytes <= most
        assert shape.blocks_per_sm * (block_bytes + (RESERVED_BYTES if arch != "sm_75" else 0)) <= total
        registers = -(-r.registers // REGISTER_UNIT) * REGISTER_UNIT
        assert shape.blocks_per_sm * shape.num_threads * registers <= REGISTERS_PER_SM


def shapes(arch: str) -> list[TileShape]:
    return [shape for head_dim in HEAD_DIMS for shape in tile_shapes(arch, head_dim)]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_plan_compiles_without_spills(arch: str) -> None:
    source = kernel_source("plan_attention.cu")
    (r,) = cubins().get(source, expressions(arch, source.name), arch).resources.values()
    assert (r.spill_bytes, r.stack_bytes) == (0, 0)
    assert r.registers <= 64


def main() -> None:
    compile_side_by_side()
    for arch in ARCHITECTURES:
        found = compiled(arch)
        for shape in shapes(arch):
            kind = "narrow" if shape.rows == NARROW_ROWS else "wide"
            names = [shape.instance(d).expression for d in ("bfloat16", "float16")]
            registers = [str(found[name].registers) if name in found else "-" for name in names]
            kib = (shape.shared_bytes + found[names[1]].shared_bytes) / 1024
            tile = f"{shape.keys} keys x {shape.stages} stages"
            print(f"{arch:6} D {shape.head_dim:3} {kind:6} {tile}, {shape.num_threads} threads, {kib:6.1f} KiB"
                  f" x {shape.blocks_per_sm}, registers {' / '.join(registers)}")  # fmt: skip


if __name__ == "__main__":
    main()
