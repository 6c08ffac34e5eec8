"""How many requests a KV cache holds at once, and how much of what they hold has tokens in it.

Two ways to give a request memory are compared: contiguous, a slab for max_model_len tokens from its first step to its
last; and paged, whole blocks for the tokens it has in each step.

A request of P prompt and O output tokens lives for O steps (its prompt taken as one). In the step that brings output
token k, counted from 1, it holds the keys and values of P + k - 1 tokens: those of the last output token are never
computed, so in its last step, where it is longest, it has P + O - 1.

Waste is the share of the held token slots that have no token, by the same rule for both ways:

- `waste_ratio`: when the request is longest. Slots that are empty then never get a token.
- `waste_ratio_mean`: over its whole life, each step alike. Slots that will be filled later count until they are, so it
  is the stricter one for slabs; it is what a look at the memory of a busy engine finds on average.

Of several requests all are taken to be at random steps of their lives (a steady state): one that runs twice as long is
met twice as often and counts twice. Sums are exact integers; only the ratios are rounded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lean_engine.memory.budget import num_blocks_for


@dataclass(frozen=True, slots=True)
class RequestShape:
    """The lengths of a request, tokens, each at least 1."""

    prompt_len: int
    output_len: int

    @property
    def num_steps(self) -> int:
        """Steps in which it holds memory."""
        return self.output_len

    @property
    def max_num_tokens(self) -> int:
        """Tokens whose keys and values it has in its last step."""
        return self.prompt_len + self.output_len - 1

    @property
    def num_token_steps(self) -> int:
        """Its tokens, added up over its steps."""
        return (self.prompt_len + self.max_num_tokens) * self.num_steps // 2

    def num_block_steps(self, block_size: int) -> int:
        """Its blocks, added up over its steps."""
        return blocks_up_to(self.max_num_tokens, block_size) - blocks_up_to(self.prompt_len - 1, block_size)


@dataclass(frozen=True, slots=True)
class Occupancy:
    """What a KV cache holds of requests of the given shapes; see the head of this file for the two views."""

    num_requests: int  # at once, each at its longest
    num_requests_mean: int  # at once, each at a random step of its life
    waste_ratio: float
    waste_ratio_mean: float


def contiguous(shapes: Sequence[RequestShape], num_tokens: int, max_model_len: int) -> Occupancy:
    """Each request reserves a slab of `max_model_len` tokens out of `num_tokens`."""
    num_requests = num_tokens // max_model_len
    num_slots = max_model_len * sum(s.num_steps for s in shapes)
    num_used = sum(s.num_steps * s.max_num_tokens for s in shapes)
    num_used_mean = sum(s.num_token_steps for s in shapes)
    return Occupancy(num_requests, num_requests, empty(num_slots, num_used), empty(num_slots, num_used_mean))


def paged(shapes: Sequence[RequestShape], num_blocks: int, block_size: int) -> Occupancy:
    """Each request holds the blocks that its tokens need, out of `num_blocks` (the null block not among them)."""
    num_steps = sum(s.num_steps for s in shapes)
    num_held = sum(s.num_steps * num_blocks_for(s.max_num_tokens, block_size) for s in shapes)
    num_held_mean = sum(s.num_block_steps(block_size) for s in shapes)
    num_used = sum(s.num_steps * s.max_num_tokens for s in shapes)
    num_used_mean = sum(s.num_token_steps for s in shapes)
    return Occupancy(
        num_requests=num_blocks * num_steps // num_held,
        num_requests_mean=num_blocks * num_steps // num_held_mean,
        waste_ratio=empty(num_held * block_size, num_used),
        waste_ratio_mean=empty(num_held_mean * block_size, num_used_mean),
    )


def empty(num_slots: int, num_used: int) -> float:
    """The share of the slots that is not used."""
    return (num_slots - num_used) / num_slots


def blocks_up_to(num_tokens: int, block_size: int) -> int:
    """The blocks of 1 token, of 2 tokens, … of `num_tokens` tokens, added up."""
    num_full, rest = divmod(num_tokens, block_size)
    return block_size * num_full * (num_full + 1) // 2 + rest * (num_full + 1)
