"""Rebuilds a tokenizer from GGUF metadata (the `tokenizer.*` keys).

GGUF stores the vocabulary, and the rules only by name: `tokenizer.ggml.model` names the algorithm, `tokenizer.ggml.pre`
the pre-tokenizer. Three algorithms are rebuilt: "gpt2" (byte-level BPE with merges), "llama" (SentencePiece BPE, whose
merges follow from the scores) and "gemma4" (SentencePiece spelling with merges). Names and defaults are those of
llama.cpp's src/llama-vocab.cpp; the regular expressions are those of the models' own tokenizer.json.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lean_engine.errors import CheckpointError
from lean_engine.text.parts import TokenizerParts, set_added_specials

if TYPE_CHECKING:
    import tokenizers
    from tokenizers import decoders, normalizers, pre_tokenizers

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # of tokenizer.ggml.token_type; the others are unused and byte
SPACE = "\u2581"  # how SentencePiece writes a space
MODELS = ("gpt2", "llama", "gemma4")  # values of tokenizer.ggml.model
LLAMA_IDS = {"bos": 1, "eos": 2}  # where the model is "llama" and the file names none


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How text is cut into words before the merges, and what llama.cpp ties to it."""

    splits: tuple[str, ...] = ()  # regular expressions, each match a word; none: GPT-2's own
    has_single_digits: bool = False  # every digit is a word, before GPT-2's expression
    normalizes_nfc: bool = False
    ignores_merges: bool = False  # a word that is a token is that token, whatever the merges say
    adds_bos: bool = False  # where tokenizer.ggml.add_bos_token is missing


ENDING = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
REST_WITH_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LOWER_END = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
UPPER_START = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"

LLAMA3_SPLIT = rf"{ENDING}|{WORD}|\p{{N}}{{1,3}}|{REST}"
QWEN2_SPLIT = rf"{ENDING}|{WORD}|\p{{N}}|{REST}"
QWEN35_SPLIT = (
    rf"{ENDING}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
    r"| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEKKEN_SPLIT = rf"{LOWER_END}|{UPPER_START}|\p{{N}}|{REST_WITH_SLASH}"
GPT4O_SPLIT = rf"{LOWER_END}{ENDING}?|{UPPER_START}{ENDING}?|\p{{N}}{{1,3}}|{REST_WITH_SLASH}"
DEEPSEEK_V3_SPLITS = (
    r"\p{N}{1,3}",
    r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    (
        r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
        r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
    ),
)
DEEPSEEK_CODER_SPLITS = (
    r"[\r\n]",
    r"\s?\p{L}+",
    r"\s?\p{P}+",
    r"[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}",
)

GPT2 = PreTokenizer()
SINGLE_DIGITS = PreTokenizer(has_single_digits=True)
LLAMA3 = PreTokenizer((LLAMA3_SPLIT,), ignores_merges=True, adds_bos=True)
CL100K = PreTokenizer((LLAMA3_SPLIT,))
QWEN2 = PreTokenizer((QWEN2_SPLIT,), normalizes_nfc=True)
PLAIN_QWEN2 = PreTokenizer((QWEN2_SPLIT,))
GPT4O = PreTokenizer((GPT4O_SPLIT,))

PRE_TOKENIZERS = {
    "default": GPT2,
    "gpt-2": GPT2,
    "phi-2": GPT2,
    "mpt": GPT2,
    "olmo": GPT2,
    "smollm": SINGLE_DIGITS,
    "starcoder": SINGLE_DIGITS,
    "refact": SINGLE_DIGITS,
    "command-r": SINGLE_DIGITS,
    "llama-bpe": LLAMA3,
    "llama3": LLAMA3,
    "llama-v3": LLAMA3,
    "falcon3": LLAMA3,
    "dbrx": CL100K,
    "smaug-bpe": CL100K,
    "qwen2": QWEN2,
    "qwen35": PreTokenizer((QWEN35_SPLIT,), normalizes_nfc=True),
    "deepseek-r1-qwen": PLAIN_QWEN2,
    "megrez": PLAIN_QWEN2,
    "stablelm2": PLAIN_QWEN2,
    "tekken": PreTokenizer((TEKKEN_SPLIT,), ignores_merges=True, adds_bos=True),
    "gpt-4o": GPT4O,
    "llama4": GPT4O,
    "deepseek-v3": PreTokenizer(DEEPSEEK_V3_SPLITS),
    "deepseek-coder": PreTokenizer(DEEPSEEK_CODER_SPLITS),
}


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """The three parallel arrays of the metadata; the index is the token id."""

    tokens: list[str]
    types: Sequence[int]
    scores: Sequence[float]


def load_metadata(metadata: dict[str, Any]) -> TokenizerParts:
    """Build the tokenizer that GGUF metadata describes (keys as in the file, values plain Python).

    CheckpointError names the key that is missing, inconsistent, or has a value that is not known.
    """
    model = model_of(metadata)
    vocabulary = read_vocabulary(metadata)
    if model == "gpt2":
        backend, adds_bos = byte_level_bpe(metadata, vocabulary)
    else:
        backend, adds_bos = sentencepiece_bpe(metadata, vocabulary), True
    add_special_tokens(backend, vocabulary)
    bos, eos = (named_token(metadata, vocabulary, name) for name in ("bos", "eos"))
    has_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", adds_bos and bos is not None))
    has_eos = bool(metadata.get("tokenizer.ggml.add_eos_token", False))
    for name, is_added, token in (("bos", has_bos, bos), ("eos", has_eos, eos)):
        if is_added and token is None:
            raise CheckpointError(f"GGUF: tokenizer.ggml.add_{name}_token is true but {name}_token_id is missing")
    set_added_specials(backend, bos=bos if has_bos else None, eos=eos if has_eos else None, source="GGUF")
    return TokenizerParts(backend, "GGUF", bos, eos, read_templates(metadata))


def required_list(metadata: dict[str, Any], key: str, kind: type | tuple[type, ...] = str) -> Sequence[Any]:
    """An array that must be there; its elements, which are all of one type, are of a kind."""
    value = metadata.get(key)
    if isinstance(value, str) or not isinstance(value, Sequence):
        raise CheckpointError(f"GGUF: {key} is {kind_of(value)}; should be a list")
    if value and not isinstance(value[0], kind):
        wanted = "strings" if kind is str else "numbers"
        raise CheckpointError(f"GGUF: {key} is a list with {value[0]!r}; should be a list of {wanted}")
    return value


def kind_of(value: Any) -> str:
    return "missing" if value is None else f"a {type(value).__name__}"


def model_of(metadata: dict[str, Any]) -> str:
    """The algorithm's name; CheckpointError where it is not one of MODELS."""
    model = metadata.get("tokenizer.ggml.model")
    if not isinstance(model, str):
        raise CheckpointError(f"GGUF: tokenizer.ggml.model is {kind_of(model)}; should be a str")
    if model not in MODELS:
        raise CheckpointError(f"GGUF: tokenizer.ggml.model {model!r} is not known; known: {', '.join(MODELS)}")
    return model


def pre_tokenizer_of(metadata: dict[str, Any]) -> PreTokenizer:
    """The named pre-tokenizer; CheckpointError where it is not known."""
    name = metadata.get("tokenizer.ggml.pre") or "default"
    if not isinstance(name, str) or name not in PRE_TOKENIZERS:
        known = ", ".join(sorted(PRE_TOKENIZERS))
        raise CheckpointError(f"GGUF: tokenizer.ggml.pre {name!r} is not known; known: {known}")
    return PRE_TOKENIZERS[name]


def find_eos_id(metadata: dict[str, Any]) -> int | None:
    """The end-of-text id of the tokenizer that `load_metadata` would build; of the vocabulary one string is read.

    CheckpointError as load_metadata, for the mistakes that show without reading the strings.
    """
    if model_of(metadata) == "gpt2":
        pre_tokenizer_of(metadata)
    return token_id_of(metadata, "eos", len(required_list(metadata, "tokenizer.ggml.tokens")))


def read_vocabulary(metadata: dict[str, Any]) -> Vocabulary:
    """Tokens with their types and scores; an empty token gets the name that llama.cpp gives it."""
    tokens = [t or f"[EMPTY_{i}]" for i, t in enumerate(required_list(metadata, "tokenizer.ggml.tokens"))]
    usual: dict[str, Any] = {
        "tokenizer.ggml.token_type": [NORMAL] * len(tokens),
        "tokenizer.ggml.scores": [0.0] * len(tokens),
    }
    types, scores = (required_list(usual | metadata, key, (int, float)) for key in usual)
    for name, values in (("token_type", types), ("scores", scores)):
        if len(values) != len(tokens):
            raise CheckpointError(f"GGUF: {len(tokens)} tokens but {len(values)} values in tokenizer.ggml.{name}")
    if len(set(tokens)) != len(tokens):
        twice, _ = Counter(tokens).most_common(1)[0]
        raise CheckpointError(f"GGUF: token {twice!r} stands twice in tokenizer.ggml.tokens")
    return Vocabulary(tokens, types, scores)


def bpe(vocabulary: Vocabulary, merges: list[tuple[str, str]], **options: Any) -> tokenizers.Tokenizer:
    """A BPE tokenizer over the vocabulary, without any rules yet."""
    from tokenizers import Tokenizer, models

    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    try:
        return Tokenizer(models.BPE(vocab=ids, merges=merges, **options))
    except Exception as error:  # tokenizers raises nothing more specific
        raise CheckpointError(f"GGUF: tokenizer.ggml.merges do not fit the vocabulary: {error}") from None


def stored_merges(metadata: dict[str, Any]) -> list[tuple[str, str]]:
    """The merges of the file, in order; the space that parts a pair is never its first character."""
    merges = list(required_list(metadata, "tokenizer.ggml.merges"))
    pairs = [(merge[:cut], merge[cut + 1 :]) for merge in merges if (cut := merge.find(" ", 1)) > 0]
    if len(pairs) != len(merges):
        wrong = next(merge for merge in merges if " " not in merge[1:])
        raise CheckpointError(f"GGUF: merge {wrong!r} in tokenizer.ggml.merges should be two tokens")
    return pairs


def byte_level_bpe(metadata: dict[str, Any], vocabulary: Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    """GPT-2's algorithm with the named pre-tokenizer; also says whether that one adds BOS by default."""
    from tokenizers import decoders, normalizers

    pre = pre_tokenizer_of(metadata)
    backend = bpe(vocabulary, stored_merges(metadata), ignore_merges=pre.ignores_merges)
    if pre.normalizes_nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = build_pre_tokenizer(pre)
    backend.decoder = decoders.ByteLevel()
    return backend, pre.adds_bos


def build_pre_tokenizer(pre: PreTokenizer) -> pre_tokenizers.PreTokenizer:
    """The `tokenizers` object of a pre-tokenizer."""
    from tokenizers import Regex
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence, Split

    steps: list[pre_tokenizers.PreTokenizer] = [Split(Regex(split), "isolated") for split in pre.splits]
    if pre.has_single_digits:
        steps.append(Digits(individual_digits=True))
    return Sequence([*steps, ByteLevel(add_prefix_space=False, use_regex=not pre.splits)])


def sentencepiece_bpe(metadata: dict[str, Any], vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    """SentencePiece's BPE: spaces written "▁", bytes as fallback, merges stored ("gemma4") or from the scores."""
    if metadata["tokenizer.ggml.model"] == "gemma4":
        merges, has_prefix = stored_merges(metadata), False
    else:
        required_list(metadata, "tokenizer.ggml.scores", (int, float))
        merges = merges_by_score(vocabulary)
        has_prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    unknown = next((t for t, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind == UNKNOWN), None)
    backend = bpe(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True)
    backend.normalizer, backend.decoder = sentencepiece_rules(has_prefix=has_prefix)
    return backend


def sentencepiece_rules(*, has_prefix: bool) -> tuple[normalizers.Normalizer, decoders.Decoder]:
    """How text becomes pieces and pieces text; with a prefix every stretch between added tokens begins with a space."""
    from tokenizers import decoders, normalizers

    escape = normalizers.Replace(" ", SPACE)
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if not has_prefix:
        return escape, decoders.Sequence(steps)
    return (
        normalizers.Sequence([normalizers.Prepend(SPACE), escape]),
        decoders.Sequence([*steps, decoders.Strip(content=" ", left=1, right=0)]),
    )


def merges_by_score(vocabulary: Vocabulary) -> list[tuple[str, str]]:
    """Every way to make a normal token of two others, best score first, then by id.

    SentencePiece merges the neighbours whose union has the best score; as ranked pairs that is this list.
    """
    normal = {
        token: (-score, i)
        for i, (token, kind, score) in enumerate(
            zip(vocabulary.tokens, vocabulary.types, vocabulary.scores, strict=True)
        )
        if kind == NORMAL
    }
    return [
        (token[:cut], token[cut:])
        for token in sorted(normal, key=normal.__getitem__)
        for cut in range(1, len(token))
        if token[:cut] in normal and token[cut:] in normal
    ]


def add_special_tokens(backend: tokenizers.Tokenizer, vocabulary: Vocabulary) -> None:
    """Make control and user-defined tokens match whole in a text; they keep their ids."""
    from tokenizers import AddedToken

    backend.add_tokens(
        [
            AddedToken(token, special=kind != USER_DEFINED, normalized=False)
            for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
            if kind in (CONTROL, UNKNOWN, USER_DEFINED)
        ]
    )


def named_token(metadata: dict[str, Any], vocabulary: Vocabulary, name: str) -> str | None:
    """The token of `tokenizer.ggml.{name}_token_id`."""
    token_id = token_id_of(metadata, name, len(vocabulary.tokens))
    return None if token_id is None else vocabulary.tokens[token_id]


def token_id_of(metadata: dict[str, Any], name: str, num_tokens: int) -> int | None:
    """The value of `tokenizer.ggml.{name}_token_id`, or the one that the algorithm takes where it is missing."""
    default = LLAMA_IDS[name] if metadata["tokenizer.ggml.model"] == "llama" else None
    token_id: int | None = metadata.get(f"tokenizer.ggml.{name}_token_id", default)
    if token_id is not None and not (isinstance(token_id, int) and 0 <= token_id < num_tokens):
        raise CheckpointError(
            f"GGUF: tokenizer.ggml.{name}_token_id is {token_id}; the vocabulary has {num_tokens} tokens"
        )
    return token_id


def read_templates(metadata: dict[str, Any]) -> dict[str, str]:
    """The chat templates by name."""
    key = "tokenizer.chat_template"
    found = {k: v for k, v in metadata.items() if k == key or k.startswith(key + ".")}
    for name, template in found.items():
        if not isinstance(template, str):
            raise CheckpointError(f"GGUF: {name} is of type {type(template).__name__}, must be a string")
    return {name.removeprefix(key).removeprefix(".") or "default": template for name, template in found.items()}
