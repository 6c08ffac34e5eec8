"""Keys of the prefix cache: equal exactly where tokens, everything before them, and the extra keys are."""

from __future__ import annotations

import random
from itertools import product

import pytest

from lean_engine.config import HASH_ALGORITHMS
from lean_engine.errors import ConfigError
from lean_engine.memory.prefix_cache import BlockKey, BlockKeys, ExtraKey, ExtraKeys


def keys_of(maker: BlockKeys, token_ids: list[int], extra_keys: ExtraKeys = ()) -> list[BlockKey]:
    keys: list[BlockKey] = []
    maker.extend(keys, token_ids, len(token_ids), extra_keys)
    return keys


@pytest.fixture(params=[*HASH_ALGORITHMS, "constant"])
def maker(request: pytest.FixtureRequest) -> BlockKeys:
    """For blocks of 4 tokens."""
    if request.param == "constant":
        return BlockKeys(4, "builtin", lambda _: 7)
    return BlockKeys(4, request.param)


def test_there_is_a_key_for_each_full_block(maker: BlockKeys) -> None:
    assert [len(keys_of(maker, list(range(n)))) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]


def test_equal_prefixes_have_equal_keys_up_to_where_they_differ(maker: BlockKeys) -> None:
    first = keys_of(maker, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
    second = keys_of(maker, [1, 2, 3, 4, 5, 6, 7, 9, 9, 10, 11, 12])
    assert first == keys_of(maker, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
    assert [a == b for a, b in zip(first, second, strict=True)] == [True, False, False], "a key holds all before it"
    assert {first[0]: "found"}[second[0]] == "found"


def test_same_tokens_at_another_place_are_another_block(maker: BlockKeys) -> None:
    first, second = keys_of(maker, [1, 2, 3, 4, 1, 2, 3, 4])
    assert first != second


def test_keys_grow_with_a_request_and_are_made_once(maker: BlockKeys) -> None:
    tokens = list(range(20))
    keys: list[BlockKey] = []
    made: list[BlockKey] = []
    for num_tokens in range(21):
        maker.extend(keys, tokens, num_tokens, ())
        assert len(keys) == num_tokens // 4
        assert all(key is old for key, old in zip(keys, made, strict=False))
        made = list(keys)
    assert keys == keys_of(maker, tokens)


def test_extra_keys_count_by_kind_and_value(maker: BlockKeys) -> None:
    """An adapter X and a salt X are different things, and so is an adapter that was loaded anew under its old name."""
    extras: list[ExtraKeys] = [
        (),
        (ExtraKey("salt", "X"),),
        (ExtraKey("lora", "X"),),
        (ExtraKey("lora", "X@2"),),
        (ExtraKey("lora", "X"), ExtraKey("salt", "X")),
        (ExtraKey("salt", "lora"), ExtraKey("lora", "salt")),
        (ExtraKey("salt", "lora"), ExtraKey("lora", "salt"), ExtraKey("mm", "")),
    ]
    tokens = list(range(8))
    for (i, a), (j, b) in product(enumerate(extras), repeat=2):
        same = [x == y for x, y in zip(keys_of(maker, tokens, a), keys_of(maker, tokens, b), strict=True)]
        assert same == [i == j] * 2, (a, b)


def test_order_of_extra_keys_does_not_count(maker: BlockKeys) -> None:
    salt, lora = ExtraKey("salt", "a"), ExtraKey("lora", "b")
    assert keys_of(maker, [1, 2, 3, 4], (salt, lora)) == keys_of(maker, [1, 2, 3, 4], (lora, salt))


def test_extra_key_counts_from_its_position_on(maker: BlockKeys) -> None:
    tokens = list(range(12))
    plain, picture = keys_of(maker, tokens), keys_of(maker, tokens, (ExtraKey("mm", "cat", position=5),))
    assert [a == b for a, b in zip(plain, picture, strict=True)] == [True, False, False]
    moved = keys_of(maker, tokens, (ExtraKey("mm", "cat", position=9),))
    assert picture[1] != moved[1]
    assert picture[2] != moved[2]


def test_random_prefixes_agree_with_their_content(maker: BlockKeys) -> None:
    rng = random.Random(1)
    content: dict[BlockKey, tuple[int, ...]] = {}
    for _ in range(200):
        tokens = [rng.randrange(2) for _ in range(16)]
        for place, key in enumerate(keys_of(maker, tokens), 1):
            assert content.setdefault(key, tuple(tokens[: 4 * place])) == tuple(tokens[: 4 * place])


def test_comparing_long_chains_costs_no_more_than_two_blocks_once_they_were_compared() -> None:
    maker = BlockKeys(1, "builtin")
    first, second = keys_of(maker, list(range(3000))), keys_of(maker, list(range(3000)))
    found = dict.fromkeys(first, True)
    assert all(key in found for key in second)  # in order, as a lookup does
    assert all(a.parent is b.parent for a, b in zip(first[2:], second[2:], strict=True))  # type: ignore[attr-defined]


def test_key_is_equal_to_no_other_kind_of_thing() -> None:
    key = keys_of(BlockKeys(2, "builtin"), [1, 2])[0]
    assert key != hash(key)
    assert keys_of(BlockKeys(2, "sha256"), [1, 2])[0] != key


def test_unknown_algorithm_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="prefix_caching_hash_algo is 'md5', must be one of: sha256, builtin"):
        BlockKeys(4, "md5")
