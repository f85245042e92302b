"""`LLMEngine`: requests are added, the caller runs the steps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import jax
import pytest

from jaxserve import (
    LLM,
    EngineArgs,
    LLMEngine,
    PoolingParams,
    PoolingRequestOutput,
    SamplingParams,
)
from jaxserve.errors import EngineDeadError, ValidationError
from jaxserve.parallel.platform import cleanup_dist_env_and_memory
from tests.jaxserve.test_sdk import GREEDY, PROMPTS, SMALL


@pytest.fixture(scope="module")
def llm(model_folder) -> Iterator[LLM]:
    settings: dict[str, Any] = SMALL | {"enable_embeddings": True}
    args = EngineArgs(model=str(model_folder("llama_gqa")), enforce_eager=True, **settings)
    with LLM.from_engine_args(args) as made:
        yield made


@pytest.fixture
def engine(llm: LLM) -> LLMEngine:
    return llm.llm_engine


def finished(engine: LLMEngine) -> dict[str, Any]:
    found = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                found[output.request_id] = output
    return found


@pytest.mark.slow
def test_steps_give_what_generate_gives(llm: LLM, engine: LLMEngine) -> None:
    for number, prompt in enumerate(PROMPTS):
        assert engine.add_request(f"r{number}", prompt, GREEDY) == f"r{number}"
    engine.add_request("vector", PROMPTS[0], PoolingParams())
    cut = {"truncate_prompt_tokens": 2}
    engine.add_request("cut", PROMPTS[0], GREEDY, tokenization_kwargs=cut)
    assert engine.get_num_unfinished_requests() == len(PROMPTS) + 2
    found = finished(engine)
    assert found["cut"].prompt_token_ids == PROMPTS[0][-2:]
    whole = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    told = [found[f"r{number}"].outputs[0].token_ids for number in range(len(PROMPTS))]
    assert told == [output.outputs[0].token_ids for output in whole]
    assert isinstance(found["vector"], PoolingRequestOutput) and len(found["vector"].outputs.data)


@pytest.mark.slow
def test_requests_are_aborted_and_refused_by_their_ids(engine: LLMEngine) -> None:
    engine.add_request("a", PROMPTS[0], SamplingParams(max_tokens=8))
    with pytest.raises(ValidationError, match="request_id"):
        engine.add_request("a", PROMPTS[0], GREEDY)
    engine.step()
    engine._failures["a"] = ValidationError("a", 1, "none")  # as of a step that refused it
    engine.abort_request(["a", "no such"])
    assert not engine.has_unfinished_requests() and engine.step() == []
    engine.add_request("a", PROMPTS[0], GREEDY)
    assert list(finished(engine)) == ["a"]


@pytest.mark.slow
def test_calls_that_run_to_their_end_and_steps_do_not_mix(llm: LLM, engine: LLMEngine) -> None:
    engine.add_request("0", PROMPTS[0], GREEDY)
    with pytest.raises(ValidationError, match="unfinished requests"):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert list(finished(engine)) == ["0"]
    llm.enqueue(PROMPTS, GREEDY)
    with pytest.raises(ValidationError, match="enqueued requests"):
        engine.add_request("1", PROMPTS[0], GREEDY)
    with pytest.raises(ValidationError, match="enqueued requests"):
        engine.step()
    assert len(llm.wait_for_completion(use_tqdm=False)) == len(PROMPTS)


@pytest.mark.slow
def test_a_sleeping_engine_and_a_time_to_come_are_refused(engine: LLMEngine) -> None:
    with pytest.raises(ValidationError, match="arrival_time"):
        engine.add_request("late", PROMPTS[0], GREEDY, arrival_time=time.time() + 60)
    engine.sleep()
    with pytest.raises(ValidationError, match="wake_up"):
        engine.add_request("asleep", PROMPTS[0], GREEDY)
    engine.wake_up()
    engine.add_request("awake", PROMPTS[0], GREEDY, arrival_time=time.time() - 1)
    assert list(finished(engine)) == ["awake"]


@pytest.mark.slow
def test_an_engine_that_was_dropped_is_freed(model_folder) -> None:
    before = sum(array.nbytes for array in jax.live_arrays())
    llm = LLM(str(model_folder("llama_gqa")), **SMALL)
    held = sum(array.nbytes for array in jax.live_arrays())
    del llm
    cleanup_dist_env_and_memory()
    assert sum(array.nbytes for array in jax.live_arrays()) - before < (held - before) / 10


@pytest.mark.slow
def test_names_that_scripts_read(llm: LLM, engine: LLMEngine, model_folder) -> None:
    folder = str(model_folder("llama_gqa"))
    config, model = engine.vllm_config, engine.model_config
    assert model is config.model_config
    assert (model.model, model.max_model_len, model.dtype) == (folder, 64, llm.config.model.dtype)
    assert model.get_vocab_size() == llm.model_config.vocab_size
    assert model.get_hidden_size() == model.hf_config.hidden_size == llm.model_config.hidden_size
    assert model.hf_config.model_type == "llama" and model.quantization is None
    assert model.get_diff_sampling_param() == llm.config.sampling_defaults
    cache = config.cache_config
    assert cache.num_gpu_blocks * cache.block_size >= 64
    assert config.scheduler_config.max_num_seqs == 4
    assert config.parallel_config.data_parallel_size == config.parallel_config.world_size == 1
    assert llm.get_world_size() == engine.get_world_size(include_dp=False) == 1
    with pytest.raises(AttributeError, match=r"CacheNames has no 'swap_space'.*block_size"):
        _ = cache.swap_space
    assert not hasattr(config, "compilation_config")
    assert [one.name for one in engine.get_metrics()] == [one.name for one in llm.get_metrics()]
    with pytest.raises(ValidationError, match="skip_tokenizer_init"):
        engine.get_tokenizer()
    with pytest.raises(ValidationError, match="collective_rpc"):
        engine.collective_rpc("sleep", args=(1,))


@pytest.mark.slow
def test_an_engine_of_its_own_is_shut_down(model_folder) -> None:
    args = EngineArgs(model=str(model_folder("llama_gqa")), enforce_eager=True, **SMALL)
    with pytest.raises(ValidationError, match="stat_loggers"):
        LLMEngine.from_engine_args(args, stat_loggers=[])
    engine = LLMEngine.from_engine_args(args, usage_context="LLM_CLASS")
    engine.add_request("a", PROMPTS[0], GREEDY)
    assert list(finished(engine)) == ["a"]
    engine.engine_core.shutdown()
    with pytest.raises(EngineDeadError):
        engine.add_request("b", PROMPTS[0], GREEDY)
