"""`lean-engine chat`: a conversation in the terminal, or one message per line from a pipe."""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click

from lean_engine.cli.options import RUNNING, Command, Option, engine_options, model_argument, sampling_options
from lean_engine.cli.terminal import interruptible, open_llm, write
from lean_engine.errors import RequestError
from lean_engine.sampling.params import SamplingParams

if TYPE_CHECKING:
    from lean_engine.engine.outputs import Group
    from lean_engine.llm import LLM

INTERRUPTED = 130
HELP = """/reset  forget the conversation, but for the system message
/help   show this
/exit   leave (also Ctrl-D)
Ctrl-C  stop an answer; what was said stays in the conversation"""
EXAMPLES = (
    "lean-engine chat",
    'lean-engine chat --system "You are a pirate." --temperature 0.8',
    "lean-engine chat ./model < questions.txt",
)


@click.command("chat", cls=Command, examples=EXAMPLES)
@model_argument
@click.option("--system", cls=Option, section="Conversation", help="The system message. Default: the chat template's.")
@sampling_options(
    {
        "max_tokens": "what is left of the context",
        "temperature": "the model's",
        "top_p": "the model's",
        "top_k": "the model's",
        "min_p": "the model's",
        "seed": "a fresh one per answer",
        "stop": "none",
        "presence_penalty": "0",
        "frequency_penalty": "0",
        "repetition_penalty": "the model's",
    }
)
@engine_options(*RUNNING, "chat_template")
def command(model: str | None, system: str | None, sampling: dict[str, Any], engine: dict[str, Any]) -> int:
    """Talk with a model.

    Answers appear as they are computed, and the conversation is remembered. /reset starts over, /exit or Ctrl-D
    leaves, Ctrl-C stops an answer and not the program. Where standard input is not a terminal, each line of it is a
    message.

    "The model's" sampling values are those its generation_config.json recommends; where it recommends none, answers
    are greedy (temperature 0).
    """
    if sys.stdin is None:
        raise click.UsageError("chat reads messages from standard input, which is closed")
    SamplingParams(**sampling)  # refuses a bad value before the model is loaded
    with open_llm(model, engine) as llm:
        chat = Conversation(llm, system, chat_params(llm, sampling))
        return talk(chat) if sys.stdin.isatty() else read_lines(chat)


def chat_params(llm: LLM, given: dict[str, Any]) -> SamplingParams:
    """What was given over what the model recommends; greedy where it recommends nothing."""
    recommended = replace(llm.default_sampling_params(), max_tokens=None)
    if recommended == SamplingParams(max_tokens=None):
        recommended = replace(recommended, temperature=0.0)
    return replace(recommended, **given)


class Conversation:
    """The messages so far and the model that answers them."""

    def __init__(self, llm: LLM, system: str | None, params: SamplingParams) -> None:
        self.llm = llm
        self.params = params
        self._start = [] if system is None else [{"role": "system", "content": system}]
        self.messages = list(self._start)

    def reset(self) -> None:
        self.messages = list(self._start)

    def answer(self, text: str) -> Group:
        """Send a message and print the answer as it grows; both are remembered, as far as Ctrl-C let it come.

        Raises:
            RequestError: the conversation cannot be sent, being longer than the context for one; it is as it was then.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        with interruptible() as is_stopped:
            group = self._send(messages)
            num_shown = 0
            try:
                while not group.is_finished and not is_stopped():
                    self.llm.engine.step()
                    num_shown = show_rest(group, num_shown)
            finally:
                self.llm.engine.abort(group.request_id)
        show_rest(group, num_shown)  # what was held back as the possible beginning of a stop string
        click.echo()
        if group.answers[0].error is None:
            self.messages = [*messages, {"role": "assistant", "content": group.answers[0].text}]
        return group

    def _send(self, messages: list[dict[str, str]]) -> Group:
        prompt, ids = self.llm.encode_chat(messages)
        return self.llm.engine.add("chat", ids, self.params, prompt)


def show_rest(group: Group, num_shown: int) -> int:
    """Print an answer from this character on; return its length now."""
    text = group.answers[0].text
    if len(text) > num_shown:
        write(text[num_shown:])
    return len(text)


def talk(chat: Conversation) -> int:
    """The dialogue in a terminal."""
    enable_line_editing()
    click.echo(f"{chat.llm.model}, context of {chat.llm.max_model_len:,} tokens. /help shows the commands.")
    was_interrupted = False
    while True:
        try:
            line = input("\n> ").strip()
        except EOFError:
            click.echo()
            return 0
        except KeyboardInterrupt:
            if was_interrupted:
                raise
            was_interrupted = True
            click.echo("\nCtrl-C once more, Ctrl-D or /exit leaves.", nl=False)
            continue
        was_interrupted = False
        if line == "/exit":
            return 0
        if line and not obey(chat, line):
            try:
                report_end(chat.answer(line))
            except RequestError as error:
                click.echo(f"Error: {error}. /reset starts over.", err=True)


def enable_line_editing() -> None:
    """Give input() history and editing where the platform has readline."""
    with suppress(ImportError):
        import readline  # noqa: F401 - its import is its effect


def obey(chat: Conversation, line: str) -> bool:
    """Carry out a command; False where the line is a message."""
    if line == "/reset":
        chat.reset()
        click.echo("The conversation starts over.", err=True)
    elif line == "/help":
        click.echo(HELP, err=True)
    elif re.fullmatch(r"/\w+", line):
        click.echo(f"Error: unknown command {line}; /help lists them", err=True)
    else:
        return False
    return True


def report_end(group: Group) -> None:
    """Say why an answer ended, where its reader would wonder."""
    answer = group.answers[0]
    num_tokens = len(answer.token_ids)
    if answer.error is not None:
        click.echo(f"Error: {answer.error}", err=True)
    elif answer.finish_reason == "abort":
        click.secho(f"[stopped after {num_tokens} tokens]", dim=True, err=True)
    elif answer.finish_reason == "length":
        limit = "--max-tokens" if answer.params.max_tokens == num_tokens else "the context is full: /reset starts over"
        click.secho(f"[ended after {num_tokens} tokens: {limit}]", dim=True, err=True)


def read_lines(chat: Conversation) -> int:
    """The dialogue from a pipe or file: the first wrong message ends it."""
    for line in sys.stdin:
        message = line.strip()
        if message == "/exit":
            break
        if message and not obey(chat, message):
            group = chat.answer(message)
            if group.answers[0].error is not None:
                raise click.ClickException(group.answers[0].error)
    return 0
