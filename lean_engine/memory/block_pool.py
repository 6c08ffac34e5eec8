"""The block pool: which KV blocks are free, in which order they are given out, and how many holders each has.

It deals in block ids only; the KV data lies on the device. Block 0 is the null block: padded rows point to it, it is
never granted. Free blocks form one intrusive doubly linked list whose order is the eviction order: taking from the
head, removing from the middle and putting back at either end are O(1), whatever the size of the pool. Misuse (freeing
a block that nobody holds, asking for more than is free) is a bug of the caller and raises IntegrityError.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lean_engine.errors import ConfigError, LeanEngineError

NULL_BLOCK_ID = 0


class IntegrityError(LeanEngineError):
    """The bookkeeping of blocks or requests contradicts itself. A bug, never a user's fault."""


class Block:
    """One KV block: its holders, and its neighbours while it is free."""

    __slots__ = ("block_id", "next", "prev", "ref_count")

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.ref_count = 0
        self.prev = self
        self.next = self


class BlockPool:
    """`num_blocks` blocks, the null block included; all but that one start free, in the order 1, 2, 3, ...

    Attributes:
        num_blocks: blocks in all, the null block included.
        num_free: blocks that `allocate` can grant now.
        max_held: the most blocks that were held at once so far.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ConfigError(
                f"a block pool of {num_blocks} blocks can hold nothing; it needs the null block and 1 more"
            )
        self.num_blocks = num_blocks
        self.num_free = 0
        self.max_held = 0
        self._blocks = [Block(block_id) for block_id in range(num_blocks)]
        # The free list is a ring closed by the null block: null.next is its head, null.prev its tail.
        self._null = self._blocks[NULL_BLOCK_ID]
        for block in self._blocks[1:]:
            self._insert_after(self._null.prev, block)

    @property
    def num_usable(self) -> int:
        """Blocks that can ever be granted: all but the null block."""
        return self.num_blocks - 1

    @property
    def num_held(self) -> int:
        """Blocks with at least one holder; a block shared by several counts once."""
        return self.num_usable - self.num_free

    def ref_count(self, block_id: int) -> int:
        """How many holders a block has; 0 means free."""
        return self._blocks[block_id].ref_count

    def allocate(self, num_blocks: int) -> list[int]:
        """Grant `num_blocks` blocks from the head of the free list, each with one holder; all or none.

        Raises:
            IntegrityError: fewer are free (ask `num_free` first); nothing has changed.
        """
        if num_blocks > self.num_free:
            raise IntegrityError(f"{num_blocks} blocks were asked for, {self.num_free} are free")
        block_ids = []
        for _ in range(num_blocks):
            block = self._null.next
            self._remove(block)
            block.ref_count = 1
            block_ids.append(block.block_id)
        self.max_held = max(self.max_held, self.num_held)
        return block_ids

    def touch(self, block_ids: Sequence[int]) -> None:
        """Add one holder to each block; a free one leaves the free list, from wherever it stands in it."""
        for block_id in block_ids:
            if not NULL_BLOCK_ID < block_id < self.num_blocks:
                raise IntegrityError(f"block {block_id} cannot be held; the pool grants 1 to {self.num_usable}")
            block = self._blocks[block_id]
            if block.ref_count == 0:
                self._remove(block)
            block.ref_count += 1
        self.max_held = max(self.max_held, self.num_held)

    def free(self, block_ids: Sequence[int]) -> None:
        """Take one holder from each block of a block table (in table order), the last block first.

        Raises:
            IntegrityError: a block has no holder (freed twice, or never granted).
        """
        for block_id in reversed(block_ids):
            if not NULL_BLOCK_ID < block_id < self.num_blocks or self._blocks[block_id].ref_count == 0:
                raise IntegrityError(f"block {block_id} is freed, but nobody holds it")
            block = self._blocks[block_id]
            block.ref_count -= 1
            if block.ref_count == 0:
                self._release(block)

    def free_block_ids(self) -> Iterator[int]:
        """The free list from head to tail: the order in which blocks will be granted. O(n), for checks and displays."""
        block = self._null.next
        while block is not self._null:
            yield block.block_id
            block = block.next

    def check(self) -> None:
        """Prove that links, counts and holders agree. O(n); IntegrityError names the first contradiction."""
        num_free = 0
        block = self._null
        while True:
            if block.next.prev is not block:
                raise IntegrityError(f"free list: block {block.next.block_id} does not point back to {block.block_id}")
            block = block.next
            if block is self._null:
                break
            num_free += 1
            if block.ref_count != 0:
                raise IntegrityError(f"block {block.block_id} is free, but has {block.ref_count} holders")
        num_held = sum(block.ref_count > 0 for block in self._blocks)
        if num_free != self.num_free or num_free + num_held != self.num_usable:
            raise IntegrityError(
                f"{num_free} blocks in the free list ({self.num_free} counted) and {num_held} held; "
                f"together they must be {self.num_usable}"
            )

    def _release(self, block: Block) -> None:
        """Put a block that lost its last holder back into the free list.

        Nothing in it is worth keeping, so it goes to the head: hot memory is used again first, and a lightly loaded
        engine never touches the rest of the pool.
        """
        self._insert_after(self._null, block)

    def _insert_after(self, left: Block, block: Block) -> None:
        right = left.next
        block.prev, block.next = left, right
        left.next = right.prev = block
        self.num_free += 1

    def _remove(self, block: Block) -> None:
        block.prev.next = block.next
        block.next.prev = block.prev
        block.prev = block.next = block
        self.num_free -= 1
