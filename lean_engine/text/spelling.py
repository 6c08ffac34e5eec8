"""How a vocabulary spells bytes: from a token's string to the exact bytes it stands for.

Two spellings cover the decoder models. Byte-level BPE writes every byte as one printable character (GPT-2's alphabet);
SentencePiece writes a space as "▁" and a byte without a character as "<0xE4>", and drops one space at the start of a
text. Both are read from the `decoder` of tokenizer.json. Bytes make detokenization exact and cheap: the text of some
tokens is their bytes joined and read as UTF-8, wherever the text was cut into tokens.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from lean_engine.errors import CheckpointError

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SUPPORTED = "ByteLevel, or a Sequence of Replace, ByteFallback, Fuse, Strip and Metaspace"


@dataclass(frozen=True, slots=True)
class Spelling:
    """The rules of one vocabulary; immutable."""

    is_byte_level: bool = False
    replacements: tuple[tuple[str, str], ...] = ()  # (in the token, in the text), in order
    has_byte_tokens: bool = False  # "<0xE4>" is one byte
    leading: bytes = b""  # what is dropped at the start of a text ...
    max_leading: int = 0  # ... at most so many times

    def to_bytes(self, token: str) -> bytes:
        """The bytes that one token string stands for."""
        if self.is_byte_level:
            alphabet = byte_of_character()
            spelled = [alphabet.get(character) for character in token]
            # A token with any other character (`<｜User｜>`) is an added one and stands for itself.
            return token.encode() if None in spelled else bytes(b for b in spelled if b is not None)
        if self.has_byte_tokens and (match := BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        for old, new in self.replacements:
            token = token.replace(old, new)
        return token.encode()

    def strip_leading(self, text: bytes, num_left: int) -> tuple[bytes, int]:
        """Drop up to `num_left` leading characters from the next bytes of a text.

        Returns the rest, and how many may still be dropped from what follows: none once the text has begun.
        """
        while num_left and text.startswith(self.leading):
            text = text[len(self.leading) :]
            num_left -= 1
            if not text:
                return text, num_left
        return text, 0 if text else num_left


@cache
def byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet, character → byte: printable Latin-1 stands for itself, the other 68 bytes begin at U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(0x100 + n): b for n, b in enumerate(others)}


def read_spelling(decoder: dict[str, Any] | None, source: str) -> Spelling:
    """The spelling that a tokenizer.json `decoder` describes.

    Metaspace counts as Replace and Strip of one space. CheckpointError names `source` and the decoder that is none of
    these.
    """
    if decoder is None:
        raise CheckpointError(f"{source}: the tokenizer has no decoder; supported: {SUPPORTED}")
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    if [step["type"] for step in steps if step["type"] != "Fuse"] == ["ByteLevel"]:
        return Spelling(is_byte_level=True)
    replacements: list[tuple[str, str]] = []
    leading, max_leading = b"", 0
    for step in steps:
        match step:
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                replacements.append((old, new))
            case {"type": "Strip", "content": str(character), "start": int(start), "stop": 0}:
                leading, max_leading = character.encode(), start
            case {"type": "Metaspace", "replacement": str(old)}:
                replacements.append((old, " "))
                leading, max_leading = b" ", int(step.get("prepend_scheme") != "never")
            case {"type": "ByteFallback" | "Fuse"}:
                pass
            case _:
                raise CheckpointError(f"{source}: decoder {step['type']!r} is not supported; supported: {SUPPORTED}")
    has_byte_tokens = any(step["type"] == "ByteFallback" for step in steps)
    return Spelling(False, tuple(replacements), has_byte_tokens, leading, max_leading)
