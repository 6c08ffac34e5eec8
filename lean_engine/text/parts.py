"""What a tokenizer is made of, however it was stored: the two loaders return this, `Tokenizer` wraps it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lean_engine.errors import CheckpointError

if TYPE_CHECKING:
    import tokenizers


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """A loaded tokenizer: the `tokenizers` object and what it does not hold itself."""

    backend: tokenizers.Tokenizer
    source: str  # the file, for messages
    bos_token: str | None = None
    eos_token: str | None = None
    chat_templates: dict[str, str] = field(default_factory=dict)  # name → template; the usual one is "default"


def set_added_specials(backend: tokenizers.Tokenizer, *, bos: str | None, eos: str | None, source: str) -> None:
    """Make `encode` put exactly `bos` before and `eos` after every text (None: nothing).

    Replaces the post-processor. CheckpointError where a token is not in the vocabulary.
    """
    from tokenizers.processors import TemplateProcessing

    ids = {token: backend.token_to_id(token) for token in (bos, eos) if token is not None}
    for token, token_id in ids.items():
        if token_id is None:
            raise CheckpointError(f"{source}: {token!r} is to be added to every text but is not in the vocabulary")
    template = [token for token in (bos, "$A", eos) if token is not None]
    backend.post_processor = TemplateProcessing(single=template, special_tokens=list(ids.items()))
