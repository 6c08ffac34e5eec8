"""Runner: a program and the arrays it reads; StepPlan in, logits out."""

from __future__ import annotations

from lean_engine.engine.batch import Batch, StepSize
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
            Logits [R, V] float32 of the plan's logit rows, in the plan's order, in host memory; valid until the next
            step.
        """
        program = self.program
        size = self.batch.fill(plan)
        padded = StepSize(*program.device.padded(size.num_tokens, size.num_requests, size.num_rows, program.max_dims))
        self.batch.pad(size, padded)
        logits = program.run(padded.num_tokens, padded.num_requests, padded.num_rows)["logits"]
        return program.device.read(logits[: size.num_rows])

    def close(self) -> None:
        self.program.device.close()
