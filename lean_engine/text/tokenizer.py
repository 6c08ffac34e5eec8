"""Text ↔ token ids, for a Hugging Face directory or a GGUF file.

Encoding is that of the `tokenizers` package. Decoding is done here, from each token's exact bytes: `decode`, the
incremental detokenizer and the `bytes` of a logprob always agree. It equals transformers' decode, except where byte
tokens of a SentencePiece vocabulary are not UTF-8: there each ill-formed part becomes one U+FFFD and its well-formed
neighbours stay, where transformers replaces every byte of the run. `clean_up_tokenization_spaces` is not applied: it
would delete real spaces, and transformers 5 ignores it for BPE too.

A chat prompt holds its BOS already: encode what `render_chat` returns with `add_special_tokens=False`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

from lean_engine.errors import RequestError
from lean_engine.text.parts import TokenizerParts
from lean_engine.text.spelling import read_spelling

PART_IDS = 2**16  # joined at once: other threads run between two parts
LONG_TEXT = 1024  # characters: a shorter one holds the interpreter for less than a millisecond


class Tokenizer:
    """A model's tokenizer. Immutable but for its caches; usable from several threads.

    Attributes:
        bos_token, eos_token: the strings, None where the model names none.
        bos_token_id, eos_token_id: their ids.
        special_ids: the tokens that `skip_special_tokens` leaves out.
        chat_template: the usual chat template, None where there is none.
        chat_templates: all of them by name ("default", "tool_use", …).
    """

    def __init__(self, parts: TokenizerParts) -> None:
        self._backend = parts.backend
        decoder = parts.backend.decoder
        self.spelling = read_spelling(None if decoder is None else json.loads(decoder.__getstate__()), parts.source)
        self.bos_token = parts.bos_token
        self.eos_token = parts.eos_token
        self.bos_token_id = self._id_of(parts.bos_token)
        self.eos_token_id = self._id_of(parts.eos_token)
        added = self._backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.chat_templates = dict(parts.chat_templates)
        self.chat_template = self.chat_templates.get("default")
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def from_directory(cls, path: Path) -> Tokenizer:
        """The tokenizer of a Hugging Face model directory; CheckpointError names the file that is missing or wrong."""
        from lean_engine.text.hf_tokenizer import load_directory

        return cls(load_directory(Path(path)))

    @classmethod
    def from_gguf(cls, metadata: dict[str, Any]) -> Tokenizer:
        """The tokenizer in GGUF metadata (plain Python values); CheckpointError names the key that is wrong."""
        from lean_engine.text.gguf_tokenizer import load_metadata

        return cls(load_metadata(metadata))

    def to_json(self) -> str:
        """The content of a tokenizer.json."""
        text: str = self._backend.to_str()
        return text

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest id, added tokens included. A model may have more rows than this."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; special tokens written in the text become their ids.

        RequestError where the text holds half a surrogate pair, which no encoding of text allows.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"text holds the lone surrogate U+{ord(text[error.start]):04X} at position {error.start}; "
                "should be valid Unicode",
                param="prompt",
            ) from None
        if len(text) < LONG_TEXT:
            encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        else:  # the same ids; other threads run meanwhile, and offsets that nobody needs are left out
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of some token ids; bytes that are not UTF-8 become U+FFFD. RequestError for an unknown id."""
        ids = list(ids)
        distinct = set(ids)
        unknown = {i for i in distinct if i not in self._bytes and self._token(i) is None}
        if unknown:
            raise RequestError(
                f"token id {next(i for i in ids if i in unknown)} is not in the vocabulary; should be 0 to "
                f"{self.vocab_size - 1}",
                param="tokens",
            )
        skipped = self.special_ids if skip_special_tokens else frozenset()
        bytes_of = {token_id: b"" if token_id in skipped else self.token_bytes(token_id) for token_id in distinct}
        parts = (ids[start : start + PART_IDS] for start in range(0, len(ids), PART_IDS))
        joined = b"".join(b"".join(map(bytes_of.__getitem__, part)) for part in parts)
        text, _ = self.spelling.strip_leading(joined, self.spelling.max_leading)
        return text.decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The exact bytes that a token adds inside a text (so a leading space stays); b"" for an id without a token.

        A model may have more rows than the tokenizer has tokens (padding); such an id has no text.
        """
        known = self._bytes.get(token_id)
        if known is None:
            token = self._token(token_id)
            if token is None:
                return b""
            known = self._bytes[token_id] = self.spelling.to_bytes(token)
        return known

    def token_text(self, token_id: int) -> str:
        """One token as text: `token_bytes` read as UTF-8, with U+FFFD for what is only part of a character."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def is_special(self, token_id: int) -> bool:
        """Whether `skip_special_tokens` leaves this token out."""
        return token_id in self.special_ids

    def _token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it; ids are 32-bit there."""
        return self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self._backend.token_to_id(token)
