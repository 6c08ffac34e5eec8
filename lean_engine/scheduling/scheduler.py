"""The scheduler: at each step, which requests move, by how many tokens, and in which KV blocks.

One mechanism: a request has `num_tokens` known and `num_computed_tokens` computed, and each step lets it catch up by a
chunk. A decode is a chunk of one token; a long prompt takes several chunks; a preempted request starts over from token
0 and its output so far is computed like a prompt. There is no prefill phase and no decode phase.

A step: `plan()` grants tokens and blocks, the caller computes and samples, `apply()` takes the sampled tokens. Always:

- Every running request moves in every step: those behind it in the order keep one token and one row of logits each.
- Requests are admitted in the order they were added, and running + waiting always stand in that order. When blocks run
  out the latest is preempted, so the oldest request always gets to its end.
- A request is admitted when the free blocks cover all its known tokens, what the running still lack for theirs, and a
  block of growth for each of them. So it takes no block that is needed in the next steps, and is not preempted again
  before it has caught up and moved on. A step that preempts admits nobody.
- What can never fit is refused by `add()`, so a request that is alone always runs to its end.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from lean_engine.errors import ConfigError, RequestError
from lean_engine.memory.block_pool import BlockPool, IntegrityError
from lean_engine.memory.budget import num_blocks_for
from lean_engine.scheduling.request import FinishReason, Request, RequestStatus


@dataclass(slots=True)
class ScheduledChunk:
    """The tokens [start, start + num_tokens) of one request; its block table already covers them.

    Nobody changes one; it is not frozen because hundreds are made in a step and a frozen one costs several times more.
    """

    request: Request
    start: int
    num_tokens: int
    num_logit_rows: int  # logits are wanted for the last num_logit_rows tokens of the chunk
    samples: bool  # the chunk reaches the end of the known tokens and a token is to be sampled there


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes. Every running request has exactly one chunk."""

    scheduled: list[ScheduledChunk]
    num_tokens: int
    num_logit_rows: int
    preempted: list[Request]  # lost their blocks while this step was planned; they wait


@dataclass(slots=True)
class StepUpdate:
    """What a step brought to one request: new tokens, its end, or both."""

    request: Request
    new_token_ids: Sequence[int]
    finished: bool


@dataclass(slots=True)
class _Step:
    """A plan in the making: what is scheduled and what is left of the budgets."""

    tokens_left: int
    rows_left: int
    scheduled: list[ScheduledChunk] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)


class Scheduler:
    """Continuous batching over one block pool.

    Args:
        pool: all its blocks are this scheduler's to grant.
        block_size: tokens per block.
        max_model_len: a request ends with "length" when it has this many tokens.
        max_num_seqs: requests running at once. As each of them moves in every step, the two budgets below bound it too.
        max_num_batched_tokens: tokens per step.
        max_num_logit_rows: rows of logits per step: 1 for each sampled token, 1 for each prompt token whose logits are
            wanted. Vocabulary-wide logits of a long prompt are never materialised at once.
        enable_chunked_prefill: False admits a request only when all its tokens fit into the step.

    Raises:
        ConfigError: a limit is below 1, or whole prompts of max_model_len do not fit into a step.
    """

    def __init__(
        self,
        pool: BlockPool,
        *,
        block_size: int,
        max_model_len: int,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_num_logit_rows: int,
        enable_chunked_prefill: bool = True,
    ) -> None:
        for name, limit in (
            ("block_size", block_size),
            ("max_model_len", max_model_len),
            ("max_num_seqs", max_num_seqs),
            ("max_num_batched_tokens", max_num_batched_tokens),
            ("max_num_logit_rows", max_num_logit_rows),
        ):
            if limit < 1:
                raise ConfigError(f"{name} is {limit}; it must be at least 1")
        if not enable_chunked_prefill and max_num_batched_tokens < max_model_len:
            raise ConfigError(
                f"without chunked prefill max_num_batched_tokens ({max_num_batched_tokens}) must be at least "
                f"max_model_len ({max_model_len})"
            )
        self.pool = pool
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_logit_rows = max_num_logit_rows
        self.enable_chunked_prefill = enable_chunked_prefill
        self.max_num_running = min(max_num_seqs, max_num_batched_tokens, max_num_logit_rows)
        self._requests: dict[str, Request] = {}  # all that are not finished
        self._running: list[Request] = []
        self._waiting: OrderedDict[str, Request] = OrderedDict()  # a queue that anybody can leave in O(1)
        self._awaits_blocks = False  # the first in the queue found too few blocks, and none were given back since

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests without blocks: never admitted, or preempted."""
        return len(self._waiting)

    def has_work(self) -> bool:
        return bool(self._requests)

    def add(self, request: Request) -> None:
        """Queue a new request.

        Raises:
            RequestError: it can never run here; the message holds the numbers.
        """
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id!r} is already in use", param="request_id")
        request.max_total_tokens = min(request.num_prompt_tokens + request.max_tokens, self.max_model_len)
        self._refuse_what_never_fits(request)
        self._requests[request.request_id] = request
        self._waiting[request.request_id] = request

    def finish(
        self,
        request_id: str,
        reason: FinishReason,
        stop_reason: int | str | None = None,
        *,
        now: float | None = None,
    ) -> bool:
        """End a request in any state and free its blocks at once; False if no unfinished request has this id."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
        else:
            del self._waiting[request_id]
        self._close(request, reason, stop_reason, now)
        return True

    def abort(self, request_id: str, *, now: float | None = None) -> bool:
        """`finish` with the reason "abort"."""
        return self.finish(request_id, "abort", now=now)

    # -- a step

    def plan(self, now: float | None = None) -> StepPlan | None:
        """Decide the next step and grant its blocks; None if there is nothing to do. `now` stamps first admissions."""
        step = _Step(self.max_num_batched_tokens, self.max_num_logit_rows)
        self._schedule_running(step)
        if not step.preempted:
            self._schedule_waiting(step, now)
        if step.tokens_left < 0 or step.rows_left < 0 or len(step.scheduled) != len(self._running):
            raise IntegrityError(
                f"step overdrawn: {step.tokens_left} tokens and {step.rows_left} rows of logits left, "
                f"{len(step.scheduled)} of {len(self._running)} running requests scheduled"
            )
        if not step.scheduled:
            if self._requests:
                raise IntegrityError(f"nothing runs and nothing can be admitted, but {len(self._requests)} wait")
            return None
        return StepPlan(
            step.scheduled,
            self.max_num_batched_tokens - step.tokens_left,
            self.max_num_logit_rows - step.rows_left,
            step.preempted,
        )

    def apply(self, plan: StepPlan, sampled: Sequence[Sequence[int]], now: float) -> list[StepUpdate]:
        """Take the step's results: advance counters, append tokens, end what is complete and free its blocks.

        Args:
            plan: the plan that was computed, once.
            sampled: per chunk of the plan its new token ids: at least one where the chunk samples, else none. What
                follows a token that ends the request is dropped.
            now: seconds, stamped on first tokens and ends.

        Returns:
            Updates of the requests that got tokens or ended, in the plan's order. Requests that were finished by
            `finish` or `abort` since the plan was made are left out.
        """
        if len(sampled) != len(plan.scheduled):
            raise IntegrityError(f"{len(plan.scheduled)} chunks were planned, results of {len(sampled)} were given")
        updates = []
        has_finished = False
        for chunk, tokens in zip(plan.scheduled, sampled, strict=True):
            request = chunk.request
            if request.finish_reason is not None:  # ended since the plan was made
                continue
            samples = chunk.samples
            if (not tokens) is samples:
                raise IntegrityError(f"{len(tokens)} sampled tokens for {request!r}, whose chunk has samples={samples}")
            end = request.num_computed_tokens = chunk.start + chunk.num_tokens
            if request.needs_prompt_logits:
                request.num_prompt_logits = max(request.num_prompt_logits, min(end, request.num_prompt_tokens))
            if samples:
                if request.first_token_time is None:
                    request.first_token_time = now
                tokens = request.append(tokens)
            elif end == request.max_total_tokens:  # max_tokens is 0: the prompt was all there is to compute
                request.finish_reason = "length"
            else:
                continue
            reason = request.finish_reason
            updates.append(StepUpdate(request, tokens, reason is not None))
            if reason is not None:
                has_finished = True
                self._close(request, reason, request.stop_reason, now)
        if has_finished:
            self._running = [request for request in self._running if request.status is RequestStatus.RUNNING]
        return updates

    def check(self) -> None:
        """Prove that pool, queues and block tables agree. O(n); IntegrityError names the first contradiction."""
        self.pool.check()
        queued = [*self._running, *self._waiting.values()]
        if len(queued) != len(self._requests) or any(self._requests.get(r.request_id) is not r for r in queued):
            raise IntegrityError(f"{len(queued)} requests run or wait, {len(self._requests)} are unfinished")
        for request in self._running:
            if request.status is not RequestStatus.RUNNING:
                raise IntegrityError(f"among the running: {request!r}")
            if request.num_computed_tokens > len(request.block_table) * self.block_size:
                raise IntegrityError(f"computed tokens without blocks: {request!r}")
            if request.num_computed_tokens >= request.num_tokens:
                raise IntegrityError(f"runs with nothing to compute: {request!r}")
        for request in self._waiting.values():
            if request.status not in (RequestStatus.WAITING, RequestStatus.PREEMPTED) or request.block_table:
                raise IntegrityError(f"among the waiting: {request!r}")
        holders = Counter(block_id for request in self._running for block_id in request.block_table)
        for block_id in range(self.pool.num_blocks):
            if holders[block_id] != self.pool.ref_count(block_id):
                raise IntegrityError(
                    f"block {block_id} is in {holders[block_id]} block tables and has "
                    f"{self.pool.ref_count(block_id)} holders"
                )

    # -- planning

    def _schedule_running(self, step: _Step) -> None:
        """Give every running request its next chunk, preempting from the end of the order while blocks are short."""
        scheduled, block_size = step.scheduled, self.block_size
        tokens_left, rows_left = step.tokens_left, step.rows_left
        for request in self._running:  # may lose requests at its end, behind this one, to preemption
            start = request.num_computed_tokens
            if start + 1 == len(request.token_ids) and start >= request.num_prompt_tokens:
                chunk = ScheduledChunk(request, start, 1, 1, True)  # a decode: its token and row are always there
            else:
                num_behind = len(self._running) - len(scheduled) - 1
                chunk = self._chunk(request, tokens_left - num_behind, rows_left - num_behind)
            end = start + chunk.num_tokens
            if end > len(request.block_table) * block_size and not self._make_room(request, end, step):
                break
            scheduled.append(chunk)
            tokens_left -= chunk.num_tokens
            rows_left -= chunk.num_logit_rows
        step.tokens_left, step.rows_left = tokens_left, rows_left

    def _schedule_waiting(self, step: _Step, now: float | None) -> None:
        """Admit waiting requests in order, until the first that does not fit into what is left."""
        if self._awaits_blocks or not self._waiting or len(self._running) >= self.max_num_running:
            return
        num_reserved = sum(map(self._num_blocks_soon, self._running))
        while self._waiting and len(self._running) < self.max_num_running:
            request = next(iter(self._waiting.values()))
            chunk = self._chunk(request, step.tokens_left, step.rows_left)
            if chunk.num_tokens < (1 if self.enable_chunked_prefill else request.num_tokens):
                return
            if num_reserved + self._num_blocks_to_admit(request) > self.pool.num_free:
                self._awaits_blocks = True  # until blocks come back, the running can only need more
                return
            self._admit(request, chunk.num_tokens, now)
            num_reserved += self._num_blocks_soon(request)
            step.scheduled.append(chunk)
            step.tokens_left -= chunk.num_tokens
            step.rows_left -= chunk.num_logit_rows

    def _chunk(self, request: Request, max_tokens: int, max_rows: int) -> ScheduledChunk:
        """What the request can catch up by within these limits; num_tokens is 0 where they allow nothing."""
        start = request.num_computed_tokens
        num_known = len(request.token_ids)
        first_row = request.first_logit_position
        end = min(num_known, start + max_tokens, first_row + max_rows)
        samples = end == num_known and request.max_tokens > 0
        return ScheduledChunk(request, start, end - start, max(0, end - first_row), samples)

    def _num_blocks_soon(self, request: Request) -> int:
        """Blocks it lacks for its known tokens and one block of growth, as far as it can grow at all."""
        num_tokens = min(len(request.token_ids) + self.block_size, request.max_total_tokens)
        return num_blocks_for(num_tokens, self.block_size) - len(request.block_table)

    def _num_blocks_to_admit(self, request: Request) -> int:
        """Blocks it needs itself, and what the running grow by, beyond their reserve, while it is catching up."""
        num_running = len(self._running)
        num_steps = (request.num_tokens - 1) // (self.max_num_batched_tokens - num_running)  # after this one
        return self._num_blocks_soon(request) + num_running * (num_steps // self.block_size)

    def _admit(self, request: Request, num_tokens: int, now: float | None) -> None:
        del self._waiting[request.request_id]
        self._running.append(request)
        request.status = RequestStatus.RUNNING
        request.block_table = self.pool.allocate(num_blocks_for(num_tokens, self.block_size))
        if request.first_scheduled_time is None:
            request.first_scheduled_time = now

    def _make_room(self, request: Request, end: int, step: _Step) -> bool:
        """Extend the block table to cover `end` tokens; False if the request itself had to be preempted."""
        num_missing = num_blocks_for(end, self.block_size) - len(request.block_table)
        while num_missing > self.pool.num_free:
            victim = self._running.pop()  # never one that this step has scheduled: those stand before `request`
            self._preempt(victim)
            step.preempted.append(victim)
            if victim is request:
                return False
        request.block_table += self.pool.allocate(num_missing)
        return True

    # -- giving blocks back

    def _preempt(self, request: Request) -> None:
        """Back to the front of the queue, to be computed again from its first token; its tokens stay as they are."""
        self._give_blocks_back(request)
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        request.status = RequestStatus.PREEMPTED
        self._waiting[request.request_id] = request
        self._waiting.move_to_end(request.request_id, last=False)

    def _close(self, request: Request, reason: FinishReason, stop_reason: int | str | None, now: float | None) -> None:
        """The one way to the end; the caller has taken the request out of its queue, or does so next."""
        self._give_blocks_back(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.stop_reason = stop_reason
        request.finished_time = now
        del self._requests[request.request_id]

    def _give_blocks_back(self, request: Request) -> None:
        self.pool.free(request.block_table)
        request.block_table = []
        self._awaits_blocks = False

    # -- admission

    def _refuse_what_never_fits(self, request: Request) -> None:
        num_prompt = request.num_prompt_tokens
        if num_prompt == 0:
            raise RequestError("the prompt is empty; it needs at least one token", param="prompt")
        if request.max_tokens < 0:
            raise RequestError(f"max_tokens is {request.max_tokens}; it must be at least 0", param="max_tokens")
        if num_prompt + 1 > self.max_model_len:
            raise RequestError(
                f"the prompt has {num_prompt} tokens; with max_model_len={self.max_model_len} it can have at most "
                f"{self.max_model_len - 1}",
                param="prompt",
            )
        if not self.enable_chunked_prefill and request.needs_prompt_logits and num_prompt > self.max_num_logit_rows:
            raise RequestError(
                f"logprobs of all {num_prompt} prompt tokens need as many rows of logits in one step, of which there "
                f"are {self.max_num_logit_rows}; shorten the prompt or enable chunked prefill",
                param="prompt_logprobs",
            )
        num_needed = num_blocks_for(request.max_total_tokens, self.block_size)
        num_pool_tokens = self.pool.num_usable * self.block_size
        if num_needed > self.pool.num_usable:
            raise RequestError(
                f"a prompt of {num_prompt} tokens and max_tokens={request.max_tokens} can grow to "
                f"{request.max_total_tokens} tokens, which need {num_needed} KV blocks; "
                f"the pool has {self.pool.num_usable} ({num_pool_tokens} tokens)",
                param="prompt" if num_prompt + 1 > num_pool_tokens else "max_tokens",
            )
