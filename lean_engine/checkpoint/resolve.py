"""From what a user types after `lean-engine serve` to an open checkpoint."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lean_engine.checkpoint.base import Checkpoint
from lean_engine.checkpoint.demo_model import DEMO_MODEL, demo_model_path
from lean_engine.errors import CheckpointError, ConfigError

DEFAULT_MODEL = DEMO_MODEL
LOAD_FORMATS = ("auto", "dummy")
_HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[\w.-]+)(:(?P<file>[^:]+\.gguf))?", re.ASCII)
_CONFIG_FILES = ["*.json", "*.jinja", "*.txt", "tokenizer.model"]
_UNUSED_FILES = ["*/*", "consolidated*.safetensors"]  # other formats of the same weights


def open_checkpoint(
    model: str,
    *,
    revision: str | None = None,
    token: str | None = None,
    load_format: str = "auto",
    progress: bool = True,
) -> Checkpoint:
    """Open the checkpoint that `model` names; no tensor is read yet.

    Args:
        model: a directory, a .gguf file, "smollm2-135m-instruct", or a Hub repository "owner/name"
            ("owner/name:file.gguf" for a GGUF file in one).
        revision: Hub branch, tag or commit; only for a Hub repository.
        token: Hub access token, used where the Hub is; None = the one the Hub library finds.
        load_format: "auto" reads the weights; "dummy" needs only the config and makes random ones.
        progress: show downloads on stderr.

    Raises:
        CheckpointError: nothing is there, or it is not a checkpoint that can be read.
        ConfigError: an unknown load_format, or a revision of something that is not on the Hub.
    """
    if load_format not in LOAD_FORMATS:
        raise ConfigError(f"load_format is {load_format!r}, must be one of: {', '.join(LOAD_FORMATS)}")
    is_dummy = load_format == "dummy"
    path = Path(os.path.expanduser(model))  # unlike Path's, it leaves ~unknown as it is
    is_local = bool(model) and os.path.exists(path)
    if revision is not None and (is_local or model == DEMO_MODEL):
        raise ConfigError(f"revision is {revision!r}, but {model} is not a Hugging Face repository")
    if is_local:
        return open_path(path, str(path), is_dummy)
    if model == DEMO_MODEL:
        return open_path(demo_model_path(progress), model, is_dummy)
    if looks_like_path(model):
        raise CheckpointError(f"{model}: no such file or directory")
    hub_id = _HUB_ID.fullmatch(model)
    if hub_id is None:
        raise CheckpointError(
            f"{model!r} is not a model: give a directory, a .gguf file, the built-in {DEMO_MODEL!r}, "
            "or a Hugging Face repository (owner/name, or owner/name:file.gguf)"
        )
    downloaded = download(
        hub_id["repo"], hub_id["file"], revision=revision, token=token, is_dummy=is_dummy, progress=progress
    )
    if downloaded.is_dir() and not (downloaded / "config.json").is_file():
        raise CheckpointError(
            f"{model}: the repository has no config.json; name a GGUF file in it as {model}:FILE.gguf"
        )
    return open_path(downloaded, model, is_dummy)


def looks_like_path(model: str) -> bool:
    """Whether a string that names nothing on disk was meant as a path, not as a Hub repository."""
    is_rooted = Path(model).is_absolute() or model.startswith((".", "~"))
    is_file_name = ":" not in model and model.endswith((".gguf", ".safetensors"))
    return is_rooted or is_file_name or model.split(":")[0].count("/") > 1 or "\\" in model or model.endswith("/")


def open_path(path: Path, source: str, is_dummy: bool) -> Checkpoint:
    """Open a directory or a GGUF file."""
    from lean_engine.checkpoint.dummy import DummyCheckpoint

    if path.is_dir():
        from lean_engine.checkpoint.directory import DirectoryCheckpoint, read_configs, text_model_config

        if not is_dummy:
            return DirectoryCheckpoint(path, source)
        config, generation_config = read_configs(path)
        return DummyCheckpoint(text_model_config(config), generation_config, path, source)
    if not is_gguf(path):
        raise CheckpointError(
            f"{path}: is not a checkpoint: neither a GGUF file nor a directory; "
            "for safetensors give the directory that holds them"
        )
    from lean_engine.checkpoint.gguf_model import GgufCheckpoint

    gguf = GgufCheckpoint(path, source)
    return DummyCheckpoint(gguf.config, gguf.generation_config, gguf.tokenizer_source, source) if is_dummy else gguf


def is_gguf(path: Path) -> bool:
    """By name, or by content: the files of some download tools have no extension."""
    if path.suffix == ".gguf":
        return True
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None


def download(
    repo: str, file: str | None, *, revision: str | None, token: str | None, is_dummy: bool, progress: bool
) -> Path:
    """Fetch a Hub repository's checkpoint, or one GGUF file of it, into the Hub library's cache.

    The library honours HF_HUB_OFFLINE, HF_HOME, HF_ENDPOINT and proxies, and fetches only what the cache lacks.
    """
    import huggingface_hub

    patterns = _CONFIG_FILES if is_dummy else [*_CONFIG_FILES, "*.safetensors"]
    try:
        with hub_progress_bars(progress):
            if file is not None:
                return Path(huggingface_hub.hf_hub_download(repo, file, revision=revision, token=token))
            directory = huggingface_hub.snapshot_download(
                repo, revision=revision, token=token, allow_patterns=patterns, ignore_patterns=_UNUSED_FILES
            )
            return Path(directory)
    except Exception as error:  # the library lets through the errors of whichever HTTP client it is built on
        raise CheckpointError(hub_failure(repo, file, revision, error)) from None


@contextmanager
def hub_progress_bars(shown: bool) -> Iterator[None]:
    """Keep the Hub library's progress bars, or turn them off for a while."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if shown or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def hub_failure(repo: str, file: str | None, revision: str | None, error: Exception) -> str:
    """One line for what went wrong between here and the Hub."""
    from huggingface_hub import errors

    where = f"the Hugging Face repository {repo}"
    if isinstance(error, errors.GatedRepoError):
        return f"{where} is gated: accept its terms on its page, then give an access token (HF_TOKEN)"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{where} does not exist, or is private and needs an access token (HF_TOKEN); nor is there a path {repo}"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{where} has no revision {revision!r}"
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        return f"{where} is not in the local cache, and the Hub cannot be reached (or HF_HUB_OFFLINE is set)"
    if isinstance(error, errors.EntryNotFoundError):
        return f"{where} has no file {file}"
    first_line = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"{where} cannot be downloaded: {first_line}"
