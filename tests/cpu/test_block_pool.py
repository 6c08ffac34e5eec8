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
    pool._blocks[3].prev = pool._blocks[1]
    with pytest.raises(IntegrityError, match="block 3 does not point back to 2"):
        pool.check()


def test_check_sees_a_lost_block() -> None:
    pool = BlockPool(5)
    first, lost, third = pool._blocks[1:4]
    first.next, third.prev = third, first
    with pytest.raises(IntegrityError, match="3 blocks in the free list"):
        pool.check()
    pool.num_free -= 1
    with pytest.raises(IntegrityError, match="0 held; together they must be 4"):
        pool.check()
    lost.ref_count = 1
    pool.check()


def test_check_sees_a_free_block_with_holders() -> None:
    pool = BlockPool(5)
    pool._blocks[2].ref_count = 1
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
