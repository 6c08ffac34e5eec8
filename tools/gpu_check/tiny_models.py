"""Whole small models on the device beside the CPU device: greedy tokens and log-probabilities of every token.

Weights are rounded first and read by both, so what differs is arithmetic in 16 bits: an answer may leave the CPU's only
where the CPU itself was undecided between two tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gpu_check.context import CheckError, Context, describe
from gpu_check.loading import RoundedCheckpoint, generate, start
from gpu_check.wiring import open_driver
from lean_engine.engine.outputs import RequestOutput
from lean_engine.runtime.cpu.device import CpuDevice
from lean_engine.runtime.cuda.device import CudaDevice
from lean_engine.runtime.cuda.driver import Driver
from lean_engine.sampling.params import SamplingParams

TOLERANCE = {"bfloat16": 0.12, "float16": 0.02}  # of log-probabilities
SIZES: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 256,
}
GEMMA_SIZES = {"hidden_activation": "gelu_pytorch_tanh", "sliding_window": 8, "query_pre_attn_scalar": 64}
MOE_SIZES = {"moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 3, "norm_topk_prob": True}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rope_theta": 1e5, "tie_word_embeddings": True},
    "qwen3": {"model_type": "qwen3", "rope_theta": 1e6, "tie_word_embeddings": True},
    "gemma2": {
        **GEMMA_SIZES,
        "model_type": "gemma2",
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "num_hidden_layers": 2,
    },
    "gemma3": {
        **GEMMA_SIZES,
        "model_type": "gemma3_text",
        "layer_types": [*["sliding_attention"] * 2, "full_attention"],
    },
    "qwen3-moe": {**MOE_SIZES, "model_type": "qwen3_moe", "decoder_sparse_step": 1, "mlp_only_layers": [1]},
}
LARGER_LOGITS = {"gemma2": 3, "gemma3": 3}  # norm weights of 1 count as 2 there

EMULATED_EVERY = 4  # of a scenario's families: the first and the mixture of experts

SHARED = [(7 + j * 3) % 500 + 5 for j in range(33)]
PROMPTS = [[(i * 7 + j * 3) % 500 + 5 for j in range(n)] for i, n in enumerate((5, 33, 18, 1))]
GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=2)
SEEDED = SamplingParams(temperature=0.8, seed=3, max_tokens=6, ignore_eos=True, logprobs=2)
LONG = SamplingParams(temperature=0.7, seed=5, max_tokens=20, ignore_eos=True, logprobs=2)
DECIDED = {"float16"}  # types so near to the CPU's that drawn tokens are the same; others are greedy throughout


@dataclass(frozen=True)
class Scenario:
    """A run of an engine.

    Attributes:
        must_have: statistics that must not be 0 at its end, by their names.
    """

    name: str
    families: tuple[str, ...]
    prompts: list[list[int]]
    params: list[SamplingParams]
    options: dict[str, Any] = field(default_factory=dict)
    rounds: int = 1
    must_have: tuple[str, ...] = ()


def scenarios() -> list[Scenario]:
    shared = [[*SHARED, 9], [*SHARED, 10, 11], *PROMPTS, SHARED[:32]]
    mixed = [GREEDY, SEEDED, *[GREEDY] * 5]
    chunks = {"max_num_batched_tokens": 16, "max_num_seqs": 4}
    few_blocks = {"num_gpu_blocks_override": 6, "max_model_len": 64, "max_num_seqs": 4}
    three = [SHARED[i : i + 15] for i in range(3)]  # that grow into a third block together, and there are five
    return [
        Scenario("greedy", tuple(FAMILIES), PROMPTS, [GREEDY] * 4),
        Scenario("chunks and hits", ("llama", "qwen3"), shared, mixed, chunks, 2, ("num_hit_tokens",)),
        Scenario("blocks of 32", ("qwen3",), shared, mixed, {"block_size": 32, "max_num_seqs": 2}),
        Scenario("preemption", ("llama",), three, [LONG] * 3, few_blocks, 1, ("num_preemptions",)),
    ]


def run(context: Context) -> None:
    driver = open_driver(context)
    failed = 0
    for dtype in ("bfloat16",) if context.is_emulated else ("bfloat16", "float16"):
        for scenario in scenarios():
            for family in families_of(scenario, context.is_emulated):
                title = f"{family} {dtype}: {scenario.name}"
                try:
                    context.row(title, **compare(driver, family, dtype, scenario))
                except Exception as error:
                    failed += 1
                    context.row(title, error=describe(error))
    if failed:
        raise CheckError(f"{failed} runs differ from the CPU device or fail")


def families_of(scenario: Scenario, is_emulated: bool) -> tuple[str, ...]:
    """Few of them where every step takes the emulator a tenth of a second."""
    if not is_emulated:
        return scenario.families
    return () if "block_size" in scenario.options else scenario.families[::EMULATED_EVERY]


def compare(driver: Driver, family: str, dtype: str, scenario: Scenario) -> dict[str, Any]:
    """How far the device's answers are from the CPU's; AssertionError where they are too far."""
    config = {**SIZES, **FAMILIES[family], "torch_dtype": dtype}
    tolerance = TOLERANCE[dtype] * LARGER_LOGITS.get(family, 1)
    params = [p if dtype in DECIDED else replace(p, temperature=0.0) for p in scenario.params]
    common = {"max_model_len": 128, "num_gpu_blocks_override": 64}
    cpu = start(RoundedCheckpoint(config, dtype), CpuDevice(2), **common, enable_prefix_caching=False)
    wanted = generate(cpu.engine, scenario.prompts, params)
    cpu.engine.close()
    device = CudaDevice(driver, dtype)
    engine = start(RoundedCheckpoint(config, dtype), device, **{**common, **scenario.options}).engine
    difference, ties = 0.0, 0
    for _ in range(scenario.rounds):  # cold, then warm
        found = generate(engine, scenario.prompts, params)
        worst, more = distance(found, wanted, tolerance)
        difference, ties = max(difference, worst), ties + more
    totals = {name: getattr(engine.scheduler.step_stats(), name, None) for name in scenario.must_have}
    totals = {k: getattr(engine.scheduler.stats, k, 0) if v is None else v for k, v in totals.items()}
    assert all(totals.values()), f"the run was to have {totals}"
    return {
        "worst_logprob_difference": difference,
        "allowed": tolerance,
        "ties": ties,
        "steps": engine.num_steps,
        **totals,
    }


def distance(found: Sequence[RequestOutput], wanted: Sequence[RequestOutput], tolerance: float) -> tuple[float, int]:
    """The worst difference of a log-probability, and how many answers parted where two tokens were as likely."""
    worst, ties = 0.0, 0
    for one, other in zip(found, wanted, strict=True):
        mine, theirs = one.outputs[0], other.outputs[0]
        assert mine.error is None, mine.error
        assert len(mine.token_ids) == len(theirs.token_ids), "an answer of another length"
        for step, token in enumerate(theirs.token_ids):
            entries, own = (theirs.logprobs or [])[step], (mine.logprobs or [])[step]
            if mine.token_ids[step] != token:
                first, second = sorted((entry.logprob for entry in entries.values()), reverse=True)[:2]
                assert first - second < 2 * tolerance, f"token {step} differs, and no tie explains it"
                ties += 1
                break
            error = abs(own[token].logprob - entries[token].logprob)
            assert error < tolerance, f"a log-probability is off by {error:.3g}, {tolerance:g} is allowed"
            worst = max(worst, error)
    return worst, ties
