"""A step in the making: its two budgets, and how they are cut into chunks.

Every running request owns one token and one row of logits of each step; the rest is spare. Short prompts are not kept
waiting by long ones: up to half of the spare tokens are left to them, as far as they can use them.
"""

from __future__ import annotations

from dataclasses import dataclass

from lean_engine.memory.budget import num_blocks_for
from lean_engine.memory.prefix_cache import BlockKey
from lean_engine.scheduling.plan import ScheduledChunk, StepPlan
from lean_engine.scheduling.request import NEVER, Request


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a step and its chunks."""

    max_tokens: int  # of a step
    max_logit_rows: int  # of a step
    long_threshold: int  # a request that has more tokens to compute is long
    max_long_chunk: int  # tokens of one long request in a step


class Step:
    """Budgets, and what was scheduled from them.

    Args:
        num_running: requests that own a token and a row.
        short_tokens: what short prompts have to compute, waiting and running ones together.

    Attributes:
        spare_tokens, spare_rows: not owned and not taken yet.
        tokens_for_short: of spare_tokens, what long prompts leave alone.
        decodes, chunks: what is scheduled.
        num_ahead: tokens that the requests with chunks still had to compute, these chunks included.
        num_ending: running requests that end with the step in flight and have no part in this one.
        lacks_blocks: a request would have to be preempted, with a step in flight; the step is given up.
        preempted, failed: as in StepPlan.
    """

    def __init__(self, limits: Limits, num_running: int, short_tokens: int) -> None:
        self.limits = limits
        self.spare_tokens = limits.max_tokens - num_running
        self.spare_rows = limits.max_logit_rows - num_running
        self.tokens_for_short = min(self.spare_tokens // 2, short_tokens)
        self.decodes: list[Request] = []
        self.chunks: list[ScheduledChunk] = []
        self.preempted: list[Request] = []
        self.failed: list[tuple[Request, str]] = []
        self.num_ahead = 0
        self.num_ending = 0
        self.lacks_blocks = False
        self._in_flight: dict[BlockKey, Request] = {}  # key → who computes its block, of the first _num_keyed chunks
        self._num_keyed = 0

    def is_long(self, request: Request, start: int) -> bool:
        """Whether it has more to compute, from `start` on, than a short prompt."""
        return len(request.token_ids) - start > self.limits.long_threshold

    def chunk(self, request: Request, start: int, *, owned_tokens: int = 0, owned_rows: int = 0) -> ScheduledChunk:
        """What a request can catch up by from `start` on, with what it owns and what is spare; perhaps nothing."""
        num_known = len(request.token_ids)
        max_tokens = self.spare_tokens
        if self.is_long(request, start):
            max_tokens = max(0, min(max_tokens - self.tokens_for_short, self.limits.max_long_chunk - owned_tokens))
        first_row = request.first_logit_position
        end = min(num_known, start + owned_tokens + max_tokens, first_row + owned_rows + self.spare_rows)
        samples = end == num_known and request.max_tokens > 0
        return ScheduledChunk(request, start, max(0, end - start), max(0, end - first_row), samples)

    def take(self, chunk: ScheduledChunk, *, owned_tokens: int = 0, owned_rows: int = 0) -> None:
        """Schedule a chunk. (A decode takes what its request owns, and only joins `decodes`.)"""
        self.chunks.append(chunk)
        self.num_ahead += len(chunk.request.token_ids) - chunk.start
        self.spare_tokens -= chunk.num_tokens - owned_tokens
        self.spare_rows -= chunk.num_logit_rows - owned_rows
        if not self.is_long(chunk.request, chunk.start):
            self.tokens_for_short = max(0, self.tokens_for_short - chunk.num_tokens)

    def preempt(self, request: Request) -> None:
        """A running request leaves the step, and what it owned is spare."""
        self.preempted.append(request)
        self.spare_tokens += 1
        self.spare_rows += 1

    def longer(self, chunk: ScheduledChunk) -> ScheduledChunk:
        """The chunk with what is spare now added, once nothing is left to short prompts any more."""
        self.tokens_for_short = 0
        return self.chunk(chunk.request, chunk.start, owned_tokens=chunk.num_tokens, owned_rows=chunk.num_logit_rows)

    def replace(self, chunk: ScheduledChunk, longer: ScheduledChunk) -> None:
        """Schedule a longer chunk in the place of one."""
        self.spare_tokens -= longer.num_tokens - chunk.num_tokens
        self.spare_rows -= longer.num_logit_rows - chunk.num_logit_rows
        self.chunks[self.chunks.index(chunk)] = longer

    def leader(self, key: BlockKey, block_size: int) -> Request | None:
        """Whose scheduled chunk computes tokens of the block with this key, if it will be published."""
        for chunk in self.chunks[self._num_keyed :]:
            if chunk.request.publish_at != NEVER:
                end = num_blocks_for(chunk.start + chunk.num_tokens, block_size)
                for touched in chunk.request.block_keys[chunk.start // block_size : end]:
                    self._in_flight.setdefault(touched, chunk.request)
        self._num_keyed = len(self.chunks)
        return self._in_flight.get(key)

    def plan(self) -> StepPlan:
        """The step as it stands."""
        num_tokens = len(self.decodes) + sum(chunk.num_tokens for chunk in self.chunks)
        num_prefill = num_recompute = 0
        for chunk in self.chunks:
            end = chunk.start + chunk.num_tokens
            first_new = max(chunk.start, min(end, chunk.request.num_lost_tokens))
            num_recompute += first_new - chunk.start
            num_prefill += max(0, min(end, chunk.request.num_prompt_tokens) - first_new)
        return StepPlan(
            self.decodes,
            self.chunks,
            len(self.decodes) + sum(chunk.num_logit_rows for chunk in self.chunks),
            num_prefill,
            num_recompute,
            num_tokens - num_prefill - num_recompute,
            self.preempted,
            self.failed,
        )
