"""Compiled forms and their masks, on small real vocabularies of each kind and on one of plain bytes.

One file, though long: its tests share those vocabularies, which take a moment to make.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_gguf_tokenizer import metadata_of

from lean_engine.errors import RequestError
from lean_engine.sampling.constraints import NOTHING_LEFT
from lean_engine.sampling.grammar import MAX_CACHED, GrammarCompiler, Matcher, WordArray, exclude, fill_masks
from lean_engine.sampling.grammar_trial import TrialProcess
from lean_engine.sampling.params import SamplingParams
from lean_engine.sampling.sampler import Sampler, SampleResult, SamplingState
from lean_engine.sampling.structured_outputs import StructuredOutputsParams
from lean_engine.sampling.vocabulary import exact_encoder
from lean_engine.text.tokenizer import Tokenizer

TINY = Path(__file__).resolve().parents[1] / "data" / "tiny"
BYTE_LEVEL, PREFIXED, GEMMA = (
    Tokenizer.from_directory(TINY / name) for name in ("llama-gqa-tied", "mistral-swa", "gemma3")
)
GGUF = Tokenizer.from_gguf(metadata_of("phi3", "llama") | {"tokenizer.ggml.add_space_prefix": True})
TOKENIZERS = {"byte-level": BYTE_LEVEL, "SentencePiece with a prefix": PREFIXED, "SentencePiece": GEMMA, "GGUF": GGUF}
EOS, START, END = 256, 257, 258  # of ByteVocabulary
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


class ByteVocabulary:
    """Ids 0 to 255 are bytes; then come the end of text, <think> and </think>."""

    special_ids = frozenset({EOS})
    tags = {START: "<think>", END: "</think>"}  # noqa: RUF012

    def token_bytes(self, token_id: int) -> bytes:
        if token_id < 256:
            return bytes([token_id])
        return self.tags.get(token_id, "<eos>" if token_id == EOS else "").encode()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        found = [token_id for token_id, tag in self.tags.items() if tag == text]
        return found or list(text.encode())


def matcher_of(vocab_size: int = 259, **form: Any) -> Matcher:
    return GrammarCompiler(ByteVocabulary(), vocab_size, {EOS}).compile(StructuredOutputsParams(**form)).matcher()


def allowed(mask: WordArray) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist()


def accepts(text: str, **form: Any) -> bool:
    """Whether the form allows exactly this text."""
    matcher = matcher_of(**form)
    for byte in text.encode():
        if byte not in allowed(matcher.mask()):
            return False
        matcher.accept(byte)
    return EOS in allowed(matcher.mask())


# -- masks


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
def test_a_text_of_the_form_is_allowed_token_by_token_and_then_only_its_end(tokenizer: Tokenizer) -> None:
    vocab_size = tokenizer.vocab_size + 37
    eos = tokenizer.eos_token_id
    assert eos is not None
    matcher = GrammarCompiler(tokenizer, vocab_size, {eos}).compile(StructuredOutputsParams(json=SCHEMA)).matcher()
    table = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
    for token_id in exact_encoder(tokenizer, table, tokenizer.special_ids)('{"name": "Bob 漢 <s>\\n", "age": 12}'):
        mask = matcher.mask()
        assert mask.shape == ((vocab_size + 31) // 32,)
        ids = allowed(mask)
        assert token_id in ids
        assert not matcher.is_done
        assert max(ids) < tokenizer.vocab_size
        assert not {*ids} & tokenizer.special_ids
        matcher.accept(token_id)
    assert allowed(matcher.mask()) == [eos]
    assert matcher.is_done
    assert matcher.error is None


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
@pytest.mark.parametrize("wanted", ["x</s>y", "<|im_end|>", "<eos>", "é漢 <0x0A>\n"])
def test_a_special_tokens_spelling_is_written_in_plain_tokens(tokenizer: Tokenizer, wanted: str) -> None:
    eos = tokenizer.eos_token_id
    assert eos is not None
    spelled = wanted.replace("</s>", tokenizer.eos_token or "</s>")
    grammar = GrammarCompiler(tokenizer, 512, {eos}).compile(StructuredOutputsParams(json={"const": spelled}))
    for pick in (0, -1):
        matcher, written = grammar.matcher(), b""
        while not matcher.is_done:
            token_id = allowed(matcher.mask())[pick]
            matcher.accept(token_id)
            written += b"" if token_id == eos else tokenizer.token_bytes(token_id)
            assert len(written) < 100
        assert matcher.error is None
        assert json.loads(written) == spelled


@pytest.mark.parametrize("tokenizer", TOKENIZERS.values(), ids=TOKENIZERS)
@settings(max_examples=40)
@given(text=st.text(max_size=20) | st.sampled_from(["\n", "\n a", "<s></s>", "▁", " a", "a ", "\ud800"]))
def test_the_encoding_of_forced_text_is_exact(tokenizer: Tokenizer, text: str) -> None:
    tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
    ids = exact_encoder(tokenizer, tokens, tokenizer.special_ids)(text)
    assert b"".join(tokens[i] for i in ids) == text.encode("utf-8", "replace")
    assert not {*ids} & tokenizer.special_ids


def test_ids_that_end_an_answer_stand_for_no_text() -> None:
    matcher = (
        GrammarCompiler(ByteVocabulary(), 259, {ord("b"), EOS})
        .compile(StructuredOutputsParams(regex="[a-c]"))
        .matcher()
    )
    assert allowed(matcher.mask()) == [ord("a"), ord("c")]
    matcher.accept(ord("a"))
    assert allowed(matcher.mask()) == [ord("b"), EOS]
    assert matcher.is_done


def test_masks_computed_together_are_those_computed_apart() -> None:
    grammar = GrammarCompiler(ByteVocabulary(), 300, {EOS}).compile(StructuredOutputsParams(json=SCHEMA))
    matchers = [grammar.matcher() for _ in range(9)]
    for count, matcher in enumerate(matchers):
        for byte in b'{"name":"'[:count]:
            matcher.accept(byte)
    words = np.full((9, 10), 0xFFFFFFFF, dtype=np.uint32)
    fill_masks(matchers, words)
    for matcher, row in zip(matchers, words, strict=True):
        assert allowed(row) == allowed(matcher.mask())
    assert allowed(words[0]) == [ord("{")]
    assert not (words[:, 9] >> 12).any()  # no bit from id 300 on


def test_exclude_leaves_the_logits_whose_bit_is_set() -> None:
    for size in (1, 31, 32, 33, 100):
        rng = np.random.default_rng(size)
        words = rng.integers(0, 2**32, (size + 31) // 32, dtype=np.uint32)
        row = rng.normal(size=size).astype(np.float32)
        wanted = [value if words[i // 32] >> (i % 32) & 1 else -np.inf for i, value in enumerate(row.tolist())]
        exclude(row, words)
        assert row.tolist() == wanted


def test_a_token_that_the_mask_forbids_is_an_error_of_the_next_mask() -> None:
    matcher = matcher_of(regex="ab")
    matcher.accept(ord("x"))
    assert allowed(matcher.mask()) == []
    assert matcher.error is not None
    assert "\n" not in matcher.error
    assert "doesn't satisfy the grammar" in matcher.error


# -- forms


@pytest.mark.parametrize(
    ("form", "right", "wrong"),
    [
        ({"regex": "^(ab)+$"}, ["ab", "abab"], ["", "a", "abx"]),
        ({"choice": ["one", 'tw"o\n', "é\\漢", "on"]}, ["one", "on", 'tw"o\n', "é\\漢"], ["o", "ones", "tw"]),
        ({"grammar": 'start: "x" NUM\nNUM: /[0-9]{2}/'}, ["x12"], ["x1", "12"]),
        ({"grammar": 'root ::= "x" num\nnum ::= [0-9] [0-9]?'}, ["x12", "x1"], ["x"]),
        ({"grammar": 'root ::= digit-pair*\ndigit-pair ::= [0-9] "start: "'}, ["", "1start: "], ["1"]),
        ({"json_object": True}, ["{}", '{"a": [1, {"b": null}]}'], ["[]", "1", "{", "{}x"]),
        (
            {"json": SCHEMA},
            ['{"name": "", "age": 1}', '{\n  "name":"a","age":-1\n}'],
            ["{}", '{"name": "", "age": 1.5}'],
        ),
        ({"json": {"type": "array", "maxItems": 1}}, ["[]", f"[{' ' * 40}1]"], [f"[{' ' * 41}1]", "[1, 2]"]),
        ({"json": {"type": "array"}, "disable_any_whitespace": True}, ["[1,2]"], ["[1, 2]", "[ ]"]),
        ({"json": {"type": "array"}, "whitespace_pattern": " "}, ["[1, 2]", "[1,2]"], ["[1,  2]", "[\n]"]),
        ({"json": {"type": "array", "x-guidance": {"whitespace_pattern": "_"}}}, ["[1,_2]"], ["[1, 2]"]),
        ({"json": {"properties": {"a": {"const": 1}}, "type": "object"}}, ['{"a": 1, "b": 2}'], ['{"a": 2}']),
        (
            {"json": {"properties": {"a": {"const": 1}}, "type": "object"}, "disable_additional_properties": True},
            ['{"a": 1}', "{}"],
            ['{"a": 1, "b": 2}'],
        ),
    ],
)
def test_a_form_allows_what_it_says(form: dict[str, Any], right: list[str], wrong: list[str]) -> None:
    assert [text for text in right if not accepts(text, **form)] == []
    assert [text for text in wrong if accepts(text, **form)] == []


def test_thousands_of_choices_work() -> None:
    choice = [f"choice {i}" for i in range(5000)]
    assert accepts("choice 4321", choice=choice)
    assert not accepts("choice 5000", choice=choice)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"json": {"type": "strin"}}, "json cannot be honoured: Invalid type: strin"),
        ({"json": {"not": {}}}, 'json cannot be honoured: Unimplemented keys: ["not"]'),
        ({"json": {"$ref": "#"}}, "json cannot be honoured: no text fits it"),
        ({"json": {"enum": []}}, "json cannot be honoured: Unsatisfiable schema"),
        ({"json": {"type": "string", "pattern": "(?=a)b"}}, "error: look-around"),
        ({"json": {}, "whitespace_pattern": "("}, "json cannot be honoured: regex parse error: error: unclosed group"),
        ({"regex": "(a"}, "regex cannot be honoured: "),
        ({"regex": "a\ud800"}, "surrogates not allowed"),
        ({"grammar": "start: foo"}, 'grammar cannot be honoured: at 1(8): unknown name: "foo"'),
        ({"grammar": "hello"}, 'it is neither Lark (no "start:" rule) nor GBNF'),
        ({"grammar": "root ::= " + "(" * 20_000}, 'it is neither Lark (no "start:" rule) nor GBNF'),
        ({"grammar": "start: " + "(" * 20_000}, "too deeply nested"),
        ({"regex": "a" * 70_000}, "regex must be at most 65536 characters long, found 70000"),
        ({"choice": ["a" * 2**17] * 3}, "choice must be at most 262144 characters long, found 393216"),
    ],
)
def test_a_form_that_cannot_be_honoured_is_refused_with_the_reason(form: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as caught:
        matcher_of(**form)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500
    assert caught.value.param == "structured_outputs"
    assert caught.value.status == 400


def test_models_that_cannot_be_held_to_a_form_say_so() -> None:
    form = StructuredOutputsParams(regex="a")
    with pytest.raises(RequestError, match="needs a tokenizer"):
        GrammarCompiler(None, 10, {1}).compile(form)
    with pytest.raises(RequestError, match="needs an end-of-text token"):
        GrammarCompiler(ByteVocabulary(), 259, ()).compile(form)


def test_equal_forms_are_compiled_once_and_the_least_recent_is_forgotten() -> None:
    compiler = GrammarCompiler(ByteVocabulary(), 259, {EOS})
    first = compiler.compile(StructuredOutputsParams(json={"type": "null"}))
    assert compiler.compile(StructuredOutputsParams(json='{"type":"null"}')) is first
    for count in range(MAX_CACHED):
        compiler.compile(StructuredOutputsParams(regex=f"a{{{count + 1}}}"))
        compiler.compile(StructuredOutputsParams(json={"type": "null"}))
    assert compiler.compile(StructuredOutputsParams(json={"type": "null"})) is first
    for count in range(MAX_CACHED):
        compiler.compile(StructuredOutputsParams(regex=f"b{{{count + 1}}}"))
    assert compiler.compile(StructuredOutputsParams(json={"type": "null"})) is not first


def test_answers_of_one_grammar_do_not_share_their_state() -> None:
    grammar = GrammarCompiler(ByteVocabulary(), 259, {EOS}).compile(StructuredOutputsParams(regex="ab|cd"))
    first, second = grammar.matcher(), grammar.matcher()
    first.accept(ord("a"))
    second.accept(ord("c"))
    assert allowed(first.mask()) == [ord("b")]
    assert allowed(second.mask()) == [ord("d")]


# -- hostile forms

CHAIN = """
import json
from llguidance import LLMatcher, LLTokenizer
from lean_engine.sampling.grammar_trial import first_matcher
links = {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(6000)}
schema = {"$defs": {**links, "a6000": {"const": 1}}, "$ref": "#/$defs/a0"}
matcher = first_matcher(LLTokenizer("byte"), LLMatcher.grammar_from_json_schema(schema))
print(matcher.compute_bitmask()[6])
"""


def test_a_deep_chain_of_references_does_not_overflow_the_stack() -> None:
    paths = {"PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), *sys.path]))}
    done = subprocess.run([sys.executable, "-c", CHAIN], env=paths, capture_output=True, text=True)
    assert done.stdout == "2\n", (done.returncode, done.stderr)  # bit 49: the digit 1


def test_a_form_that_takes_too_long_or_crashes_the_compiler_is_refused_by_the_trial() -> None:
    trial = TrialProcess(max_seconds=2.0)
    endless = json.dumps({"allOf": [{"type": "string", "pattern": f"(a|b)*a(a|b){{{i}}}"} for i in range(1, 30)]})
    assert trial.fault(f"start: %json {endless}") == "compiling it takes longer than 2 seconds"
    assert trial.fault('start: "a"') is None
    assert trial.fault("start: b") == 'at 1(8): unknown name: "b"'
    assert trial._process is not None
    trial._process.kill()  # as the system does where memory runs out
    trial._process.wait()
    assert trial.fault('start: "a"') is None
    trial.close()
    trial.close()
    dying = TrialProcess(specials={999: "beyond the end"})  # at its first line
    assert dying.fault('start: "a"') == "it is too deep, or takes too much memory to compile"


def test_a_guarded_compiler_tries_first_and_caches_what_passed() -> None:
    compiler = GrammarCompiler(ByteVocabulary(), 259, {EOS})
    compiler.guard()
    form = StructuredOutputsParams(grammar='start: <[257]> "a" <eos>')  # an id, and a special token of this model
    grammar = compiler.compile(form)
    with pytest.raises(RequestError, match=r'cannot be honoured: .*"<other>"'):
        compiler.compile(StructuredOutputsParams(grammar="start: <other>"))
    compiler.close()
    started = time.monotonic()
    assert compiler.compile(form) is grammar
    assert time.monotonic() - started < 0.01
    compiler._trial = TrialProcess(max_seconds=0.05)
    compiler._trial._turn.acquire()
    with pytest.raises(RequestError, match="others are being compiled") as caught:
        compiler.compile(StructuredOutputsParams(regex="b"))
    assert caught.value.status == 503


# -- after the reasoning


def test_the_form_begins_behind_the_end_of_the_reasoning() -> None:
    matcher = matcher_of(regex="ab", reasoning_end="</think>")
    assert allowed(matcher.mask()) == [i for i in range(259) if i != EOS]
    for token_id in b"xy" + bytes([1]):
        matcher.accept(token_id)
    matcher.accept(START)
    matcher.accept(END)
    assert allowed(matcher.mask()) == [ord("a")]
    for token_id in b"ab":
        matcher.accept(token_id)
    assert allowed(matcher.mask()) == [EOS]
    assert matcher.is_done


def test_an_answer_that_need_not_reason_begins_with_the_tag_or_with_the_form() -> None:
    form = {"regex": "ab", "reasoning_start": "<think>", "reasoning_end": "</think>"}
    reasoning, plain = matcher_of(**form), matcher_of(**form)
    assert allowed(plain.mask()) == [ord("a"), START]
    plain.accept(ord("a"))
    assert allowed(plain.mask()) == [ord("b")]
    reasoning.accept(START)
    assert allowed(reasoning.mask()) == [i for i in range(259) if i != EOS]
    reasoning.accept(ord("a"))
    reasoning.accept(END)
    assert allowed(reasoning.mask()) == [ord("a")]


def test_a_tag_that_is_no_single_token_is_refused() -> None:
    with pytest.raises(RequestError, match=r"reasoning_end is '</thought>', must be one token .* found 10"):
        matcher_of(regex="a", reasoning_end="</thought>")


# -- in the sampler


def state_of(params: dict[str, Any] | None = None, **form: Any) -> SamplingState:
    given = SamplingParams(**{"temperature": 0, "structured_outputs": form or None, **(params or {})})
    matcher = matcher_of(**form) if form else None
    return SamplingState(given, [1], eos_token_ids=[EOS], matcher=matcher)


def sample(states: list[SamplingState], best: dict[int, float] | None = None) -> SampleResult:
    """One step, with the given logits, 0 for all others; accepts what was sampled."""
    logits = np.zeros((len(states), 259), dtype=np.float32)
    for token_id, value in (best or {}).items():
        logits[:, token_id] = value
    result = Sampler(259).sample(logits, states, [1 + state.num_output for state in states])
    for state, token_id, error in zip(states, result.token_ids, result.errors, strict=True):
        if error is None:
            state.accept(token_id)
    return result


def test_only_allowed_tokens_are_sampled_and_logprobs_are_those_of_the_model() -> None:
    held, free = state_of({"logprobs": 1}, regex="[bc]"), state_of({"logprobs": 1})
    best = {ord("a"): 3.0, ord("c"): 1.0}
    result = sample([held, free], best)
    assert result.token_ids == [ord("c"), ord("a")]
    first, second = result.logprobs
    assert first is not None
    assert second is not None
    assert first.ids.tolist() == [ord("c"), ord("a")]  # the chosen one, then the likeliest
    assert first.ranks.tolist() == [2, 1]
    assert np.isclose(first.logprobs[1], second.logprobs[0])
    assert sample([held], best).token_ids == [EOS]


def test_a_finished_form_ends_whatever_else_is_asked_for() -> None:
    for params in (
        {"ignore_eos": True},
        {"min_tokens": 9},
        {"logit_bias": {EOS: -100}},
        {"allowed_token_ids": [ord("a")]},
        {"stop_token_ids": [EOS], "min_tokens": 5},
    ):
        state = state_of(params, regex="a")
        assert sample([state]).token_ids == [ord("a")]
        assert sample([state]).token_ids == [EOS], params


def test_ignore_eos_and_min_tokens_keep_a_form_going_while_it_can() -> None:
    likes_eos = {EOS: 5.0}
    assert [sample([state], likes_eos).token_ids[0] for state in [state_of(regex="a{1,3}")] for _ in range(2)] == [
        97,
        EOS,
    ]
    for params, count in (({"ignore_eos": True}, 3), ({"min_tokens": 2}, 2)):
        state = state_of(params, regex="a{1,3}")
        assert [sample([state], likes_eos).token_ids[0] for _ in range(count + 1)] == [97] * count + [EOS]


def test_options_that_leave_no_token_of_the_form_are_an_error_of_that_answer_only() -> None:
    states = [state_of({"allowed_token_ids": [ord("a")]}, regex="ab"), state_of(regex="ab")]
    assert sample(states).token_ids == [ord("a"), ord("a")]
    result = sample(states)
    assert result.errors == [NOTHING_LEFT, None]
    assert result.token_ids[1] == ord("b")


def test_a_fault_of_a_matcher_is_an_error_of_its_answer_only() -> None:
    broken, sound, free = state_of(regex="ab"), state_of(regex="ab"), state_of()
    assert broken.matcher is not None
    broken.matcher.accept(ord("x"))
    result = sample([broken, sound, free])
    assert result.errors[0] is not None
    assert result.errors[1:] == [None, None]
    assert result.token_ids[1] == ord("a")


def test_a_row_without_a_distribution_keeps_its_error_and_its_state() -> None:
    state = state_of(regex="ab")
    assert "NaN" in (sample([state], {5: np.nan}).errors[0] or "")
    assert sample([state]).token_ids == [ord("a")]
