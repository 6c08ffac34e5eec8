"""The block pool: which KV blocks are free, what is cached in them, and how many holders each has.

It deals in block ids only; the KV data lies on the device. Block 0 is the null block: padded rows point to it, it is
never granted. Free blocks form one intrusive doubly linked list whose order is the eviction order: taking from the
head, removing from the middle and putting back at either end are O(1), whatever the size of the pool.

A full block may be published under a key (prefix_cache.py). It keeps its key when its last holder leaves, and is found
again by `match` until `allocate` takes it for something else: it is evicted. A free block with nothing in it goes to
the head of the free list, where it is used again first; a cached one goes to the tail. A request's blocks are freed
last block first, so the least recently used are evicted first and, of one request's, the ends of chains before
what they hang on.

What is known of a block stands in arrays under its id, not in an object of its own: a pool of a million blocks is built
at once, takes 37 MB, and gives Python's garbage collector nothing to walk over.

Misuse (freeing a block that nobody holds, asking for more than is free) is a bug of the caller: IntegrityError.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence

from lean_engine.errors import ConfigError, LeanEngineError
from lean_engine.histogram import Histogram
from lean_engine.memory.prefix_cache import BlockKey

NULL_BLOCK_ID = 0


class IntegrityError(LeanEngineError):
    """The bookkeeping of blocks or requests contradicts itself. A bug, never a user's fault."""


class BlockPool:
    """`num_blocks` blocks, the null block included; all but that one start free, in the order 1, 2, 3, ...

    Attributes:
        num_blocks: blocks in all, the null block included.
        num_free: blocks that `allocate` can grant now, cached ones included.
        num_cached: free blocks whose content can still be found.
        max_held: the most blocks that were held at once so far.
        num_evictions: cached blocks that were granted for something else.
        lifetime: from a block's grant until its content is dropped, in the clock's unit.
        idle_before_evict: from a cached block's last holder until its eviction, in the clock's unit.
        now: the clock; whoever drives the pool sets it (seconds, or steps).
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 2:
            raise ConfigError(
                f"a block pool of {num_blocks} blocks can hold nothing; it needs the null block and 1 more"
            )
        self.num_blocks = num_blocks
        self.num_free = num_blocks - 1
        self.num_cached = 0
        self.max_held = 0
        self.num_evictions = 0
        self.lifetime = Histogram()
        self.idle_before_evict = Histogram()
        self.now = 0.0
        self._ref_counts = array("i", bytes(4 * num_blocks))  # holders
        self._keys: list[BlockKey | None] = [None] * num_blocks  # under which a block is published
        self._published: dict[BlockKey, int] = {}  # the other way round
        self._is_published = bytearray(num_blocks)  # 1 where a block has a key, for whoever looks at all of them
        self._granted_at = array("d", bytes(8 * num_blocks))  # by the pool's clock
        self._freed_at = array("d", bytes(8 * num_blocks))  # when the last holder left
        # The free list is a ring closed by the null block: next of the null block is its head, previous its tail.
        self._next = array("i", range(1, num_blocks + 1))
        self._next[-1] = NULL_BLOCK_ID
        self._previous = array("i", range(-1, num_blocks - 1))
        self._previous[NULL_BLOCK_ID] = num_blocks - 1

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
        return self._ref_counts[block_id]

    def num_shared(self, block_ids: Iterable[int]) -> int:
        """How many of these blocks somebody holds."""
        return sum(self._ref_counts[block_id] > 0 for block_id in block_ids)

    @property
    def num_empty(self) -> int:
        """Free blocks with nothing cached in them: empty + cached + held = usable."""
        return self.num_free - self.num_cached

    def is_published(self, block_id: int) -> bool:
        """Whether the block can be found by its key."""
        return self._keys[block_id] is not None

    def allocate(self, num_blocks: int) -> list[int]:
        """Grant `num_blocks` blocks from the head of the free list, each with one holder; all or none.

        What was cached in them is evicted.

        Raises:
            IntegrityError: fewer are free (ask `num_free` first); nothing has changed.
        """
        if num_blocks > self.num_free:
            raise IntegrityError(f"{num_blocks} blocks were asked for, {self.num_free} are free")
        block_ids = []
        after, previous, block = self._next, self._previous, self._next[NULL_BLOCK_ID]
        for _ in range(num_blocks):
            if self._keys[block] is not None:
                self._evict(block)
            self._ref_counts[block] = 1
            self._granted_at[block] = self.now
            block_ids.append(block)
            block = after[block]
        after[NULL_BLOCK_ID] = block
        previous[block] = NULL_BLOCK_ID
        self.num_free -= num_blocks
        self.max_held = max(self.max_held, self.num_held)
        return block_ids

    def touch(self, block_ids: Sequence[int]) -> None:
        """Add one holder to each block; a free one leaves the free list, from wherever it stands in it."""
        for block_id in block_ids:
            if not NULL_BLOCK_ID < block_id < self.num_blocks:
                raise IntegrityError(f"block {block_id} cannot be held; the pool grants 1 to {self.num_usable}")
            if self._ref_counts[block_id] == 0:
                self._remove(block_id)
                self.num_cached -= self._keys[block_id] is not None
            self._ref_counts[block_id] += 1
        self.max_held = max(self.max_held, self.num_held)

    def free(self, block_ids: Sequence[int]) -> None:
        """Take one holder from each block of a block table (in table order), the last block first.

        Raises:
            IntegrityError: a block has no holder (freed twice, or never granted).
        """
        for block_id in reversed(block_ids):
            if not NULL_BLOCK_ID < block_id < self.num_blocks or self._ref_counts[block_id] == 0:
                raise IntegrityError(f"block {block_id} is freed, but nobody holds it")
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] == 0:
                self._release(block_id)

    # -- the prefix cache

    def publish(self, block_id: int, key: BlockKey) -> bool:
        """Let a held block be found by its key; False, and nothing changed, where another held block already is.

        A free block of this key, which might be evicted before what hangs on it, gives the key up and is empty then.

        Raises:
            IntegrityError: nobody holds the block, or it is published under another key.
        """
        if self._ref_counts[block_id] == 0 or self._keys[block_id] is not None:
            raise IntegrityError(
                f"block {block_id} is published with {self._ref_counts[block_id]} holders "
                f"and the key {self._keys[block_id]!r}"
            )
        twin = self._published.setdefault(key, block_id)
        if twin != block_id:
            if self._ref_counts[twin] > 0:
                return False
            self._remove(twin)
            self._keys[twin] = None
            self._is_published[twin] = 0
            self.num_cached -= 1
            self._release(twin)
            self._published[key] = block_id
        self._keys[block_id] = key
        self._is_published[block_id] = 1
        return True

    def match(self, keys: Iterable[BlockKey]) -> list[int]:
        """The blocks of the longest prefix of `keys` of which every block is published. It does not hold them."""
        block_ids = []
        for key in keys:
            block_id = self._published.get(key)
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def forget(self) -> None:
        """Forget everything cached. Held blocks stay with their holders and are found by nobody else any more."""
        for block_id in self._published.values():
            self._keys[block_id] = None
            if self._ref_counts[block_id] == 0:
                self.lifetime.observe(self.now - self._granted_at[block_id])
        self._published.clear()
        self._is_published = bytearray(self.num_blocks)
        self.num_cached = 0

    def free_block_ids(self) -> Iterator[int]:
        """The free list from head to tail: the order in which blocks will be granted. O(n), for checks and displays."""
        block = self._next[NULL_BLOCK_ID]
        while block != NULL_BLOCK_ID:
            yield block
            block = self._next[block]

    def occupancy(self) -> tuple[bytes, bytes]:
        """By block id: the holders of every block, as int32, and 1 or 0 for each that can be found by its key or not.

        Copies of memory, quick enough to be taken between two steps: about 1 ms for a million blocks.
        """
        return self._ref_counts.tobytes(), bytes(self._is_published)

    def check(self) -> None:
        """Prove that links, counts and holders agree. O(n); IntegrityError names the first contradiction."""
        num_free, block = 0, NULL_BLOCK_ID
        while True:
            if self._previous[self._next[block]] != block:
                raise IntegrityError(f"free list: block {self._next[block]} does not point back to {block}")
            block = self._next[block]
            if block == NULL_BLOCK_ID:
                break
            num_free += 1
            if self._ref_counts[block] != 0:
                raise IntegrityError(f"block {block} is free, but has {self._ref_counts[block]} holders")
        num_held = sum(count > 0 for count in self._ref_counts)
        keyed = [block for block, key in enumerate(self._keys) if key is not None]
        if len(keyed) != len(self._published) or any(self._published.get(self._keys[b]) != b for b in keyed):
            raise IntegrityError(f"{len(keyed)} blocks have a key, {len(self._published)} keys are published")
        if [block for block, flag in enumerate(self._is_published) if flag] != keyed:
            raise IntegrityError(f"{sum(self._is_published)} blocks count as published, {len(keyed)} have a key")
        num_cached = sum(self._ref_counts[block] == 0 for block in keyed)
        if num_cached != self.num_cached:
            raise IntegrityError(f"{num_cached} free blocks are cached, {self.num_cached} were counted")
        if num_free != self.num_free or num_free + num_held != self.num_usable:
            raise IntegrityError(
                f"{num_free} blocks in the free list ({self.num_free} counted) and {num_held} held; "
                f"together they must be {self.num_usable}"
            )

    def _release(self, block: int) -> None:
        """Put a block that lost its last holder back into the free list.

        Where nothing in it is worth keeping it goes to the head: hot memory is used again first, and a lightly loaded
        engine never touches the rest of the pool.
        """
        self._freed_at[block] = self.now
        if self._keys[block] is not None:
            self.num_cached += 1
            self._insert_after(self._previous[NULL_BLOCK_ID], block)
        else:
            self.lifetime.observe(self.now - self._granted_at[block])
            self._insert_after(NULL_BLOCK_ID, block)

    def _evict(self, block: int) -> None:
        """Forget what is cached in a free block that is being granted."""
        del self._published[self._keys[block]]
        self._keys[block] = None
        self._is_published[block] = 0
        self.num_cached -= 1
        self.num_evictions += 1
        self.lifetime.observe(self.now - self._granted_at[block])
        self.idle_before_evict.observe(self.now - self._freed_at[block])

    def _insert_after(self, left: int, block: int) -> None:
        right = self._next[left]
        self._previous[block], self._next[block] = left, right
        self._next[left] = self._previous[right] = block
        self.num_free += 1

    def _remove(self, block: int) -> None:
        left, right = self._previous[block], self._next[block]
        self._next[left], self._previous[right] = right, left
        self.num_free -= 1
