"""Sampling: what a request asks for (params), noise (philox), the choice of tokens (sampler), log-probabilities.

Only the leaf `params` is imported here, so that the scheduler and the server stay free of NumPy.
"""

from lean_engine.sampling.params import SamplingParams

__all__ = ["SamplingParams"]
