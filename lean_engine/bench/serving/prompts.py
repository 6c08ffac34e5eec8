"""Random prompts of a wanted number of tokens: as token ids, or as text that the tokenizer cuts into as many.

Text is made of words that are one token each with the space before them, so that a tokenizer that splits at spaces
finds them again; the count is then checked and mended, since the beginning of a text is often cut otherwise.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from functools import cached_property
from random import Random

from lean_engine.errors import ConfigError
from lean_engine.text.tokenizer import Tokenizer

WORD = re.compile(r" [a-z]{2,12}")
MIN_WORDS = 100  # fewer, as in the tokenizers of tests: any tokens will do
MAX_MENDS = 16


class PromptSource:
    """Prompts that are the same for the same seed and tokenizer."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self.tokenizer = tokenizer
        self.random = Random(f"prompts {seed}")
        self.ordinary_ids = [i for i in range(tokenizer.vocab_size) if is_ordinary(tokenizer, i)]
        if not self.ordinary_ids:
            raise ConfigError("the tokenizer has no token with text")

    @cached_property
    def words(self) -> list[str]:
        """Tokens that are a space and a word."""
        texts = [self.tokenizer.token_text(i) for i in self.ordinary_ids]
        words = [text for text in texts if WORD.fullmatch(text)]
        return words if len(words) >= MIN_WORDS else [text for text in texts if "\ufffd" not in text]

    def token_ids(self, num_tokens: int) -> list[int]:
        return self.random.choices(self.ordinary_ids, k=num_tokens)

    def text(self, num_tokens: int) -> tuple[str, int]:
        """A text and the number of its tokens: num_tokens, but for a few where the tokenizer allows no better."""
        words = self.random.choices(self.words, k=num_tokens)
        for _ in range(MAX_MENDS):
            text = "".join(words).lstrip()
            count = len(self.tokenizer.encode(text, add_special_tokens=False))
            if count == num_tokens:
                break
            if count < num_tokens:
                words += self.random.choices(self.words, k=num_tokens - count)
            elif len(words) > 1:
                del words[max(1, len(words) - (count - num_tokens)) :]
            else:  # one word that is cut up at the beginning of a text
                words = self.random.choices(self.words, k=1)
        return text, count

    # -- what stands for the token ids of a workload, which knows no vocabulary: equal ones for equal ones

    def ids_for(self, numbers: Sequence[int] | array[int]) -> list[int]:
        ids = self.ordinary_ids
        return [ids[n % len(ids)] for n in numbers]

    def text_for(self, numbers: Sequence[int] | array[int]) -> str:
        words = self.words
        return "".join([words[n % len(words)] for n in numbers])


def is_ordinary(tokenizer: Tokenizer, token_id: int) -> bool:
    return not tokenizer.is_special(token_id) and bool(tokenizer.token_bytes(token_id))
