"""Runs CUDA kernels on the CPU: unchanged .cu sources, compiled by g++ and launched on NumPy arrays.

    module = HostModule("norm.cu", ["rms_norm<bfloat16, 1>"], is_checked=True)
    kernel = module.get_function("rms_norm<bfloat16, 1>")
    kernel((rows,), (256,), (out, x, weight, np.float32(eps), np.int32(hidden)))

See README.md for what is checked and what is not modelled. Needs NumPy, Linux and g++; knows nothing of lean-engine.
"""

from cuda_host.build import BuildError, missing_reason
from cuda_host.kernel import BoundLaunch, HostKernel, HostModule, KernelError, LineProfile

__all__ = ["BoundLaunch", "BuildError", "HostKernel", "HostModule", "KernelError", "LineProfile", "missing_reason"]
