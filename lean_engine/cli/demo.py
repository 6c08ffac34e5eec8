"""`lean-engine demo`: eight chat requests at once, and what serving them took."""

from __future__ import annotations

import re
import time
from typing import TYPE_CHECKING, Any

import click

from lean_engine.cli.options import RUNNING, Command, Option, engine_options, model_argument, tokens
from lean_engine.cli.terminal import interruptible, open_llm
from lean_engine.sampling.params import SamplingParams

if TYPE_CHECKING:
    from lean_engine.engine.outputs import Group
    from lean_engine.llm import LLM

SYSTEM = (
    "You are a helpful AI assistant. You answer questions correctly and in plain words. Your answers are short: one or "
    "two sentences, and nothing after them."
)
QUESTIONS = (
    "What is the capital of France?",
    "What do plants need to grow?",
    "Which planet is the largest in our solar system?",
    "What is photosynthesis?",
    "What is the largest animal on Earth?",
    "Why do we need sleep?",
    "What language is spoken in Brazil?",
    "Write a short poem about the sea.",
)
COLOURS = ("red", "green", "yellow", "blue", "magenta", "cyan", "bright_red", "bright_blue")
_COMPLETE = re.compile(r".*(?:\n|[^\d\s][.!?](?=\s))", re.DOTALL)  # up to the last end of a line or sentence
EXAMPLES = ("lean-engine demo", "lean-engine demo ./model --max-tokens 100 --threads 4")


@click.command("demo", cls=Command, examples=EXAMPLES)
@model_argument
@click.option(
    "--max-tokens",
    type=tokens,
    default=64,
    show_default=True,
    cls=Option,
    section="Requests",
    help="Tokens per answer at most.",
)
@engine_options(*RUNNING, "chat_template")
def command(model: str | None, max_tokens: int, engine: dict[str, Any]) -> int:
    """Serve eight chat requests at once and measure it.

    The requests share a system message and are answered greedily (temperature 0), all in one batch. Each line is shown
    as soon as it is complete. The table gives times in seconds and speeds in tokens per second.
    """
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    started = time.perf_counter()
    with open_llm(model, engine) as llm:
        load_s = time.perf_counter() - started
        click.echo(f"{llm.model}: ready after {load_s:.1f} s. {llm.describe_memory()}\n")
        with interruptible() as is_stopped:
            run = Run(llm, params)
            while llm.engine.has_work():
                if is_stopped():
                    raise KeyboardInterrupt
                run.step()
        click.echo(f"\n{format_table(run.figures(load_s))}")
        failures = [a.error for group in run.groups for a in group.answers if a.error is not None]
    if failures:
        raise click.ClickException(failures[0])
    return 0


class Run:
    """The requests under way and what is measured of them."""

    def __init__(self, llm: LLM, params: SamplingParams) -> None:
        self.llm = llm
        self.groups: list[Group] = []
        self.shown = [0] * len(QUESTIONS)  # characters printed of each answer
        self.num_steps = 0
        self.started = time.perf_counter()
        for index, question in enumerate(QUESTIONS):
            messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
            prompt, ids = llm.encode_chat(messages)
            self.groups.append(llm.engine.add(str(index), ids, params, prompt))
            show(index, f"Q: {question}", dim=True)

    def step(self) -> None:
        changed = self.llm.engine.step()
        self.num_steps += 1
        for group in changed:
            self._show_new(int(group.request_id), group)

    def _show_new(self, index: int, group: Group) -> None:
        answer = group.answers[0]
        fresh = answer.text[self.shown[index] :]
        complete = _COMPLETE.match(fresh)
        end = len(fresh) if group.is_finished else complete.end() if complete else 0
        self.shown[index] += end
        lines = [line.strip() for line in fresh[:end].splitlines() if line.strip()]
        if answer.finish_reason == "length" and lines:
            lines[-1] += " …"
        for line in lines:
            show(index, line)

    def figures(self, load_s: float) -> dict[str, str]:
        run_s = time.perf_counter() - self.started
        outputs = [group.output(None) for group in self.groups]
        num_prompt = sum(len(o.prompt_token_ids) for o in outputs)
        num_output = sum(len(o.outputs[0].token_ids) for o in outputs)
        num_cached = sum(o.num_cached_tokens for o in outputs)
        waits = [t for o in outputs if (t := o.metrics.time_to_first_token) is not None]
        pool = self.llm.engine.scheduler.pool
        share = 100 * pool.max_held / pool.num_usable
        return {
            "requests": f"{len(outputs)}, answered in {run_s:.2f} s after {load_s:.2f} s of loading",
            "prompt tokens": f"{num_prompt:,}, {num_cached:,} of them found in the prefix cache",
            "output tokens": f"{num_output:,}",
            "speed": f"{num_output / run_s:,.1f} output tokens/s, {(num_prompt + num_output) / run_s:,.1f} in all",
            "first token": f"{sum(waits) / max(1, len(waits)):.2f} s on average, {max(waits, default=0):.2f} s at most",
            "steps": f"{self.num_steps}",
            "KV blocks": f"{pool.max_held:,} at most of {pool.num_usable:,} ({share:.1f} %), "
            f"{self.llm.engine.scheduler.block_size} tokens each",
        }


def show(index: int, line: str, dim: bool = False) -> None:
    """A line of one request, after its number."""
    click.echo(click.style(f"[{index + 1}]", fg=COLOURS[index % len(COLOURS)]) + " " + click.style(line, dim=dim))


def format_table(rows: dict[str, str]) -> str:
    return "\n".join(f"{name:<14} {value}" for name, value in rows.items())
