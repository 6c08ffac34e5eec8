"""The engine's promises on a tiny model: batching, chunking, preemption, aborts, errors, seeds, stops.

One file, though long: its tests share the prompts and the check that nothing is left behind.
"""

import gc
import json
import random
import shutil
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import TINY, LoadLLM
from safetensors.numpy import load_file, save_file

from lean_engine import LLM, RequestOutput, SamplingParams
from lean_engine.errors import CheckpointError, ConfigError, OutOfMemory, RequestError
from lean_engine.runtime.cpu.host_memory import HostMemory

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)


def prompts_of(count: int, low: int = 3, high: int = 30, seed: int = 0) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    return [{"prompt_token_ids": [rng.randrange(5, 512) for _ in range(rng.randint(low, high))]} for _ in range(count)]


def ids_of(outputs: list[RequestOutput]) -> list[list[int]]:
    return [answer.token_ids for output in outputs for answer in output.outputs]


def logprobs_of(outputs: list[RequestOutput]) -> list[float]:
    return [
        entry[token].logprob
        for output in outputs
        for answer in output.outputs
        for token, entry in zip(answer.token_ids, answer.logprobs or [], strict=True)
    ]


def assert_idle(llm: LLM) -> None:
    scheduler = llm.engine.scheduler
    scheduler.check()
    assert scheduler.pool.num_free == scheduler.pool.num_usable
    assert not llm.engine.has_work()
    assert not scheduler.has_work()
    assert not llm.engine._groups
    assert not llm.engine._group_of


# -- how the work is cut does not matter


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 8, "max_num_seqs": 8},
        {"max_num_batched_tokens": 64, "block_size": 4, "max_num_seqs": 8},
        {"block_size": 32, "max_num_seqs": 2},
        {"num_gpu_blocks_override": 11, "block_size": 4, "max_model_len": 44, "max_num_seqs": 8},
    ],
    ids=["budget 8", "blocks of 4", "two at a time", "tight pool"],
)
def test_outputs_do_not_depend_on_budget_blocks_or_pool(load_llm: LoadLLM, options: dict[str, Any]) -> None:
    prompts = prompts_of(7)
    params = [
        GREEDY,
        SamplingParams(temperature=0.8, seed=3, max_tokens=12, logprobs=1, ignore_eos=True),
        SamplingParams(temperature=0, max_tokens=12, repetition_penalty=1.3, frequency_penalty=0.5, logprobs=1),
        SamplingParams(temperature=0, max_tokens=12, min_tokens=12, presence_penalty=1.0, logprobs=1),
        SamplingParams(temperature=1.0, seed=-7, top_k=20, top_p=0.9, min_p=0.01, max_tokens=9, n=2, logprobs=1),
        GREEDY,
        GREEDY,
    ]
    wanted = load_llm("llama-gqa-untied").generate(prompts, params)
    llm = load_llm("llama-gqa-untied", **options)
    found = llm.generate(prompts, params)
    assert ids_of(found) == ids_of(wanted)
    assert np.allclose(logprobs_of(found), logprobs_of(wanted), atol=1e-4)
    assert_idle(llm)


def test_a_pool_that_is_too_small_for_all_preempts_and_loses_nothing(load_llm: LoadLLM) -> None:
    prompts = prompts_of(6, low=20, high=30, seed=1)
    wanted = load_llm("qwen3").generate(prompts, GREEDY)
    llm = load_llm("qwen3", num_gpu_blocks_override=30, block_size=4, max_model_len=64, max_num_seqs=6)
    found = llm.generate(prompts, GREEDY)
    assert ids_of(found) == ids_of(wanted)
    assert all(len(o.outputs[0].logprobs or []) == 12 for o in found)
    assert_idle(llm)


def test_requests_join_and_leave_a_running_batch(load_llm: LoadLLM) -> None:
    prompts = [p["prompt_token_ids"] for p in prompts_of(6)]
    alone = load_llm().generate([{"prompt_token_ids": p} for p in prompts], GREEDY)
    engine = load_llm().engine
    groups = []
    for i, prompt in enumerate(prompts):  # a new one every other step, while the earlier ones are in full flight
        groups.append(engine.add(f"r{i}", prompt, GREEDY))
        engine.step()
        engine.step()
    assert engine.scheduler.num_running > 1
    while engine.has_work():
        engine.step()
    assert [g.answers[0].token_ids for g in groups] == ids_of(alone)


def test_nothing_is_sampled_before_a_prompts_last_chunk(load_llm: LoadLLM) -> None:
    engine = load_llm(max_num_batched_tokens=8, max_num_seqs=2).engine
    group = engine.add("a", list(range(10, 40)), GREEDY)
    for _ in range(3):
        assert engine.step() == []
        assert group.answers[0].token_ids == []
    assert engine.step() == [group]
    assert len(group.answers[0].token_ids) == 1


def test_block_granularity_grows_on_demand(load_llm: LoadLLM) -> None:
    engine = load_llm(block_size=4).engine
    engine.add("a", list(range(10, 17)), SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
    held = []
    while engine.has_work():
        engine.step()
        held.append(engine.scheduler.pool.num_usable - engine.scheduler.pool.num_free)
    assert held[:4] == [2, 2, 3, 3]  # 7 tokens, then 8, 9, 10: a block only when the next token needs it
    assert max(held) == 7  # 7 + 19 computed tokens
    assert held[-1] == 0


# -- what ends an answer


def stop_at(llm: LLM, prompt: dict[str, Any], **values: Any) -> RequestOutput:
    (output,) = llm.generate(prompt, SamplingParams(temperature=0, **{"max_tokens": 12, **values}))
    return output


def test_eos_of_config_generation_config_and_tokenizer_all_end_an_answer(load_llm: LoadLLM, tmp_path: Path) -> None:
    prompt = prompts_of(1)[0]
    greedy = stop_at(load_llm(), prompt, ignore_eos=True).outputs[0].token_ids
    model = tmp_path / "model"
    shutil.copytree(TINY / "llama-gqa-tied", model)
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": [greedy[4], 500]}))
    llm = load_llm(model)
    assert llm.engine.eos_token_ids == {1, greedy[4], 500}
    output = stop_at(llm, prompt).outputs[0]
    assert output.token_ids == greedy[: greedy.index(greedy[4]) + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", None)


def test_ignore_eos_leaves_stop_token_ids_in_force(load_llm: LoadLLM) -> None:
    llm, prompt = load_llm(), prompts_of(1)[0]
    greedy = stop_at(llm, prompt, ignore_eos=True).outputs[0].token_ids
    output = stop_at(llm, prompt, ignore_eos=True, stop_token_ids=[greedy[3]]).outputs[0]
    assert output.token_ids == greedy[: greedy.index(greedy[3]) + 1]
    assert (output.finish_reason, output.stop_reason) == ("stop", greedy[3])


def test_min_tokens_forbids_an_earlier_end(load_llm: LoadLLM) -> None:
    llm, prompt = load_llm(), prompts_of(1)[0]
    greedy = stop_at(llm, prompt, ignore_eos=True).outputs[0].token_ids
    output = stop_at(llm, prompt, stop_token_ids=[greedy[0]], min_tokens=4).outputs[0]
    assert len(output.token_ids) >= 4
    assert greedy[0] not in output.token_ids[:4]


def test_a_stop_string_cuts_text_ids_and_logprobs_at_the_same_place(load_llm: LoadLLM) -> None:
    llm, prompt = load_llm("qwen2"), prompts_of(1)[0]
    whole = stop_at(llm, prompt, ignore_eos=True, logprobs=0).outputs[0]
    stop = whole.text[5:8]
    output = stop_at(llm, prompt, ignore_eos=True, logprobs=0, stop=[stop]).outputs[0]
    assert output.text == whole.text[: whole.text.index(stop)]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert output.token_ids == whole.token_ids[: len(output.token_ids)]
    assert len(output.logprobs or []) == len(output.token_ids) < 12
    kept = stop_at(llm, prompt, ignore_eos=True, stop=stop, include_stop_str_in_output=True).outputs[0]
    assert kept.text == whole.text[: whole.text.index(stop) + len(stop)]
    assert_idle(llm)


def test_max_tokens_left_out_means_what_is_left_of_the_context(load_llm: LoadLLM) -> None:
    llm = load_llm(max_model_len=32)
    output = stop_at(llm, {"prompt_token_ids": list(range(10, 30))}, ignore_eos=True, max_tokens=None).outputs[0]
    assert len(output.token_ids) == 12
    assert output.finish_reason == "length"


@pytest.mark.parametrize("kind", [np.int32, np.uint16, np.int64])
def test_token_ids_may_be_numpys(load_llm: LoadLLM, kind: Any) -> None:
    llm = load_llm()
    ids = list(range(10, 40))
    array = np.array(ids, dtype=kind)
    outputs = llm.generate([{"prompt_token_ids": given} for given in (ids, array, list(array), tuple(array))], GREEDY)
    assert len({tuple(answer) for answer in ids_of(outputs)}) == 1
    assert [output.prompt_token_ids for output in outputs] == [ids] * 4
    assert type(outputs[1].prompt_token_ids[0]) is int


# -- what is refused, and what it leaves behind


@pytest.mark.parametrize(
    ("prompt", "values", "found"),
    [
        ({"prompt_token_ids": list(range(40))}, {}, ("40", "32")),
        ({"prompt_token_ids": list(range(20))}, {"max_tokens": 13}, ("20", "13", "32", "12")),
        ({"prompt_token_ids": []}, {}, ("empty",)),
        ("", {}, ("empty",)),
        ({"prompt_token_ids": [3, 512]}, {}, ("512", "vocabulary")),
        ({"prompt_token_ids": [-1]}, {}, ("-1", "vocabulary")),
        ({"prompt_token_ids": [2**31]}, {}, (str(2**31),)),
        ({"prompt_token_ids": ["5"]}, {}, ("integers",)),
        ({"prompt_token_ids": np.array([5.0])}, {}, ("integers",)),
        ({"prompt_token_ids": np.ones((2, 30), dtype=int)}, {}, ("integers",)),
        ({"prompt_token_ids": [np.True_]}, {}, ("integers",)),
        ({"tokens": [1]}, {}, ("prompt_token_ids",)),
        ({"prompt_token_ids": [5]}, {"logit_bias": {512: 1.0}}, ("logit_bias", "512")),
        ({"prompt_token_ids": [5]}, {"stop_token_ids": [2**31]}, ("stop_token_ids", str(2**31))),
        ({"prompt_token_ids": [5]}, {"logprobs": 21}, ("logprobs", "21", "20")),
    ],
)
def test_a_bad_request_is_refused_with_its_numbers_and_the_engine_lives(
    load_llm: LoadLLM, prompt: Any, values: dict[str, Any], found: tuple[str, ...]
) -> None:
    llm = load_llm(max_model_len=32)
    good = {"prompt_token_ids": [7, 8, 9]}
    params = SamplingParams(**{"temperature": 0, "max_tokens": 4, **values})
    with pytest.raises(RequestError) as error:
        llm.generate([good, prompt], [SamplingParams(temperature=0, max_tokens=4), params])
    assert all(part in str(error.value) for part in found), str(error.value)
    assert "\n" not in str(error.value)
    assert error.value.status == 400
    assert_idle(llm)
    assert (
        len(llm.generate(good, SamplingParams(temperature=0, max_tokens=4, ignore_eos=True))[0].outputs[0].token_ids)
        == 4
    )


def test_what_the_pool_can_never_hold_is_refused_at_once(load_llm: LoadLLM) -> None:
    llm = load_llm(num_gpu_blocks_override=8, block_size=4)
    assert llm.max_model_len == 32  # a context left open is fitted to the pool
    with pytest.raises(RequestError, match="40 tokens"):
        llm.generate({"prompt_token_ids": list(range(10, 50))}, GREEDY)
    assert_idle(llm)


def test_what_is_wrong_is_said_before_memory_is_taken(load_llm: LoadLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostMemory, "allocate", lambda *_: pytest.fail("allocated"))
    monkeypatch.setattr(HostMemory, "memory_bytes", lambda _: 200_000)
    with pytest.raises(
        OutOfMemory, match=r"the weights need 5\d\d\.\d\d KiB( as float32)?, 195\.31 KiB of memory are free"
    ):
        load_llm("llama-gqa-untied")
    monkeypatch.setattr(HostMemory, "memory_bytes", lambda _: 800_000)
    with pytest.raises(OutOfMemory, match="one request of max_model_len=256 needs 16 KV blocks"):
        load_llm("llama-gqa-untied", max_model_len=256)


def test_a_tensor_of_another_shape_is_found_before_memory_is_taken(
    load_llm: LoadLLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(TINY / "qwen2", model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"intermediate_size": 144}))
    monkeypatch.setattr(HostMemory, "allocate", lambda *_: pytest.fail("allocated"))
    with pytest.raises(
        CheckpointError, match=r"mlp.gate_proj.weight has shape \[128, 64\], its config asks for \[144, 64\]"
    ):
        load_llm(model)


def test_unknown_engine_options_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="unknown engine option 'tensor_parallel_size'"):
        LLM(TINY / "qwen2", tensor_parallel_size=2)


def test_damaged_logits_fail_their_request_alone_and_poison_nobody(load_llm: LoadLLM, tmp_path: Path) -> None:
    """Tokens 7 and 8 are damaged: requests that hold one end with a reason, others and later ones are untouched."""
    model = tmp_path / "model"
    shutil.copytree(TINY / "llama-gqa-untied", model)
    weights = load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"][7] = np.inf
    weights["model.embed_tokens.weight"][8] = np.nan
    save_file(weights, model / "model.safetensors")
    clean = [p for p in prompts_of(4, seed=2) if not {7, 8} & set(p["prompt_token_ids"])]
    wanted = ids_of(load_llm("llama-gqa-untied").generate(clean, GREEDY))
    llm = load_llm(model, num_gpu_blocks_override=16, block_size=4, max_model_len=64, max_num_seqs=4)
    for bad_token in (7, 8):
        bad = {"prompt_token_ids": [10, bad_token, 11, 12, 13]}
        outputs = llm.generate([bad, *clean], GREEDY)
        assert outputs[0].outputs[0].finish_reason == "error"
        assert "logits" in (outputs[0].outputs[0].error or "")
        assert ids_of(outputs)[1:] == wanted
        assert ids_of(llm.generate(clean, GREEDY)) == wanted  # over the blocks the failed one held
    scored = llm.generate({"prompt_token_ids": [10, 8, 11]}, SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert scored[0].outputs[0].finish_reason == "error"
    assert_idle(llm)


def test_values_of_a_wrong_type_are_refused_and_the_engine_lives(load_llm: LoadLLM) -> None:
    llm = load_llm("qwen2")
    wrong: list[tuple[Any, ...]] = [(None,), (5,), ([[1, 2]],), ([None],), ("a", {"temperature": 0}), ("a", [None])]
    for arguments in wrong:
        with pytest.raises(RequestError):
            llm.generate(*arguments)
    for messages in (None, 5, {"role": "user"}):
        with pytest.raises(RequestError):
            llm.chat(messages)
    with pytest.raises(RequestError, match="must not hold bos_token"):
        llm.chat([{"role": "user", "content": "x"}], chat_template_kwargs={"bos_token": "x"})
    assert_idle(llm)


def test_a_closed_engine_says_so(load_llm: LoadLLM) -> None:
    llm = load_llm()
    llm.close()
    with pytest.raises(RequestError, match="the engine is closed"):
        llm.generate("x")


def test_a_closed_engine_keeps_neither_weights_nor_caches(load_llm: LoadLLM) -> None:
    llm = load_llm()
    llm.generate("x", SamplingParams(max_tokens=2))
    program = weakref.ref(llm.engine.runner.program)
    llm.close()
    gc.collect()
    assert program() is None
    assert llm.stats().num_running == 0


def test_two_threads_at_once_are_refused(load_llm: LoadLLM) -> None:
    engine = load_llm().engine
    with engine._in_turn(), pytest.raises(RequestError, match="another thread is using this engine"):
        engine.step()


def test_closing_during_another_thread_s_step_is_refused(load_llm: LoadLLM) -> None:
    llm = load_llm()
    with llm.engine._in_turn(), pytest.raises(RequestError, match="another thread is using this engine"):
        llm.close()
    assert llm.generate("x", SamplingParams(max_tokens=2))[0].finished
    llm.close()
    llm.close()


def test_a_chat_template_that_is_no_jinja_is_refused_at_the_start(load_llm: LoadLLM) -> None:
    with pytest.raises(ConfigError, match=r"chat template, line 1: .*end of template"):
        load_llm(chat_template="{% if")


def test_kv_blocks_beyond_the_memory_are_refused(load_llm: LoadLLM) -> None:
    with pytest.raises(OutOfMemory, match=r"10000001 KV blocks need .* are free beside the weights"):
        load_llm("qwen2", num_gpu_blocks_override=10**7)


def test_a_head_of_its_own_counts_whatever_the_config_says(load_llm: LoadLLM, tmp_path: Path) -> None:
    """As in transformers: tied only where the checkpoint does not hold two different tensors."""
    model = tmp_path / "model"
    shutil.copytree(TINY / "llama-gqa-untied", model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    prompts = prompts_of(2)
    assert ids_of(load_llm(model).generate(prompts, GREEDY)) == ids_of(
        load_llm("llama-gqa-untied").generate(prompts, GREEDY)
    )


# -- seeds


def test_a_seeded_answer_is_the_same_alone_in_company_and_at_another_place(load_llm: LoadLLM) -> None:
    llm = load_llm()
    prompt = prompts_of(1)[0]
    seeded = SamplingParams(temperature=1.0, seed=42, max_tokens=10, ignore_eos=True)
    loose = SamplingParams(temperature=1.0, max_tokens=10, ignore_eos=True)
    (alone,) = ids_of(llm.generate(prompt, seeded))
    company = ids_of(llm.generate([*prompts_of(3, seed=5), prompt], [loose, loose, loose, seeded]))
    assert company[3] == alone
    assert ids_of(llm.generate([prompt, prompt], [loose, loose]))[0] != ids_of(llm.generate(prompt, loose))[0]


def test_answers_of_one_seeded_request_differ_and_repeat(load_llm: LoadLLM) -> None:
    llm = load_llm()
    params = SamplingParams(temperature=1.0, seed=1, n=3, max_tokens=8, ignore_eos=True)
    first, second = (ids_of(llm.generate(prompts_of(1), params)) for _ in range(2))
    assert first == second
    assert len({tuple(ids) for ids in first}) == 3


def test_the_engines_seed_makes_unseeded_requests_repeatable(load_llm: LoadLLM) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=10, ignore_eos=True)
    prompts = [prompts_of(1)[0]] * 2
    first, second = (ids_of(load_llm(seed=9).generate(prompts, params)) for _ in range(2))
    assert first == second
    assert first[0] != first[1]  # each request has a seed of its own


# -- aborts and leaks


def test_abort_in_every_state_frees_the_blocks_and_can_be_repeated(load_llm: LoadLLM) -> None:
    llm = load_llm(num_gpu_blocks_override=12, block_size=4, max_model_len=48, max_num_seqs=2, max_num_batched_tokens=8)
    engine = llm.engine
    engine.add("prefill", list(range(10, 34)), GREEDY)
    engine.add("waiting", list(range(10, 30)), GREEDY)
    engine.step()
    for request_id in ("waiting", "prefill"):
        assert engine.abort(request_id) is not None
        assert engine.abort(request_id) is None
    assert engine.abort("unknown") is None
    assert_idle(llm)
    engine.add("running", [5, 6, 7], GREEDY)
    engine.step()
    group = engine.abort("running")
    assert group is not None
    assert group.output(engine.tokenizer).outputs[0].finish_reason == "abort"
    assert len(group.answers[0].token_ids) == 1
    assert_idle(llm)


def test_leaving_a_stream_early_aborts_the_request(load_llm: LoadLLM) -> None:
    llm = load_llm()
    stream = llm.stream({"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=200, ignore_eos=True))
    next(stream)
    stream.close()
    assert_idle(llm)


def test_a_thousand_random_requests_leave_nothing_behind(load_llm: LoadLLM) -> None:
    llm = load_llm("qwen2", num_gpu_blocks_override=40, block_size=4, max_model_len=64, max_num_seqs=16)
    engine, rng = llm.engine, random.Random(0)
    alive: list[str] = []
    for i in range(1000):
        params = SamplingParams(
            temperature=rng.choice([0, 1.0]),
            max_tokens=rng.randint(0, 8),
            stop=rng.choice([None, "e", "th"]),
            ignore_eos=rng.random() < 0.5,
            prompt_logprobs=rng.choice([None, None, 1]),
        )
        length = rng.randint(0, 40)
        try:
            engine.add(f"r{i}", [rng.randrange(512) for _ in range(length)], params)
            alive.append(f"r{i}")
        except RequestError:
            assert length == 0
        if rng.random() < 0.2 and alive:
            engine.abort(rng.choice(alive))
        for _ in range(rng.randint(0, 2)):
            engine.step()
        if i % 50 == 0:
            engine.scheduler.check()
    while engine.has_work():
        engine.step()
    assert_idle(llm)


# -- outputs


def test_streamed_deltas_add_up_to_the_answer(load_llm: LoadLLM) -> None:
    llm = load_llm("gemma3")
    prompt = prompts_of(1)[0]
    params = SamplingParams(temperature=0, max_tokens=14, logprobs=1, ignore_eos=True)
    (whole,) = llm.generate(prompt, params)
    deltas = [o.outputs[0] for o in llm.stream(prompt, params)]
    assert "".join(d.text for d in deltas) == whole.outputs[0].text
    assert [t for d in deltas for t in d.token_ids] == whole.outputs[0].token_ids
    assert [e for d in deltas for e in d.logprobs or []] == whole.outputs[0].logprobs
    assert [d.finish_reason for d in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason == "length"


def test_a_stream_keeps_what_another_call_computes_meanwhile(load_llm: LoadLLM) -> None:
    llm = load_llm("qwen2")
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    (whole,) = llm.generate("The quick", params)
    pieces = []
    for index, output in enumerate(llm.stream("The quick", params)):
        pieces.append(output.outputs[0])
        if index == 2:
            llm.generate("other", params)
    assert [t for piece in pieces for t in piece.token_ids] == whole.outputs[0].token_ids
    assert pieces[-1].finish_reason == "length"
    stream = llm.stream("The quick", params)
    del stream  # never started: nothing was queued
    assert_idle(llm)


def test_the_token_that_stops_is_kept_out_of_the_text(load_llm: LoadLLM) -> None:
    llm, prompt = load_llm("qwen2"), prompts_of(1)[0]
    greedy = stop_at(llm, prompt, ignore_eos=True).outputs[0].token_ids
    at = greedy.index(greedy[5])
    before = stop_at(llm, prompt, ignore_eos=True, max_tokens=at).outputs[0].text if at else ""
    output = stop_at(llm, prompt, ignore_eos=True, stop_token_ids=[greedy[5]]).outputs[0]
    assert (output.text, output.token_ids) == (before, greedy[: at + 1])
    kept = stop_at(llm, prompt, ignore_eos=True, stop_token_ids=[greedy[5]], include_stop_str_in_output=True).outputs[0]
    assert kept.text == stop_at(llm, prompt, ignore_eos=True, max_tokens=at + 1).outputs[0].text


def test_output_has_vllms_form(load_llm: LoadLLM) -> None:
    llm = load_llm("qwen2")
    (output,) = llm.generate("Once upon a", SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=0))
    assert output.prompt == "Once upon a"
    assert output.prompt_token_ids == llm.tokenizer.encode("Once upon a")
    assert output.prompt_logprobs is not None
    assert [None if e is None else len(e) for e in output.prompt_logprobs] == [None] + [1] * (
        len(output.prompt_token_ids) - 1
    )
    answer = output.outputs[0]
    assert answer.logprobs is not None
    for token, entry in zip(answer.token_ids, answer.logprobs, strict=True):
        assert entry[token].rank == 1
        assert entry[token].decoded_token == llm.tokenizer.token_text(token)
        assert len(entry) == 2
    assert answer.cumulative_logprob == pytest.approx(
        sum(e[t].logprob for t, e in zip(answer.token_ids, answer.logprobs, strict=True))
    )
    assert output.num_cached_tokens == 0
    assert output.finished
    metrics = output.metrics
    assert metrics.first_token_time is not None
    assert metrics.finished_time is not None
    assert metrics.arrival_time <= metrics.first_token_time <= metrics.finished_time


def test_dummy_weights_need_no_tokenizer(load_llm: LoadLLM, tmp_path: Path) -> None:
    shutil.copy(TINY / "qwen3" / "config.json", tmp_path / "config.json")
    llm = load_llm(tmp_path, load_format="dummy")
    assert len(ids_of(llm.generate({"prompt_token_ids": [1, 2]}, GREEDY))[0]) == 12
    with pytest.raises(ConfigError, match="has no tokenizer"):
        llm.generate("text", GREEDY)


def test_dummy_weights_need_only_a_config(load_llm: LoadLLM, tmp_path: Path) -> None:
    for family in ("mixtral", "gemma3", "phi3"):
        model = tmp_path / family
        model.mkdir()
        for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
            shutil.copy(TINY / family / name, model / name)
        llm = load_llm(model, load_format="dummy")
        assert len(llm.generate("hello", SamplingParams(max_tokens=5, ignore_eos=True))[0].outputs[0].token_ids) == 5
