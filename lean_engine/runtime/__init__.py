"""Lowered programs meet a device: kernels are checked, buffers bound, weights packed, steps run."""
