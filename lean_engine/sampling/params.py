"""SamplingParams: what one request asks of the sampler, with vLLM's names and defaults.

Type and range of every value are checked when it is made, token ids against a vocabulary by `validate_for_model`.
Whatever is wrong, or not known, raises RequestError whose `param` names it. Imports no NumPy.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TypeGuard

from lean_engine.errors import RequestError
from lean_engine.sampling.structured_outputs import StructuredOutputsParams, to_structured_outputs

MAX_N = 16_384  # answers per request
MIN_TEMPERATURE = 0.01  # smaller ones, 0 apart, are raised to it: logits divided by them overflow
MAX_LOGIT_BIAS = 100.0


@dataclass(frozen=True, init=False)
class SamplingParams:
    """How one request's tokens are chosen, when it ends, and what it reports.

    Frozen; `dataclasses.replace` makes a changed copy and checks it again. All arguments are keywords.

    Raises:
        RequestError: a value has a wrong type or range, two values contradict each other, or a keyword is unknown.
    """

    n: int  # answers per prompt
    presence_penalty: float  # [-2, 2], once for each token generated before
    frequency_penalty: float  # [-2, 2], for each time a token was generated before
    repetition_penalty: float  # > 0, divides what the prompt or the output holds; 1 = off
    temperature: float  # 0 = greedy
    top_p: float  # (0, 1]
    top_k: int  # 0 = all; -1 is read as 0
    min_p: float  # [0, 1], relative to the likeliest token
    seed: int | None  # any signed or unsigned 64-bit integer; None, or -1 as in vLLM, = fresh entropy
    stop: tuple[str, ...]
    stop_token_ids: tuple[int, ...]
    include_stop_str_in_output: bool
    ignore_eos: bool
    max_tokens: int | None  # None = what is left of the context; 0 = score the prompt only
    min_tokens: int
    logprobs: int | None  # per generated token: 0 = the chosen one, k = and the k likeliest, -1 = the whole vocabulary
    prompt_logprobs: int | None  # the same per prompt token
    detokenize: bool
    skip_special_tokens: bool
    spaces_between_special_tokens: bool  # no tokenizer that is supported inserts any: both values give the same text
    logit_bias: Mapping[int, float]  # token id → [-100, 100]
    allowed_token_ids: tuple[int, ...] | None  # None = all
    bad_words: tuple[str, ...]
    skip_reading_prefix_cache: bool  # compute the whole prompt; always so with prompt_logprobs
    structured_outputs: StructuredOutputsParams | None  # the form of the answer; its fields may be given as a mapping

    def __init__(
        self,
        *,
        n: int = 1,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        repetition_penalty: float = 1.0,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        min_p: float = 0.0,
        seed: int | None = None,
        stop: str | Sequence[str] | None = None,
        stop_token_ids: Sequence[int] | None = None,
        include_stop_str_in_output: bool = False,
        ignore_eos: bool = False,
        max_tokens: int | None = 16,
        min_tokens: int = 0,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        detokenize: bool = True,
        skip_special_tokens: bool = True,
        spaces_between_special_tokens: bool = True,
        logit_bias: Mapping[int, float] | Mapping[str, float] | None = None,
        allowed_token_ids: Sequence[int] | None = None,
        bad_words: Sequence[str] | None = None,
        skip_reading_prefix_cache: bool | None = None,
        structured_outputs: StructuredOutputsParams | Mapping[str, object] | None = None,
        **unknown: object,
    ) -> None:
        _refuse_unknown(unknown)
        vars(self).update(  # not by assignment: the class is frozen from here on
            n=_integer("n", n, 1, MAX_N),
            presence_penalty=_number("presence_penalty", presence_penalty, -2, 2),
            frequency_penalty=_number("frequency_penalty", frequency_penalty, -2, 2),
            repetition_penalty=_number("repetition_penalty", repetition_penalty, 0, excludes_low=True),
            temperature=_temperature(temperature),
            top_p=_number("top_p", top_p, 0, 1, excludes_low=True),
            top_k=max(_integer("top_k", top_k, -1), 0),
            min_p=_number("min_p", min_p, 0, 1),
            seed=_seed(seed),
            stop=_stop(stop),
            stop_token_ids=_token_ids("stop_token_ids", stop_token_ids),
            include_stop_str_in_output=_flag("include_stop_str_in_output", include_stop_str_in_output),
            ignore_eos=_flag("ignore_eos", ignore_eos),
            max_tokens=None if max_tokens is None else _integer("max_tokens", max_tokens, 0),
            min_tokens=_integer("min_tokens", min_tokens, 0),
            logprobs=None if logprobs is None else _integer("logprobs", logprobs, -1),
            prompt_logprobs=None if prompt_logprobs is None else _integer("prompt_logprobs", prompt_logprobs, -1),
            detokenize=_flag("detokenize", detokenize),
            skip_special_tokens=_flag("skip_special_tokens", skip_special_tokens),
            spaces_between_special_tokens=_flag("spaces_between_special_tokens", spaces_between_special_tokens),
            logit_bias=_logit_bias(logit_bias),
            allowed_token_ids=_allowed_token_ids(allowed_token_ids),
            bad_words=_strings("bad_words", bad_words),
            skip_reading_prefix_cache=skip_reading_prefix_cache is not None
            and _flag("skip_reading_prefix_cache", skip_reading_prefix_cache),
            structured_outputs=to_structured_outputs(structured_outputs),
        )
        self._refuse_contradictions()

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is taken, without noise."""
        return self.temperature == 0.0

    def validate_for_model(self, vocab_size: int, max_logprobs: int) -> None:
        """Check ids against the model's vocabulary and logprobs against the engine's limit (-1 = no limit).

        Raises:
            RequestError: an id is not in [0, vocab_size), or more log-probabilities are asked for than allowed.
        """
        id_fields: dict[str, Iterable[int]] = {
            "logit_bias": self.logit_bias,
            "stop_token_ids": self.stop_token_ids,
            "allowed_token_ids": self.allowed_token_ids or (),
        }
        for name, ids in id_fields.items():
            for token_id in ids:
                if token_id >= vocab_size:
                    expected = f"of token ids from 0 to {vocab_size - 1} (the model's vocabulary)"
                    raise RequestError(f"{name} must be made {expected}, found {token_id}", param=name)
        for name, asked in (("logprobs", self.logprobs), ("prompt_logprobs", self.prompt_logprobs)):
            if asked is None or max_logprobs == -1:
                continue
            if (vocab_size if asked == -1 else asked) > max_logprobs:
                found = f"-1, which is the whole vocabulary of {vocab_size}" if asked == -1 else str(asked)
                raise RequestError(
                    f"{name} must be at most {max_logprobs} (the engine's max_logprobs), found {found}", param=name
                )

    def _refuse_contradictions(self) -> None:
        if self.n > 1 and self.is_greedy:
            raise RequestError(
                f"n must be 1 when temperature is 0 (all answers are the same), found {self.n}", param="n"
            )
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens must be at most max_tokens ({self.max_tokens}), found {self.min_tokens}",
                param="min_tokens",
            )
        if self.stop and not self.detokenize:
            raise RequestError(
                "stop must be left out when detokenize is false (there is no text to search), "
                f"found {reprlib.repr(self.stop)}",
                param="stop",
            )


def _refuse_unknown(unknown: Mapping[str, object]) -> None:
    for name in unknown:
        if name == "best_of":
            raise RequestError("best_of is not supported; use n", param=name)
        if name in ("use_beam_search", "beam_width", "length_penalty", "early_stopping"):
            raise RequestError(f"{name} is not supported: there is no beam search", param=name)
        known = ", ".join(SamplingParams.__dataclass_fields__)
        raise RequestError(f"{name} is not a known sampling parameter; known: {known}", param=name)


def _wrong(name: str, expected: str, value: object) -> RequestError:
    return RequestError(f"{name} must be {expected}, found {reprlib.repr(value)}", param=name)


def _is_integer(value: object) -> TypeGuard[int]:
    """Any integer type (NumPy's too), bool apart."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def _integer(name: str, value: object, low: int, high: int | None = None) -> int:
    expected = f"an integer from {low} to {high}" if high is not None else f"an integer of at least {low}"
    if not _is_integer(value) or value < low or (high is not None and value > high):
        raise _wrong(name, expected, value)
    return int(value)


def _number(
    name: str, value: object, low: float, high: float = math.inf, *, excludes_low: bool = False, of: str = ""
) -> float:
    """A finite number in [low, high], or in (low, high]."""
    relation = "above" if excludes_low else "of at least"
    expected = f"a finite number {relation} {low:g}" + (f" and at most {high:g}" if high < math.inf else "") + of
    if not isinstance(value, Real) or isinstance(value, bool):
        raise _wrong(name, expected, value)
    try:
        number = float(value)
    except OverflowError:  # an integer beyond float64
        raise _wrong(name, expected, value) from None
    if not math.isfinite(number) or not low <= number <= high or (excludes_low and number == low):
        raise _wrong(name, expected, value)
    return number


def _temperature(value: object) -> float:
    temperature = _number("temperature", value, 0)
    return temperature if temperature == 0 else max(temperature, MIN_TEMPERATURE)


def _seed(value: object) -> int | None:
    if value is None:
        return None
    seed = _integer("seed", value, -(2**63), 2**64 - 1)
    return None if seed == -1 else seed


def _flag(name: str, value: object) -> bool:
    if not isinstance(value, bool):
        raise _wrong(name, "true or false", value)
    return value


def _items(name: str, value: object, expected: str) -> Sequence[object]:
    """The items of a list or tuple; none for None."""
    if value is None:
        return ()
    if not isinstance(value, list | tuple):
        raise _wrong(name, expected, value)
    return value


def _stop(value: object) -> tuple[str, ...]:
    if isinstance(value, str) and value:
        return (value,)
    return _strings("stop", value, "a non-empty string or a list of them")


def _strings(name: str, value: object, expected: str = "a list of non-empty strings") -> tuple[str, ...]:
    strings = []
    for item in _items(name, value, expected):
        if not isinstance(item, str) or not item:
            raise _wrong(name, expected, value)
        strings.append(item)
    return tuple(strings)


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    expected = "a list of token ids (integers of at least 0)"
    ids = []
    for item in _items(name, value, expected):
        if not _is_integer(item) or item < 0:
            raise _wrong(name, expected, item)
        ids.append(int(item))
    return tuple(ids)


def _allowed_token_ids(value: object) -> tuple[int, ...] | None:
    if value is None:
        return None
    ids = _token_ids("allowed_token_ids", value)
    if not ids:
        raise _wrong("allowed_token_ids", "None or a list of at least one token id", value)
    return ids


def _logit_bias(value: object) -> Mapping[int, float]:
    """Token id → bias; JSON writes the ids as strings."""
    if value is None:
        return {}
    expected = "an object of token ids (integers of at least 0) and numbers"
    if not isinstance(value, Mapping):
        raise _wrong("logit_bias", expected, value)
    bias = {}
    for key, amount in value.items():
        token_id = int(key) if isinstance(key, str) and key.isascii() and key.isdecimal() and len(key) < 20 else key
        if not _is_integer(token_id) or token_id < 0:
            raise _wrong("logit_bias", expected, key)
        bias[int(token_id)] = _number(
            "logit_bias", amount, -MAX_LOGIT_BIAS, MAX_LOGIT_BIAS, of=f" for token {token_id}"
        )
    return bias
