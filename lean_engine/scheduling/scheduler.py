"""The scheduler: at each step, which requests move, by how many tokens, and in which KV blocks.

One mechanism: a request has `num_tokens` known and `num_computed_tokens` computed, and each step lets it catch up by a
chunk. A decode is a chunk of one token; a long prompt takes several chunks; a preempted request starts over and its
output so far is computed like a prompt. There is no prefill phase and no decode phase.

A step: `plan()` grants tokens and blocks, the caller computes and samples, `apply()` takes the sampled tokens. One step
may be planned ahead, before the step in flight is applied: what has been planned counts as computed, and a token that
is being sampled counts as the request's next. So nothing of a plan hangs on tokens that nobody knows yet. Always:

- Every running request moves in every step: those behind it in the order keep one token and one row of logits each.
  (Ahead, one that is sure to end with the step in flight does not.)
- The order is (priority, arrival), priority counting only under that policy. Running requests stand in it. When blocks
  run out the last one is preempted, so the first always gets to its end. No step ahead preempts: where it lacks blocks
  there is no plan until the step in flight is applied.
- Waiting requests are admitted in that order, and nobody passes one that lacks blocks. A short one passes a long one
  that lacks tokens: while short prompts wait or run, long ones leave them up to half of the tokens that decodes leave.
- A request is admitted when the free blocks cover all its known tokens, what the running still lack for theirs, and a
  block of growth for each of them. So it takes no block that is needed in the next steps, and is not preempted again
  before it has caught up and moved on. A step that preempts admits nobody.
- Blocks are published in the prefix cache when they are full and all their tokens known. A waiting request is looked up
  when its turn comes, and is held back while the very block it needs next is computed by another; its place is kept,
  and it is passed only by requests that this step computes to their last token.
- What can never fit is refused by `add()`, so a request that is alone always runs to its end.

Longer than other files here, because these rules only hold together.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence
from itertools import islice
from operator import attrgetter

from lean_engine.config import POLICIES
from lean_engine.errors import ConfigError, RequestError
from lean_engine.memory.block_pool import BlockPool, IntegrityError
from lean_engine.memory.prefix_cache import BlockKeys
from lean_engine.scheduling.admission import refuse_what_never_fits
from lean_engine.scheduling.block_tables import BlockTables
from lean_engine.scheduling.plan import ScheduledChunk, StepPlan, StepUpdate
from lean_engine.scheduling.queue import WaitingQueue
from lean_engine.scheduling.request import NEVER, FinishReason, Request, RequestStatus
from lean_engine.scheduling.statistics import SchedulerStats, StepStats
from lean_engine.scheduling.step import Limits, Step

_order = attrgetter("order")


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
        block_keys: makes the keys of the prefix cache; None switches it off.
        policy: "fcfs", or "priority": a lower Request.priority goes first.
        long_prefill_token_threshold: a request with more tokens to compute is long, and computes at most this many in a
            step; 0: none is long; None: half of the token budget, and no cap.

    Raises:
        ConfigError: a limit is out of range, or whole prompts of max_model_len do not fit into a step.
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
        block_keys: BlockKeys | None = None,
        policy: str = "fcfs",
        long_prefill_token_threshold: int | None = None,
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
        if policy not in POLICIES:
            raise ConfigError(f"scheduling_policy is {policy!r}, must be one of: {', '.join(POLICIES)}")
        self.pool = pool
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_num_logit_rows = max_num_logit_rows
        self.enable_chunked_prefill = enable_chunked_prefill
        self.max_num_running = min(max_num_seqs, max_num_batched_tokens, max_num_logit_rows)
        self.policy = policy
        self.tables = BlockTables(pool, block_size, block_keys)
        self.stats = SchedulerStats()
        self._limits = self._make_limits(long_prefill_token_threshold)
        self._requests: dict[str, Request] = {}  # all that are not finished
        self._running: list[Request] = []  # in order
        self._waiting = WaitingQueue(self._limits.long_threshold)
        self._catching_up: list[Request] = []  # those that had tokens left to compute after the last step
        self._in_flight: list[StepPlan] = []  # planned and not applied, in order
        self._num_added = 0
        self._has_finished = False  # among the running, in the step that is being applied
        self._awaits_blocks = False  # whose turn it is found too few blocks; only decodes have run since
        self._last_plan = StepPlan([], [], 0, 0, 0, 0)

    def _make_limits(self, threshold: int | None) -> Limits:
        if threshold is not None and threshold < 0:
            raise ConfigError(f"long_prefill_token_threshold is {threshold}; it must be at least 0")
        if threshold and not self.enable_chunked_prefill:
            raise ConfigError(f"long_prefill_token_threshold is {threshold}, but chunked prefill is off")
        is_any_long = self.enable_chunked_prefill and threshold != 0
        default = max(1, self.max_num_batched_tokens // 2)
        return Limits(
            self.max_num_batched_tokens,
            self.max_num_logit_rows,
            long_threshold=(threshold or default) if is_any_long else NEVER,
            max_long_chunk=threshold or NEVER,
        )

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests without blocks: never admitted, or preempted."""
        return len(self._waiting)

    def has_work(self) -> bool:
        return bool(self._requests)

    def unfinished(self, max_waiting: int) -> tuple[list[Request], list[Request]]:
        """Those that run, in order, and of the others the `max_waiting` that came first. For displays."""
        others = (request for request in self._requests.values() if request.status is not RequestStatus.RUNNING)
        return list(self._running), list(islice(others, max_waiting))

    def add(self, request: Request) -> None:
        """Queue a new request.

        Raises:
            RequestError: it can never run here; the message holds the numbers.
        """
        if request.request_id in self._requests:
            raise RequestError(f"request id {request.request_id!r} is already in use", param="request_id")
        request.max_total_tokens = min(request.num_prompt_tokens + request.max_tokens, self.max_model_len)
        refuse_what_never_fits(
            request,
            max_model_len=self.max_model_len,
            num_blocks=self.pool.num_usable,
            block_size=self.block_size,
            max_whole_prompt_rows=None if self.enable_chunked_prefill else self.max_num_logit_rows,
        )
        self.tables.prepare(request)
        self._num_added += 1
        request.order = (request.priority if self.policy == "priority" else 0, self._num_added)
        self._requests[request.request_id] = request
        self._enqueue(request)

    def _enqueue(self, request: Request) -> None:
        num_cached = len(self.tables.match(request)) * self.block_size
        self._waiting.push(request, request.num_tokens - num_cached)
        if self._waiting.first() is request:
            self._awaits_blocks = False  # that was about another one

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
        is_running = request.status is RequestStatus.RUNNING
        self._close(request, reason, stop_reason, now)
        if is_running:
            self._running.remove(request)
        else:
            self._waiting.discard(request)
        return True

    def abort(self, request_id: str, *, now: float | None = None) -> bool:
        """`finish` with the reason "abort"."""
        return self.finish(request_id, "abort", now=now)

    def reset_prefix_cache(self) -> None:
        """Forget every cached block. What runs goes on, and publishes nothing that it began before."""
        self.pool.forget()
        for request in self._running:
            request.publish_at = NEVER

    # -- a step

    def plan(self, now: float = 0.0) -> StepPlan | None:
        """Decide the next step and grant its blocks. `now` stamps first admissions.

        Returns:
            None if there is nothing to do, or, with a step in flight, if the next one hangs on its results.
        """
        self.pool.now = now
        self._publish_prompts_in_flight()
        if self._last_plan.chunks:
            self._awaits_blocks = False  # prompts are nearer to their end, and blocks may be shared that were not
        step = Step(self._limits, len(self._running), self._num_short_tokens())
        self._schedule_running(step)
        if step.lacks_blocks:
            return None
        if not step.preempted:
            self._schedule_waiting(step, now)
            while not self._running and self._waiting:
                self._fail_first(step, now)
        self._use_up(step)
        plan = step.plan()
        self._check_plan(plan, step.num_ending)
        if not (plan.num_requests or plan.preempted or plan.failed):
            if self._requests and not self._in_flight:
                raise IntegrityError(f"nothing runs and nothing can be admitted, but {len(self._requests)} wait")
            return None
        self._advance(plan)
        return plan

    def _publish_prompts_in_flight(self) -> None:
        """Whatever is computed from now on may read what the step in flight computes of prompts."""
        for plan in self._in_flight:
            for chunk in plan.chunks:
                if not chunk.request.is_finished:
                    self._publish(chunk)

    def _publish(self, chunk: ScheduledChunk) -> None:
        end = chunk.start + chunk.num_tokens
        if end >= chunk.request.publish_at:
            self.tables.publish(chunk.request, end)

    def _check_plan(self, plan: StepPlan, num_ending: int) -> None:
        if (
            plan.num_tokens > self.max_num_batched_tokens
            or plan.num_logit_rows > self.max_num_logit_rows
            or plan.num_requests + num_ending != len(self._running)
        ):
            raise IntegrityError(
                f"step overdrawn: {plan.num_tokens} tokens, {plan.num_logit_rows} rows of logits, "
                f"{plan.num_requests} of {len(self._running)} running requests scheduled, {num_ending} end before it"
            )

    def _advance(self, plan: StepPlan) -> None:
        """From here on the plan's tokens count as computed, and the tokens it samples as known."""
        for request in plan.decodes:
            request.num_computed_tokens += 1
        self._catching_up = []
        for chunk in plan.chunks:
            request, end = chunk.request, chunk.start + chunk.num_tokens
            request.num_computed_tokens = end
            if request.needs_prompt_logits:
                request.num_prompt_logits = max(request.num_prompt_logits, min(end, request.num_prompt_tokens))
            has_one_left = end + 1 == request.num_tokens and request.num_output_tokens > 0
            request.is_caught_up = chunk.samples or has_one_left
            if end < request.num_tokens and not has_one_left:
                self._catching_up.append(request)
        self.tables.num_resident_tokens += plan.num_tokens
        self._last_plan = plan
        self._in_flight.append(plan)

    def withdraw(self, plan: StepPlan) -> None:
        """Take back the latest plan, which was not computed; its blocks stay with their requests."""
        if not self._in_flight or self._in_flight.pop() is not plan:
            raise IntegrityError("a step is withdrawn that is not the latest in flight")
        for chunk in plan.scheduled:
            request, end = chunk.request, chunk.start + chunk.num_tokens
            if request.is_finished:
                continue
            self.tables.num_resident_tokens -= chunk.num_tokens
            request.num_computed_tokens = chunk.start
            if request.needs_prompt_logits and chunk.num_logit_rows:
                request.num_prompt_logits = min(request.num_prompt_logits, end - chunk.num_logit_rows)
        for chunk in plan.chunks:
            chunk.request.is_caught_up = False
        self._catching_up = [chunk.request for chunk in plan.chunks]

    def apply(self, plan: StepPlan, sampled: Sequence[Sequence[int]], now: float) -> list[StepUpdate]:
        """Take a step's results: append tokens, publish what is full, end what is complete and free its blocks.

        Args:
            plan: the plan that was computed, once; the oldest in flight.
            sampled: per decode, then per chunk of the plan, its new token ids: at least one where the plan samples,
                else none. What follows a token that ends the request is dropped.
            now: seconds, stamped on first tokens and ends.

        Returns:
            Updates of the requests that got tokens or ended, in the plan's order. Requests that were finished by
            `finish` or `abort` since the plan was made are left out.
        """
        num_decodes = len(plan.decodes)
        if len(sampled) != plan.num_requests:
            raise IntegrityError(f"{plan.num_requests} requests were planned, results of {len(sampled)} were given")
        if not self._in_flight or self._in_flight[0] is not plan:
            raise IntegrityError("results are given of a step that is not the oldest in flight")
        self.pool.now = now
        self._count_step(plan)
        updates = self._apply_decodes(plan.decodes, sampled, now)
        for chunk, tokens in zip(plan.chunks, sampled[num_decodes:], strict=True):
            if chunk.request.finish_reason is None:  # not ended since the plan was made
                self._apply_chunk(chunk, tokens, now, updates)
        if self._has_finished:
            self._running = [request for request in self._running if request.status is RequestStatus.RUNNING]
            self._has_finished = False
        del self._in_flight[0]
        return updates

    def _apply_decodes(self, decodes: list[Request], sampled: Sequence[Sequence[int]], now: float) -> list[StepUpdate]:
        """The part of a step that is as long as the batch, so every line of it counts."""
        updates: list[StepUpdate] = []
        for request, tokens in zip(decodes, sampled, strict=False):  # what `sampled` has beyond belongs to chunks
            if request.finish_reason is not None:  # ended since the plan was made
                continue
            token_ids = request.token_ids
            end = len(token_ids)  # the step computed the last of them
            if end >= request.publish_at:
                self.tables.publish(request, end)
            if len(tokens) == 1 and end + 1 < request.max_total_tokens and tokens[0] not in request.ending_token_ids:
                token_ids.append(tokens[0])
                updates.append((request, tokens))
            else:
                self._append(request, tokens, now, updates)
        return updates

    def _append(self, request: Request, tokens: Sequence[int], now: float, updates: list[StepUpdate]) -> None:
        """Append tokens of which one may end the request."""
        if not tokens:
            raise IntegrityError(f"no sampled token for {request!r}")
        updates.append((request, request.append(tokens)))
        if request.finish_reason is not None:
            self._end(request, now)
        elif request.num_tokens > request.num_computed_tokens + 1:  # several tokens were sampled
            request.is_caught_up = False
            self._catching_up.append(request)

    def _apply_chunk(self, chunk: ScheduledChunk, tokens: Sequence[int], now: float, updates: list[StepUpdate]) -> None:
        request = chunk.request
        if (not tokens) is chunk.samples:
            raise IntegrityError(f"{len(tokens)} sampled tokens for {request!r}, whose chunk has {chunk.samples=}")
        self._publish(chunk)
        if chunk.samples:
            if request.first_token_time is None:
                request.first_token_time = now
            self._append(request, tokens, now, updates)
        elif chunk.start + chunk.num_tokens == request.max_total_tokens:  # max_tokens is 0: the prompt was all
            request.finish_reason = "length"
            updates.append((request, tokens))
            self._end(request, now)

    def _end(self, request: Request, now: float) -> None:
        assert request.finish_reason is not None
        self._has_finished = True
        self._close(request, request.finish_reason, request.stop_reason, now)

    # -- planning

    def _num_short_tokens(self) -> int:
        """What short prompts have to compute that run, or wait and may be admitted."""
        missing = (r.num_tokens - r.num_computed_tokens for r in self._catching_up if not r.is_finished)
        num_tokens = sum(num for num in missing if num <= self._limits.long_threshold)
        if not self._awaits_blocks and len(self._running) < self.max_num_running:
            num_tokens += self._waiting.num_short_tokens
        return num_tokens

    def _schedule_running(self, step: Step) -> None:
        """Give every running request its next chunk, preempting from the end of the order while blocks are short."""
        decodes, is_ahead = step.decodes, bool(self._in_flight)
        for request in self._running:  # may lose requests at its end, behind this one, to preemption
            start = request.num_computed_tokens
            if is_ahead and start + 1 >= request.max_total_tokens:  # its last token is being sampled
                step.num_ending += 1
                continue
            if request.is_caught_up:
                if start >= request.num_slots and not self._make_room(request, start + 1, step):
                    return
                decodes.append(request)
                continue
            chunk = step.chunk(request, start, owned_tokens=1, owned_rows=1)
            if not self._make_room(request, start + chunk.num_tokens, step):
                return
            step.take(chunk, owned_tokens=1, owned_rows=1)

    def _schedule_waiting(self, step: Step, now: float) -> None:
        """Admit waiting requests in order, until one does not fit into what is left."""
        if self._awaits_blocks or not self._waiting or len(self._running) >= self.max_num_running:
            return
        held_back: list[Request] = []
        try:
            self._admit_in_order(step, held_back, now)
        finally:
            for request in held_back:
                self._waiting.push(request, request.num_waiting_tokens)

    def _admit_in_order(self, step: Step, held_back: list[Request], now: float) -> None:
        tables, waiting = self.tables, self._waiting
        num_reserved = sum(map(tables.num_missing_soon, self._running))
        with_long = True
        while len(self._running) + len(held_back) < self.max_num_running:
            request = waiting.first(with_long)
            if request is None:
                return
            hits = tables.match(request)
            next_key = tables.next_key(request, len(hits))
            leader = None if next_key is None else step.leader(next_key, self.block_size)
            if leader is not None:
                waiting.pop(request)
                held_back.append(request)
                num_reserved += tables.num_missing_soon(request) - tables.num_common(request, leader)
                continue
            start = len(hits) * self.block_size
            chunk = step.chunk(request, start)
            must_be_whole = bool(held_back) or not self.enable_chunked_prefill
            if chunk.num_tokens < (request.num_tokens - start if must_be_whole else 1):
                if step.is_long(request, start):
                    if not with_long:
                        return
                    with_long = False  # short ones may pass
                    continue
                if waiting.is_long(request):  # it was queued before what it shares was cached
                    waiting.pop(request)
                    waiting.push(request, request.num_tokens - start)
                return
            if num_reserved + self._num_blocks_to_admit(request, hits, step) > self.pool.num_free:
                self._awaits_blocks = True
                return
            self._admit(request, hits, chunk, now)
            step.take(chunk)
            num_reserved += tables.num_missing_soon(request)

    def _num_blocks_to_admit(self, request: Request, hits: list[int], step: Step) -> int:
        """Free blocks it takes, and what the running grow by, beyond their reserve, while it is catching up."""
        num_missing = request.num_tokens - len(hits) * self.block_size
        num_running = len(self._running)
        pace = self.max_num_batched_tokens - num_running  # tokens per step; at least 1, since one more may run
        if num_missing > self._limits.long_threshold:
            pace = min((pace + 1) // 2, self._limits.max_long_chunk)
        num_steps = (step.num_ahead + num_missing - 1) // pace  # after this one
        num_from_free = self.tables.num_missing_soon(request) - self.pool.num_shared(hits)
        return num_from_free + num_running * (num_steps // self.block_size)

    def _admit(self, request: Request, hits: list[int], chunk: ScheduledChunk, now: float) -> None:
        self._waiting.pop(request)
        insort(self._running, request, key=_order)
        self.tables.start(request, hits, chunk.start + chunk.num_tokens)
        if request.status is RequestStatus.WAITING:
            self._count_admission(request)
            request.first_scheduled_time = now
        request.status = RequestStatus.RUNNING

    def _make_room(self, request: Request, end: int, step: Step) -> bool:
        """Extend the block table to cover `end` tokens; False if the request itself had to be preempted, or had to be
        but must not, since a step is in flight.
        """
        num_missing = max(0, self.tables.num_missing(request, end))
        while num_missing > self.pool.num_free:
            if self._in_flight:
                step.lacks_blocks = True
                return False
            victim = self._running.pop()  # never one that this step has scheduled: those stand before `request`
            self._preempt(victim)
            step.preempt(victim)
            if victim is request:
                return False
        self.tables.extend(request, num_missing)
        return True

    def _use_up(self, step: Step) -> None:
        """Give long prompts the tokens that were left to short ones and that none of those could take."""
        for chunk in list(step.chunks) if step.spare_tokens > 0 else ():
            if not step.is_long(chunk.request, chunk.start):
                continue
            longer = step.longer(chunk)
            num_missing = max(0, self.tables.num_missing(chunk.request, longer.start + longer.num_tokens))
            if longer.num_tokens > chunk.num_tokens and num_missing <= self.pool.num_free:
                self.tables.extend(chunk.request, num_missing)
                step.replace(chunk, longer)

    def _fail_first(self, step: Step, now: float) -> None:
        """Nothing runs and whose turn it is cannot be admitted: end it, so that the next one gets its turn.

        `add` has refused what does not fit, so this means that somebody outside holds blocks.
        """
        request = self._waiting.first()
        assert request is not None
        message = (
            f"no step can admit this request: it needs {self.tables.num_missing_soon(request)} KV blocks to go on, "
            f"{self.pool.num_free} of {self.pool.num_usable} are free though nothing runs"
        )
        self.finish(request.request_id, "error", now=now)
        self.stats.num_failed += 1
        step.failed.append((request, message))
        self._schedule_waiting(step, now)

    # -- giving blocks back

    def _preempt(self, request: Request) -> None:
        """Back into the queue, to be computed again from its first token; its tokens stay as they are."""
        request.num_lost_tokens = max(request.num_lost_tokens, request.num_computed_tokens)
        self._give_blocks_back(request)
        request.num_computed_tokens = 0
        request.is_caught_up = False
        request.num_preemptions += 1
        self.stats.num_preemptions += 1
        request.status = RequestStatus.PREEMPTED
        self._enqueue(request)

    def _close(self, request: Request, reason: FinishReason, stop_reason: int | str | None, now: float | None) -> None:
        """The one way to the end; the caller takes the request out of its queue next."""
        self._give_blocks_back(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.stop_reason = stop_reason
        request.finished_time = now
        self.stats.num_finished += 1
        del self._requests[request.request_id]

    def _give_blocks_back(self, request: Request) -> None:
        self.tables.give_back(request)
        self._awaits_blocks = False

    # -- statistics and checks

    def step_stats(self) -> StepStats:
        """How things stand after the latest step; O(1)."""
        plan, pool, stats = self._last_plan, self.pool, self.stats
        return StepStats(
            step=stats.num_steps,
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_held_blocks=pool.num_held,
            num_cached_blocks=pool.num_cached,
            num_empty_blocks=pool.num_empty,
            num_unused_slots=self.tables.num_unused_slots,
            num_prefill_tokens=plan.num_prefill_tokens,
            num_recompute_tokens=plan.num_recompute_tokens,
            num_decode_tokens=plan.num_decode_tokens,
            num_preempted=len(plan.preempted),
            num_query_tokens=stats.num_query_tokens,
            num_hit_tokens=stats.num_hit_tokens,
            num_evictions=pool.num_evictions,
            block_size=self.block_size,
        )

    def _count_step(self, plan: StepPlan) -> None:
        stats = self.stats
        stats.num_steps += 1
        stats.num_prefill_tokens += plan.num_prefill_tokens
        stats.num_recompute_tokens += plan.num_recompute_tokens
        stats.num_decode_tokens += plan.num_decode_tokens

    def _count_admission(self, request: Request) -> None:
        request.num_cached_tokens = request.num_computed_tokens
        self.stats.num_admitted += 1
        if request.publish_at != NEVER and request.reads_cache:
            self.stats.num_query_tokens += request.num_prompt_tokens
            self.stats.num_hit_tokens += request.num_cached_tokens

    def check(self) -> None:
        """Prove that pool, queues, block tables and counters agree. O(n); IntegrityError names a contradiction."""
        self.pool.check()
        waiting = list(self._waiting)
        queued = [*self._running, *waiting]
        if len(queued) != len(self._requests) or any(self._requests.get(r.request_id) is not r for r in queued):
            raise IntegrityError(f"{len(queued)} requests run or wait, {len(self._requests)} are unfinished")
        if len(waiting) != len(self._waiting) or self._running != sorted(self._running, key=_order):
            raise IntegrityError(f"{len(self._waiting)} of {len(waiting)} waiting counted, or running out of order")
        for request in self._running:
            if request.status is not RequestStatus.RUNNING:
                raise IntegrityError(f"among the running: {request!r}")
            num_missing = request.num_tokens - request.num_computed_tokens
            if num_missing < 1 - len(self._in_flight):
                raise IntegrityError(f"runs with nothing to compute: {request!r}")
            if request.is_caught_up and (num_missing > 1 or (num_missing == 1 and request.num_output_tokens == 0)):
                raise IntegrityError(f"counts as caught up: {request!r}")
        for request in waiting:
            if request.status not in (RequestStatus.WAITING, RequestStatus.PREEMPTED) or request.block_table:
                raise IntegrityError(f"among the waiting: {request!r}")
        self.tables.check(self._running)
