"""`lean-engine generate`: prompts in, answers out."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from lean_engine.cli.forms import form_options
from lean_engine.cli.options import RUNNING, Command, Option, engine_options, sampling_options
from lean_engine.cli.terminal import open_llm, progress_bar, write
from lean_engine.sampling.params import SamplingParams

if TYPE_CHECKING:
    from lean_engine.engine.outputs import RequestOutput
    from lean_engine.llm import LLM, Prompt
    from lean_engine.sampling.structured_outputs import StructuredOutputsParams

DEFAULT_MAX_TOKENS = 256
EXAMPLES = (
    'lean-engine generate --prompt "What is the capital of France?"',
    'lean-engine generate --raw --prompt "The sea is" --max-tokens 20',
    "lean-engine generate ./model --prompt-file question.txt --temperature 0.7 --seed 1 --json",
    "lean-engine generate --prompt 'Name a colour.' --choice red --choice green",
    "git diff | lean-engine generate --system 'Write a commit message.' -",
)


@click.command("generate", cls=Command, examples=EXAMPLES)
@click.argument("words", nargs=-1, metavar="[MODEL] [-]")
@click.option("--prompt", "texts", multiple=True, cls=Option, section="Prompts", help="A prompt; may be repeated.")
@click.option(
    "--prompt-file",
    "files",
    multiple=True,
    type=click.Path(path_type=Path),
    cls=Option,
    section="Prompts",
    help="A UTF-8 file that is one prompt, whole and unchanged; may be repeated.",
)
@click.option(
    "--chat/--raw",
    "is_chat",
    default=None,
    cls=Option,
    section="Prompts",
    help="Whether a prompt is a user's message, put into the model's chat template, or sent as it is.  [default: chat "
    "where the model has a template and the prompt holds none of its special tokens]",
)
@click.option("--system", cls=Option, section="Prompts", help="A system message before each prompt; not with --raw.")
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    cls=Option,
    section="Output",
    help="Print each prompt's RequestOutput as a JSON object on one line.",
)
@sampling_options(
    {
        "max_tokens": f"{DEFAULT_MAX_TOKENS}, or what is left of the context",
        "temperature": "0",
        "top_p": "1",
        "top_k": "0",
        "min_p": "0",
        "seed": "a fresh one",
        "stop": "none",
        "n": "1",
        "logprobs": "none",
        "presence_penalty": "0",
        "frequency_penalty": "0",
        "repetition_penalty": "1",
        "ignore_eos": "off",
    }
)
@form_options
@engine_options(*RUNNING, "chat_template", "max_logprobs")
def command(
    words: Sequence[str],
    texts: Sequence[str],
    files: Sequence[Path],
    is_chat: bool | None,
    system: str | None,
    as_json: bool,
    sampling: dict[str, Any],
    form: StructuredOutputsParams | None,
    engine: dict[str, Any],
) -> int:
    """Answer or complete prompts and print the result.

    A prompt is a user's message for a model with a chat template, and a text to complete for one without; --raw sends
    it as it is in any case. Prompts come from --prompt, then --prompt-file, then standard input where a lone - is
    given. A single answer is printed as it comes; the answers to several prompts are computed together and printed in
    order, with an empty line between them. Sampling is greedy unless a --temperature is given: the same prompt gives
    the same answer. The model's generation_config.json is not used.
    """
    model, has_stdin = split_words(words)
    refuse_unused(is_chat, system, as_json, sampling, engine)
    params = SamplingParams(**{"max_tokens": None, "temperature": 0.0, **sampling}, structured_outputs=form)
    prompts = read_prompts(texts, files, has_stdin)
    with open_llm(model, engine) as llm:
        items = [as_chat(llm, text, system) if is_message(llm, text, is_chat) else text for text in prompts]
        all_params = [params if params.max_tokens is not None else limited(llm, item, params) for item in items]
        if len(items) == 1 and params.n == 1 and not as_json:
            return stream_answer(llm, items[0], all_params[0])
        return answer_all(llm, items, all_params, as_json)


def split_words(words: Sequence[str]) -> tuple[str | None, bool]:
    """The model and whether a prompt comes from standard input, in either order."""
    models = [word for word in words if word != "-"]
    if len(models) > 1:
        raise click.UsageError(
            f"one MODEL at most, found {len(models)}: {', '.join(models)}; a prompt goes to --prompt"
        )
    return (models[0] if models else None), "-" in words


def refuse_unused(
    is_chat: bool | None, system: str | None, as_json: bool, sampling: dict[str, Any], engine: dict[str, Any]
) -> None:
    """A flag that would have no effect is a mistake."""
    if is_chat is False and system is not None:
        raise click.UsageError("--system contradicts --raw: a raw prompt is sent as it is")
    if is_chat is False and engine["chat_template"] is not None:
        raise click.UsageError("--chat-template contradicts --raw: a raw prompt is sent as it is")
    if not as_json and "logprobs" in sampling:
        raise click.UsageError("--logprobs needs --json: plain text does not show them")


def read_prompts(texts: Sequence[str], files: Sequence[Path], has_stdin: bool) -> list[str]:
    prompts = [*texts, *(read_prompt(path) for path in files)]
    if has_stdin:
        if sys.stdin is None:
            raise click.UsageError("- reads the prompt from standard input, which is closed")
        prompts.append(decode(sys.stdin.buffer.read(), "standard input"))
    if not prompts:
        raise click.UsageError("no prompt: give --prompt TEXT, --prompt-file FILE, or - for standard input")
    return prompts


def read_prompt(path: Path) -> str:
    try:
        return decode(path.read_bytes(), str(path))
    except OSError as error:
        raise click.UsageError(f"--prompt-file {path}: cannot be read: {error.strerror or error}") from None


def decode(data: bytes, source: str) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise click.UsageError(
            f"the prompt from {source} is not UTF-8 text: byte 0x{data[error.start]:02x} at {error.start}"
        ) from None


def is_message(llm: LLM, text: str, is_chat: bool | None) -> bool:
    """Whether a prompt goes through the chat template; where nothing was said, unless it has been through one."""
    if is_chat is not None or not text:
        return is_chat or False
    has_template = llm.config.chat_template is not None or llm.tokenizer.chat_template is not None
    ids = llm.tokenizer.encode(text, add_special_tokens=False)
    return has_template and not llm.tokenizer.special_ids.intersection(ids)


def as_chat(llm: LLM, text: str, system: str | None) -> dict[str, Any]:
    """A user's message as a prompt with its ids."""
    user = {"role": "user", "content": text}
    prompt, ids = llm.encode_chat([user] if system is None else [{"role": "system", "content": system}, user])
    return {"prompt": prompt, "prompt_token_ids": ids}


def limited(llm: LLM, item: Prompt, params: SamplingParams) -> SamplingParams:
    """params with the default limit of tokens, or less where the prompt leaves less of the context."""
    ids = llm.tokenizer.encode(item) if isinstance(item, str) else item["prompt_token_ids"]
    room = max(1, llm.max_model_len - len(ids))  # where nothing is left, the engine says so with both numbers
    return replace(params, max_tokens=min(DEFAULT_MAX_TOKENS, room))


def stream_answer(llm: LLM, item: Prompt, params: SamplingParams) -> int:
    last = ""
    for output in llm.stream(item, params):
        answer = output.outputs[0]
        write(answer.text)
        last = answer.text or last
        if answer.error is not None:
            raise click.ClickException(answer.error)
    if not last.endswith("\n"):
        click.echo()
    return 0


def answer_all(llm: LLM, items: Sequence[Prompt], params: Sequence[SamplingParams], as_json: bool) -> int:
    with progress_bar("answering") as on_progress:
        outputs = llm.generate(items, params, on_progress=on_progress)
    for index, output in enumerate(outputs):
        if as_json:
            click.echo(to_json(output))
        else:
            click.echo(("\n" if index else "") + "\n\n".join(a.text.rstrip("\n") for a in output.outputs))
    errors = [f"prompt {i}: {a.error}" for i, o in enumerate(outputs, 1) for a in o.outputs if a.error is not None]
    for error in errors:
        click.echo(f"Error: {error}", err=True)
    return 1 if errors else 0


def to_json(output: RequestOutput) -> str:
    """A RequestOutput on one line. Token ids that are keys become strings, and a logprob of -infinity null."""
    return json.dumps(finite(dataclasses.asdict(output)), ensure_ascii=False, allow_nan=False)


def finite(value: Any) -> Any:
    """JSON has no infinities."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value
