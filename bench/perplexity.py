"""What reduced precision costs in accuracy: the perplexity of a fixed public-domain text.

    python bench/perplexity.py [--model MODEL]

Every row loads the model with other options and scores the same tokens in windows; perplexity is
exp(-mean log-probability), and the last column compares the log-probabilities of single tokens with float32's.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lean_engine import LLM, SamplingParams

TEXT = Path(__file__).parents[1] / "tests" / "data" / "public_domain.txt"
WINDOW = 256  # tokens that are scored together
PRECISIONS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "as stored": {},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16, KV cache too": {"dtype": "bfloat16", "kv_cache_dtype": "bfloat16"},
    "int8": {"quantization": "int8"},
}


def token_logprobs(model: str | None, **options: Any) -> NDArray[np.float64]:
    """Log-probability of each token of the text but the first of every window."""
    with LLM(model, max_model_len=WINDOW + 1, enable_prefix_caching=False, **options) as llm:
        assert llm.engine.tokenizer is not None
        ids = llm.engine.tokenizer.encode(TEXT.read_text(encoding="utf-8"))
        windows = [{"prompt_token_ids": ids[start : start + WINDOW]} for start in range(0, len(ids), WINDOW)]
        outputs = llm.generate(windows, SamplingParams(max_tokens=0, prompt_logprobs=0))
    found: list[float] = []
    for window, output in zip(windows, outputs, strict=True):
        rows = output.prompt_logprobs or []
        found += [row[i].logprob for i, row in zip(window["prompt_token_ids"], rows, strict=True) if row is not None]
    return np.array(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="as for LLM; default: the demo model")
    parser.add_argument("--json", action="store_true", help="one object per row")
    args = parser.parse_args()
    exact: NDArray[np.float64] | None = None
    for name, options in PRECISIONS.items():
        found = token_logprobs(args.model, **options)
        exact = found if exact is None else exact
        perplexity = math.exp(-found.mean())
        change = 100 * (perplexity / math.exp(-exact.mean()) - 1)
        error = float(np.sqrt(np.mean((found - exact) ** 2)))
        if args.json:
            row = {"precision": name, "tokens": len(found), "perplexity": perplexity, "change_percent": change}
            print(json.dumps(row | {"logprob_rms_error": error}), flush=True)
        else:
            print(
                f"{name:24} {len(found)} tokens  perplexity {perplexity:8.4f}  {change:+.3f} %  rms {error:.4f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
