"""Runner: a program, the arrays it reads and what chooses tokens; StepPlan in, a launched step out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lean_engine.engine.batch import Batch, StepSize
from lean_engine.engine.token_choice import StepTokens, TokenChooser, TokensAtHand, TokensToCome
from lean_engine.runtime.program import Program
from lean_engine.scheduling.plan import StepPlan


@dataclass(frozen=True, slots=True, eq=False)
class LaunchedStep:
    plan: StepPlan
    results: TokensToCome


class Runner:
    """Launches steps.

    Args:
        program: its step inputs are written in turns, where there are several of them, so that one can be written while
            the step before is in flight.
    """

    def __init__(self, program: Program, block_size: int, chooser: TokenChooser) -> None:
        self.program = program
        self.chooser = chooser
        self._batches = [Batch(inputs.host, block_size) for inputs in program.input_sets]
        self._num_launched = 0

    def launch(self, plan: StepPlan, is_ahead: bool) -> LaunchedStep:
        """Run a step, or begin to.

        A plan that could not be launched leaves nothing behind but graphs, requests to be released and a chooser that
        is to settle.

        Args:
            is_ahead: one other step is in flight.
        """
        if plan.num_requests == 0:
            return LaunchedStep(plan, TokensAtHand(StepTokens([])))
        program, turn = self.program, self._num_launched % len(self._batches)
        self._num_launched += 1
        batch = self._batches[turn]
        size = batch.fill(plan)
        padded = StepSize(*program.device.padded(size.num_tokens, size.num_requests, size.num_rows, program.max_dims))
        batch.pad(size, padded)
        program.upload(turn, size.num_requests, size.num_blocks)
        self.chooser.prepare(plan)
        outputs = program.launch(padded.num_tokens, padded.num_requests, padded.num_rows)
        return LaunchedStep(plan, self.chooser.choose(plan, outputs["logits"], is_ahead))

    def capture(self, sizes: Sequence[int]) -> None:
        """Prepare steps of so many decodes each, on requests that are all padding."""
        batch = self._batches[0]
        for size in sizes:
            padded = StepSize(*self.program.device.padded(size, size, size, self.program.max_dims))
            batch.pad(StepSize(0, 0, 0), padded)
            self.program.upload(0)
            outputs = self.program.launch(padded.num_tokens, padded.num_requests, padded.num_rows)
            self.chooser.capture(outputs["logits"])
            self.program.device.read(outputs["logits"][:1])  # waits: the inputs are written again

    def close(self) -> None:
        """Give the device back, and with it weights, caches and graphs: nothing can be launched after that."""
        device = self.program.device
        del self.program, self.chooser, self._batches
        device.close()
