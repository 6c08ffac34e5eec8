"""The requests' hold on KV blocks: what the prefix cache gives them, what they grow by, publish and give back."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from itertools import islice

from lean_engine.memory.block_pool import BlockPool, IntegrityError
from lean_engine.memory.budget import num_blocks_for
from lean_engine.memory.prefix_cache import BlockKey, BlockKeys
from lean_engine.scheduling.request import NEVER, Request


class BlockTables:
    """All that changes a request's block_table, block_keys and num_computed_tokens.

    Args:
        pool: whose blocks these are.
        block_size: tokens per block.
        block_keys: makes the keys of the prefix cache; None switches it off.

    Attributes:
        num_blocks: in all block tables, shared ones counted in each.
        num_resident_tokens: computed tokens of all requests that hold blocks.
    """

    def __init__(self, pool: BlockPool, block_size: int, block_keys: BlockKeys | None) -> None:
        self.pool = pool
        self.block_size = block_size
        self.block_keys = block_keys
        self.num_blocks = 0
        self.num_resident_tokens = 0

    @property
    def num_unused_slots(self) -> int:
        """Tokens for which the tables have room beyond those computed; shared blocks are full and count for nothing."""
        return self.num_blocks * self.block_size - self.num_resident_tokens

    def prepare(self, request: Request) -> None:
        """Make the keys of a new request's prompt, once; those it came with are kept."""
        if self.block_keys is not None:
            self.block_keys.extend(request.block_keys, request.token_ids, request.num_prompt_tokens, request.extra_keys)
            request.publish_at = self.block_size

    # -- the prefix cache

    def match(self, request: Request) -> list[int]:
        """The cached blocks that a waiting request could start from."""
        return self.pool.match(islice(request.block_keys, self.num_readable(request)))

    def next_key(self, request: Request, num_hits: int) -> BlockKey | None:
        """The key of the first block that the cache does not hold, if the request could read it from there."""
        return request.block_keys[num_hits] if num_hits < self.num_readable(request) else None

    def num_readable(self, request: Request) -> int:
        """Blocks it may take from the cache: none of those whose logits it still needs, so at least one token less."""
        if not request.reads_cache:
            return 0
        return min(len(request.block_keys), request.first_logit_position // self.block_size)

    def num_common(self, request: Request, leader: Request) -> int:
        """How many blocks a request can share with another, once that has computed its prompt."""
        mine, theirs = request.block_keys, leader.block_keys
        return bisect_left(
            range(min(self.num_readable(request), len(theirs))), True, key=lambda i: mine[i] != theirs[i]
        )

    # -- growing

    def num_missing(self, request: Request, num_tokens: int) -> int:
        """Blocks to add so that the table covers `num_tokens`."""
        return num_blocks_for(num_tokens, self.block_size) - len(request.block_table)

    def num_missing_soon(self, request: Request) -> int:
        """Blocks it lacks for its known tokens and one block of growth, as far as it can grow at all."""
        num_known = max(len(request.token_ids), request.num_computed_tokens + 1)  # with one that is being sampled
        return self.num_missing(request, min(num_known + self.block_size, request.max_total_tokens))

    def start(self, request: Request, hits: list[int], num_tokens: int) -> None:
        """Give a request the cached blocks it starts from and blocks that cover `num_tokens` in all."""
        self.pool.touch(hits)
        request.block_table = hits
        request.num_slots = len(hits) * self.block_size
        request.num_computed_tokens = request.num_slots
        if request.publish_at != NEVER:
            request.publish_at = request.num_computed_tokens + self.block_size
        self.num_blocks += len(hits)
        self.num_resident_tokens += request.num_computed_tokens
        self.extend(request, self.num_missing(request, num_tokens))

    def extend(self, request: Request, num_blocks: int) -> None:
        request.block_table += self.pool.allocate(num_blocks)
        request.num_slots += num_blocks * self.block_size
        self.num_blocks += num_blocks

    def publish(self, request: Request, num_tokens: int) -> None:
        """Let the blocks be found that its first `num_tokens` have filled: computed, known, and at least publish_at."""
        assert self.block_keys is not None
        keys, block_size = request.block_keys, self.block_size
        self.block_keys.extend(keys, request.token_ids, num_tokens, request.extra_keys)
        num_full = num_tokens // block_size
        for i in range(request.publish_at // block_size - 1, num_full):
            self.pool.publish(request.block_table[i], keys[i])
        request.publish_at = (num_full + 1) * block_size

    def give_back(self, request: Request) -> None:
        self.pool.free(request.block_table)
        self.num_blocks -= len(request.block_table)
        self.num_resident_tokens -= request.num_computed_tokens
        request.block_table = []
        request.num_slots = 0

    def check(self, running: Sequence[Request]) -> None:
        """Prove that the tables of all requests that hold blocks agree with the pool and the counters. O(n)."""
        holders = Counter(block_id for request in running for block_id in request.block_table)
        for block_id in range(self.pool.num_blocks):
            if holders[block_id] != self.pool.ref_count(block_id):
                raise IntegrityError(
                    f"block {block_id} is in {holders[block_id]} block tables and has "
                    f"{self.pool.ref_count(block_id)} holders"
                )
        for request in running:
            if request.num_slots != len(request.block_table) * self.block_size:
                raise IntegrityError(f"{request.num_slots} slots were counted: {request!r}")
            if request.num_computed_tokens > request.num_slots:
                raise IntegrityError(f"computed tokens without blocks: {request!r}")
        num_resident = sum(request.num_computed_tokens for request in running)
        if (self.num_blocks, self.num_resident_tokens) != (holders.total(), num_resident):
            raise IntegrityError(
                f"{self.num_blocks} blocks and {self.num_resident_tokens} tokens were counted in block tables, "
                f"there are {holders.total()} and {num_resident}"
            )
