"""The tokenizer of the model under load, for prompts of a wanted length: its files alone, no weights."""

from __future__ import annotations

from pathlib import Path

from lean_engine.checkpoint import open_checkpoint
from lean_engine.errors import CheckpointError, ConfigError
from lean_engine.text.tokenizer import Tokenizer


def load_tokenizer(name: str, was_given: bool, progress: bool = False) -> Tokenizer:
    """The tokenizer of a model, or of a directory with a tokenizer.json.

    Args:
        name: what open_checkpoint takes, or such a directory.
        was_given: the user named it; else it is what the server calls its model.

    Raises:
        ConfigError: there is none of this name; says what to give.
    """
    try:
        if (Path(name) / "tokenizer.json").is_file():
            return Tokenizer.from_directory(Path(name))
        source = open_checkpoint(name, load_format="dummy", progress=progress).tokenizer_source
        return Tokenizer.from_gguf(source) if isinstance(source, dict) else Tokenizer.from_directory(source)
    except CheckpointError as error:
        if was_given:
            raise
        raise ConfigError(f"no tokenizer for the server's model {name!r} ({error}); give --tokenizer") from None
