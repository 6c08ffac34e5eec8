"""A tokenizer that costs nothing until text is met: building one takes longer than all else that a start needs.

A model that is given token ids and asked for no text starts without. The files are read when it is opened, and what
stands in them apart from the vocabulary is checked; the vocabulary is when it is built.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from threading import RLock
from typing import Any

from lean_engine.text.parts import TokenizerParts
from lean_engine.text.tokenizer import Tokenizer


def open_tokenizer(source: Path | dict[str, Any]) -> Tokenizer:
    """The tokenizer of a model directory or of GGUF metadata, built when more than its end-of-text id is asked for.

    CheckpointError names the file or the key that is wrong: now, or where it is the vocabulary, when that is built.
    """
    if isinstance(source, dict):
        from lean_engine.text import gguf_tokenizer

        return LazyTokenizer(partial(gguf_tokenizer.load_metadata, source), gguf_tokenizer.find_eos_id(source))
    from lean_engine.text import hf_tokenizer

    files = hf_tokenizer.read_files(source)
    try:
        return LazyTokenizer(partial(hf_tokenizer.load_files, files), hf_tokenizer.find_eos_id(files))
    except LookupError:
        return Tokenizer(hf_tokenizer.load_files(files))


class LazyTokenizer(Tokenizer):
    """See Tokenizer.

    Args:
        build: called once for what `Tokenizer` is made of, and again where it failed.
        eos_token_id: the attribute, which is known without.
    """

    def __init__(self, build: Callable[[], TokenizerParts], eos_token_id: int | None) -> None:
        self._build = build
        self._building = RLock()
        self._is_built = False
        self.eos_token_id = eos_token_id

    def __getattr__(self, name: str) -> Any:
        """Only asked for what is not there yet: all that Tokenizer's own __init__ sets."""
        if name.startswith("__"):
            raise AttributeError(name)
        with self._building:
            if not self._is_built:
                self.__dict__.update(vars(Tokenizer(self._build())))
                self._is_built = True
        return object.__getattribute__(self, name)
