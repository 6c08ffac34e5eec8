"""A tokenizer that is built when text is met: the same as one built at once, its mistakes said as early as can be."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from lean_engine.errors import CheckpointError
from lean_engine.text import Tokenizer
from lean_engine.text.hf_tokenizer import find_eos_id, load_directory, read_files
from lean_engine.text.lazy_tokenizer import LazyTokenizer, open_tokenizer
from lean_engine.text.parts import TokenizerParts

TINY = Path(__file__).parents[1] / "data" / "tiny"
NAMES = sorted(path.name for path in TINY.iterdir())
GGUF: dict[str, Any] = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.tokens": ["<s>", "</s>", "a", "b", "ab"],
    "tokenizer.ggml.token_type": [3, 3, 1, 1, 1],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.eos_token_id": 1,
}


def is_built(tokenizer: Tokenizer) -> bool:
    return "spelling" in vars(tokenizer)


def write_directory(directory: Path, tokenizer_json: str | None, **config: Any) -> Path:
    if tokenizer_json is not None:
        (directory / "tokenizer.json").write_text(tokenizer_json)
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("name", NAMES)
def test_is_the_tokenizer_that_is_built_at_once(name: str) -> None:
    eager, lazy = Tokenizer.from_directory(TINY / name), open_tokenizer(TINY / name)
    assert lazy.eos_token_id == eager.eos_token_id
    assert not is_built(lazy)
    ids = eager.encode("Der Fluß, 12 <s> ok")
    assert lazy.encode("Der Fluß, 12 <s> ok") == ids
    assert is_built(lazy)
    assert lazy.decode(ids) == eager.decode(ids)
    for attribute in ("bos_token", "eos_token", "bos_token_id", "eos_token_id", "special_ids", "chat_templates"):
        assert getattr(lazy, attribute) == getattr(eager, attribute)
    assert lazy.vocab_size == eager.vocab_size


@pytest.mark.parametrize(
    ("fields", "eos"), [({}, 1), ({"model": "llama", "scores": [0.0] * 5, "eos_token_id": None}, 2)]
)
def test_gguf_metadata_tell_the_end_of_text_alone(fields: dict[str, Any], eos: int) -> None:
    named = GGUF | {f"tokenizer.ggml.{key}": value for key, value in fields.items()}
    metadata = {key: value for key, value in named.items() if value is not None}
    lazy = open_tokenizer(metadata)
    assert lazy.eos_token_id == Tokenizer.from_gguf(metadata).eos_token_id == eos
    assert not is_built(lazy)
    assert lazy.encode("ab", add_special_tokens=False) == [4]


def test_end_of_text_outside_the_added_tokens_is_found_by_building(tmp_path: Path) -> None:
    content = json.loads((TINY / "qwen2" / "tokenizer.json").read_text())
    word = next(token for token in content["model"]["vocab"] if token not in str(content["added_tokens"]))
    write_directory(tmp_path, json.dumps(content), eos_token=word)
    with pytest.raises(LookupError):
        find_eos_id(read_files(tmp_path))
    tokenizer = open_tokenizer(tmp_path)
    assert is_built(tokenizer)
    assert tokenizer.eos_token_id == content["model"]["vocab"][word]


def test_a_token_called_added_tokens_is_not_taken_for_the_list(tmp_path: Path) -> None:
    content = json.loads((TINY / "qwen2" / "tokenizer.json").read_text())
    added = content.pop("added_tokens")
    content["model"]["vocab"]["added_tokens"] = max(content["model"]["vocab"].values()) + 1
    content["added_tokens"] = added  # now the last key
    write_directory(tmp_path, json.dumps(content, indent=1), eos_token=added[1]["content"])
    assert open_tokenizer(tmp_path).eos_token_id == added[1]["id"]


@pytest.mark.parametrize("change", ["twice", "shifted", "text", "nested"])
def test_added_tokens_that_disagree_with_the_vocabulary_are_left_to_it(tmp_path: Path, change: str) -> None:
    content = json.loads((TINY / "qwen2" / "tokenizer.json").read_text())
    eos = content["added_tokens"][1]["content"]
    wanted = Tokenizer.from_directory(write_directory(tmp_path, json.dumps(content), eos_token=eos)).eos_token_id
    if change == "twice":
        content["added_tokens"].append(content["added_tokens"][1] | {"id": 4})
    elif change == "shifted":
        for token in content["added_tokens"]:
            token["id"] += 1
    elif change == "text":
        content["added_tokens"][1]["id"] = "1"
    text = json.dumps(content) if change != "nested" else '{"added_tokens": ' + "[" * 100_000
    write_directory(tmp_path, text, eos_token=eos)
    if change in ("text", "nested"):
        with pytest.raises(CheckpointError, match="not a readable tokenizer"):
            open_tokenizer(tmp_path)
    else:
        assert open_tokenizer(tmp_path).eos_token_id == Tokenizer.from_directory(tmp_path).eos_token_id == wanted


def test_files_may_go_or_change_once_they_are_open(tmp_path: Path) -> None:
    write_directory(tmp_path, (TINY / "qwen2" / "tokenizer.json").read_text())
    wanted = Tokenizer.from_directory(tmp_path).encode("ab")
    tokenizer = open_tokenizer(tmp_path)
    for path in tmp_path.iterdir():
        path.write_text("no JSON")
    assert tokenizer.encode("ab") == wanted


def test_no_end_of_text_is_none(tmp_path: Path) -> None:
    lazy = open_tokenizer(write_directory(tmp_path, (TINY / "qwen2" / "tokenizer.json").read_text()))
    assert lazy.eos_token_id is None
    assert not is_built(lazy)


@pytest.mark.parametrize("config", [{}, {"eos_token": "</s>"}])
def test_missing_file_is_said_when_it_is_opened(tmp_path: Path, config: dict[str, str]) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: no such file; a model directory needs"):
        open_tokenizer(write_directory(tmp_path, None, **config))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("model", "bert", "model 'bert' is not known"),
        ("pre", "no-such", "pre 'no-such' is not known"),
        ("tokens", None, "tokens is missing"),
        ("eos_token_id", 5, "eos_token_id is 5; the vocabulary has 5 tokens"),
        ("eos_token_id", [1], r"eos_token_id is \[1\]; the vocabulary has 5 tokens"),
        ("pre", ["default"], r"pre \['default'\] is not known"),
        ("tokens", [1, 2], "tokens is a list with 1; should be a list of strings"),
    ],
)
def test_gguf_mistake_outside_the_vocabulary_is_said_when_it_is_opened(key: str, value: Any, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        open_tokenizer(GGUF | {f"tokenizer.ggml.{key}": value})


def test_damaged_vocabulary_is_said_by_every_use(tmp_path: Path) -> None:
    damaged = '{"added_tokens": [{"id": 1, "content": "</s>"}], "model": {"vocab": {"</s>": 1'
    directory = write_directory(tmp_path, damaged, eos_token="</s>")
    tokenizer = open_tokenizer(directory)
    assert tokenizer.eos_token_id == 1
    for _ in range(2):
        with pytest.raises(CheckpointError, match="not a readable tokenizer"):
            tokenizer.encode("a")
    with pytest.raises(CheckpointError, match="should be two tokens"):
        open_tokenizer(GGUF | {"tokenizer.ggml.merges": ["ab"]}).decode([0])


def test_threads_that_come_at_once_build_it_once() -> None:
    builds: list[int] = []

    def build() -> TokenizerParts:
        builds.append(1)
        time.sleep(0.02)
        return load_directory(TINY / "qwen2")

    tokenizer = LazyTokenizer(build, None)
    found: list[list[int]] = []
    threads = [threading.Thread(target=lambda: found.append(tokenizer.encode("ab"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(builds) == 1
    assert found == [Tokenizer.from_directory(TINY / "qwen2").encode("ab")] * 4


def test_attribute_that_no_tokenizer_has_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError):
        _ = open_tokenizer(TINY / "qwen2").no_such  # type: ignore[attr-defined]


def test_a_model_that_is_given_token_ids_loads_no_tokenizer() -> None:
    code = f"""if True:
        import sys
        from lean_engine import LLM, SamplingParams
        llm = LLM({str(TINY / "llama-gqa-tied")!r}, cpu_kernels="numpy", num_gpu_blocks_override=32)
        output = llm.generate({{"prompt_token_ids": [3, 4]}}, SamplingParams(max_tokens=2, detokenize=False))[0]
        assert len(output.outputs[0].token_ids) == 2
        print("tokenizers" in sys.modules)
        print(llm.tokenizer.decode([5]) and "tokenizers" in sys.modules)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["False", "True"], done.stderr
