"""What the scheduler and whoever runs its steps hand to each other: plans and updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from lean_engine.scheduling.request import Request

StepUpdate = tuple[Request, Sequence[int]]
"""What a step brought to one request: its new tokens; whether it has ended is in its finish_reason."""


@dataclass(slots=True, eq=False)
class ScheduledChunk:
    """The tokens [start, start + num_tokens) of one request; its block table already covers them."""

    request: Request
    start: int
    num_tokens: int
    num_logit_rows: int  # logits are wanted for the last num_logit_rows tokens of the chunk
    samples: bool  # the chunk reaches the end of the known tokens and a token is to be sampled there


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes. Every running request stands once in `decodes` or in `chunks`.

    A decode is the latest token of a request that has caught up, and its next token is sampled: it is represented by
    its request alone, because there may be hundreds in a step. Tokens, requests and rows of logits are laid out decodes
    first.
    """

    decodes: list[Request]
    chunks: list[ScheduledChunk]
    num_logit_rows: int
    num_prefill_tokens: int  # of the prompts, computed for the first time
    num_recompute_tokens: int  # computed before, and lost by preemption
    num_decode_tokens: int  # generated, computed for the first time
    preempted: list[Request] = field(default_factory=list)  # lost their blocks in this plan; they wait
    failed: list[tuple[Request, str]] = field(default_factory=list)  # ended with "error", and why

    @property
    def num_requests(self) -> int:
        return len(self.decodes) + len(self.chunks)

    @property
    def num_tokens(self) -> int:
        return self.num_prefill_tokens + self.num_recompute_tokens + self.num_decode_tokens

    @property
    def scheduled(self) -> list[ScheduledChunk]:
        """Decodes too as chunks, in the order of the layout; for checks and displays, before the next plan."""
        decodes = [ScheduledChunk(request, request.num_computed_tokens - 1, 1, 1, True) for request in self.decodes]
        return decodes + self.chunks
