"""What a request must satisfy to be queued at all: a request that passes can run to its end when it is alone."""

from __future__ import annotations

from lean_engine.errors import RequestError
from lean_engine.memory.budget import num_blocks_for
from lean_engine.scheduling.request import Request


def refuse_what_never_fits(
    request: Request, *, max_model_len: int, num_blocks: int, block_size: int, max_whole_prompt_rows: int | None
) -> None:
    """Check a request against the scheduler's limits.

    Args:
        request: its max_total_tokens is set.
        max_model_len: tokens of prompt and output.
        num_blocks: blocks that can be granted.
        block_size: tokens per block.
        max_whole_prompt_rows: rows of logits in a step, where a prompt is computed in one; None where it can be cut.

    Raises:
        RequestError: it can never run here; the message holds the numbers.
    """
    num_prompt = request.num_prompt_tokens
    if num_prompt == 0:
        raise RequestError("the prompt is empty; it needs at least one token", param="prompt")
    if request.max_tokens < 0:
        raise RequestError(f"max_tokens is {request.max_tokens}; it must be at least 0", param="max_tokens")
    if num_prompt + 1 > max_model_len:
        raise RequestError(
            f"the prompt has {num_prompt} tokens; with max_model_len={max_model_len} it can have at most "
            f"{max_model_len - 1}",
            param="prompt",
        )
    if request.needs_prompt_logits and max_whole_prompt_rows is not None and num_prompt > max_whole_prompt_rows:
        raise RequestError(
            f"logprobs of all {num_prompt} prompt tokens need as many rows of logits in one step, of which there "
            f"are {max_whole_prompt_rows}; shorten the prompt or enable chunked prefill",
            param="prompt_logprobs",
        )
    num_needed = num_blocks_for(request.max_total_tokens, block_size)
    if num_needed > num_blocks:
        num_pool_tokens = num_blocks * block_size
        raise RequestError(
            f"a prompt of {num_prompt} tokens and max_tokens={request.max_tokens} can grow to "
            f"{request.max_total_tokens} tokens, which need {num_needed} KV blocks; "
            f"the pool has {num_blocks} ({num_pool_tokens} tokens)",
            param="prompt" if num_prompt + 1 > num_pool_tokens else "max_tokens",
        )
