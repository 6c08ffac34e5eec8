"""What the scheduler did, counted since the start, and how things stand after a step.

Everything here is read off counters; nothing walks over requests or blocks.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SchedulerStats:
    """Counters that only grow."""

    num_steps: int = 0
    num_prefill_tokens: int = 0  # prompt tokens computed for the first time
    num_recompute_tokens: int = 0  # tokens computed again after a preemption
    num_decode_tokens: int = 0
    num_preemptions: int = 0
    num_admitted: int = 0  # requests, each at its first admission
    num_finished: int = 0  # requests, whatever their end
    num_failed: int = 0  # requests that could not be admitted though nothing ran
    num_query_tokens: int = 0  # prompt tokens of admitted requests that read the prefix cache
    num_hit_tokens: int = 0  # of those, tokens found in it


@dataclass(frozen=True, slots=True)
class StepStats:
    """The engine after one step. Blocks: held + cached + empty = all that can be granted."""

    step: int  # steps so far, this one included
    num_running: int
    num_waiting: int
    num_held_blocks: int  # a block shared by several requests counts once
    num_cached_blocks: int  # free, and still found by their content
    num_empty_blocks: int  # free, with nothing in them
    num_unused_slots: int  # tokens for which held blocks have room: the unfilled part of last blocks
    num_prefill_tokens: int  # of this step, as the next two
    num_recompute_tokens: int
    num_decode_tokens: int
    num_preempted: int  # requests, in this step
    num_query_tokens: int  # since the start, as the next two
    num_hit_tokens: int
    num_evictions: int
    block_size: int  # tokens

    @property
    def num_tokens(self) -> int:
        """Tokens this step computed."""
        return self.num_prefill_tokens + self.num_recompute_tokens + self.num_decode_tokens

    @property
    def usage(self) -> float:
        """Held blocks as a share of all; cached ones are free."""
        return self.num_held_blocks / (self.num_held_blocks + self.num_cached_blocks + self.num_empty_blocks)

    @property
    def waste_ratio(self) -> float:
        """Unused slots as a share of those in held blocks."""
        return self.num_unused_slots / (self.num_held_blocks * self.block_size) if self.num_held_blocks else 0.0

    @property
    def prefix_hit_ratio(self) -> float:
        """Tokens found in the prefix cache, of those that were looked up since the start."""
        return self.num_hit_tokens / self.num_query_tokens if self.num_query_tokens else 0.0
