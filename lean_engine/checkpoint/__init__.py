"""From a model name to tensors and a raw config; nothing about the forward pass.

`open_checkpoint` turns what a user typed into a Checkpoint: safetensors directory, GGUF file, Hub repository or the
built-in demo model. Whatever the format, config keys, tensor names, layouts and values are those of transformers.
"""

from lean_engine.checkpoint.base import Checkpoint
from lean_engine.checkpoint.resolve import DEFAULT_MODEL, open_checkpoint

__all__ = ["DEFAULT_MODEL", "Checkpoint", "open_checkpoint"]
