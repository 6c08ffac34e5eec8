"""The block pool: exact ids, exact order, holders, and a check that sees damage."""

from __future__ import annotations

import random

import pytest

from lean_engine.errors import ConfigError
from lean_engine.memory.block_pool import BlockPool, IntegrityError


def free_order(pool: BlockPool) -> list[int]:
    pool.check()
    order = list(pool.free_block_ids())
    assert len(order) == pool.num_free
    return order


def test_new_pool_grants_from_block_1_upwards() -> None:
    pool = BlockPool(6)
    assert free_order(pool) == [1, 2, 3, 4, 5]
    assert pool.allocate(2) == [1, 2]
    assert pool.allocate(1) == [3]
    assert free_order(pool) == [4, 5]


def test_null_block_is_counted_but_never_granted() -> None:
    pool = BlockPool(4)
    assert (pool.num_blocks, pool.num_usable, pool.num_free, pool.num_held) == (4, 3, 3, 0)
    assert 0 not in pool.allocate(3)
    assert (pool.num_free, pool.num_held) == (0, 3)
    assert pool.ref_count(0) == 0


@pytest.mark.parametrize("num_blocks", [1, 0, -1])
def test_pool_without_a_usable_block_is_refused(num_blocks: int) -> None:
    with pytest.raises(ConfigError, match=f"{num_blocks} blocks"):
        BlockPool(num_blocks)


def test_smallest_pool_grants_its_one_block() -> None:
    pool = BlockPool(2)
    assert pool.allocate(1) == [1]
    assert free_order(pool) == []
    pool.free([1])
    assert free_order(pool) == [1]


def test_allocate_is_all_or_nothing() -> None:
    pool = BlockPool(4)
    pool.allocate(1)
    with pytest.raises(IntegrityError, match="3 blocks were asked for, 2 are free"):
        pool.allocate(3)
    assert free_order(pool) == [2, 3]


def test_allocate_nothing_grants_nothing() -> None:
    pool = BlockPool(3)
    assert pool.allocate(0) == []
    assert free_order(pool) == [1, 2]


def test_free_puts_blocks_at_the_head_tail_first() -> None:
    pool = BlockPool(8)
    table = pool.allocate(3)
    pool.free(table)
    assert free_order(pool) == [1, 2, 3, 4, 5, 6, 7], "block 3 went first, block 1 last and so to the head"


def test_blocks_freed_last_are_granted_first() -> None:
    pool = BlockPool(8)
    first, second = pool.allocate(2), pool.allocate(3)
    pool.free(first)
    pool.free(second)
    assert free_order(pool) == [3, 4, 5, 1, 2, 6, 7]
    assert pool.allocate(4) == [3, 4, 5, 1]


def test_untouched_blocks_stay_untouched_while_freed_ones_suffice() -> None:
    pool = BlockPool(100)
    seen = set()
    for _ in range(50):
        table = pool.allocate(3)
        seen |= set(table)
        pool.free(table)
    assert seen == {1, 2, 3}


def test_touch_takes_free_blocks_out_of_the_middle() -> None:
    pool = BlockPool(7)
    pool.touch([3, 5])
    assert free_order(pool) == [1, 2, 4, 6]
    assert (pool.ref_count(3), pool.ref_count(5)) == (1, 1)
    pool.touch([1])
    pool.touch([6])
    assert free_order(pool) == [2, 4], "the head and the tail as well"


def test_shared_block_is_counted_once_and_freed_by_its_last_holder() -> None:
    pool = BlockPool(4)
    table = pool.allocate(2)
    pool.touch(table[:1])
    assert (pool.ref_count(1), pool.num_held) == (2, 2)
    pool.free(table)
    assert free_order(pool) == [2, 3]
    pool.free([1])
    assert free_order(pool) == [1, 2, 3]


@pytest.mark.parametrize("block_id", [0, 2, 4, -1, -3])
def test_freeing_what_nobody_holds_is_an_error(block_id: int) -> None:
    pool = BlockPool(4)
    assert pool.allocate(1) == [1]
    with pytest.raises(IntegrityError, match=f"block {block_id} is freed"):
        pool.free([block_id])
    assert free_order(pool) == [2, 3]


def test_freeing_twice_is_an_error() -> None:
    pool = BlockPool(4)
    table = pool.allocate(1)
    pool.free(table)
    with pytest.raises(IntegrityError, match="block 1 is freed, but nobody holds it"):
        pool.free(table)
    with pytest.raises(IntegrityError, match="block 1"):
        pool.free(pool.allocate(1) * 2)


@pytest.mark.parametrize("block_id", [0, 4, -1])
def test_touching_what_cannot_be_held_is_an_error(block_id: int) -> None:
    pool = BlockPool(4)
    with pytest.raises(IntegrityError, match=f"block {block_id} cannot be held"):
        pool.touch([block_id])
    assert free_order(pool) == [1, 2, 3]


def test_check_sees_a_broken_link() -> None:
    pool = BlockPool(5)
    pool._previous[3] = 1
    with pytest.raises(IntegrityError, match="block 3 does not point back to 2"):
        pool.check()


def test_check_sees_a_lost_block() -> None:
    pool = BlockPool(5)
    pool._next[1], pool._previous[3] = 3, 1
    with pytest.raises(IntegrityError, match="3 blocks in the free list"):
        pool.check()
    pool.num_free -= 1
    with pytest.raises(IntegrityError, match="0 held; together they must be 4"):
        pool.check()
    pool._ref_counts[2] = 1
    pool.check()


def test_check_sees_a_free_block_with_holders() -> None:
    pool = BlockPool(5)
    pool._ref_counts[2] = 1
    with pytest.raises(IntegrityError, match="block 2 is free, but has 1 holders"):
        pool.check()


def test_check_sees_a_wrong_count() -> None:
    pool = BlockPool(5)
    pool.num_free = 3
    with pytest.raises(IntegrityError, match=r"4 blocks in the free list \(3 counted\)"):
        pool.check()


@pytest.mark.parametrize("seed", range(20))
def test_order_follows_a_plain_list_under_random_operations(seed: int) -> None:
    rng = random.Random(seed)
    pool = BlockPool(rng.randint(2, 20))
    order = list(range(1, pool.num_blocks))  # the free list, as a list
    tables: list[list[int]] = []
    for _ in range(200):
        if rng.random() < 0.5 and order:
            n = rng.randint(1, len(order))
            table, order = order[:n], order[n:]
            assert pool.allocate(n) == table
            tables.append(table)
        elif rng.random() < 0.3:
            shared = sorted({rng.randrange(1, pool.num_blocks) for _ in range(3)})
            pool.touch(shared)
            order = [block_id for block_id in order if block_id not in shared]
            tables.append(shared)
        elif tables:
            table = tables.pop(rng.randrange(len(tables)))
            pool.free(table)
            held = {block_id for other in tables for block_id in other}
            order = [block_id for block_id in table if block_id not in held] + order
        assert free_order(pool) == order
        for block_id in range(pool.num_blocks):
            assert pool.ref_count(block_id) == sum(table.count(block_id) for table in tables)


def test_the_most_blocks_ever_held_are_remembered() -> None:
    pool = BlockPool(8)
    first, second = pool.allocate(2), pool.allocate(3)
    pool.free(second)
    pool.touch([first[0], 7])
    assert pool.max_held == 5
    pool.allocate(4)
    assert pool.max_held == 7


# -- what is cached


def hold(pool: BlockPool, *keys: str) -> list[int]:
    """Blocks published under these keys, with one holder."""
    block_ids = pool.allocate(len(keys))
    for block_id, key in zip(block_ids, keys, strict=True):
        assert pool.publish(block_id, key)
    return block_ids


def test_published_blocks_are_found_as_far_as_the_prefix_goes() -> None:
    pool = BlockPool(6)
    a, b, _ = hold(pool, "a", "b", "c")
    assert pool.match(["a", "b"]) == [a, b]
    assert pool.match(["a", "x", "c"]) == [a], "nothing after a gap"
    assert pool.match(["x", "a"]) == []


def test_cached_blocks_are_found_after_they_are_freed_and_leave_the_middle_of_the_free_list() -> None:
    pool = BlockPool(8)
    a, b, c = hold(pool, "a", "b", "c")
    pool.free([a, b, c])
    assert free_order(pool) == [4, 5, 6, 7, c, b, a], "empty ones first, then the end of the chain"
    assert (pool.num_empty, pool.num_cached, pool.num_held) == (4, 3, 0)
    pool.touch(pool.match(["a", "b"]))
    assert free_order(pool) == [4, 5, 6, 7, c]
    assert (pool.num_empty, pool.num_cached, pool.num_held) == (4, 1, 2)
    pool.check()


def test_blocks_with_nothing_in_them_are_granted_before_cached_ones() -> None:
    pool = BlockPool(6)
    a = hold(pool, "a")
    plain = pool.allocate(2)
    pool.free(a)
    pool.free(plain)
    assert free_order(pool) == [2, 3, 4, 5, 1]
    assert pool.allocate(4) == [2, 3, 4, 5]
    assert pool.match(["a"]) == [1]
    assert pool.num_evictions == 0


def test_least_recently_used_are_evicted_first() -> None:
    pool = BlockPool(5)
    old, new = hold(pool, "old1", "old2"), hold(pool, "new1", "new2")
    pool.free(old)
    pool.free(new)
    pool.touch(pool.match(["old1", "old2"]))
    pool.free(old)
    assert free_order(pool) == [new[1], new[0], old[1], old[0]]
    assert pool.allocate(1) == [new[1]]
    assert (pool.num_evictions, pool.num_cached) == (1, 3)
    assert pool.match(["new1", "new2"]) == [new[0]]
    pool.check()


def test_block_shared_by_two_is_free_when_the_second_lets_go() -> None:
    pool = BlockPool(4)
    (a,) = hold(pool, "a")
    pool.touch([a])
    pool.free([a])
    assert (pool.num_held, pool.num_cached) == (1, 0)
    pool.free([a])
    assert (pool.num_held, pool.num_cached) == (0, 1)


def test_second_block_of_the_same_content_stays_unpublished() -> None:
    pool = BlockPool(5)
    (a,) = hold(pool, "a")
    (twin,) = pool.allocate(1)
    assert not pool.publish(twin, "a")
    assert pool.match(["a"]) == [a]
    pool.free([twin])
    assert free_order(pool)[0] == twin, "worth nothing: used again first"
    pool.check()


def test_free_block_gives_its_key_to_a_held_one_of_the_same_content() -> None:
    """It would be evicted first, and what hangs on the held one would not be found any more."""
    pool = BlockPool(5)
    pool.free(hold(pool, "a"))
    twin = pool.allocate(1)[0]
    assert free_order(pool) == [3, 4, 1]
    assert pool.publish(twin, "a")
    assert pool.match(["a"]) == [twin]
    assert free_order(pool) == [1, 3, 4], "empty now"
    assert (pool.num_empty, pool.num_cached, pool.num_held) == (3, 0, 1)
    assert pool.num_evictions == 0
    pool.check()


@pytest.mark.parametrize("state", ["free", "published"])
def test_only_a_held_block_can_be_published_and_once(state: str) -> None:
    pool = BlockPool(4)
    (a,) = hold(pool, "a")
    if state == "free":
        pool.free([a])
    with pytest.raises(IntegrityError, match="block 1 is published"):
        pool.publish(a, "b")


def test_forget_leaves_held_blocks_to_their_holders() -> None:
    pool = BlockPool(5)
    kept, freed = hold(pool, "a"), hold(pool, "b")
    pool.free(freed)
    pool.forget()
    pool.check()
    assert pool.match(["a"]) == pool.match(["b"]) == []
    assert (pool.num_held, pool.num_cached, pool.num_empty) == (1, 0, 3)
    pool.free(kept)
    assert pool.num_empty == 4
    assert pool.num_evictions == 0


def test_lifetime_and_idle_time_are_those_of_contents() -> None:
    pool = BlockPool(3)
    (cached,) = hold(pool, "a")
    (plain,) = pool.allocate(1)
    pool.now = 2.0
    pool.free([plain])  # lived 2
    pool.free([cached])
    pool.now = 5.0
    pool.touch([cached])
    pool.now = 6.0
    pool.free([cached])
    pool.now = 10.0
    pool.allocate(2)  # evicts: lived 10, idle 4
    assert (pool.lifetime.count, pool.lifetime.sum) == (2, 12.0)
    assert (pool.idle_before_evict.count, pool.idle_before_evict.sum) == (1, 4.0)


def test_check_sees_a_key_without_its_block() -> None:
    pool = BlockPool(4)
    (a,) = hold(pool, "a")
    pool._keys[a] = None
    with pytest.raises(IntegrityError, match="0 blocks have a key, 1 keys are published"):
        pool.check()


def test_check_sees_a_wrong_count_of_cached_blocks() -> None:
    pool = BlockPool(4)
    pool.free(hold(pool, "a"))
    pool.num_cached = 0
    with pytest.raises(IntegrityError, match="1 free blocks are cached, 0 were counted"):
        pool.check()
