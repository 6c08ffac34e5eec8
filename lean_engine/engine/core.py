"""Engine: the step, and the requests' way in and out.

One thread drives it at a time: a step or an add during another one is refused. A request that is wrong is refused by
`add`; one whose logits are damaged ends with finish_reason "error". Neither touches the others.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from lean_engine.config import ModelConfig
from lean_engine.engine.outputs import Answer, Group
from lean_engine.engine.runner import LaunchedStep, Runner
from lean_engine.engine.token_choice import StepTokens, requests_of
from lean_engine.errors import RequestError
from lean_engine.memory.prefix_cache import ExtraKey, ExtraKeys
from lean_engine.sampling.grammar import GrammarCompiler
from lean_engine.sampling.params import SamplingParams
from lean_engine.sampling.sampler import SamplingState
from lean_engine.scheduling.plan import StepPlan, StepUpdate
from lean_engine.scheduling.request import Request
from lean_engine.scheduling.scheduler import Scheduler
from lean_engine.scheduling.statistics import StepStats
from lean_engine.text.detokenizer import IncrementalDetokenizer
from lean_engine.text.tokenizer import Tokenizer

MAX_CACHE_SALT = 1024  # characters
SEED_STRIDE = 0x9E3779B97F4A7C15  # between the seeds of successive requests: odd, so that none repeats


class Engine:
    """Continuous batching over one model.

    Args:
        tokenizer: None serves token ids only (random weights without a tokenizer).
        eos_token_ids: every id that ends an answer unless the request ignores them.
        max_logprobs: cap of logprobs and prompt_logprobs; -1 = none.
        seed: of requests that bring none; None = fresh entropy for each.
        runs_ahead: whether a step is planned and launched before the results of the one before it are taken, where
            those are not needed for it. What an answer gets is the same; one that ends may cost a token that nobody
            sees.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        tokenizer: Tokenizer | None,
        scheduler: Scheduler,
        runner: Runner,
        *,
        eos_token_ids: frozenset[int],
        max_logprobs: int,
        seed: int | None = None,
        runs_ahead: bool = False,
    ) -> None:
        self.model_config = model_config
        self.tokenizer = tokenizer
        self.scheduler = scheduler
        self.runner = runner
        self.eos_token_ids = eos_token_ids
        self.max_logprobs = max_logprobs
        self.seed = seed
        self.runs_ahead = runs_ahead
        self.grammars = GrammarCompiler(tokenizer, model_config.vocab_size, eos_token_ids)
        self.num_steps = 0
        self.last_progress_time = 0.0  # seconds on time.monotonic's clock: the last step's end, or work after none
        self._num_unseeded = 0  # requests that the engine's seed has served
        self._in_flight: deque[LaunchedStep] = deque()  # launched, results not taken: one between steps, if any
        self._settles_first = False  # a launch has failed: what is in flight comes before any other
        self._is_closed = False
        self._turn = threading.Lock()  # held during add and step
        self._groups: dict[str, Group] = {}  # unfinished
        self._group_of: dict[str, Group] = {}  # by the scheduler's request ids

    @property
    def max_model_len(self) -> int:
        return self.scheduler.max_model_len

    def has_work(self) -> bool:
        return bool(self._groups)

    def seconds_without_progress(self) -> float:
        """How long there has been work and no step has been completed: what a watchdog looks at. 0 without work."""
        return time.monotonic() - self.last_progress_time if self._groups else 0.0

    def stats(self) -> StepStats:
        """Requests, blocks and tokens after the latest step, and totals since the start."""
        return self.scheduler.step_stats()

    def reset_prefix_cache(self) -> None:
        """Forget every cached block; requests that run go on undisturbed."""
        with self._in_turn():
            self.scheduler.reset_prefix_cache()

    # -- a request's way in

    def add(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        prompt: str | None = None,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
    ) -> Group:
        """Queue a request; its answers grow with every step.

        Args:
            request_id: unique among unfinished requests.
            prompt: the text behind the ids, returned with the output.
            priority: a lower one goes first, under scheduling_policy "priority".
            cache_salt: 1 to 1024 characters; cached blocks are shared only with requests of the same salt.

        Raises:
            RequestError: it can never be served here; nothing has changed then.
        """
        with self._in_turn():
            return self._add(request_id, prompt_token_ids, params, prompt, priority, cache_salt)

    @contextmanager
    def _in_turn(self) -> Iterator[None]:
        if self._is_closed:
            raise RequestError("the engine is closed; load the model again", status=503)
        if not self._turn.acquire(blocking=False):
            raise RequestError("another thread is using this engine; one may use it at a time", status=503)
        try:
            yield
        finally:
            self._turn.release()

    def _add(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        prompt: str | None,
        priority: int,
        cache_salt: str | None,
    ) -> Group:
        self._check(request_id, prompt_token_ids, params)
        check_cache_salt(cache_salt)
        self._check_priority(priority)
        now = time.monotonic()
        if not self._groups:
            self.last_progress_time = now
        group = Group(request_id, prompt, list(prompt_token_ids), params, [], now)
        extra_keys = () if cache_salt is None else (ExtraKey("salt", cache_salt),)
        try:
            for index in range(params.n):
                self._add_answer(group, index, priority, extra_keys)
        except RequestError:
            self._drop(group)
            raise
        self._groups[request_id] = group
        return group

    def _check(self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams) -> None:
        if request_id in self._groups:
            raise RequestError(f"request id {request_id!r} is already in use", param="request_id")
        vocab_size = self.model_config.vocab_size
        for token_id in prompt_token_ids:
            if not 0 <= token_id < vocab_size:
                raise RequestError(
                    f"prompt token id {token_id} is outside the vocabulary of {vocab_size} tokens", param="prompt"
                )
        params.validate_for_model(vocab_size, self.max_logprobs)
        num_prompt = len(prompt_token_ids)
        is_too_long = num_prompt < self.max_model_len < num_prompt + (params.max_tokens or 0)
        if is_too_long:
            raise RequestError(
                f"max_tokens is {params.max_tokens} and the prompt has {num_prompt} tokens, together more than the "
                f"context of {self.max_model_len}; at most {self.max_model_len - num_prompt} can be generated",
                param="max_tokens",
            )
        if self.tokenizer is None and (params.stop or params.bad_words):
            raise RequestError("stop and bad_words need a tokenizer, which this model has not", param="stop")

    def _check_priority(self, priority: object) -> None:
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise RequestError(f"priority is {priority!r}, must be an integer (lower ones go first)", param="priority")
        if priority != 0 and self.scheduler.policy != "priority":
            raise RequestError(
                f"priority is {priority}, but scheduling_policy is {self.scheduler.policy!r}; it must be 'priority'",
                param="priority",
            )

    def _add_answer(self, group: Group, index: int, priority: int, extra_keys: ExtraKeys) -> None:
        params, prompt = group.params, group.prompt_token_ids
        has_form = params.structured_outputs is not None
        eos = frozenset() if params.ignore_eos and not has_form else self.eos_token_ids
        answer = Answer(index, params, self._sampling_state(group, index), self._detokenizer(group))
        room = max(1, self.max_model_len - len(prompt))
        request = Request(
            group.request_id if params.n == 1 else f"{group.request_id}#{index}",
            prompt,
            max_tokens=room if params.max_tokens is None else params.max_tokens,
            min_tokens=0 if has_form else params.min_tokens,  # the sampler knows when a form is finished before
            eos_token_ids=eos,
            stop_token_ids=frozenset(params.stop_token_ids),
            arrival_time=group.arrival_time,
            needs_prompt_logits=params.prompt_logprobs is not None and index == 0,
            priority=priority,
            extra_keys=extra_keys,
            reads_cache=not params.skip_reading_prefix_cache,
            payload=answer,
        )
        if group.answers:
            request.block_keys = list(group.first_request.block_keys)  # of the same prompt
        self.scheduler.add(request)
        answer.request = request
        group.answers.append(answer)
        self._group_of[request.request_id] = group

    def _sampling_state(self, group: Group, index: int) -> SamplingState:
        params = group.params
        form = params.structured_outputs
        state = SamplingState(
            params,
            group.prompt_token_ids,
            eos_token_ids=self.eos_token_ids,
            bad_words_token_ids=self._bad_words(params),
            answer_index=index,
            matcher=None if form is None else self.grammars.compile(form).matcher(),
        )
        if params.seed is None and self.seed is not None:
            state.seed = (self.seed + SEED_STRIDE * self._num_unseeded) % 2**64
            self._num_unseeded += 1
        return state

    def _bad_words(self, params: SamplingParams) -> list[tuple[int, ...]]:
        """Each word as it stands at the start of a text and after a space."""
        if self.tokenizer is None or not params.bad_words:
            return []
        forms = [form for word in params.bad_words for form in (word, f" {word}")]
        encoded = [tuple(self.tokenizer.encode(form, add_special_tokens=False)) for form in forms]
        return [ids for ids in dict.fromkeys(encoded) if ids]

    def _detokenizer(self, group: Group) -> IncrementalDetokenizer | None:
        params = group.params
        if self.tokenizer is None or not params.detokenize:
            return None
        return IncrementalDetokenizer(
            self.tokenizer,
            group.prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
            stop=params.stop,
            include_stop_str_in_output=params.include_stop_str_in_output,
            min_tokens=params.min_tokens,
        )

    # -- a step

    def step(self) -> list[Group]:
        """Run one step; return the requests that got something new: text, tokens or their end."""
        with self._in_turn():
            return self._step()

    def _step(self) -> list[Group]:
        self._launch_steps()
        changed = self._take_results() if self._in_flight else []
        while self._in_flight and not self._groups:  # a step ahead of which nobody is left
            self._take_results()
        return changed

    def _launch_steps(self) -> None:
        """Plan and launch until a step is in flight, or two where the next does not hang on the first one's results."""
        while not self._in_flight or (len(self._in_flight) == 1 and self._may_run_ahead()):
            plan = self.scheduler.plan(time.monotonic())
            if plan is None:
                return
            for request in plan.preempted:
                self.runner.chooser.release(request)
            try:
                self._in_flight.append(self.runner.launch(plan, is_ahead=bool(self._in_flight)))
            except BaseException:
                self._withdraw(plan)
                raise

    def _may_run_ahead(self) -> bool:
        return self.runs_ahead and not self._in_flight[0].results.needs_host and not self._settles_first

    def _withdraw(self, plan: StepPlan) -> None:
        """A plan was not launched: its requests stand where they stood, and the device is told of them anew."""
        self._settles_first = True
        self.scheduler.withdraw(plan)
        self._end_failed(plan, {})
        for request in requests_of(plan):
            self.runner.chooser.release(request)
        self.runner.chooser.settle()

    def _take_results(self) -> list[Group]:
        """Take what the oldest step in flight brought."""
        step = self._in_flight[0]
        plan, tokens = step.plan, step.results.wait()
        self._launch_choice_ahead()
        self._in_flight.popleft()
        self._settles_first &= bool(self._in_flight)
        changed: dict[str, Group] = {}
        self._end_failed(plan, changed)
        self._take_errors(tokens, changed)
        updates = self.scheduler.apply(plan, tokens.token_ids, time.monotonic())
        self.num_steps += 1
        self.last_progress_time = time.monotonic()
        self._emit(updates, tokens, changed)
        return list(changed.values())

    def _launch_choice_ahead(self) -> None:
        """With the oldest results at hand the next step's choice can be launched, where it had to wait for them."""
        if len(self._in_flight) == 2:
            ahead = self._in_flight[1]
            try:
                ahead.results.launch_choice()
            except BaseException:
                self._in_flight.pop()
                self._withdraw(ahead.plan)
                raise

    def _end_failed(self, plan: StepPlan, changed: dict[str, Group]) -> None:
        """Requests that could not be admitted."""
        for request, message in plan.failed:
            request.payload.fail(message)
            self._finish_answer(request, changed)

    def _take_errors(self, tokens: StepTokens, changed: dict[str, Group]) -> None:
        """Note the log-probabilities of prompts, and end the requests whose logits are damaged."""
        for request, entries in tokens.prompt_logprobs:
            if not request.is_finished:
                self._group_of[request.request_id].prompt_logprobs += entries
        for request, message in tokens.errors.items():
            if not request.is_finished:
                request.payload.fail(message)
                self.scheduler.finish(request.request_id, "error", now=time.monotonic())
                self._finish_answer(request, changed)

    def _emit(self, updates: list[StepUpdate], tokens: StepTokens, changed: dict[str, Group]) -> None:
        for request, new_token_ids in updates:
            answer: Answer = request.payload
            entry = tokens.logprobs.get(request)
            answer.take(new_token_ids, () if entry is None else (entry,), request.finish_reason == "stop")
            if answer.finish_reason is not None and not request.is_finished:
                self.scheduler.finish(request.request_id, "stop", answer.stop_reason, now=time.monotonic())
            if request.is_finished:
                self._finish_answer(request, changed)
            elif new_token_ids:
                group = self._group_of[request.request_id]
                changed[group.request_id] = group

    def _finish_answer(self, request: Request, changed: dict[str, Group]) -> None:
        group = self._group_of.pop(request.request_id)
        self.runner.chooser.release(request)
        answer: Answer = request.payload
        answer.finish(request.finish_reason or "abort", request.stop_reason)
        changed[group.request_id] = group
        if group.is_finished:
            self._groups.pop(group.request_id, None)

    # -- a request's way out before its end

    def abort(self, request_id: str) -> Group | None:
        """End a request in any state and free its blocks; None if no unfinished request has this id."""
        group = self._groups.get(request_id)
        if group is not None:
            self._drop(group)
        return group

    def _drop(self, group: Group) -> None:
        for answer in group.answers:
            request = answer.request
            if request is not None and self.scheduler.abort(request.request_id, now=time.monotonic()):
                self._finish_answer(request, {})

    def close(self) -> None:
        """Abort what runs and give the device back.

        Raises:
            RequestError: another thread is in the middle of a step; nothing has changed then.
        """
        if self._is_closed:
            return
        with self._in_turn():
            for request_id in list(self._groups):
                self.abort(request_id)
            self._is_closed = True
            self.grammars.close()
            self.runner.close()


def check_cache_salt(cache_salt: object) -> None:
    if cache_salt is None or (isinstance(cache_salt, str) and 0 < len(cache_salt) <= MAX_CACHE_SALT):
        return
    found = f"{len(cache_salt)} characters long" if isinstance(cache_salt, str) else repr(cache_salt)
    raise RequestError(
        f"cache_salt is {found}, must be a string of 1 to {MAX_CACHE_SALT} characters", param="cache_salt"
    )
