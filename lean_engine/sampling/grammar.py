"""Answers held to a form: schema, expression or grammar → the tokens allowed next, by the llguidance package.

A form is compiled once, off the engine's thread, into a Grammar that equal requests share; each answer has a Matcher of
its own, which follows its tokens and gives a mask of one bit per token of the model's vocabulary. A matcher belongs to
its answer's SamplingState: preemption does not touch it.

What else a request asks for, together with a form (`sampling.sampler` applies these after the mask):
  - a finished form ends the answer with its end-of-text token, whatever min_tokens, ignore_eos, bad_words,
    allowed_token_ids or logit_bias say; until then they count, and ignore_eos and min_tokens make the answer go on as
    long as the form can. Where they leave no token that the form allows, the answer ends with an error.
  - stop strings, stop token ids (where the form allows the token) and max_tokens end the answer in the middle of it.
  - log-probabilities are those of the model, before the mask.

A hostile form cannot harm the process: its size is bounded, it is compiled on a thread with a stack for the deepest
nesting of that size, and a server lets another process try it first (`grammar_trial`).
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from lean_engine.errors import RequestError
from lean_engine.sampling.constraints import RequestFault
from lean_engine.sampling.grammar_source import check_size, source_of
from lean_engine.sampling.grammar_trial import TrialProcess, first_matcher, one_line
from lean_engine.sampling.structured_outputs import FIELD, StructuredOutputsParams
from lean_engine.sampling.vocabulary import TokenTable, Vocabulary, single_token

WordArray = npt.NDArray[np.uint32]

MAX_CACHED = 32  # compiled forms
MAX_THREADS = 8  # that compute masks


class GrammarCompiler:
    """Compiles forms for one model. Usable from several threads; `compile` takes milliseconds, seldom a second.

    Args:
        tokenizer: None where the model has none: every form is refused.
        vocab_size: rows of the model's logits, V; ids without a token are never allowed.
        eos_token_ids: what ends a finished form; where there is none every form is refused.
    """

    def __init__(self, tokenizer: Vocabulary | None, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(token_id for token_id in eos_token_ids if token_id < vocab_size)
        self._tokenizer = tokenizer
        self._grammars: OrderedDict[StructuredOutputsParams, Grammar] = OrderedDict()  # the latest used last
        self._lock = threading.Lock()  # of the above
        self._ll_tokenizer: Any = None  # llguidance's, made for the first form
        self._making = threading.Lock()
        self._trial: TrialProcess | None = None

    def guard(self) -> None:
        """From now on try each new form in another process first: for forms that strangers send."""
        tokenizer = self._tokenizer
        if self._trial is None and tokenizer is not None:
            ids = sorted(token_id for token_id in tokenizer.special_ids if token_id < self.vocab_size)
            specials = {token_id: tokenizer.token_bytes(token_id).decode("utf-8", "replace") for token_id in ids}
            self._trial = TrialProcess(self.vocab_size, specials)

    def close(self) -> None:
        """End that process."""
        if self._trial is not None:
            self._trial.close()

    def compile(self, form: StructuredOutputsParams) -> Grammar:
        """The grammar of a form, from the cache where it has been compiled before.

        Raises:
            RequestError: it cannot be honoured, with llguidance's reason; param is "structured_outputs".
        """
        with self._lock:
            found = self._grammars.get(form)
            if found is not None:
                self._grammars.move_to_end(form)
                return found
        made = self._compile(form)
        with self._lock:
            self._grammars[form] = made
            while len(self._grammars) > MAX_CACHED:
                self._grammars.popitem(last=False)
        return made

    def _compile(self, form: StructuredOutputsParams) -> Grammar:
        tokenizer = self._tokenizer
        if tokenizer is None:
            raise RequestError(f"{FIELD} needs a tokenizer, which this model has not", param=FIELD)
        if not self.eos_token_ids:
            raise RequestError(f"{FIELD} needs an end-of-text token, which this model has not", param=FIELD)
        check_size(form)
        start_id = single_token(tokenizer, form.reasoning_start, f"{FIELD}.reasoning_start")
        end_id = single_token(tokenizer, form.reasoning_end, f"{FIELD}.reasoning_end")
        try:
            source = source_of(form)
        except (ValueError, RecursionError) as error:
            raise refused(form, one_line(str(error))) from None
        self._try(form, source)
        first = first_matcher(self._made_tokenizer(), source)
        if isinstance(first, str):
            raise refused(form, first)
        return Grammar(first, self.vocab_size, self.eos_token_ids, start_id, end_id)

    def _try(self, form: StructuredOutputsParams, source: str) -> None:
        """Compile in the other process first, where there is one."""
        if self._trial is None:
            return
        try:
            fault = self._trial.fault(source)
        except TimeoutError:
            raise RequestError(
                f"{FIELD}: others are being compiled; try again later", param=FIELD, status=503
            ) from None
        if fault is not None:
            raise refused(form, fault)

    def _made_tokenizer(self) -> Any:
        """The vocabulary as llguidance reads it: bytes of every id, b"" where there is no token."""
        from llguidance import LLTokenizer

        with self._making:
            if self._ll_tokenizer is None:
                assert self._tokenizer is not None
                table: Any = TokenTable(self._tokenizer, self.vocab_size, self.eos_token_ids)
                self._ll_tokenizer = LLTokenizer(table, eos_token=sorted(self.eos_token_ids))
            return self._ll_tokenizer


class Grammar:
    """A compiled form: where each answer's Matcher begins."""

    def __init__(
        self, first: Any, vocab_size: int, eos_token_ids: Iterable[int], start_id: int | None, end_id: int | None
    ) -> None:
        self.num_words = (vocab_size + 31) // 32
        self.start_id = start_id  # of reasoning
        self.end_id = end_id
        self.eos_words = words_of(eos_token_ids, self.num_words)
        self.other_words = words_of(range(vocab_size), self.num_words) & ~self.eos_words
        self._first = first

    def matcher(self) -> Matcher:
        """A matcher at the start of an answer."""
        return Matcher(self, self._first.deep_copy())


class Matcher:
    """The form's state in one answer. `accept` each token in order; masks come from `mask` or `fill_masks`.

    While the answer reasons (`reasoning_end` of the form) every token but the end of text is allowed.

    Attributes:
        is_done: the last mask allows the end of text only.
        error: why there can be no further token, in one line; None where all is well.
    """

    def __init__(self, grammar: Grammar, inner: Any) -> None:
        self.inner = inner  # llguidance's
        self.is_done = False
        self.error: str | None = None
        self._grammar = grammar
        self._may_reason = grammar.start_id is not None  # it is open whether the answer begins with reasoning
        self.is_reasoning = grammar.end_id is not None and grammar.start_id is None

    def accept(self, token_id: int) -> None:
        """Follow a token of the answer. One that the mask forbade is an error of the next mask."""
        if self.is_reasoning:
            self.is_reasoning = token_id != self._grammar.end_id
        elif self._may_reason and token_id == self._grammar.start_id:
            self._may_reason, self.is_reasoning = False, True
        else:
            self._may_reason = False
            self.inner.consume_token(token_id)

    def mask(self) -> WordArray:
        """The tokens allowed next: bit i % 32 of word i // 32 for token id i, [ceil(V / 32)] uint32."""
        words = np.zeros((1, self._grammar.num_words), dtype=np.uint32)
        fill_masks([self], words)
        return words[0]

    def complete(self, words: WordArray) -> None:
        """Make llguidance's mask, or none while the answer reasons, this answer's; note how the form stands."""
        if self.is_reasoning:
            words[:] = self._grammar.other_words
            return
        if self.inner.is_error():
            self.error = RequestFault(f"{FIELD}: {one_line(self.inner.get_error())}")
            words[:] = 0
            return
        start_id = self._grammar.start_id
        if self._may_reason and start_id is not None:
            words[start_id // 32] |= np.uint32(1 << start_id % 32)
        self.is_done = not (words & ~self._grammar.eos_words).any()


def fill_masks(matchers: Sequence[Matcher], words: WordArray) -> None:
    """Compute the masks of several answers at once, on several threads.

    Args:
        words: [len(matchers), ceil(V / 32)] uint32, C order; one row each. That of an answer with an error is 0.
    """
    wanted = [(matcher.inner, row) for row, matcher in enumerate(matchers) if not matcher.is_reasoning]
    if wanted:
        executor().unsafe_compute_mask_ptr(wanted, words.ctypes.data, words.shape[1] * 4, len(words))
    for matcher, row_words in zip(matchers, words, strict=True):
        matcher.complete(row_words)


def exclude(row: npt.NDArray[np.float32], words: WordArray) -> None:
    """Make -inf of the logits [V] whose bit is not set, in place."""
    allowed = np.unpackbits(words.view(np.uint8), count=len(row), bitorder="little").view(np.bool_)
    np.copyto(row, -np.inf, where=~allowed)


@cache
def executor() -> Any:
    """llguidance's threads, shared by all engines of the process."""
    from llguidance import LLExecutor

    num_cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return LLExecutor(min(num_cpus, MAX_THREADS))


def words_of(token_ids: Iterable[int], num_words: int) -> WordArray:
    """A mask with the bits of these ids."""
    bits = np.zeros(num_words * 32, dtype=np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.uint32)


def refused(form: StructuredOutputsParams, reason: str) -> RequestError:
    return RequestError(f"{FIELD}.{form.form} cannot be honoured: {reason}", param=FIELD)
