"""What every checkpoint offers, and the check that a config and its weights belong together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lean_engine.errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np

# Stored by some files, read by no model: rotary buffers of old Llama files, the head of a model whose head is tied.
_UNUSED_SUFFIXES = (".rotary_emb.inv_freq", "lm_head.weight")


class Checkpoint(ABC):
    """A model's raw config and its tensors, in Hugging Face names, `[out, in]` layout and values.

    Attributes:
        config: config.json in transformers' spelling; GGUF metadata is translated to it.
        generation_config: generation_config.json; {} where there is none.
        source: what was opened, for messages.
        tokenizer_source: the directory with tokenizer.json, or a GGUF file's metadata by full key.
    """

    config: dict[str, Any]
    generation_config: dict[str, Any]
    source: str
    tokenizer_source: Path | dict[str, Any]

    @abstractmethod
    def names(self) -> Collection[str]:
        """All tensor names."""

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, without reading it. Raises CheckpointError where it is missing."""

    @abstractmethod
    def dtype(self, name: str) -> str:
        """The dtype `tensor(name)` will have: "float32", "float16" or "bfloat16".

        Raises CheckpointError where the tensor is missing or stored in a type that cannot be loaded.
        """

    @abstractmethod
    def tensor(self, name: str) -> np.ndarray:
        """A tensor's values; possibly a read-only view of the mapped file. Raises as shape and dtype do."""

    def stored_type(self, name: str) -> str:
        """How a tensor is stored: "float32", "float16", "bfloat16", or a GGUF block type in lower case, "q4_1".

        Raises as dtype does.
        """
        return self.dtype(name)

    def stored(self, name: str) -> np.ndarray:
        """A tensor as it is stored: elements of its own type, or its rows of quantised blocks, uint8 [O, row bytes].

        Possibly a read-only view of the mapped file. Raises as dtype does.
        """
        return self.tensor(name)

    def is_quantised(self) -> bool:
        """Whether some matrix is stored in quantised blocks."""
        return any(
            len(self.shape(name)) > 1 and self.stored_type(name) not in ("float32", "float16", "bfloat16")
            for name in self.names()
        )

    def release(self, name: str) -> None:  # noqa: B027 - a checkpoint that maps no file has nothing to give back
        """Give back the memory a tensor's file pages occupy, once its values have been copied elsewhere.

        A later `tensor(name)` reads them again.
        """

    def expect(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """Declare every tensor the model will read, before anything is allocated. Call it once, with all of them.

        Raises:
            CheckpointError: one is missing, has another shape or a type that cannot be loaded, or the checkpoint holds
                tensors the model would silently ignore: config and weights contradict each other.
        """
        for name, expected in shapes.items():
            found = self.shape(name)
            if found != tuple(expected):
                raise CheckpointError(
                    f"{self.source}: tensor {name} has shape {list(found)}, its config asks for {list(expected)}"
                )
            self.dtype(name)
        unused = [n for n in self.names() if n not in shapes and not n.endswith(_UNUSED_SUFFIXES)]
        if unused:
            raise CheckpointError(
                f"{self.source}: holds {len(unused)} tensors that its config has no use for, such as {min(unused)}"
            )
