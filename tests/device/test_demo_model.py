"""The real model: chat prompts and greedy answers of SmolLM2-135M-Instruct equal transformers'."""

import json
import math
from pathlib import Path

import pytest
from conftest import LoadLLM

from lean_engine import LLM, SamplingParams
from lean_engine.engine.cpu_device import has_compiler

GOLDEN = json.loads((Path(__file__).resolve().parents[1] / "data" / "smollm2.json").read_text())
GREEDY = SamplingParams(temperature=0, max_tokens=GOLDEN["max_new_tokens"])
pytestmark = pytest.mark.demo


@pytest.fixture(scope="module")
def llm(demo_model: str) -> LLM:
    return LLM(demo_model, threads=2, max_model_len=512)


def test_chat_reproduces_prompts_ids_and_ends(llm: LLM) -> None:
    outputs = llm.chat([item["messages"] for item in GOLDEN["items"]], GREEDY)
    for output, item in zip(outputs, GOLDEN["items"], strict=True):
        assert output.prompt == item["prompt"]
        assert output.prompt_token_ids == item["prompt_ids"]
        assert output.outputs[0].token_ids == item["generated_ids"], item["name"]
        assert output.outputs[0].finish_reason == item["finish"]


def test_generate_on_the_rendered_prompt_gives_the_same(llm: LLM) -> None:
    for item in GOLDEN["items"]:
        (output,) = llm.generate(item["prompt"], GREEDY)
        assert output.outputs[0].token_ids == item["generated_ids"], item["name"]


def test_first_logprobs_match_the_reference(llm: LLM) -> None:
    for item in GOLDEN["items"]:
        params = SamplingParams(temperature=0, max_tokens=1, logprobs=5)
        entry = (llm.generate({"prompt_token_ids": item["prompt_ids"]}, params)[0].outputs[0].logprobs or [])[0]
        assert list(entry) == item["first_top5_ids"]
        for token, logit in zip(item["first_top5_ids"], item["first_top5_logits"], strict=True):
            assert entry[token].logprob == pytest.approx(
                logit - item["first_logsumexp"], abs=0.03
            )  # the reference holds float16 weights


def test_the_capital_of_france_is_paris(llm: LLM) -> None:
    text = "".join(
        o.outputs[0].text for o in llm.stream([{"role": "user", "content": "What is the capital of France?"}], GREEDY)
    )
    assert "Paris" in text


def test_no_model_means_the_demo_model(demo_model: str, load_llm: LoadLLM) -> None:
    llm = LLM(max_model_len=64, threads=1)
    assert llm.model == demo_model
    llm.close()


TEXT = Path(__file__).resolve().parents[1] / "data" / "public_domain.txt"


def mean_logprob(model: str, **options: str) -> float:
    """Of the text's tokens, in windows of 256."""
    with LLM(model, threads=2, max_model_len=257, cpu_kernels="compiled", **options) as llm:
        ids = llm.engine.tokenizer.encode(TEXT.read_text(encoding="utf-8"))
        windows = [{"prompt_token_ids": ids[start : start + 256]} for start in range(0, len(ids), 256)]
        outputs = llm.generate(windows, SamplingParams(max_tokens=0, prompt_logprobs=0))
    found = [
        row[token].logprob
        for window, output in zip(windows, outputs, strict=True)
        for token, row in zip(window["prompt_token_ids"], output.prompt_logprobs, strict=True)
        if row is not None
    ]
    return sum(found) / len(found)


@pytest.fixture(scope="module")
def exact_logprob(demo_model: str) -> float:
    if not has_compiler():
        pytest.skip("reduced precision needs the compiled kernels, and no C compiler is installed")
    return mean_logprob(demo_model, dtype="float32")


@pytest.mark.parametrize(
    ("options", "bound"),
    [
        ({}, 0.0005),
        ({"kv_cache_dtype": "float32"}, 1e-6),
        ({"dtype": "bfloat16"}, 0.002),
        ({"dtype": "bfloat16", "kv_cache_dtype": "bfloat16"}, 0.002),
        ({"quantization": "int8"}, 0.01),
    ],
    ids=["as stored", "float32 keys and values", "bfloat16", "bfloat16 keys and values", "int8"],
)
def test_reduced_precision_keeps_the_perplexity_of_a_text(
    options: dict[str, str], bound: float, demo_model: str, exact_logprob: float
) -> None:
    assert abs(math.expm1(exact_logprob - mean_logprob(demo_model, **options))) < bound
