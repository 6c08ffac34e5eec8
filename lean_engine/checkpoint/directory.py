"""A checkpoint directory as transformers writes it: config.json, safetensors in one file or in shards.

A multimodal Gemma 3 is reduced to its language model: text_config becomes the config, the other parts are left out.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from lean_engine.checkpoint.base import Checkpoint
from lean_engine.checkpoint.safetensors_file import SafetensorsFile
from lean_engine.errors import CheckpointError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


class DirectoryCheckpoint(Checkpoint):
    """The tensors and configs of one directory.

    Raises:
        CheckpointError: config or weights are missing, damaged or contradict the index.
    """

    def __init__(self, directory: Path, source: str | None = None) -> None:
        self.source = source or str(directory)
        self.tokenizer_source = directory
        raw_config, self.generation_config = read_configs(directory)
        self.config = text_model_config(raw_config)
        self._files = open_weights(directory)
        self._stored_names = {name: name for name in self._files}
        if self.config is not raw_config:
            pairs = ((text_model_name(name), name) for name in self._files)
            self._stored_names = {name: stored for name, stored in pairs if name is not None}

    def names(self) -> Collection[str]:
        return self._stored_names.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        file, stored_name = self._locate(name)
        return file.shape(stored_name)

    def dtype(self, name: str) -> str:
        file, stored_name = self._locate(name)
        return file.dtype(stored_name)

    def tensor(self, name: str) -> np.ndarray:
        file, stored_name = self._locate(name)
        return file.tensor(stored_name)

    def release(self, name: str) -> None:
        file, stored_name = self._locate(name)
        file.release(stored_name)

    def _locate(self, name: str) -> tuple[SafetensorsFile, str]:
        stored_name = self._stored_names.get(name)
        if stored_name is None:
            files = sorted({file.path.name for file in self._files.values()})
            listed = ", ".join(files[:3]) + (f" and {len(files) - 3} more files" if len(files) > 3 else "")
            raise CheckpointError(f"{self.source}: tensor {name} is missing; looked in {listed}")
        return self._files[stored_name], stored_name


def read_configs(directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json and generation_config.json ({} where there is none)."""
    config_path = directory / "config.json"
    if not config_path.is_file():
        ggufs = sorted(p.name for p in directory.glob("*.gguf"))
        hint = f"; for a GGUF model give the path of the file: {directory / ggufs[0]}" if ggufs else ""
        raise CheckpointError(f"{directory}: is not a checkpoint: it has no config.json{hint}")
    generation_path = directory / "generation_config.json"
    return read_json_object(config_path), read_json_object(generation_path) if generation_path.is_file() else {}


def read_json_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: is not a JSON object but {type(value).__name__}")
    return value


def open_weights(directory: Path) -> dict[str, SafetensorsFile]:
    """The file that holds each tensor, by the tensor's stored name."""
    if (directory / SINGLE_FILE).is_file():
        return open_unindexed([directory / SINGLE_FILE])
    if (directory / INDEX_FILE).is_file():
        return open_indexed(directory)
    paths = sorted(directory.glob("*.safetensors"))
    if paths:
        return open_unindexed(paths)
    pickles = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in directory.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"{directory}: has its weights as {pickles[0]}; safetensors are needed "
            "(save_pretrained of a current transformers writes them)"
        )
    raise CheckpointError(f"{directory}: has no weights: expected {SINGLE_FILE}, {INDEX_FILE} or other *.safetensors")


def open_unindexed(paths: list[Path]) -> dict[str, SafetensorsFile]:
    files: dict[str, SafetensorsFile] = {}
    for path in paths:
        file = SafetensorsFile(path)
        for name in file.names():
            if name in files:
                raise CheckpointError(f"{path}: holds tensor {name} a second time; {files[name].path.name} has it too")
            files[name] = file
    return files


def open_indexed(directory: Path) -> dict[str, SafetensorsFile]:
    """Shards, as the index assigns tensors to them; what a shard holds beyond the index is left out."""
    index_path = directory / INDEX_FILE
    weight_map = read_json_object(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(shard, str) for shard in weight_map.values()):
        raise CheckpointError(f"{index_path}: has no weight_map from tensor names to file names")
    shards: dict[str, SafetensorsFile] = {}
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard:
            raise CheckpointError(f"{index_path}: names the shard {shard!r}, must be a file beside it")
        if not (directory / shard).is_file():
            raise CheckpointError(f"{directory / shard}: is missing; {INDEX_FILE} lists it as a shard")
        shards[shard] = SafetensorsFile(directory / shard)
    for name, shard in weight_map.items():
        if name not in shards[shard].names():
            raise CheckpointError(f"{directory / shard}: lacks tensor {name}, which {INDEX_FILE} says it holds")
    return {name: shards[shard] for name, shard in weight_map.items()}


def text_model_config(config: dict[str, Any]) -> dict[str, Any]:
    """The config of the language model inside a multimodal Gemma 3; any other config as it is."""
    text_config = config.get("text_config")
    if config.get("model_type") != "gemma3" or not isinstance(text_config, dict):
        return config
    shared = {key: config[key] for key in ("torch_dtype", "dtype", "bos_token_id", "eos_token_id") if key in config}
    named = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
    return {**text_config, **shared, **named}


def text_model_name(stored_name: str) -> str | None:
    """A multimodal Gemma 3 tensor's name in the language model alone, None where it belongs to another part.

    Files of transformers 4 begin it with "language_model.", later ones with "model.language_model.".
    """
    if stored_name.startswith("language_model."):
        return stored_name.removeprefix("language_model.")
    if stored_name.startswith("model.language_model."):
        return "model." + stored_name.removeprefix("model.language_model.")
    return stored_name if stored_name == "lm_head.weight" else None
