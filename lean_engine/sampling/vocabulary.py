"""A model's vocabulary as bytes: what llguidance needs to know of a tokenizer.

`text.tokenizer.Tokenizer` fits `Vocabulary`, from whatever file it came: byte-level BPE and SentencePiece alike give
the bytes that each id adds to a text.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from lean_engine.errors import RequestError

ANCHOR = "\n"  # nothing merges with it; a vocabulary that adds a space before a text adds it before this instead


class Vocabulary(Protocol):
    """What is asked of a tokenizer."""

    special_ids: frozenset[int]  # tokens that are no text

    def token_bytes(self, token_id: int) -> bytes: ...

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]: ...


class TokenTable:
    """A vocabulary under the names that llguidance looks for.

    Attributes:
        tokens: the bytes of each id below vocab_size; b"" for one without a token, which is never allowed.
        special_token_ids: ids that stand for no text: special ones, and whatever ends an answer.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        specials = {*vocabulary.special_ids, *eos_token_ids}
        self.eos_token_id = min(eos_token_ids)
        self.tokens = [vocabulary.token_bytes(token_id) for token_id in range(vocab_size)]
        self.special_token_ids = sorted(token_id for token_id in specials if token_id < vocab_size)
        self._encode = exact_encoder(vocabulary, self.tokens, specials)

    def __call__(self, text: str) -> list[int]:
        """Tokens of a text that the form forces, as the model would write them."""
        return self._encode(text)


def exact_encoder(
    vocabulary: Vocabulary, tokens: Sequence[bytes], specials: Collection[int]
) -> Callable[[str], list[int]]:
    """A function text → ids whose bytes are exactly that text, none of them special; it never raises.

    The tokenizer's own encoding where that is so. It is not where a vocabulary adds a space before every text, nor
    where the text holds a special token's spelling: then as the text stands in the middle of another, or else by the
    longest tokens that fit.
    """
    longest_first: dict[int, dict[bytes, int]] = {}
    for token_id, token in enumerate(tokens):
        if token and token_id not in specials:
            longest_first.setdefault(len(token), {}).setdefault(token, token_id)
    by_length = sorted(longest_first.items(), reverse=True)
    anchor_ids = vocabulary.encode(ANCHOR, add_special_tokens=False)

    def is_exact(ids: list[int], text: bytes) -> bool:
        return all(i < len(tokens) and i not in specials for i in ids) and b"".join(tokens[i] for i in ids) == text

    def encode(text: str) -> list[int]:
        wanted = text.encode("utf-8", errors="replace")
        plain = vocabulary.encode(wanted.decode(), add_special_tokens=False)
        if is_exact(plain, wanted):
            return plain
        anchored = vocabulary.encode(ANCHOR + wanted.decode(), add_special_tokens=False)[len(anchor_ids) :]
        return anchored if is_exact(anchored, wanted) else greedy(wanted, by_length)

    return encode


def greedy(text: bytes, by_length: Sequence[tuple[int, dict[bytes, int]]]) -> list[int]:
    """The longest token that fits, again and again; stops where none does."""
    ids: list[int] = []
    start = 0
    while start < len(text):
        found = next(
            (
                (size, known[text[start : start + size]])
                for size, known in by_length
                if text[start : start + size] in known
            ),
            None,
        )
        if found is None:
            break
        start += found[0]
        ids.append(found[1])
    return ids


def single_token(vocabulary: Vocabulary, text: str | None, where: str) -> int | None:
    """The id of a text that is one token; RequestError(param="structured_outputs") where it is several."""
    if text is None:
        return None
    ids = vocabulary.encode(text, add_special_tokens=False)
    if len(ids) != 1 or vocabulary.token_bytes(ids[0]) != text.encode():
        raise RequestError(
            f"{where} is {text!r}, must be one token of the model's vocabulary, found {len(ids)}",
            param=where.partition(".")[0],
        )
    return ids[0]
