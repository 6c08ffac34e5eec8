"""Reads a Hugging Face model directory: tokenizer.json and the files that complete it.

tokenizer.json holds the vocabulary and all the rules. tokenizer_config.json names bos and eos, may add tokens, and may
hold the chat template; special_tokens_map.json is its older form; a template file wins over the configuration.

Who decides about BOS: the post-processor of tokenizer.json does, as in transformers. The one exception is transformers
4's Llama, Gemma and Cohere classes, which built the post-processor from an explicit `add_bos_token`; for these classes
an explicit `add_bos_token` (and `add_eos_token`) is honoured in both directions.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lean_engine.errors import CheckpointError
from lean_engine.text.parts import TokenizerParts, set_added_specials

if TYPE_CHECKING:
    import tokenizers

ADDED_TOKENS = re.compile(r'"added_tokens"\s*:\s*')  # within a string its quotes would be escaped
NAMED_SPECIALS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
SPECIAL_LISTS = ("additional_special_tokens", "extra_special_tokens")
CLASSES_WITH_ADD_BOS = {
    f"{family}Tokenizer{end}" for family in ("Llama", "CodeLlama", "Gemma", "Cohere") for end in ("", "Fast")
}


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """What the files of a model directory say of its tokenizer; they may change or go meanwhile."""

    path: Path  # of tokenizer.json
    backend: str  # its text
    config: dict[str, Any]  # tokenizer_config.json
    names: dict[str, Any]  # the same completed by special_tokens_map.json
    chat_templates: dict[str, str]

    @property
    def config_path(self) -> Path:
        return self.path.with_name("tokenizer_config.json")

    @property
    def eos_token(self) -> str | None:
        return text_of(self.names.get("eos_token"), self.config_path)


def read_files(directory: Path) -> TokenizerFiles:
    """CheckpointError names the file that is missing or cannot be read."""
    path = directory / "tokenizer.json"
    if not path.is_file():
        other = "; tokenizer.model alone is not read: convert it" if (directory / "tokenizer.model").is_file() else ""
        raise CheckpointError(f"{path}: no such file; a model directory needs a tokenizer.json{other}")
    try:
        backend = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not a readable tokenizer.json: {one_line(error)}") from None
    config = read_json(directory / "tokenizer_config.json")
    names = with_special_tokens_map(config, read_json(directory / "special_tokens_map.json"))
    return TokenizerFiles(path, backend, config, names, read_templates(directory, config))


def load_directory(directory: Path) -> TokenizerParts:
    """Load the tokenizer of a model directory; CheckpointError names the file that is missing or wrong."""
    return load_files(read_files(directory))


def load_files(files: TokenizerFiles) -> TokenizerParts:
    """Build the tokenizer; CheckpointError names the file that is wrong."""
    backend = read_backend(files)
    add_configured_tokens(backend, files.names, files.config_path)
    bos, eos = text_of(files.names.get("bos_token"), files.config_path), files.eos_token
    honour_add_bos(backend, files.config, bos, eos, files.config_path)
    return TokenizerParts(backend, str(files.path), bos, eos, files.chat_templates)


def find_eos_id(files: TokenizerFiles) -> int | None:
    """The end-of-text id of the tokenizer that `load_files` would build; of tokenizer.json only the part that lists the
    added tokens is parsed, in a tenth of the time.

    LookupError where the token is not one of those and of the vocabulary, once and under the same id: the vocabulary
    decides the id of an added token, and the order that of others. CheckpointError as load_files for the names.
    """
    eos = files.eos_token
    if eos is None:
        return None
    try:
        key = ADDED_TOKENS.search(files.backend)
        added = [] if key is None else json.JSONDecoder().raw_decode(files.backend, key.end())[0]
        ids: list[int] = [token["id"] for token in added if token["content"] == eos]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise LookupError(f"{files.path}: its added tokens cannot be read alone") from None
    entries = re.findall(re.escape(json.dumps(eos, ensure_ascii=False)) + r"\s*:\s*(\d+)", files.backend)
    if len(ids) != 1 or [int(entry) for entry in entries] != ids:
        raise LookupError(f"{files.path}: {eos!r} is not one added token of the vocabulary")
    return ids[0]


def read_backend(files: TokenizerFiles) -> tokenizers.Tokenizer:
    """tokenizer.json as a `tokenizers` object that neither cuts nor pads."""
    from tokenizers import Tokenizer

    try:
        backend = Tokenizer.from_str(files.backend)
    except Exception as error:  # tokenizers raises nothing more specific
        raise CheckpointError(f"{files.path}: not a readable tokenizer.json: {one_line(error)}") from None
    backend.no_truncation()
    backend.no_padding()
    return backend


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, {} where there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not readable as JSON: {one_line(error)}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: holds a {type(content).__name__}; should hold an object")
    return content


def with_special_tokens_map(config: dict[str, Any], special_map: dict[str, Any]) -> dict[str, Any]:
    """The configuration completed by special_tokens_map.json, which wins where the configuration is of its time."""
    config = {key: value for key, value in config.items() if value is not None}
    return special_map | config if "added_tokens_decoder" in config else config | special_map


def text_of(token: Any, path: Path) -> str | None:
    """The string of a token that is written as a string or as {"content": …}; None where it is empty."""
    if isinstance(token, dict):
        token = token.get("content")
    if token is not None and not isinstance(token, str):
        raise CheckpointError(f'{path}: token {token!r} should be a string or {{"content": string}}')
    return token or None


def added_token(token: Any, path: Path, *, special: bool) -> tokenizers.AddedToken:
    """One entry of the configuration as an added token; a plain string gets the usual flags."""
    from tokenizers import AddedToken

    text = text_of(token, path)
    if not text:
        raise CheckpointError(f"{path}: {token!r} is no token; should be a non-empty string")
    flags = token if isinstance(token, dict) else {}
    special = bool(flags.get("special", special))
    return AddedToken(
        text,
        single_word=bool(flags.get("single_word", False)),
        lstrip=bool(flags.get("lstrip", False)),
        rstrip=bool(flags.get("rstrip", False)),
        normalized=bool(flags.get("normalized", not special)),
        special=special,
    )


def add_configured_tokens(backend: tokenizers.Tokenizer, names: dict[str, Any], path: Path) -> None:
    """Add the tokens of the configuration in transformers' order: by id, then the named, then further special ones.

    A token that tokenizer.json has keeps its id and takes the configuration's flags. CheckpointError where a token that
    tokenizer.json lacks does not get the id that the configuration gives it.
    """
    declared = names.get("added_tokens_decoder", {})
    try:
        by_id = sorted(((int(token_id), token) for token_id, token in declared.items()), key=lambda entry: entry[0])
    except (AttributeError, TypeError, ValueError):
        raise CheckpointError(f"{path}: added_tokens_decoder should map ids to tokens") from None
    tokens = {token_id: added_token(token, path, special=False) for token_id, token in by_id}
    absent = [(i, token.content) for i, token in tokens.items() if backend.token_to_id(token.content) is None]
    backend.add_tokens(list(tokens.values()))
    for token_id, text in absent:
        if (actual := backend.token_to_id(text)) != token_id:
            raise CheckpointError(
                f"{path}: added token {text!r} should have id {token_id}; tokenizer.json leaves it {actual}"
            )
    backend.add_tokens(unknown_specials(backend, names, path))


def unknown_specials(backend: tokenizers.Tokenizer, names: dict[str, Any], path: Path) -> list[tokenizers.AddedToken]:
    """The special tokens of the configuration that are not added tokens yet."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    entries = [names[key] for key in NAMED_SPECIALS if names.get(key) is not None]
    for key in SPECIAL_LISTS:
        further = names.get(key, [])
        entries += further.values() if isinstance(further, dict) else further
    return [added_token(entry, path, special=True) for entry in entries if text_of(entry, path) not in {None, *known}]


def honour_add_bos(
    backend: tokenizers.Tokenizer, config: dict[str, Any], bos: str | None, eos: str | None, path: Path
) -> None:
    """Set what is added to a text where an old class's explicit `add_bos_token` decides it (see the head)."""
    add_bos, add_eos = config.get("add_bos_token"), config.get("add_eos_token") is True
    if config.get("tokenizer_class") not in CLASSES_WITH_ADD_BOS or not isinstance(add_bos, bool):
        return
    for key, wanted, token in (("bos", add_bos, bos), ("eos", add_eos, eos)):
        if wanted and token is None:
            raise CheckpointError(f"{path}: add_{key}_token is true but there is no {key}_token")
    set_added_specials(backend, bos=bos if add_bos else None, eos=eos if add_eos else None, source=str(path))


def read_templates(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    """The chat templates by name: chat_template.jinja, else chat_template.json, else the configuration's."""
    path = directory / "chat_template.jinja"
    if path.is_file():
        named = {p.stem: read_text(p) for p in sorted((directory / "additional_chat_templates").glob("*.jinja"))}
        return {"default": read_text(path)} | named
    path = directory / "chat_template.json"
    template = read_json(path).get("chat_template")
    if template is None:
        path, template = directory / "tokenizer_config.json", config.get("chat_template")
    match template:
        case None:
            return {}
        case str():
            return {"default": template}
        case dict() if all(isinstance(text, str) for text in template.values()):
            return template
        case list() if all(is_named_template(t) for t in template):
            return {t["name"]: t["template"] for t in template}
    raise CheckpointError(f"{path}: chat_template should be a string or a list of {{name, template}}")


def is_named_template(found: Any) -> bool:
    return isinstance(found, dict) and all(isinstance(found.get(key), str) for key in ("name", "template"))


def read_text(path: Path) -> str:
    """A template file's text."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: not readable as UTF-8 text: {one_line(error)}") from None


def one_line(error: Exception) -> str:
    """An exception's message without line breaks."""
    return " ".join(str(error).split())
