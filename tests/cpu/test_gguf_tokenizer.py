"""Tokenizer rebuilt from GGUF metadata, against tokenizer.json of the same vocabulary."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lean_engine.errors import CheckpointError
from lean_engine.text import Tokenizer
from lean_engine.text.gguf_tokenizer import PRE_TOKENIZERS, build_pre_tokenizer

TINY = Path(__file__).parents[1] / "data" / "tiny"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def metadata_of(name: str, model: str, **fields: Any) -> dict[str, Any]:
    """The metadata that a converter would write for a tiny model, with further `tokenizer.ggml` fields."""
    file = json.loads((TINY / name / "tokenizer.json").read_text())
    tokens = sorted(file["model"]["vocab"], key=file["model"]["vocab"].__getitem__)
    merges = [" ".join(pair) for pair in file["model"]["merges"]]
    rank = {merge.replace(" ", ""): -float(i) for i, merge in enumerate(merges)}
    added = {token["content"] for token in file["added_tokens"]}
    ggml = {
        "model": model,
        "tokens": tokens,
        "token_type": [token_type(token, added) for token in tokens],
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    ggml |= {"scores": [rank.get(token, -1e6) for token in tokens]} if model == "llama" else {"merges": merges}
    return {f"tokenizer.ggml.{key}": value for key, value in (ggml | fields).items()}


def token_type(token: str, added: set[str]) -> int:
    if token == "<unk>":
        return UNKNOWN
    if token in added:
        return CONTROL
    return BYTE if token.startswith("<0x") else NORMAL


def small(model: str = "gpt2", **fields: Any) -> dict[str, Any]:
    """Metadata of a vocabulary that fits a line."""
    ggml = {"tokens": ["<s>", "</s>", "a", "b", "c", "ab", "bc", "<think>"], "merges": ["a b", "b c"]}
    ggml |= {"token_type": [CONTROL, CONTROL, *[NORMAL] * 5, USER_DEFINED], "model": model}
    return {f"tokenizer.ggml.{key}": value for key, value in (ggml | fields).items() if value is not None}


@pytest.mark.parametrize(
    ("name", "model", "fields"),
    [
        ("llama-gqa-tied", "gpt2", {"pre": "smollm"}),
        ("qwen2", "gpt2", {"pre": "qwen2"}),
        ("llama3-rope", "gpt2", {"pre": "llama-bpe"}),  # adds BOS without being told
        ("phi3", "llama", {}),
        ("gemma2", "llama", {"add_space_prefix": False, "add_bos_token": True}),
        ("gemma2", "gemma4", {}),
    ],
)
def test_ids_and_text_are_those_of_tokenizer_json(name: str, model: str, fields: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_gguf(metadata_of(name, model, **fields))
    for case in json.loads((TINY / name / "golden.json").read_text())["tokenizer"]:
        assert tokenizer.encode(case["text"]) == case["ids"]
        assert tokenizer.decode(case["ids_no_special"], skip_special_tokens=False) == case["decoded"]
    assert tokenizer.special_ids == Tokenizer.from_directory(TINY / name).special_ids
    assert (tokenizer.bos_token, tokenizer.eos_token_id) == ("<|bos|>", 1)


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["I", "'m", " 1234", " caféX", "!!", "\n\n", " x", "/", "y"]),
        ("smollm", ["I", "'m", " ", "1", "2", "3", "4", " caféX", "!!", "\n\n", " x", "/", "y"]),
        ("llama-bpe", ["I", "'m", " ", "123", "4", " caféX", "!!\n\n", " x", "/y"]),
        ("qwen2", ["I", "'m", " ", "1", "2", "3", "4", " caféX", "!!\n\n", " x", "/y"]),
        ("tekken", ["I", "'m", " ", "1", "2", "3", "4", " café", "X", "!!\n\n", " x", "/y"]),
        ("gpt-4o", ["I'm", " ", "123", "4", " café", "X", "!!\n\n", " x", "/y"]),
        ("deepseek-v3", ["I", "'m", " ", "123", "4", " caféX", "!!\n\n", " x", "/y"]),
        ("deepseek-coder", ["I", "'", "m", " ", "1", "2", "3", "4", " caféX", "!!", "\n", "\n", " x", "/", "y"]),
    ],
)
def test_pre_tokenizer_cuts_text_into_words(pre: str, words: list[str]) -> None:
    text = "I'm 1234 caféX!!\n\n x/y"
    found = build_pre_tokenizer(PRE_TOKENIZERS[pre]).pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in found] == words


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenizer_keeps_all_text(pre: str) -> None:
    text = "Zwei  Wörter, 中文あ한국 1234567 ½ don't\r\n\t😀 x"
    words = build_pre_tokenizer(PRE_TOKENIZERS[pre]).pre_tokenize_str(text)
    assert "".join(text[start:end] for _, (start, end) in words) == text


def test_word_that_is_a_token_is_that_token_where_the_pre_tokenizer_says_so() -> None:
    fields: dict[str, Any] = {"tokens": [*"<>abc", "ab", "abc", "d"]}  # no merge makes "abc"
    assert Tokenizer.from_gguf(small(pre="llama-bpe", merges=["a b"], **fields)).encode("abc") == [6]
    assert Tokenizer.from_gguf(small(pre="smaug-bpe", merges=["a b"], **fields)).encode("abc") == [5, 4]


def test_qwen2_composes_characters() -> None:
    tokenizer = Tokenizer.from_gguf(metadata_of("qwen2", "gpt2", pre="qwen2"))
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")


def test_scores_decide_what_is_merged() -> None:
    def ids(score_ab: float, score_bc: float) -> list[int]:
        scores = [0, 0, -1, -2, -3, score_ab, score_bc, 0]
        metadata = small("llama", scores=scores, merges=None, add_space_prefix=False, add_bos_token=False)
        return Tokenizer.from_gguf(metadata).encode("abc")

    assert ids(-4, -5) == [5, 4]  # ab c
    assert ids(-5, -4) == [2, 6]  # a bc


def test_space_is_put_before_text_unless_the_file_says_no() -> None:
    fields: dict[str, Any] = {"tokens": ["<unk>", "<s>", "</s>", "▁", "a"], "scores": [0.0] * 5, "merges": None}
    fields |= {"token_type": [UNKNOWN, CONTROL, CONTROL, NORMAL, NORMAL]}
    tokenizer = Tokenizer.from_gguf(small("llama", **fields))
    assert tokenizer.encode("a") == [1, 3, 4]  # BOS is added, and ids 1 and 2 are BOS and EOS, where nothing is said
    assert tokenizer.decode([1, 3, 4]) == "a"
    assert tokenizer.encode("aéé") == [1, 3, 4, 0]  # without byte tokens, what is unknown is one token
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<s>", "</s>")
    tokenizer = Tokenizer.from_gguf(small("llama", add_space_prefix=False, **fields))
    assert tokenizer.encode("a") == [1, 4]
    assert tokenizer.decode([3, 4]) == " a"


def test_user_defined_tokens_match_whole_but_show() -> None:
    tokenizer = Tokenizer.from_gguf(small())
    assert tokenizer.encode("a<think>bc</s>") == [2, 7, 6, 1]
    assert tokenizer.decode([2, 7, 6, 1]) == "a<think>bc"
    assert tokenizer.special_ids == {0, 1}


@pytest.mark.parametrize(("bos", "eos", "ids"), [(True, True, [0, 2, 1]), (True, False, [0, 2]), (False, True, [2, 1])])
def test_bos_and_eos_are_added_as_the_file_says(bos: bool, eos: bool, ids: list[int]) -> None:
    metadata = small(bos_token_id=0, eos_token_id=1, add_bos_token=bos, add_eos_token=eos)
    assert Tokenizer.from_gguf(metadata).encode("a") == ids
    assert Tokenizer.from_gguf(metadata).encode("a", add_special_tokens=False) == [2]


def test_chat_templates_are_read_by_name() -> None:
    templates = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": "tools"}
    tokenizer = Tokenizer.from_gguf(small() | templates)
    assert tokenizer.chat_template == "plain"
    assert tokenizer.chat_templates == {"default": "plain", "tool_use": "tools"}
    assert Tokenizer.from_gguf(small()).chat_template is None
    with pytest.raises(CheckpointError, match=r"tokenizer\.chat_template is of type int, must be a string"):
        Tokenizer.from_gguf(small() | {"tokenizer.chat_template": 3})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pre": "no-such"}, "tokenizer.ggml.pre 'no-such' is not known; known: command-r, .*, tekken"),
        ({"model": "bert"}, "tokenizer.ggml.model 'bert' is not known; known: gpt2, llama, gemma4"),
        ({"model": None}, "tokenizer.ggml.model is missing"),
        ({"tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokens": "a b"}, "tokenizer.ggml.tokens is a str; should be a list"),
        ({"merges": None}, "tokenizer.ggml.merges is missing"),
        ({"merges": ["ab"]}, "merge 'ab' in tokenizer.ggml.merges should be two tokens"),
        ({"merges": ["a zz"]}, "tokenizer.ggml.merges do not fit the vocabulary: .*zz"),
        ({"token_type": [NORMAL]}, "8 tokens but 1 values in tokenizer.ggml.token_type"),
        ({"tokens": [*"aabcdefg"]}, "token 'a' stands twice"),
        ({"bos_token_id": 8}, "tokenizer.ggml.bos_token_id is 8; the vocabulary has 8 tokens"),
        ({"add_eos_token": True}, "tokenizer.ggml.add_eos_token is true but eos_token_id is missing"),
        ({"model": "llama"}, "tokenizer.ggml.scores is missing"),
    ],
)
def test_wrong_metadata_is_refused_by_key(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.from_gguf(small(**fields))
