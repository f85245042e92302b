"""The parts of vLLM's offline API beside `generate`: scores, metrics, sleep, traces."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator

import jax
import numpy as np
import pytest
from tqdm import tqdm

from jaxserve import (
    LLM,
    BeamSearchParams,
    LoRARequest,
    PoolingParams,
    SamplingParams,
)
from jaxserve.client.similarity import cosine, pair_up
from jaxserve.config import ProfilerConfig
from jaxserve.errors import ValidationError
from jaxserve.observability.metric_values import Counter, Gauge, Histogram

SMALL = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 32,
    "max_model_len": 64,
    "skip_tokenizer_init": True,
    "compile_ahead": 2,
    "compile_in_background": False,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPTS = [[5, 6, 7, 8], [9, 10, 11], [5, 6, 7]]


def test_several_engines_are_refused_with_what_has_them() -> None:
    with pytest.raises(ValidationError, match=r"data_parallel_size=2.*jaxserve serve"):
        LLM("m", data_parallel_size=2)


def test_pairs_and_their_cosine() -> None:
    fields = ("data_1", "data_2")
    assert pair_up(1, 3, fields) == [(0, 0), (0, 1), (0, 2)]
    assert pair_up(2, 2, fields) == [(0, 0), (1, 1)]
    with pytest.raises(ValidationError, match="data_2"):
        pair_up(2, 3, fields)
    a, b = np.float32([3, 4]), np.float32([4, 3])
    assert cosine(a, b) == pytest.approx(24 / 25) and cosine(a, np.zeros(2)) == 0.0


@pytest.fixture(scope="module")
def llm(model_folder) -> Iterator[LLM]:
    with LLM(
        str(model_folder("llama_gqa")), enable_embeddings=True, enforce_eager=True, **SMALL
    ) as made:
        yield made


def tokens(llm: LLM) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def test_where_a_profile_goes() -> None:
    assert ProfilerConfig.of(None).torch_profiler_dir == "jaxserve-profile"
    given = {"profiler": "torch", "torch_profiler_dir": "here", "torch_profiler_with_stack": False}
    assert ProfilerConfig.of(given).torch_profiler_dir == "here"
    with pytest.raises(ValidationError, match=r"profiler_config\.max_iterations"):
        ProfilerConfig.of({"max_iterations": 3})
    with pytest.raises(ValidationError, match="profiler_config"):
        ProfilerConfig.of({"no_such_field": 3})


@pytest.mark.slow
def test_scores_are_cosines_of_the_vectors(llm: LLM) -> None:
    params = PoolingParams(pooling="mean", use_activation=False)
    vectors = [one.outputs.data for one in llm.encode(PROMPTS, params, use_tqdm=False)]
    scores = llm.score(PROMPTS[0], PROMPTS[1:], pooling_params=params, use_tqdm=False)
    assert [one.outputs.score for one in scores] == pytest.approx(
        [cosine(vectors[0], vectors[1]), cosine(vectors[0], vectors[2])]
    )
    assert scores[0].prompt_token_ids == PROMPTS[0] + PROMPTS[1]
    assert vectors[0].dtype == np.float32


def sleep_states(llm: LLM) -> dict[str, float]:
    found = (one for one in llm.client.metrics.registry.collect() if "sleep_state" in one.name)
    return {one.labels["sleep_state"]: one.value for family in found for one in family.samples}


@pytest.mark.slow
@pytest.mark.parametrize("level", [1, 2])
def test_an_engine_sleeps_and_goes_on(llm: LLM, level: int) -> None:
    before = tokens(llm)
    llm.sleep(level)
    assert llm.is_sleeping
    runner = llm.client.engine.runner
    assert runner.state is None
    with pytest.raises(ValidationError, match="wake_up"):
        tokens(llm)
    asleep = {"awake": 0.0, "weights_offloaded": level == 1, "discard_all": level == 2}
    assert sleep_states(llm) == asleep
    if level == 1:
        llm.wake_up(["weights"])
        assert llm.is_sleeping and sleep_states(llm) == asleep
    llm.wake_up()
    assert sleep_states(llm) == {"awake": 1.0, "weights_offloaded": 0.0, "discard_all": 0.0}
    assert tokens(llm) == before
    with pytest.raises(ValidationError, match="level=3"):
        llm.sleep(3, mode="wait")
    with pytest.raises(ValidationError, match="mode='keep'"):
        llm.sleep(mode="keep")
    with pytest.raises(ValidationError, match="tags='cache'"):
        llm.wake_up(["cache"])


@pytest.mark.slow
def test_a_paused_engine_gives_its_pages_away(llm: LLM) -> None:
    before = tokens(llm)
    with pytest.raises(ValidationError, match="level=0"):
        llm.release_kv_cache_memory()
    llm.sleep(level=0)
    llm.enqueue(PROMPTS, GREEDY, use_tqdm=False)
    with pytest.raises(ValidationError, match=r"paused.*wake_up"):
        llm.wait_for_completion()
    with pytest.raises(ValidationError, match="unfinished"):
        llm.release_kv_cache_memory()
    with pytest.raises(ValidationError, match=r"mode='abort'.*keep"):
        llm.sleep(level=0)
    assert llm.wake_up(["scheduling"])
    waited = llm.wait_for_completion(use_tqdm=False)
    assert [out.outputs[0].token_ids for out in waited] == before
    llm.sleep(level=0)
    llm.release_kv_cache_memory()
    assert llm.client.engine.runner.state is None and llm.params and llm.is_sleeping
    assert not any(sleep_states(llm).values())
    for call in (llm.sleep, llm.release_kv_cache_memory, lambda: tokens(llm)):
        with pytest.raises(ValidationError, match="wake_up"):
            call()
    assert llm.wake_up(["kv_cache"]) and tokens(llm) == before


@pytest.mark.slow
def test_metrics_are_plain_objects(llm: LLM) -> None:
    def read() -> dict[str, Counter | Gauge | Histogram]:
        return {one.name: one for one in llm.get_metrics()}  # type: ignore[misc]

    before, made = read(), sum(map(len, tokens(llm)))
    after = read()
    name = "jaxserve:generation_tokens"
    assert after[name].value - before[name].value == made  # type: ignore[union-attr]
    first = after["jaxserve:time_to_first_token_seconds"]
    assert isinstance(first, Histogram) and first.count >= len(PROMPTS) and first.sum > 0
    assert first.buckets["+Inf"] == first.count
    assert isinstance(after["jaxserve:num_requests_running"], Gauge)


@pytest.mark.slow
def test_pictures_a_trace_and_the_life_of_a_request(llm: LLM, tmp_path) -> None:
    pytest.importorskip("matplotlib", reason="needs the extra `bench`")
    llm.reset_prefix_cache()
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    for draw, panels in ((llm.plot_pages, 2), (llm.plot_timeline, 3), (llm.plot_latency, 4)):
        path = tmp_path / f"{draw.__name__}.png"
        assert len(draw(path).axes) == panels
        assert path.read_bytes().startswith(b"\x89PNG")
    events = json.loads(llm.trace(tmp_path / "out.json").read_text())["traceEvents"]
    names = [event["name"] for event in events]
    assert {"plan", "wait", "queue", "prefill", "decode", "pages in use"} <= set(names)
    life = llm.explain(outputs[0].request_id)
    (one,) = life.sequences.values()
    assert [(chunk.start, chunk.length) for chunk in one.chunks] == [(0, len(PROMPTS[0]))]
    assert one.num_tokens == 6 and life.finish_reasons == ["length"]
    assert f"step {one.last_step}" in names and one.last_step >= one.chunks[0].step + 5
    with pytest.raises(ValidationError, match="request_id"):
        llm.explain("nobody")


@pytest.mark.slow
def test_a_trace_for_perfetto(llm: LLM, tmp_path) -> None:
    refused = {"profile_prefix": "/a", "delay_iterations": 1, "profiler_kwargs": {"a": 1}}
    for name, value in refused.items():
        with pytest.raises(ValidationError, match=name):
            llm.start_profile(**{name: value})  # type: ignore[arg-type]
    llm.start_profile("trace", folder=tmp_path, delay_iterations=0, max_iterations=0)
    with pytest.raises(ValidationError, match="one trace at a time"):
        llm.start_profile()
    tokens(llm)
    file = llm.stop_profile()
    assert file.is_relative_to(tmp_path / "trace")
    assert json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
    with pytest.raises(ValidationError, match="start_profile"):
        llm.stop_profile()


@pytest.mark.slow
def test_adapters_are_refused_by_name(llm: LLM) -> None:
    adapter = LoRARequest("a", 1, "/a")
    with pytest.raises(ValidationError, match="no adapters yet"):
        llm.generate(PROMPTS, GREEDY, lora_request=adapter)


@pytest.mark.slow
def test_a_function_reads_the_parameters(llm: LLM) -> None:
    (count,) = llm.apply_model(lambda params: sum(leaf.size for leaf in jax.tree.leaves(params)))
    assert count == sum(leaf.size for leaf in jax.tree.leaves(llm.params)) > 0
    with pytest.raises(ValidationError, match="apply_model"):
        llm.collective_rpc("get_weights", args=(1,))


@pytest.mark.slow
def test_prompts_are_cut_and_share_a_priority(llm: LLM) -> None:
    cut = {"truncate_prompt_tokens": 2}
    bars = []

    def bar(**how: object) -> tqdm:
        bars.append(how["total"])
        return tqdm(**how, leave=False)  # type: ignore[arg-type]

    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=bar, priority=0, tokenization_kwargs=cut)
    assert [out.prompt_token_ids for out in outputs] == [prompt[-2:] for prompt in PROMPTS]
    assert bars == [len(PROMPTS)]
    llm.enqueue(PROMPTS[0], GREEDY, tokenization_kwargs=cut | {"truncation_side": "right"})
    (output,) = llm.wait_for_completion(use_tqdm=False)
    assert output.prompt_token_ids == PROMPTS[0][:2]
    with pytest.raises(ValidationError, match="no adapters yet"):
        llm.beam_search([PROMPTS[0]], BeamSearchParams(2, 4), LoRARequest("a", 1, "/a"))
    with pytest.raises(ValidationError, match="priority=1"):
        llm.beam_search([PROMPTS[0]], BeamSearchParams(2, 4), concurrency_limit=2, priority=1)


@pytest.mark.slow
def test_requests_that_are_enqueued_run_when_something_waits(llm: LLM) -> None:
    expected = tokens(llm)
    ids = llm.enqueue(PROMPTS[:2], GREEDY)
    ids += llm.enqueue(PROMPTS[2], GREEDY, use_tqdm=False)
    assert len(set(ids)) == 3
    assert tokens(llm) == expected  # others may run meanwhile
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [out.request_id for out in outputs] == ids
    assert [out.outputs[0].token_ids for out in outputs] == expected
    assert llm.wait_for_completion(use_tqdm=False) == [] and not llm.client.has_work
    with pytest.raises(ValidationError, match="output_type"):
        llm.wait_for_completion(int)


@pytest.mark.slow
def test_defaults_are_those_of_the_model(model_folder) -> None:
    given = {"temperature": 0.0, "max_new_tokens": 3}
    folder = str(model_folder("llama_gqa"))
    with LLM(folder, override_generation_config=given, **SMALL) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.0, max_tokens=3)
        (output,) = llm.generate([[5, 6]], use_tqdm=False)
        assert len(output.outputs[0].token_ids) <= 3
