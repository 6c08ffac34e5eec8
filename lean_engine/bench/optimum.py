"""What a prefix cache could find at best: with unlimited memory, from the requests alone.

Kept apart from the engine's own cache, to judge it: no keys and no hashes, only tokens that are compared.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence


class PrefixOptimum:
    """Requests are told in the order of their first admission, and again when they end.

    A prompt could find its longest prefix, in full blocks, with which an earlier request begins: its prompt or, once it
    has ended, its prompt and output, all but the last token, which is never computed. At least one token of a prompt
    has to be computed, so at most (length - 1) // block_size blocks are found.

    Attributes:
        num_query_tokens: of all prompts.
        num_hit_tokens: of those, what could be found.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.num_query_tokens = 0
        self.num_hit_tokens = 0
        self._children: dict[tuple[int, bytes], int] = {}  # a node and a block's tokens → the node behind that block

    @property
    def hit_ratio(self) -> float:
        return self.num_hit_tokens / self.num_query_tokens if self.num_query_tokens else 0.0

    def admit(self, prompt_token_ids: Sequence[int]) -> None:
        """A request starts: count what it could find, then let its prompt be found."""
        num_tokens = len(prompt_token_ids)
        self.num_query_tokens += num_tokens
        node, num_found = 0, 0
        for content in self._blocks(prompt_token_ids[: num_tokens - 1]):
            child = self._children.get((node, content))
            if child is None:
                break
            node, num_found = child, num_found + self.block_size
        self.num_hit_tokens += num_found
        self._insert(prompt_token_ids)

    def finish(self, token_ids: Sequence[int]) -> None:
        """A request has ended: prompt and output, the last token not among what can be found."""
        self._insert(token_ids[:-1])

    def _insert(self, token_ids: Sequence[int]) -> None:
        node = 0
        for content in self._blocks(token_ids):
            node = self._children.setdefault((node, content), len(self._children) + 1)

    def _blocks(self, token_ids: Sequence[int]) -> list[bytes]:
        size = self.block_size
        packed = array("I", token_ids)
        return [packed[start : start + size].tobytes() for start in range(0, len(packed) - size + 1, size)]
