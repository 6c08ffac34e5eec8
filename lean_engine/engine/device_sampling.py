"""What passes between a request's SamplingParams and the sampler on a CUDA device: setups of slots, and results."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

import numpy as np
import numpy.typing as npt

from lean_engine.runtime.cuda import sampling as device
from lean_engine.runtime.cuda.sampling import SlotSetup
from lean_engine.sampling.constraints import NOTHING_LEFT
from lean_engine.sampling.logprobs import FloatArray, TokenLogprobs, logits_error
from lean_engine.sampling.params import SamplingParams
from lean_engine.sampling.philox import MAX_GUMBEL, MIN_GUMBEL
from lean_engine.sampling.sampler import SampleResult

Int32s = npt.NDArray[np.int32]

ERRORS = {
    device.IS_NAN: logits_error(math.nan),
    device.IS_INFINITE: logits_error(math.inf),
    device.IS_EMPTY: logits_error(-math.inf),
    device.NOTHING_LEFT: NOTHING_LEFT,
}


def slot_setup(
    params: SamplingParams,
    token_ids: Sequence[int],
    *,
    num_prompt: int,
    seed: int,
    max_total_tokens: int,
    eos_token_ids: Collection[int] = (),
    bad_words_token_ids: Sequence[Sequence[int]] = (),
) -> SlotSetup:
    """What the device is told of one answer when it is admitted, for the first time or after a preemption.

    Args:
        token_ids: prompt, and output so far.
        seed: SamplingState.seed.
        max_total_tokens: Request.max_total_tokens.
        eos_token_ids, bad_words_token_ids: those given to SamplingState.
    """
    return SlotSetup(
        token_ids=token_ids,
        num_prompt=num_prompt,
        max_total_tokens=max_total_tokens,
        seed=seed,
        temperature=params.temperature,
        hopeless_reach=MAX_GUMBEL - MIN_GUMBEL + 0.5,  # the slack covers rounding
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        frequency_penalty=params.frequency_penalty,
        presence_penalty=params.presence_penalty,
        min_tokens=params.min_tokens,
        excluded_until_min_tokens={*eos_token_ids, *params.stop_token_ids},
        eos_token_ids=() if params.ignore_eos else eos_token_ids,
        stop_token_ids=params.stop_token_ids,
        logit_bias=params.logit_bias,
        allowed_token_ids=params.allowed_token_ids,
        bad_words=bad_words_token_ids,
        num_logprobs=params.logprobs,
    )


def sample_result(results: Int32s, logprobs: Sequence[TokenLogprobs | None]) -> SampleResult:
    """The form of Sampler.sample, of a device's `results` [R, 2]. A row whose outcome is SKIPPED has neither token nor
    error."""
    errors = [ERRORS.get(outcome) for outcome in results[:, 1].tolist()]
    return SampleResult(results[:, 0].tolist(), list(logprobs), errors)


def token_logprobs(ids: Int32s, values: FloatArray, ranks: Int32s, num_logprobs: int | None) -> TokenLogprobs | None:
    """One row's log-probabilities, of its rows of the device's logprob_* arrays; None where there are none."""
    if num_logprobs is None or ids[0] == device.NO_TOKEN:
        return None
    count = int(np.count_nonzero(ids[: 1 + num_logprobs] != device.NO_TOKEN))
    return TokenLogprobs(ids[:count].copy(), values[:count].copy(), ranks[:count].copy())
