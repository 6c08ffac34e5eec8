"""Write the demo model as a float32 safetensors directory, which transformers and others can read.

python bench/export_demo_model.py OUT_DIR
"""

import json
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from lean_engine.checkpoint import DEFAULT_MODEL, open_checkpoint
from lean_engine.text import Tokenizer


def export(out: Path) -> None:
    checkpoint = open_checkpoint(DEFAULT_MODEL)
    assert isinstance(checkpoint.tokenizer_source, dict)
    tokenizer = Tokenizer.from_gguf(checkpoint.tokenizer_source)
    out.mkdir(parents=True, exist_ok=True)
    config = {k: v for k, v in checkpoint.config.items() if k != "dtype"} | {"torch_dtype": "float32"}
    (out / "config.json").write_text(json.dumps(config, indent=1))
    (out / "generation_config.json").write_text(json.dumps(checkpoint.generation_config, indent=1))
    (out / "tokenizer.json").write_text(tokenizer.to_json(), encoding="utf-8")
    names = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token}
    template = {"chat_template": tokenizer.chat_template, "tokenizer_class": "PreTrainedTokenizerFast"}
    (out / "tokenizer_config.json").write_text(json.dumps(names | template, indent=1))
    tensors = {name: np.ascontiguousarray(checkpoint.tensor(name), np.float32) for name in checkpoint.names()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    export(Path(sys.argv[1]))
