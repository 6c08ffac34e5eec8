"""Whole engine against transformers: greedy ids and logits of every family, however the work is cut."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import TINY, LoadLLM

from lean_engine import SamplingParams

FAMILIES = sorted(p.name for p in TINY.iterdir())
GREEDY = SamplingParams(temperature=0, max_tokens=16, ignore_eos=True)
CUTS = {
    "defaults": {},
    "tokens one by one": {"max_num_batched_tokens": 4, "max_num_seqs": 4, "block_size": 4},
    "chunks of 8": {"max_num_batched_tokens": 8, "max_num_seqs": 4, "block_size": 16},
    "blocks of 32": {"block_size": 32, "max_num_seqs": 3},
    "no chunks": {"enable_chunked_prefill": False, "block_size": 5},
    "tight pool": {"num_gpu_blocks_override": 14, "block_size": 4, "max_num_seqs": 4, "max_model_len": 56},
}


def golden(family: str) -> dict[str, Any]:
    sequences: dict[str, Any] = json.loads((TINY / family / "golden.json").read_text())["sequences"]
    return sequences


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("cut", CUTS)
def test_greedy_ids_equal_transformers(load_llm: LoadLLM, family: str, cut: str) -> None:
    sequences = golden(family)
    llm = load_llm(family, **CUTS[cut])
    prompts = [{"prompt_token_ids": s["ids"]} for s in sequences.values()]
    outputs = llm.generate(prompts, GREEDY)
    assert [o.outputs[0].token_ids for o in outputs] == [s["greedy"] for s in sequences.values()]
    assert {o.outputs[0].finish_reason for o in outputs} == {"length"}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_request_alone_equals_transformers(load_llm: LoadLLM, family: str) -> None:
    sequence = golden(family)["a"]
    (output,) = load_llm(family).generate({"prompt_token_ids": sequence["ids"]}, GREEDY)
    assert output.outputs[0].token_ids == sequence["greedy"]


@pytest.mark.parametrize("family", FAMILIES)
def test_prompt_logprobs_equal_transformers_logits(load_llm: LoadLLM, family: str) -> None:
    """The whole vocabulary at every prompt position, aligned with a log-softmax of the reference's logits."""
    arrays = np.load(TINY / family / "golden.npz")
    ids, logits = arrays["a_ids"].tolist(), arrays["a_logits"].astype(np.float64)
    llm = load_llm(family, max_logprobs=-1, max_num_batched_tokens=16, max_num_seqs=2)
    (output,) = llm.generate({"prompt_token_ids": ids}, SamplingParams(max_tokens=0, prompt_logprobs=-1))
    expected = logits - np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1, keepdims=True))
    expected -= logits.max(-1, keepdims=True)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(ids)
    for position, entry in enumerate(output.prompt_logprobs[1:]):
        assert entry is not None
        assert next(iter(entry)) == ids[position + 1]  # the prompt's own token comes first
        found = np.array([entry[token].logprob for token in range(logits.shape[1])])
        assert np.abs(found - expected[position]).max() < 4e-4 * np.abs(logits).max()
    assert output.outputs[0].token_ids == []


def test_both_spellings_of_config_json_give_the_same_answer(load_llm: LoadLLM, tmp_path: Path) -> None:
    for family in FAMILIES:
        copy = tmp_path / family
        copy.mkdir()
        for file in (TINY / family).iterdir():
            (copy / file.name).symlink_to(file)
        (copy / "config.json").unlink()
        (copy / "config.json").write_text((TINY / family / "config.v4.json").read_text())
        sequence = golden(family)["b1"]
        (output,) = load_llm(copy).generate({"prompt_token_ids": sequence["ids"]}, GREEDY)
        assert output.outputs[0].token_ids == sequence["greedy"], family
