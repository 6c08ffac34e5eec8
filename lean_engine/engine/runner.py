"""Runner: a program and the arrays it reads; StepPlan in, logits out."""

from __future__ import annotations

from lean_engine.engine.batch import Batch
from lean_engine.runtime.device import Array
from lean_engine.runtime.program import Program
from lean_engine.scheduling.plan import StepPlan


class Runner:
    def __init__(self, program: Program, block_size: int) -> None:
        self.program = program
        self.batch = Batch(program.inputs, block_size)

    def run(self, plan: StepPlan) -> Array:
        """Compute a step.

        Returns:
            Logits [R, V] float32 of the plan's logit rows, in the plan's order; valid until the next step.
        """
        size = self.batch.fill(plan)
        return self.program.run(size.num_tokens, size.num_requests, size.num_rows)["logits"]

    def close(self) -> None:
        self.program.device.close()
