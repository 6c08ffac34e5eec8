"""Occupancy in closed form against the lives of requests played step by step, and against what the scheduler holds."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lean_engine.memory.block_pool import BlockPool
from lean_engine.memory.budget import num_blocks_for
from lean_engine.memory.capacity import Occupancy, RequestShape, blocks_up_to, contiguous, paged
from lean_engine.scheduling.request import Request
from lean_engine.scheduling.scheduler import Scheduler

lengths = st.integers(1, 70)
shapes = st.lists(st.builds(RequestShape, lengths, lengths), min_size=1, max_size=4)
block_sizes = st.integers(1, 40)


def life(shape: RequestShape) -> Iterator[int]:
    """Tokens in the cache, step by step: the prompt when the first token is sampled, then one more each time."""
    num_tokens = shape.prompt_len
    for _ in range(shape.output_len):
        yield num_tokens
        num_tokens += 1


def by_simulation(many: list[RequestShape], num_slots: int, unit: int, slab: int | None) -> Occupancy:
    """Every request at every step of its life once; unit: slots that are granted together; slab: None = as needed."""

    def held(num_tokens: int) -> int:
        return slab or num_blocks_for(num_tokens, unit) * unit

    now = [n for shape in many for n in life(shape)]
    last = [list(life(shape))[-1] for shape in many for _ in life(shape)]
    slots_now, slots_last = sum(map(held, now)), sum(map(held, last))
    return Occupancy(
        num_requests=int(num_slots / Fraction(slots_last, len(last))),
        num_requests_mean=int(num_slots / Fraction(slots_now, len(now))),
        waste_ratio=float(1 - Fraction(sum(last), slots_last)),
        waste_ratio_mean=float(1 - Fraction(sum(now), slots_now)),
    )


@given(shapes, st.integers(0, 500), block_sizes)
def test_paged_is_what_a_simulation_of_every_step_finds(
    many: list[RequestShape], num_blocks: int, block_size: int
) -> None:
    assert paged(many, num_blocks, block_size) == by_simulation(many, num_blocks * block_size, block_size, None)


@given(shapes, st.integers(0, 5000), st.integers(139, 400))
def test_contiguous_is_what_a_simulation_of_every_step_finds(
    many: list[RequestShape], num_tokens: int, max_model_len: int
) -> None:
    assert contiguous(many, num_tokens, max_model_len) == by_simulation(many, num_tokens, 1, max_model_len)


@given(st.integers(0, 300), block_sizes)
def test_sum_of_blocks_in_closed_form(num_tokens: int, block_size: int) -> None:
    assert blocks_up_to(num_tokens, block_size) == sum(num_blocks_for(n, block_size) for n in range(num_tokens + 1))


@pytest.mark.parametrize(
    ("prompt_len", "output_len"), [(1, 1), (4, 1), (5, 1), (3, 2), (4, 5), (7, 6), (8, 9), (2, 30)]
)
def test_tokens_and_blocks_are_those_that_the_scheduler_holds(prompt_len: int, output_len: int) -> None:
    scheduler = Scheduler(
        BlockPool(100),
        block_size=4,
        max_model_len=64,
        max_num_seqs=1,
        max_num_batched_tokens=64,
        max_num_logit_rows=1,
    )
    request = Request("a", [1] * prompt_len, max_tokens=output_len)
    scheduler.add(request)
    tokens, blocks = [], []
    while plan := scheduler.plan():
        tokens.append(plan.scheduled[0].start + plan.scheduled[0].num_tokens)
        blocks.append(len(request.block_table))
        scheduler.apply(plan, [[1]], 0.0)
    shape = RequestShape(prompt_len, output_len)
    assert tokens == list(life(shape))
    assert (shape.num_steps, shape.max_num_tokens, shape.num_token_steps) == (len(tokens), tokens[-1], sum(tokens))
    assert shape.num_block_steps(4) == sum(blocks)


def test_a_request_that_fills_its_slab_wastes_nothing_in_its_last_step() -> None:
    full = contiguous([RequestShape(9, 8)], num_tokens=33, max_model_len=16)
    assert (full.num_requests, full.waste_ratio) == (2, 0.0)
    assert full.waste_ratio_mean == 1 - (9 + 16) / 2 / 16  # it fills up evenly from 9 to 16


def test_blocks_of_one_token_waste_nothing() -> None:
    exact = paged([RequestShape(5, 3), RequestShape(1, 20)], num_blocks=100, block_size=1)
    assert (exact.waste_ratio, exact.waste_ratio_mean) == (0.0, 0.0)


def test_a_longer_life_counts_for_more() -> None:
    short, long = RequestShape(16, 1), RequestShape(1, 16)  # both reach 16 tokens
    mixed = paged([short, long], num_blocks=170, block_size=16)
    assert mixed.waste_ratio_mean == 1 - (16 * 1 + sum(range(1, 17))) / (17 * 16)
    assert mixed.waste_ratio == 0.0


def test_smaller_blocks_hold_at_least_as_many_requests_of_the_published_example() -> None:
    shape = [RequestShape(200, 300)]
    means = [paged(shape, 16384 // s, s).num_requests_mean for s in (8, 16, 32, 64, 128, 256)]
    assert means == sorted(means, reverse=True)
    assert means[0] > means[-1]
