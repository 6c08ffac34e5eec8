"""One request as the scheduler sees it: its tokens, how many of them are computed, its blocks and its end.

The scheduler alone changes a request after it was added. Everything else the engine knows of it (sampling state,
detokenizer, the caller's stream) hangs on `payload`, which the scheduler never looks at.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import Enum
from typing import Any, Literal

from lean_engine.memory.prefix_cache import BlockKey, ExtraKeys

FinishReason = Literal["stop", "length", "abort", "error"]
NEVER = sys.maxsize  # tokens: more than any request has


class RequestStatus(Enum):
    """Where a request stands; PREEMPTED waits like WAITING, with its blocks given back."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class Request:
    """A prompt, its limits, and what has become of it so far.

    Attributes:
        request_id: unique among unfinished requests.
        token_ids: prompt and output in one list; only ever appended to.
        num_prompt_tokens: how many of `token_ids` are the prompt.
        max_tokens: output tokens at most; 0 computes the prompt and samples nothing.
        min_tokens: output tokens before which neither eos nor a stop token id ends the request.
        eos_token_ids: end it with stop_reason None; empty when eos is ignored.
        stop_token_ids: end it with the token's id as stop_reason.
        ending_token_ids: both.
        needs_prompt_logits: logits are wanted at every prompt position (for prompt logprobs), not only the last.
        priority: a lower one goes first, where the scheduler's policy heeds it.
        extra_keys: what besides the tokens its keys and values depend on, for the prefix cache.
        reads_cache: whether its prompt may be looked up in the prefix cache.
        payload: the engine's own state.
        arrival_time, first_scheduled_time, first_token_time, finished_time: seconds, on the caller's clock.
        max_total_tokens: prompt and output at most, max_model_len considered; set when the request is added.
        block_table: ids of the KV blocks it holds, in token order.
        num_computed_tokens: tokens whose keys and values are in those blocks, or will be by a step that is in flight.
        order: (priority, arrival number), ascending in the order of service; set when the request is added.
        block_keys: keys of its full blocks in the prefix cache, as far as they are known.
        num_slots: tokens that its blocks have room for.
        is_caught_up: its latest token was sampled, or is being, and is the only one to compute: its next chunk is a
            decode.
        num_waiting_tokens: what it had to compute when it was queued, cached blocks apart.
        publish_at: computed tokens at which its next full block is published; NEVER if it publishes none.
        num_cached_tokens: prompt tokens that the prefix cache held when it was first admitted.
        num_lost_tokens: tokens whose computed keys and values preemption has taken, at most.
        num_prompt_logits: prompt positions whose logits were delivered; preemption does not deliver them again.
        num_preemptions: how often its blocks were taken away.
        finish_reason: "stop", "length", "abort", "error"; None while unfinished.
        stop_reason: the stop token id or stop string behind "stop"; None for eos.
    """

    __slots__ = (
        "arrival_time",
        "block_keys",
        "block_table",
        "ending_token_ids",
        "eos_token_ids",
        "extra_keys",
        "finish_reason",
        "finished_time",
        "first_scheduled_time",
        "first_token_time",
        "is_caught_up",
        "max_tokens",
        "max_total_tokens",
        "min_tokens",
        "needs_prompt_logits",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_lost_tokens",
        "num_preemptions",
        "num_prompt_logits",
        "num_prompt_tokens",
        "num_slots",
        "num_waiting_tokens",
        "order",
        "payload",
        "priority",
        "publish_at",
        "reads_cache",
        "request_id",
        "status",
        "stop_reason",
        "stop_token_ids",
        "token_ids",
    )

    def __init__(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        *,
        max_tokens: int,
        min_tokens: int = 0,
        eos_token_ids: frozenset[int] = frozenset(),
        stop_token_ids: frozenset[int] = frozenset(),
        arrival_time: float = 0.0,
        needs_prompt_logits: bool = False,
        priority: int = 0,
        extra_keys: ExtraKeys = (),
        reads_cache: bool = True,
        payload: Any = None,
    ) -> None:
        self.request_id = request_id
        self.token_ids = list(prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.max_tokens = max_tokens
        self.min_tokens = min_tokens
        self.eos_token_ids = eos_token_ids
        self.stop_token_ids = stop_token_ids
        self.ending_token_ids = eos_token_ids | stop_token_ids
        self.needs_prompt_logits = needs_prompt_logits
        self.priority = priority
        self.extra_keys = extra_keys
        self.reads_cache = reads_cache
        self.payload = payload
        self.arrival_time = arrival_time
        self.first_scheduled_time: float | None = None
        self.first_token_time: float | None = None
        self.finished_time: float | None = None

        self.status = RequestStatus.WAITING
        self.max_total_tokens = self.num_prompt_tokens + max_tokens
        self.block_table: list[int] = []
        self.num_slots = 0
        self.is_caught_up = False
        self.num_computed_tokens = 0
        self.order = (priority, 0)
        self.block_keys: list[BlockKey] = []
        self.num_waiting_tokens = 0
        self.publish_at = NEVER
        self.num_cached_tokens = 0
        self.num_lost_tokens = 0
        self.num_prompt_logits = 0
        self.num_preemptions = 0
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None

    def __repr__(self) -> str:
        return (
            f"Request({self.request_id!r}, {self.status.value}, {self.num_computed_tokens} of {self.num_tokens} tokens "
            f"computed, {self.num_output_tokens} generated, {len(self.block_table)} blocks)"
        )

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: prompt and output."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def prompt_token_ids(self) -> list[int]:
        """A copy of the prompt; use `token_ids` in the step loop."""
        return self.token_ids[: self.num_prompt_tokens]

    @property
    def output_token_ids(self) -> list[int]:
        """A copy of the output; use `token_ids` in the step loop."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    @property
    def first_logit_position(self) -> int:
        """The first position whose logits are still wanted; every known position from there on wants them too.

        The last known position, from which the next token is sampled, unless prompt logits are due: no token can have
        been generated before the last of those was delivered.
        """
        if self.needs_prompt_logits and self.num_prompt_logits < self.num_prompt_tokens:
            return self.num_prompt_logits
        return len(self.token_ids) - 1

    def append(self, sampled_token_ids: Sequence[int]) -> Sequence[int]:
        """Append tokens up to the one that ends the request, set `finish_reason`, return the tokens appended.

        Each token is judged in turn: eos, then stop token ids (both only from `min_tokens` on), then the length.
        """
        token_ids = self.token_ids
        num_before = len(token_ids)
        for token_id in sampled_token_ids:
            token_ids.append(token_id)
            if token_id in self.ending_token_ids or len(token_ids) >= self.max_total_tokens:
                self._judge(token_id)
                if self.finish_reason is not None:
                    return token_ids[num_before:]
        return sampled_token_ids

    def _judge(self, token_id: int) -> None:
        """Set `finish_reason` if `token_id`, just appended, ends the request."""
        can_stop = self.num_output_tokens >= self.min_tokens
        if can_stop and token_id in self.eos_token_ids:
            self.finish_reason = "stop"
        elif can_stop and token_id in self.stop_token_ids:
            self.finish_reason, self.stop_reason = "stop", token_id
        elif len(self.token_ids) >= self.max_total_tokens:
            self.finish_reason = "length"
