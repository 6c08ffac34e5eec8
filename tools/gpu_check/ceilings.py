"""What the device can do at most: bytes copied and read per second, and operations of a large matrix product.

Bytes of a copy count twice, read and written. All other parts give their shares of the best rate that is found here.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from gpu_check.arrays import Array, noise, shaped
from gpu_check.context import Context
from gpu_check.timing import Launch, Stopwatch
from gpu_check.wiring import chosen_gemm, copy_on_device, open_driver
from lean_engine.runtime.cuda.cupy_driver import CupyDriver, device
from lean_engine.runtime.cuda.driver import Driver
from lean_engine.runtime.cuda.gemm_kernels import Gemm
from lean_engine.runtime.cuda.sources import KernelSource

MIB = 1 << 20
SIZES = tuple(n * MIB for n in (16, 64, 256, 1024, 4096))
SIDES = (4096, 8192)
READ_THREADS = 512
BLOCKS_PER_SM = 4
READ_SOURCE = """
// Each thread adds up 16-byte words, four loads at a time; the sum is written so rarely that it costs nothing.
extern "C" __global__ void read_words(const uint4* words, unsigned long long count, unsigned* out) {
    unsigned long long stride = (unsigned long long)gridDim.x * blockDim.x;
    unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
    unsigned sum = 0;
    for (; i + 3 * stride < count; i += 4 * stride) {
        uint4 a = words[i], b = words[i + stride], c = words[i + 2 * stride], d = words[i + 3 * stride];
        sum |= (a.x ^ a.y ^ a.z ^ a.w) + (b.x ^ b.y ^ b.z ^ b.w) + (c.x ^ c.y ^ c.z ^ c.w) + (d.x ^ d.y ^ d.z ^ d.w);
    }
    for (; i < count; i += stride) sum |= words[i].x ^ words[i].y ^ words[i].z ^ words[i].w;
    if (sum == 0x12345678u) *out = sum;
}
"""


def run(context: Context) -> None:
    driver = open_driver(context, loads_all=False)
    watch = Stopwatch(driver)
    sizes = (MIB // 16, MIB // 4) if context.is_emulated else SIZES
    flat = noise(driver, max(sizes) // 2, "bfloat16")
    target = driver.allocate(flat.shape, "bfloat16")
    for size in sizes:
        half = size // 2
        us = watch.median_us(partial(copy_on_device, driver, flat[:half], target[:half]))
        measured = f"device to device, {watch.clock.name}; bytes read and written"
        context.row(f"copy {size // 1024} KiB", us=us, copy_gb_s=2e-3 * size / us, measured=measured)
    for size in sizes:
        us = watch.median_us(reader(driver, flat[: size // 2]))
        context.row(f"read {size // 1024} KiB", us=us, read_gb_s=1e-3 * size / us, measured="a kernel that only reads")
    for side in (64,) if context.is_emulated else SIDES:
        us = watch.graph_us([product(driver, flat, target, side)])
        context.row(f"matmul {side}", us=us, tflops=2e-6 * side**3 / us, measured="bfloat16, square, by graph replay")


def reader(driver: Driver, array: Array) -> Launch:
    """Reads an array once; on the emulated device NumPy does."""
    return GpuReader(driver, array) if isinstance(driver, CupyDriver) else partial(add_up, array)


def add_up(array: Array) -> None:
    np.add.reduce(array.view(np.uint16), dtype=np.uint64)


class GpuReader:
    """read_words over an array."""

    def __init__(self, driver: CupyDriver, array: Array) -> None:
        cubin = driver._cubins.nvrtc.compile(KernelSource("read.cu", READ_SOURCE, {}), ["read_words"], driver.arch)
        self._module = driver._cuda.Module()
        self._module.load(cubin.data)
        self._function: Any = self._module.get_function(cubin.names["read_words"])
        self._array, self._out = device(array), device(driver.allocate((1,), "uint32"))
        self._grid, self._stream = (BLOCKS_PER_SM * driver.num_sms,), driver._stream

    def __call__(self) -> None:
        count = np.uint64(self._array.nbytes // 16)
        args = (np.uint64(self._array.address), count, np.uint64(self._out.address))
        self._function(self._grid, (READ_THREADS,), args, 0, self._stream)


def product(driver: Driver, source: Array, target: Array, side: int) -> Launch:
    x, weight = shaped(source, 0, (side, side)), shaped(source, side * side, (side, side))
    gemm = Gemm(shaped(target, 0, (side, side)), x, weight)
    _, make = chosen_gemm(driver, gemm.problem)
    return make(gemm)


def bandwidth_of(context: Context) -> float | None:
    """The best rate that was measured, GB/s; None where the part has not run."""
    rates = [float(row.get("copy_gb_s") or row.get("read_gb_s") or 0) for row in context.rows_of("ceilings")]
    return max(rates, default=0.0) or None


def share(gb_s: float, bandwidth: float | None) -> float | None:
    return None if bandwidth is None else round(gb_s / bandwidth, 4)
