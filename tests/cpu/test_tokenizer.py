"""Tokenizer of a Hugging Face directory: ids and text as in transformers, and what its files may hold."""

from __future__ import annotations

import itertools
import json
import threading
import time
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from lean_engine.errors import CheckpointError, RequestError
from lean_engine.text import Tokenizer

TINY = Path(__file__).parents[1] / "data" / "tiny"
NAMES = sorted(path.name for path in TINY.iterdir())
BYTE_LEVEL, LLAMA2, GEMMA = "qwen2", "phi3", "gemma2"
BOS, EOS = 0, 1  # of every tiny model


@cache
def tokenizer_of(name: str) -> Tokenizer:
    return Tokenizer.from_directory(TINY / name)


@cache
def reference_of(name: str) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(TINY / name / "tokenizer.json"))


def write_directory(directory: Path, like: str = BYTE_LEVEL, **files: Any) -> Path:
    """A model directory with the tokenizer.json of a tiny model; `tokenizer` and `config` change their top-level keys.

    A value of None leaves its key out.
    """
    for stem, changes in (("tokenizer", "tokenizer"), ("tokenizer_config", "config")):
        content = json.loads((TINY / like / f"{stem}.json").read_text()) | files.get(changes, {})
        kept = {key: value for key, value in content.items() if value is not None or stem == "tokenizer"}
        (directory / f"{stem}.json").write_text(json.dumps(kept))
    return directory


# ---- ids and text


@pytest.mark.parametrize("name", NAMES)
def test_ids_and_text_are_those_of_transformers(name: str) -> None:
    tokenizer = tokenizer_of(name)
    for case in json.loads((TINY / name / "golden.json").read_text())["tokenizer"]:
        assert tokenizer.encode(case["text"]) == case["ids"]
        assert tokenizer.encode(case["text"], add_special_tokens=False) == case["ids_no_special"]
        assert tokenizer.decode(case["ids_no_special"], skip_special_tokens=False) == case["decoded"]


@pytest.mark.parametrize("name", NAMES)
def test_a_long_text_has_the_same_ids(name: str) -> None:
    text = "<|im_start|>hello naïve 日本 \U0001f600 " * 100
    for adds in (True, False):
        expected = reference_of(name).encode(text, add_special_tokens=adds).ids
        assert tokenizer_of(name).encode(text, add_special_tokens=adds) == expected


def test_other_threads_run_while_a_long_text_is_encoded() -> None:
    tokenizer, is_done, times = tokenizer_of(BYTE_LEVEL), threading.Event(), list[float]()

    def look() -> None:
        while not is_done.wait(0.001):
            times.append(time.perf_counter())

    thread = threading.Thread(target=look)
    thread.start()
    started = time.perf_counter()
    tokenizer.encode("hello world " * 20_000)
    ended = time.perf_counter()
    is_done.set()
    thread.join()
    gaps = [after - before for before, after in itertools.pairwise([started, *times, ended])]
    assert max(gaps) < 0.5 * (ended - started)


@given(ids=st.lists(st.integers(0, 503), max_size=20), skip=st.booleans())
@settings(max_examples=150, deadline=None)
def test_byte_level_decode_of_any_ids_is_that_of_the_tokenizers_package(ids: list[int], skip: bool) -> None:
    expected = reference_of(BYTE_LEVEL).decode(ids, skip_special_tokens=skip)
    assert tokenizer_of(BYTE_LEVEL).decode(ids, skip_special_tokens=skip) == expected


@given(text=st.text(max_size=20), name=st.sampled_from([LLAMA2, GEMMA]), skip=st.booleans())
@settings(max_examples=150, deadline=None)
def test_sentencepiece_decode_of_any_text_is_that_of_the_tokenizers_package(text: str, name: str, skip: bool) -> None:
    ids = tokenizer_of(name).encode(text)
    assert tokenizer_of(name).decode(ids, skip) == reference_of(name).decode(ids, skip_special_tokens=skip)


def test_ill_formed_byte_tokens_spare_their_well_formed_neighbours() -> None:
    tokenizer = tokenizer_of(LLAMA2)
    backend = reference_of(LLAMA2)
    ids = [backend.token_to_id(f"<0x{byte:02X}>") for byte in "é".encode() + b"\xff" + "é".encode()]
    assert tokenizer.decode(ids) == "é\ufffdé"


@pytest.mark.parametrize("name", [BYTE_LEVEL, LLAMA2, GEMMA])
def test_token_bytes_are_exact(name: str) -> None:
    tokenizer = tokenizer_of(name)
    text = "Hello  wörld 😀"
    joined = b"".join(map(tokenizer.token_bytes, tokenizer.encode(text, add_special_tokens=False)))
    assert joined == (b" " if name == LLAMA2 else b"") + text.encode()  # Llama 2 writes its space before the text


def test_token_text_keeps_the_space_before_a_word_and_marks_half_characters() -> None:
    tokenizer, backend = tokenizer_of(LLAMA2), reference_of(LLAMA2)
    assert tokenizer.token_text(backend.token_to_id("▁t")) == " t"
    assert tokenizer.token_text(backend.token_to_id("<0xC3>")) == "\ufffd"
    assert tokenizer.token_bytes(backend.token_to_id("<0xC3>")) == b"\xc3"
    assert tokenizer.token_text(EOS) == "<|im_end|>"


def test_id_that_only_the_model_has_is_empty_text_but_no_id_to_decode() -> None:
    tokenizer = tokenizer_of(BYTE_LEVEL)
    assert tokenizer.vocab_size == 504
    assert (tokenizer.token_bytes(504), tokenizer.token_text(504)) == (b"", "")
    for token_id in (504, -1, 2**32, 2**70):
        with pytest.raises(RequestError, match=f"token id {token_id} is not in the vocabulary; should be 0 to 503"):
            tokenizer.decode([1, token_id])


def test_ids_are_joined_in_parts_and_the_first_unknown_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lean_engine.text.tokenizer.PART_IDS", 3)
    tokenizer = tokenizer_of(BYTE_LEVEL)
    text = "naïve café 文 and more"  # characters of several tokens lie across the parts
    for end in range(1, 8):
        ids = tokenizer.encode(text[:end] * 4)
        assert tokenizer.decode(ids) == text[:end] * 4
    with pytest.raises(RequestError, match="token id 700 is not"):
        tokenizer.decode([1, 2, 700, 600, 1, 700])


def test_special_tokens_are_named_numbered_and_skipped() -> None:
    tokenizer = tokenizer_of(LLAMA2)
    assert (tokenizer.bos_token, tokenizer.bos_token_id) == ("<|bos|>", BOS)
    assert (tokenizer.eos_token, tokenizer.eos_token_id) == ("<|im_end|>", EOS)
    assert tokenizer.special_ids == {0, 1, 2, 3, 4}
    assert tokenizer.is_special(EOS)
    assert not tokenizer.is_special(5)
    ids = tokenizer.encode("a<|im_end|>")
    assert tokenizer.decode(ids) == "a"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|bos|> a<|im_end|>"


def test_lone_surrogate_is_refused_with_its_place() -> None:
    with pytest.raises(RequestError, match=r"lone surrogate U\+D83D at position 2"):
        tokenizer_of(BYTE_LEVEL).encode("ab\ud83d")


# ---- files


def test_missing_tokenizer_json_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: no such file"):
        Tokenizer.from_directory(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"needs a tokenizer\.json; tokenizer\.model alone is not read"):
        Tokenizer.from_directory(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
def test_damaged_file_is_named_in_one_line(tmp_path: Path, name: str) -> None:
    write_directory(tmp_path)
    (tmp_path / name).write_text('{"model": {\n')
    with pytest.raises(CheckpointError, match=name) as caught:
        Tokenizer.from_directory(tmp_path)
    assert "\n" not in str(caught.value)


def test_directory_with_tokenizer_json_alone_is_enough(tmp_path: Path) -> None:
    write_directory(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert (tokenizer.bos_token, tokenizer.eos_token_id, tokenizer.chat_template) == (None, None, None)
    assert tokenizer.decode(tokenizer.encode("Hello")) == "Hello"


def test_unknown_decoder_is_refused_by_name(tmp_path: Path) -> None:
    write_directory(tmp_path, tokenizer={"decoder": {"type": "WordPiece", "prefix": "##", "cleanup": True}})
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: decoder 'WordPiece' is not supported"):
        Tokenizer.from_directory(tmp_path)
    write_directory(tmp_path, tokenizer={"decoder": None})
    with pytest.raises(CheckpointError, match="has no decoder"):
        Tokenizer.from_directory(tmp_path)


def test_truncation_and_padding_of_the_file_do_not_touch_prompts(tmp_path: Path) -> None:
    truncation = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    padding = {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None}
    padding |= {"pad_id": 3, "pad_type_id": 0, "pad_token": "<|pad|>"}
    write_directory(tmp_path, tokenizer={"truncation": truncation, "padding": padding})
    assert Tokenizer.from_directory(tmp_path).encode("Hello") == tokenizer_of(BYTE_LEVEL).encode("Hello")


def test_tokens_may_be_written_as_objects(tmp_path: Path) -> None:
    write_directory(tmp_path, config={"bos_token": {"content": "<|bos|>", "lstrip": False}, "eos_token": None})
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (BOS, None)
    write_directory(tmp_path, config={"bos_token": ""})
    assert Tokenizer.from_directory(tmp_path).bos_token is None
    write_directory(tmp_path, config={"bos_token": 7})
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: token 7 should be a string"):
        Tokenizer.from_directory(tmp_path)


def test_special_tokens_map_fills_in_and_wins_over_a_configuration_without_added_tokens(tmp_path: Path) -> None:
    write_directory(tmp_path, config={"bos_token": None})
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": {"content": "<|bos|>"}, "eos_token": "<|pad|>"}')
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|bos|>", "<|pad|>")
    write_directory(tmp_path, config={"added_tokens_decoder": {}})
    assert Tokenizer.from_directory(tmp_path).eos_token == "<|im_end|>"


def test_tokens_of_the_configuration_are_added_with_their_ids_and_flags(tmp_path: Path) -> None:
    added = {"505": {"content": "<tool>", "special": False}, "504": {"content": "<｜x｜>", "special": True}}
    write_directory(tmp_path, config={"added_tokens_decoder": added, "additional_special_tokens": ["<y>"]})
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.encode("<｜x｜><tool><y>") == [504, 505, 506]
    assert tokenizer.decode([504, 505, 506], skip_special_tokens=False) == "<｜x｜><tool><y>"
    assert tokenizer.special_ids == {0, 1, 2, 3, 504, 506}
    assert tokenizer.vocab_size == 507


def test_named_special_token_of_the_vocabulary_becomes_special(tmp_path: Path) -> None:
    the = reference_of(BYTE_LEVEL).token_to_id("The")
    write_directory(tmp_path, config={"eos_token": "The"})
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert (tokenizer.eos_token_id, tokenizer.is_special(the), tokenizer.vocab_size) == (the, True, 504)


def test_added_token_that_cannot_have_its_id_is_refused(tmp_path: Path) -> None:
    write_directory(tmp_path, config={"added_tokens_decoder": {"600": {"content": "<x>"}}})
    with pytest.raises(CheckpointError, match=r"added token '<x>' should have id 600; tokenizer\.json leaves it 504"):
        Tokenizer.from_directory(tmp_path)


# ---- BOS

WITH_BOS = json.loads((TINY / GEMMA / "tokenizer.json").read_text())["post_processor"]


@pytest.mark.parametrize(
    ("tokenizer_class", "post_processor", "flags", "added"),
    [
        # the file decides ...
        ("PreTrainedTokenizerFast", WITH_BOS, {"add_bos_token": False}, [BOS]),
        ("PreTrainedTokenizerFast", None, {"add_bos_token": True}, []),
        ("Qwen2Tokenizer", None, {"add_bos_token": True}, []),
        ("LlamaTokenizerFast", WITH_BOS, {}, [BOS]),
        ("LlamaTokenizer", None, {}, []),
        # ... unless an old class is told explicitly
        ("LlamaTokenizer", None, {"add_bos_token": True}, [BOS]),
        ("GemmaTokenizerFast", WITH_BOS, {"add_bos_token": False}, []),
        ("LlamaTokenizerFast", WITH_BOS, {"add_bos_token": True, "add_eos_token": True}, [BOS, EOS]),
        ("LlamaTokenizerFast", WITH_BOS, {"add_bos_token": True, "add_eos_token": False}, [BOS]),
    ],
)
def test_bos_is_added_by_the_file_or_by_an_old_class(
    tmp_path: Path, tokenizer_class: str, post_processor: Any, flags: dict[str, bool], added: list[int]
) -> None:
    config = {"add_bos_token": None, "tokenizer_class": tokenizer_class} | flags
    tokenizer = Tokenizer.from_directory(
        write_directory(tmp_path, tokenizer={"post_processor": post_processor}, config=config)
    )
    assert tokenizer.encode("") == added
    assert tokenizer.encode("", add_special_tokens=False) == []


def test_add_bos_without_a_bos_token_is_refused(tmp_path: Path) -> None:
    write_directory(
        tmp_path, config={"add_bos_token": True, "bos_token": None, "tokenizer_class": "LlamaTokenizerFast"}
    )
    with pytest.raises(CheckpointError, match="add_bos_token is true but there is no bos_token"):
        Tokenizer.from_directory(tmp_path)


# ---- chat templates


def test_template_file_wins_over_the_configuration(tmp_path: Path) -> None:
    write_directory(tmp_path, config={"chat_template": "from config"})
    assert Tokenizer.from_directory(tmp_path).chat_template == "from config"
    (tmp_path / "chat_template.json").write_text('{"chat_template": "from json"}')
    assert Tokenizer.from_directory(tmp_path).chat_template == "from json"
    (tmp_path / "chat_template.jinja").write_text("from jinja")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    tokenizer = Tokenizer.from_directory(tmp_path)
    assert tokenizer.chat_template == "from jinja"
    assert tokenizer.chat_templates == {"default": "from jinja", "tool_use": "tools"}


def test_list_of_templates_is_read_by_name(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    tokenizer = Tokenizer.from_directory(write_directory(tmp_path, config={"chat_template": named}))
    assert (tokenizer.chat_template, tokenizer.chat_templates["tool_use"]) == ("plain", "tools")
    assert Tokenizer.from_directory(write_directory(tmp_path, config={"chat_template": None})).chat_template is None
    for wrong in (["plain"], [{"name": "default", "template": 3}]):
        with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: chat_template should be"):
            Tokenizer.from_directory(write_directory(tmp_path, config={"chat_template": wrong}))
