"""Text in and out: tokenizer, chat template, incremental detokenizer with stop strings.

A leaf of the package: it imports only errors. `tokenizers` and `jinja2` are imported when first used.
"""

from lean_engine.text.chat import render_chat
from lean_engine.text.detokenizer import IncrementalDetokenizer
from lean_engine.text.tokenizer import Tokenizer

__all__ = ["IncrementalDetokenizer", "Tokenizer", "render_chat"]
