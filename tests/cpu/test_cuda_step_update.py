"""Slots of requests on the emulated device: many steps beside the host's own bookkeeping, admission, reuse, limits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from cuda_kernel_running import ORDERS, Array, GuardedMemory
from cuda_sampling_running import EOS, Answer, DeviceSampler, ask, run_calls, sample_on_cpu

from lean_engine.engine.device_sampling import sample_result
from lean_engine.errors import LaunchError
from lean_engine.runtime.cuda.sampling import (
    ENDED_BY_EOS,
    ENDED_BY_LENGTH,
    ENDED_BY_STOP_ID,
    HISTORY_TOKENS,
    IS_NAN,
    MAX_SEEN_COUNT,
    NO_SLOT,
    NO_TOKEN,
    RUNNING,
    SKIPPED,
    SLOT_PARAMS,
    SLOT_STATE,
    SamplingKind,
    SamplingSizes,
    decodes_call,
    start_record,
)
from lean_engine.scheduling.request import Request

VOCAB_SIZE = 13
BLOCK_SIZE = 4
MAX_BLOCKS = 12
POISON = -1


def logits_of(num_rows: int, seed: int, vocab_size: int = VOCAB_SIZE) -> Array:
    return np.random.default_rng(seed).normal(0, 2, (num_rows, vocab_size)).astype(np.float32)


class Host:
    """A request as the scheduler and the CPU's sampler keep it."""

    def __init__(self, answer: Answer) -> None:
        params = answer.params
        self.answer = answer
        self.request = Request(
            "r",
            answer.prompt,
            max_tokens=1000,
            min_tokens=params.min_tokens,
            eos_token_ids=frozenset() if params.ignore_eos else frozenset(answer.eos),
            stop_token_ids=frozenset(params.stop_token_ids),
        )
        self.request.max_total_tokens = answer.max_total_tokens
        self.request.append(answer.output)

    def sample(self, row: Array) -> tuple[int, int]:
        """The token and outcome that the device should report."""
        if self.request.finish_reason is not None:
            return NO_TOKEN, SKIPPED
        self.answer.output = self.request.output_token_ids
        (token,) = sample_on_cpu(row[None], [self.answer]).token_ids
        self.answer.state.accept(token)
        self.request.append([token])
        return token, self.outcome()

    def outcome(self) -> int:
        if self.request.finish_reason == "length":
            return ENDED_BY_LENGTH
        if self.request.finish_reason == "stop":
            return ENDED_BY_EOS if self.request.stop_reason is None else ENDED_BY_STOP_ID
        return RUNNING


def requests() -> list[Answer]:
    """Of every kind, to be run for thirty steps."""
    long: dict[str, Any] = {"max_tokens": 100, "ignore_eos": True}
    return [
        ask([1, 2, 3], temperature=0, **long),
        ask([4], seed=1, frequency_penalty=0.9, presence_penalty=0.2, **long),
        ask([4, 4, 5], seed=2, repetition_penalty=1.4, top_p=0.9, **long),
        ask([1] * 9, seed=3, bad_words=[(4, 5), (6,), (1, 2, 3), (7, 7), (8, 9)], **long),
        ask([5, 6], seed=4, min_tokens=8, stop_token_ids=[3, 4, 5, 6, 7], max_tokens=100),
        ask([5, 6], seed=5, stop_token_ids=[2, 9], max_tokens=100),  # 2 is eos too
        ask([5, 6], seed=6, max_total_tokens=9, **long),
        ask([5, 6], seed=7, max_total_tokens=3, **long),
        ask([5], seed=8, logit_bias={2: 100.0}, min_tokens=6, max_total_tokens=7, temperature=0),  # eos and length
        ask([5], seed=9, allowed_token_ids=[1, 2, 3, 11], top_k=3, repetition_penalty=0.9, max_tokens=100),
        ask([5], [7, 8], seed=10, top_k=4, logprobs=2, **long),
    ]


class Inputs:
    """The device arrays that write_decodes fills, poisoned before each step."""

    def __init__(self, memory: GuardedMemory, num_slots: int) -> None:
        tables = np.random.default_rng(0).permutation(np.arange(1, 1 + num_slots * MAX_BLOCKS))
        self.tables = tables.reshape(num_slots, MAX_BLOCKS).astype(np.int32)  # of each slot
        names = ("input_ids", "positions", "slot_mapping", "seq_lens")
        self.arrays = {name: memory.allocate((num_slots + 2,), "int32") for name in names}
        self.arrays["block_tables"] = memory.allocate((num_slots + 2, MAX_BLOCKS), "int32")

    def write(self, device: DeviceSampler, slots: list[int], order: tuple[int, int]) -> list[list[int]]:
        """The four arrays' beginnings, after the decodes of these slots."""
        for array in self.arrays.values():
            array[...] = POISON
        for t, slot in enumerate(slots):
            if slot != NO_SLOT:
                self.arrays["block_tables"][t] = self.tables[slot]
        device.arrays.decode_slots[: len(slots)] = slots
        run_calls([decodes_call(device.arrays, self.arrays, len(slots), BLOCK_SIZE)], *order)
        device.memory.assert_guards_are_whole()
        written = [array for name, array in self.arrays.items() if name != "block_tables"]
        assert all((array[len(slots) :] == POISON).all() for array in written)
        return [array[: len(slots)].tolist() for array in written]

    def expected(self, host: Host | None, slot: int) -> tuple[int, int, int, int]:
        if host is None:
            return (POISON,) * 4
        if host.request.finish_reason is not None:
            return 0, 0, NO_SLOT, 0
        tokens = host.request.token_ids
        position = len(tokens) - 1
        block = int(self.tables[slot, position // BLOCK_SIZE])
        return tokens[-1], position, block * BLOCK_SIZE + position % BLOCK_SIZE, len(tokens)


def state_of(device: DeviceSampler, slot: int) -> Any:
    return device.arrays.states[slot].view(SLOT_STATE)[0]


@pytest.mark.parametrize("order", ORDERS)
def test_thirty_steps_beside_the_host(order: tuple[int, int]) -> None:
    answers = requests()
    device = DeviceSampler(VOCAB_SIZE, answers)
    hosts = dict(zip(device.slots, map(Host, answers), strict=True))
    inputs = Inputs(device.memory, device.sizes.num_slots)
    shuffle = np.random.default_rng(2)
    outcomes = set()
    slots = list(device.slots)
    for step in range(30):
        shuffle.shuffle(slots)
        device.place_rows(slots)
        logits = logits_of(len(slots), step)
        expected = [
            (NO_TOKEN, SKIPPED) if slot == NO_SLOT else hosts[slot].sample(row)
            for slot, row in zip(slots, logits, strict=True)
        ]
        assert device.step(device.place(logits, "float32"), *order) == expected
        outcomes |= {outcome for _, outcome in expected}
        # As when a step was launched ahead, what has just ended is among the decodes once more; then its row is free.
        shuffle.shuffle(slots)
        wanted = [inputs.expected(hosts.get(slot), slot) for slot in slots]
        assert list(zip(*inputs.write(device, slots, order), strict=True)) == wanted
        has_ended = {
            slot for slot, (_, outcome) in zip(device.arrays.row_slots, expected, strict=False) if outcome == SKIPPED
        }
        slots = [NO_SLOT if slot in has_ended else slot for slot in slots]
    assert outcomes == {RUNNING, ENDED_BY_EOS, ENDED_BY_STOP_ID, ENDED_BY_LENGTH, SKIPPED}
    assert sum(host.request.finish_reason is None for host in hosts.values()) == 5
    for slot, host in hosts.items():
        latest = host.request.output_token_ids[-HISTORY_TOKENS:]
        assert state_of(device, slot)["history"][-len(latest) :].tolist() == latest
        assert state_of(device, slot)["num_tokens"] == len(host.request.token_ids)


def test_request_restarted_in_another_slot_goes_on_with_the_same_tokens() -> None:
    options: dict[str, Any] = {"frequency_penalty": 0.7, "min_tokens": 12, "max_tokens": 100, "ignore_eos": True}
    words = [(4, 5), tuple(range(5))]
    whole = ask([3, 3, 1], bad_words=words, **options)
    device = DeviceSampler(VOCAB_SIZE, [whole])
    logits = [device.place(logits_of(1, step), "float32") for step in range(14)]
    tokens = [device.step(row)[0][0] for row in logits]
    restarted = DeviceSampler(VOCAB_SIZE, [ask([1]), ask([3, 3, 1], tokens[:7], bad_words=words, **options)])
    restarted.place_rows([restarted.slots[1]])
    assert [restarted.step(row)[0][0] for row in logits[7:]] == tokens[7:]


def test_slot_taken_again_remembers_nothing() -> None:
    first = ask(
        [1, 2, 3], [5, 5], repetition_penalty=2.0, allowed_token_ids=[1, 5], logit_bias={5: 9.0}, bad_words=[(5, 1)]
    )
    device = DeviceSampler(VOCAB_SIZE, [first])
    logits = device.place(logits_of(1, 0), "float32")
    device.step(logits)
    for second in (ask([2]), ask([2], [4], frequency_penalty=0.5), ask([2], allowed_token_ids=[3, 4, 12])):
        device.answers = [second]
        device.start([second.setup()])
        assert [token for token, _ in device.step(logits)] == sample_on_cpu(logits, [second]).token_ids


def test_damaged_row_ends_its_request_and_changes_nothing_else() -> None:
    device = DeviceSampler(VOCAB_SIZE, [ask(frequency_penalty=1.0), ask(seed=8)])
    before = device.arrays.seen.copy()
    logits = device.place(logits_of(2, 0), "float32")
    logits[0, 3] = np.nan
    (token, outcome), (_, other) = device.step(logits)
    assert (token, outcome, other) == (NO_TOKEN, IS_NAN, RUNNING)
    assert "NaN" in str(sample_result(device.arrays.results[:2], [None, None]).errors[0])
    assert np.array_equal(device.arrays.seen, before)
    logits[0, 3] = 0
    assert device.step(logits)[0] == (NO_TOKEN, SKIPPED)


def test_rows_without_a_slot_are_left_alone() -> None:
    device = DeviceSampler(VOCAB_SIZE, [ask(logprobs=2), ask(seed=3, top_p=0.5, logprobs=2)], num_rows=5)
    logits = device.place(logits_of(5, 1), "float32")
    logits[[0, 2, 4]] = np.nan
    device.place_rows([NO_SLOT, device.slots[1], NO_SLOT, device.slots[0], NO_SLOT])
    found = device.step(logits, 7, 20)
    assert [found[row] for row in (0, 2, 4)] == [(NO_TOKEN, SKIPPED)] * 3
    expected = sample_on_cpu(logits[[1, 3]], device.answers[::-1])
    assert [found[1][0], found[3][0]] == expected.token_ids
    assert (device.arrays.logprob_ids[[0, 2, 4]] == NO_TOKEN).all()


def test_count_of_a_token_stops_at_the_last_that_16_bits_hold() -> None:
    device = DeviceSampler(8, [ask([3], frequency_penalty=-1.0, temperature=0)])
    slot = device.slots[0]
    device.arrays.seen[slot, 5] = MAX_SEEN_COUNT
    logits = device.place(np.zeros((1, 8)), "float32")
    counts = []
    for _ in range(3):
        assert device.step(logits)[0][0] == 5
        counts.append(int(device.arrays.seen[slot, 5]))
    assert counts == [MAX_SEEN_COUNT + 1] * 3
    assert device.arrays.seen[slot].tolist() == [0, 0, 0, 1, 0, counts[0], 0, 0]


def test_history_is_the_end_of_the_output() -> None:
    output = [token % 7 for token in range(HISTORY_TOKENS + 5)]
    device = DeviceSampler(8, [ask([6, 6], output), ask([6, 6], [1, 2])])
    long, short = (state_of(device, slot)["history"].tolist() for slot in device.slots)
    assert long == output[-HISTORY_TOKENS:]
    assert short == [0] * (HISTORY_TOKENS - 2) + [1, 2]


def test_longest_bad_word_is_seen_in_the_history() -> None:
    output = [token % 5 for token in range(HISTORY_TOKENS + 3)]
    logits = np.zeros((2, 8), np.float32)
    word = (*output[-HISTORY_TOKENS:], 0)
    other = (*output[-HISTORY_TOKENS + 1 :], 1, 0)
    answers = [ask([6], output, temperature=0, bad_words=[w]) for w in (word, other)]
    device = DeviceSampler(8, answers)
    assert [token for token, _ in device.step(device.place(logits, "float32"))] == [1, 0]


# ---- what the host says and asks


def test_layouts_have_the_sizes_of_the_kernels_structures() -> None:
    assert (SLOT_PARAMS.itemsize, SLOT_STATE.itemsize) == (96, 144)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (ask(logprobs=21), "logprobs is 21, on the device at most 20"),
        (ask(logprobs=-1), "logprobs is -1, on the device at most 20"),
        (ask(bad_words=[(1,) * 34]), "a bad word has 34 tokens, on the device at most 33"),
        (
            ask(logit_bias=dict.fromkeys(range(70), 1.0)),
            "biases, bad words and stop token ids take 281 words, on the device at most 256",
        ),
        (ask(logprobs=20, bad_words=[(1,) * 33], logit_bias=dict.fromkeys(range(50), 1.0)), None),
    ],
)
def test_what_the_device_leaves_to_the_host(answer: Answer, expected: str | None) -> None:
    assert answer.setup().limit(list_words=256) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"temperature": 0, "top_k": 5}, SamplingKind()),
        ({}, SamplingKind(draws=True)),
        ({"min_p": 0.5}, SamplingKind(draws=True)),
        ({"top_k": 5}, SamplingKind(draws=True, cuts=True)),
        ({"top_p": 0.5, "logprobs": 0}, SamplingKind(draws=True, cuts=True, logprobs=True)),
    ],
)
def test_kind_of_a_request(options: dict[str, Any], expected: SamplingKind) -> None:
    assert ask(**options).setup().kind() == expected


def test_record_of_a_plain_request_is_short() -> None:
    record = start_record(ask(list(range(1000)), max_tokens=5).setup(), slot=3, vocab_size=2000)
    assert len(record) == 4 + 24 + 36 + len(EOS)


def test_memory_for_256_requests_of_a_large_vocabulary() -> None:
    assert SamplingSizes(128_256, 256, 256).num_bytes() < 80e6


def test_vocabulary_beyond_the_fixed_point_is_refused() -> None:
    with pytest.raises(LaunchError, match="the vocabulary has 1048576 tokens, sampling on a GPU takes at most 1048575"):
        SamplingSizes(2**20, 1, 1)
