"""Tags that a parser must see in an answer's text, such as `<tool_call>`."""

from __future__ import annotations

from collections.abc import Iterable

from lean_engine.text.tokenizer import Tokenizer


def are_special(tokenizer: Tokenizer, tags: Iterable[str]) -> bool:
    """Whether `skip_special_tokens` would leave one of these tags out of the text."""
    encoded = (tokenizer.encode(tag, add_special_tokens=False) for tag in tags)
    return any(len(ids) == 1 and ids[0] in tokenizer.special_ids for ids in encoded)
