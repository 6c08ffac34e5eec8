"""Keys of the prefix cache: what a full block holds, chained over everything before it.

The key of block i stands for all tokens up to its end and for the extra keys in force there, so equal keys mean equal
keys and values in the block. Two ways to make keys:

- "sha256": a digest over parent, tokens and extra keys. Unequal prefixes do not collide in practice.
- "builtin": Python's own hash, which does collide; a key therefore keeps its tokens and its parent, and is equal to
  another only if they are. Nothing is shared by accident, whatever the hash function.

Which block holds a key is known to the block pool (block_pool.py).
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

from lean_engine.config import HASH_ALGORITHMS
from lean_engine.errors import ConfigError

BlockKey = Hashable
ROOT = bytes(32)  # the parent of a first block, as long as a digest, so that parent and tokens keep their places


@dataclass(frozen=True, slots=True)
class ExtraKey:
    """Something besides tokens that keys and values depend on.

    The kind is part of the key: a cache salt "x" and an adapter "x" are different things.
    """

    kind: str  # "salt", "lora", "mm"
    value: str  # of an adapter its name and its generation, since a name can be loaded anew
    position: int = 0  # the token from which on it counts: 0, or where a picture stands in the prompt


ExtraKeys = tuple[ExtraKey, ...]


class BlockKeys:
    """Makes the keys of a request's full blocks.

    Args:
        block_size: tokens per block.
        algorithm: one of HASH_ALGORITHMS.
        hash_function: of "builtin"; a test gives a bad one.

    Raises:
        ConfigError: there is no such algorithm.
    """

    def __init__(self, block_size: int, algorithm: str = "sha256", hash_function: Callable[[object], int] = hash):
        if algorithm not in HASH_ALGORITHMS:
            raise ConfigError(
                f"prefix_caching_hash_algo is {algorithm!r}, must be one of: {', '.join(HASH_ALGORITHMS)}"
            )
        self.block_size = block_size
        self._hash_function = hash_function
        self._append = self._append_sha256 if algorithm == "sha256" else self._append_builtin

    def extend(self, keys: list[BlockKey], token_ids: Sequence[int], num_tokens: int, extra_keys: ExtraKeys) -> None:
        """Append the keys that are missing, so that there is one for each full block of the first `num_tokens`."""
        num_missing = num_tokens // self.block_size - len(keys)
        if num_missing > 0:
            start = len(keys) * self.block_size
            self._append(keys, token_ids[start : start + num_missing * self.block_size], extra_keys)

    def _append_sha256(self, keys: list[BlockKey], token_ids: Sequence[int], extra_keys: ExtraKeys) -> None:
        packed = array("I", token_ids).tobytes()
        num_bytes = len(packed) // len(token_ids) * self.block_size
        parent = keys[-1] if keys else ROOT
        assert isinstance(parent, bytes)
        for start in range(0, len(packed), num_bytes):
            content = parent + packed[start : start + num_bytes]
            if extra_keys:
                content += self._encode(extra_keys, len(keys))
            parent = hashlib.sha256(content).digest()
            keys.append(parent)

    def _append_builtin(self, keys: list[BlockKey], token_ids: Sequence[int], extra_keys: ExtraKeys) -> None:
        parent = keys[-1] if keys else None
        assert parent is None or isinstance(parent, PrefixKey)
        for start in range(0, len(token_ids), self.block_size):
            tokens = tuple(token_ids[start : start + self.block_size])
            extra = self._encode(extra_keys, len(keys)) if extra_keys else b""
            value = self._hash_function((None if parent is None else parent.value, tokens, extra))
            parent = PrefixKey(value, parent, tokens, extra)
            keys.append(parent)

    def _encode(self, extra_keys: ExtraKeys, block: int) -> bytes:
        """The extra keys whose place is in this block, in an order that does not depend on the caller's."""
        here = sorted((k.kind, k.value) for k in extra_keys if k.position // self.block_size == block)
        return repr(here).encode("utf-8", "surrogatepass") if here else b""


class PrefixKey:
    """A key that is equal to another only if the whole prefixes are: tokens and extra keys, block by block."""

    __slots__ = ("extra", "parent", "token_ids", "value")

    def __init__(self, value: int, parent: PrefixKey | None, token_ids: tuple[int, ...], extra: bytes) -> None:
        self.value = value
        self.parent = parent
        self.token_ids = token_ids
        self.extra = extra

    def __hash__(self) -> int:
        return self.value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PrefixKey):
            return NotImplemented
        mine: PrefixKey | None = self
        theirs: PrefixKey | None = other
        while mine is not theirs:
            if mine is None or theirs is None or mine.token_ids != theirs.token_ids or mine.extra != theirs.extra:
                return False
            mine, theirs = mine.parent, theirs.parent
        other.parent = self.parent  # equal, so they may share it: comparing their children ends two blocks up
        return True
