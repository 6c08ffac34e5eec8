"""A runner for engines without a model: KV slots hold tokens, and the next token is a checksum of what is read back.

It behaves like a GPU that is one step ahead of the host: it knows what it has sampled before anybody has read it, feeds
it to the next step, and takes no part in a step with an answer that has ended. A block granted twice, freed too early
or cached under another's key, a token lost, repeated or fed to the wrong request changes an output.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from lean_engine.config import EngineConfig, ModelConfig
from lean_engine.engine.core import Engine
from lean_engine.engine.runner import LaunchedStep
from lean_engine.engine.token_choice import StepTokens, prompt_targets, requests_of
from lean_engine.scheduling.plan import ScheduledChunk, StepPlan
from lean_engine.scheduling.request import Request
from lean_engine.scheduling.setup import make_scheduler
from lean_engine.text.tokenizer import Tokenizer

DAMAGED = "the logits are damaged"


@dataclass
class FakeTokens:
    """See engine.token_choice.TokensToCome."""

    tokens: StepTokens
    needs_host: bool
    before: FakeTokens | None  # the step in flight when this one was launched
    choose: Callable[[], None] | None  # None: done
    is_taken: bool = False

    def launch_choice(self) -> None:
        if self.choose is not None:
            assert self.before is None or self.before.is_taken
            self.choose()
            self.choose = None

    def wait(self) -> StepTokens:
        self.launch_choice()
        self.is_taken = True
        return self.tokens


class FakeRunner:
    """See engine.runner.Runner; it is its own chooser.

    Args:
        damaged_at: request id → tokens of its output after which its logits are damaged.
        host_ids: requests whose tokens the host chooses.
        late_ids: requests whose tokens can be chosen when the step before has been read.

    Attributes:
        fails_next: the next launch raises this, or the next choice that comes late, if `fails_late`.
        num_late: choices that came late.
        num_settled: failures that were settled.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        damaged_at: dict[str, int] | None = None,
        host_ids: frozenset[str] = frozenset(),
        late_ids: frozenset[str] = frozenset(),
    ) -> None:
        self.chooser = self
        self.block_size, self.vocab_size = block_size, vocab_size
        self.slots = [-1] * (num_blocks * block_size)
        self.damaged_at = damaged_at or {}
        self.host_ids, self.late_ids = host_ids, late_ids
        self.fails_next: BaseException | None = None
        self.fails_late = False
        self.num_launched = self.num_idle_rows = self.num_late = self.num_settled = 0
        self._latest: FakeTokens | None = None
        self._known: dict[Request, list[int]] = {}
        self._ended: set[Request] = set()

    def launch(self, plan: StepPlan, is_ahead: bool) -> LaunchedStep:
        if not self.fails_late:
            self._fail()
        before = self._latest if is_ahead else None
        assert before is None or before.choose is None, "logits are overwritten that nothing was chosen from"
        self.num_launched += 1
        requests = requests_of(plan)
        tokens = StepTokens([()] * len(requests))
        choices = [self._compute(place, chunk, tokens) for place, chunk in enumerate(plan.scheduled)]
        ids = {request.request_id for request in requests}
        found = FakeTokens(tokens, bool(ids & self.host_ids), before, partial(self._choose, choices, is_ahead))
        if not (is_ahead and ids & self.late_ids):
            self._choose(choices, is_late=False)
            found.choose = None
        self._latest = found
        return LaunchedStep(plan, found)

    def _fail(self) -> None:
        if self.fails_next is not None:
            error, self.fails_next = self.fails_next, None
            raise error

    def _choose(self, choices: list[Callable[[], None] | None], is_late: bool) -> None:
        self.num_late += is_late
        if is_late and self.fails_late:
            self._fail()
        for choose in choices:
            if choose is not None:
                choose()

    def settle(self) -> None:
        self.num_settled += 1

    def release(self, request: Request) -> None:
        self._known.pop(request, None)
        self._ended.discard(request)

    def capture(self, sizes: Any) -> None:
        pass

    def close(self) -> None:
        pass

    def _compute(self, place: int, chunk: ScheduledChunk, tokens: StepTokens) -> Callable[[], None] | None:
        """The forward pass; what samples afterwards."""
        request, end = chunk.request, chunk.start + chunk.num_tokens
        known = self._known.setdefault(request, list(request.token_ids))
        if request in self._ended:
            self.num_idle_rows += 1
            return None
        assert known[: request.num_tokens] == request.token_ids
        table, size = request.block_table, self.block_size
        slots = [table[position // size] * size + position % size for position in range(end)]
        for position in range(chunk.start, end):
            self.slots[slots[position]] = known[position]
        targets = prompt_targets(chunk)
        if targets:
            tokens.prompt_logprobs.append((request, list(targets)))  # type: ignore[arg-type]
        if not chunk.samples:
            return None
        return partial(self._sample, place, request, known, [self.slots[slot] for slot in slots], tokens)

    def _sample(self, place: int, request: Request, known: list[int], context: list[int], tokens: StepTokens) -> None:
        num_output = len(known) - request.num_prompt_tokens
        if self.damaged_at.get(request.request_id) == num_output:
            tokens.errors[request] = DAMAGED
            self._ended.add(request)
            return
        token = zlib.crc32(repr(context).encode()) % self.vocab_size
        can_stop = num_output + 1 >= request.min_tokens
        while not can_stop and token in request.ending_token_ids:
            token = (token + 1) % self.vocab_size
        known.append(token)
        tokens.token_ids[place] = (token,)
        if (can_stop and token in request.ending_token_ids) or len(known) >= request.max_total_tokens:
            self._ended.add(request)


def fake_engine(
    model_config: ModelConfig,
    tokenizer: Tokenizer | None,
    config: EngineConfig,
    runs_ahead: bool,
    eos_token_ids: frozenset[int],
    **options: Any,
) -> tuple[Engine, FakeRunner]:
    """An engine of num_gpu_blocks_override blocks over a FakeRunner."""
    assert config.num_gpu_blocks_override is not None
    assert config.max_model_len is not None
    num_blocks = config.num_gpu_blocks_override + 1
    runner = FakeRunner(num_blocks, config.block_size, model_config.vocab_size, **options)
    scheduler = make_scheduler(config, num_blocks, config.max_model_len)
    engine = Engine(
        model_config,
        tokenizer,
        scheduler,
        runner,  # type: ignore[arg-type]
        eos_token_ids=eos_token_ids,
        max_logprobs=20,
        runs_ahead=runs_ahead,
    )
    return engine, runner
