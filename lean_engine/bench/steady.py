"""A steady state for timing: so many requests decode, so many wait behind them, over a pool of so many blocks.

The state is that of an engine that has been busy for long: whatever the running requests do not hold is cached, so
every block they grow by evicts another. Prompts differ in length, so their blocks fill up in different steps. When the
room that the pool gives them is used up they are aborted and as many take their place; only steps in which all of them
decode are recorded, whatever the size of the pool.
"""

from __future__ import annotations

from dataclasses import replace

from lean_engine.bench.memory import MemoryReport, OnProgress, OnStep, Tally, describe
from lean_engine.bench.null_engine import NullEngine, complete
from lean_engine.bench.optimum import PrefixOptimum
from lean_engine.bench.workloads import Source
from lean_engine.config import EngineConfig
from lean_engine.errors import ConfigError
from lean_engine.memory.budget import num_blocks_for
from lean_engine.scheduling.request import Request

PROMPT_TOKENS = 256  # of each request, where the pool has room for it, and up to a block more
MAX_VAIN_STARTS = 10  # in a row, after which not one step could be recorded
FILL_TOKENS = 4096  # of the prompts that fill the pool


def reserve(block_size: int) -> int:
    """Tokens of a request beyond its shortest prompt: up to a block more of prompt, and some steps."""
    return max(2 * block_size, block_size + 3)


class SteadyState:
    """The state and the requests it is made of.

    Args:
        config: num_gpu_blocks_override is the pool. Its limits on a step are set, so that all run and only they do.
        running, waiting: requests.

    Raises:
        ConfigError: a number is out of range, or the pool too small.
    """

    def __init__(self, config: EngineConfig, running: int, waiting: int, steps: int, seed: int) -> None:
        for name, number, minimum in (("running", running, 1), ("waiting", waiting, 0), ("steps", steps, 1)):
            if number < minimum:
                raise ConfigError(f"{name} is {number}, must be at least {minimum}")
        num_blocks, size = config.num_gpu_blocks_override or 0, config.block_size
        num_least = num_blocks_for(1 + reserve(size), size) * running
        if num_blocks < num_least:
            raise ConfigError(
                f"a pool of {num_blocks} blocks is too small for {running} running requests, which need {num_least}"
            )
        room = num_blocks // running * size  # tokens of one request
        self.running, self.waiting, self.steps, self.seed = running, waiting, steps, seed
        self.min_prompt = min(PROMPT_TOKENS, room - reserve(size))
        self.max_total = min(room, self.min_prompt + size + 2 + steps)  # 2: sampled before steps count
        self.fill_tokens = min(FILL_TOKENS, num_blocks * size)
        longest = max(self.max_total, self.fill_tokens + 1)
        budget = 2 * max(self.fill_tokens, running * (self.min_prompt + size))  # computes all prompts at once
        config = replace(config, max_model_len=longest, max_num_seqs=running, max_num_batched_tokens=budget)
        self.config = complete(config, longest)
        self.engine = NullEngine(self.config)
        self._source = Source(f"steady {seed}")
        self._text = self._source.tokens(longest)

    def run(self, on_step: OnStep | None = None, on_progress: OnProgress | None = None) -> MemoryReport:
        """Record `steps` steps."""
        self._fill_pool()
        self.engine.add_us.clear()
        self._top_up()
        decoding = self._start()
        tally, num_vain = Tally(), 0
        while True:
            room = min(r.max_total_tokens - len(r.token_ids) for r in decoding) - 1
            num_vain = num_vain + 1 if room < 1 else 0
            if num_vain == MAX_VAIN_STARTS:
                raise self._too_small()
            for _ in range(min(room, self.steps - tally.num_steps)):
                record = self.engine.step()
                tally.add(record)
                if on_step is not None:
                    on_step(record)
            if on_progress is not None:
                on_progress(tally.num_steps, self.steps)
            if tally.num_steps == self.steps:
                break
            for request in decoding:
                self.engine.abort(request)
            self._top_up()
            decoding = self._start()
        self.engine.scheduler.check()
        state = {"running": self.running, "waiting": self.waiting, "steps": self.steps, "seed": self.seed}
        configuration = describe({"workload": "steady state", **state}, self.config)
        nothing_shared = PrefixOptimum(self.config.block_size)
        return tally.report(self.engine, configuration, self.running + self.waiting, nothing_shared)

    def _fill_pool(self) -> None:
        """Leave a cached block in every place."""
        num_missing = self.engine.scheduler.pool.num_usable if self.config.enable_prefix_caching else 0
        while num_missing > 0:
            num_tokens = min(self.fill_tokens, num_missing * self.config.block_size)
            self.engine.add(self._source.unique_tokens(num_tokens), ())
            while self.engine.scheduler.has_work():
                self.engine.step()
            num_missing -= num_blocks_for(num_tokens, self.config.block_size)

    def _top_up(self) -> None:
        """Add requests until as many wait as wait in the end and as can run."""
        scheduler = self.engine.scheduler
        for _ in range(self.running + self.waiting - scheduler.num_running - scheduler.num_waiting):
            num_prompt = self.min_prompt + self._source.random.randrange(self.config.block_size)
            prompt = self._source.unique_tokens(1) + self._text[1:num_prompt]
            self.engine.add(prompt, self._text[: self.max_total - num_prompt])

    def _start(self) -> list[Request]:
        """Step until as many requests decode as shall run; these.

        Raises:
            ConfigError: requests end before all the others have begun.
        """
        num_ended = 0
        while num_ended <= 2 * self.running:
            record = self.engine.step()
            num_ended += len(record.finished)
            if len(record.plan.decodes) == self.running:
                return record.plan.decodes
            if record.finished:
                self._top_up()
        raise self._too_small()

    def _too_small(self) -> ConfigError:
        return ConfigError(
            f"a pool of {self.config.num_gpu_blocks_override} blocks is too small for {self.running} running requests: "
            "some end before the others have begun"
        )


def steady_state(
    config: EngineConfig,
    *,
    running: int,
    waiting: int,
    steps: int,
    seed: int,
    on_step: OnStep | None = None,
    on_progress: OnProgress | None = None,
) -> MemoryReport:
    """Time `steps` steps of `running` decoding requests before `waiting` others; see SteadyState."""
    return SteadyState(config, running, waiting, steps, seed).run(on_step, on_progress)
