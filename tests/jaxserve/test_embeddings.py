"""Pooled hidden states, and prompts that come as embeddings, against transformers in float32."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from jaxserve import LLM, PoolingParams, SamplingParams
from jaxserve.client.input_processor import InputProcessor
from jaxserve.errors import ValidationError
from jaxserve.execution.features import Facts, make_features
from jaxserve.execution.programs import MOST_PROGRAMS
from jaxserve.params.pooling_params import POOLINGS
from tests.jaxserve import oracle
from tests.tiny_models import VOCAB_SIZE

pytestmark = pytest.mark.slow  # each starts an engine or a server, or takes seconds

CASE, LAYERS, HIDDEN = "llama_gqa", 3, 64
SWITCHES = {"enable_embeddings": True, "enable_prompt_embeds": True}
LENGTHS = (1, 7, 33, 100, 8, 64, 2)  # chunks are of 32 tokens, pages of 8
FACTS = Facts(9, 1)
GREEDY = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)


@pytest.fixture(scope="module")
def model(model_folder: Any) -> torch.nn.Module:
    return oracle.load(model_folder(CASE))


@pytest.fixture(scope="module")
def llm(make_llm: Any, model_folder: Any) -> LLM:
    return make_llm(model_folder(CASE), **SWITCHES)


def prompts(seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB_SIZE, length).tolist() for length in LENGTHS]


def expected(model: torch.nn.Module, prompt: list[int], pooling: str, layer: int) -> np.ndarray:
    with torch.no_grad():
        states = model(torch.tensor([prompt]), output_hidden_states=True).hidden_states
    hidden = states[layer][0].double().numpy()
    return {"last": hidden[-1], "mean": hidden.mean(axis=0), "cls": hidden[0]}[pooling]


def vectors(llm: LLM, prompts: Any, *how: Any, **more: Any) -> list[np.ndarray]:
    outputs = llm.embed(prompts, *how, use_tqdm=False, **more)
    assert llm.stats().page_usage == 0
    return [np.array(one.outputs.embedding) for one in outputs]


def close(found: np.ndarray, wanted: np.ndarray) -> bool:
    return bool(np.abs(found - wanted).max() <= 2e-5 * max(1.0, np.abs(wanted).max()))


@pytest.mark.parametrize("pooling", POOLINGS)
def test_vectors_are_those_of_transformers(llm: LLM, model: Any, pooling: str) -> None:
    for found, prompt in zip(vectors(llm, prompts(), pooling), prompts(), strict=True):
        wanted = expected(model, prompt, pooling, -1)
        assert found.shape == (HIDDEN,)
        assert close(found, wanted / np.linalg.norm(wanted)), len(prompt)


@pytest.mark.parametrize("layer", range(-LAYERS - 1, LAYERS + 1))
def test_each_layer_gives_its_hidden_states(llm: LLM, model: Any, layer: int) -> None:
    pooling = POOLINGS[layer % len(POOLINGS)]
    found = vectors(llm, prompts(1), pooling, False, layer=layer)
    for one, prompt in zip(found, prompts(1), strict=True):
        assert close(one, expected(model, prompt, pooling, layer)), len(prompt)


def test_what_the_prefix_cache_has_changes_no_vector(llm: LLM, model: Any) -> None:
    prompt = prompts(2)[3]
    llm.generate([prompt], GREEDY, use_tqdm=False)
    for pooling in POOLINGS:
        (output,) = llm.embed([prompt], pooling, False, use_tqdm=False)
        assert close(np.array(output.outputs.embedding), expected(model, prompt, pooling, -1))
        assert bool(output.num_cached_tokens) == (pooling == "last")
        assert output.prompt_token_ids == prompt and output.outputs.hidden_size == HIDDEN


def test_requests_of_all_kinds_share_steps(llm: LLM, model: Any) -> None:
    """Each with its own pooling and layer, beside prompts that are continued."""
    client, many = llm.client, prompts(3)
    wanted = [
        PoolingParams(POOLINGS[i % 3], i % 2 == 0, (None, 0, 1, 2)[i % 4]) for i in range(len(many))
    ]
    alone = llm.generate(many, GREEDY, use_tqdm=False)
    for index, (prompt, params) in enumerate(zip(many, wanted)):
        client.add(client.prepare(prompt, params, f"e{index}"))
        client.add(client.prepare(prompt, GREEDY, f"g{index}"))
    done = {}
    while client.has_work:
        done |= {output.request_id: output for output in client.outputs() if output.finished}
    for index, (prompt, params) in enumerate(zip(many, wanted)):
        vector = expected(
            model, prompt, params.pooling, -1 if params.layer is None else params.layer
        )
        if params.use_activation:
            vector = vector / np.linalg.norm(vector)
        assert close(np.array(done[f"e{index}"].embedding), vector)
        assert done[f"g{index}"].embedding is None
        assert done[f"g{index}"].outputs[0].token_ids == alone[index].outputs[0].token_ids


def test_an_aborted_request_leaves_nothing(llm: LLM, model: Any) -> None:
    client, prompt = llm.client, prompts(4)[3]
    client.add(client.prepare(prompt, PoolingParams("mean"), "gone"))
    client.outputs()
    client.outputs()
    client.abort("gone")
    while client.has_work:
        assert client.outputs() == []
    assert close(vectors(llm, [prompt], "mean", False)[0], expected(model, prompt, "mean", -1))


@pytest.mark.parametrize("kind", [np.float32, jnp.float32, np.float64])
def test_prompt_embeds_continue_as_their_tokens_do(llm: LLM, model: Any, kind: Any) -> None:
    table = model.get_input_embeddings().weight.detach().numpy()
    many = prompts(5)
    given = [{"prompt_embeds": kind(table[prompt])} for prompt in many]
    if kind is jnp.float32:
        given = [{"prompt_embeds": jnp.asarray(table[prompt])} for prompt in many]
    tokens = [o.outputs[0].token_ids for o in llm.generate(many, GREEDY, use_tqdm=False)]
    outputs = llm.generate([*given, many[0]], GREEDY, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in outputs] == [*tokens, tokens[0]]
    assert outputs[0].prompt_token_ids == []
    several = SamplingParams(n=2, temperature=0.3, seed=1, max_tokens=9, ignore_eos=True)
    both = llm.generate([given[2], many[2]], several, use_tqdm=False)
    mine, its = ([one.token_ids for one in output.outputs] for output in both)
    assert mine == its and len(mine) == 2
    if kind is np.float32:
        for mine, its in zip(vectors(llm, given, "mean"), vectors(llm, many, "mean")):
            assert close(mine, its)


def test_what_enters_the_first_layer_is_what_was_given(llm: LLM) -> None:
    embeds = np.random.default_rng(1).normal(size=(20, HIDDEN)).astype("f")
    (found,) = vectors(llm, [{"prompt_embeds": embeds}], "mean", False, layer=0)
    np.testing.assert_allclose(found, embeds.mean(0), rtol=0, atol=1e-5)


def test_embeds_that_are_no_tokens(llm: LLM, model: Any) -> None:
    embeds = np.random.default_rng(0).normal(size=(50, HIDDEN)).astype("f")
    with torch.no_grad():
        out = model(inputs_embeds=torch.tensor(embeds)[None], output_hidden_states=True)
    wanted = out.hidden_states[-1][0].numpy()
    given = {"prompt_embeds": embeds}
    for _ in range(2):  # once more with what the prefix cache has of it
        assert close(vectors(llm, given, "last", False)[0], wanted[-1])
    other = embeds.copy()
    other[0] += 1.0
    assert not close(vectors(llm, {"prompt_embeds": other}, "last", False)[0], wanted[-1])


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (np.zeros((3, HIDDEN + 1), "f"), r"float32\[3, 65\].*\[tokens, 64\]"),
        (np.zeros(HIDDEN, "f"), r"\[tokens, 64\]"),
        (np.zeros((3, HIDDEN), "i4"), r"int32\[3, 64\].*floating"),
        (np.zeros((3, HIDDEN), object), "floating"),
        (np.zeros((0, HIDDEN), "f"), "at least one token"),
        (np.zeros((192, HIDDEN), "f"), "192 tokens.*maximum context length is 192"),
        (np.full((3, HIDDEN), np.nan, "f"), "finite"),
        (np.full((3, HIDDEN), 1e300), "finite"),
        ([[0.0] * HIDDEN], "list.*NumPy or JAX array"),
        (b"\x80\x04", "bytes.*NumPy or JAX array"),
    ],
)
def test_embeds_that_are_refused(llm: LLM, given: Any, told: str) -> None:
    with pytest.raises(ValidationError, match=f"(?s)prompt.*{told}"):
        llm.generate({"prompt_embeds": given}, GREEDY, use_tqdm=False)


def test_pooling_params_are_in_place_of_the_arguments(llm: LLM) -> None:
    params = PoolingParams("mean", use_activation=False, layer=1)
    one = vectors(llm, [[5, 6, 7]], pooling_params=params)
    assert (one[0] == vectors(llm, [[5, 6, 7]], "mean", False, layer=1)[0]).all()
    with pytest.raises(ValidationError, match=r"pooling_params=PoolingParams.*nothing beside"):
        llm.embed([[5]], "mean", pooling_params=params)
    with pytest.raises(ValidationError, match=r"pooling_params='mean'.*: one PoolingParams"):
        llm.embed([[5]], pooling_params="mean")  # type: ignore[arg-type]


def test_other_bad_input_is_named(llm: LLM) -> None:
    with pytest.raises(ValidationError, match=r"pooling='max'.*last, mean, cls"):
        llm.embed([[5]], "max")
    for layer in (LAYERS + 1, -LAYERS - 2):
        with pytest.raises(ValidationError, match=f"layer={layer}.*from -4 to 3"):
            llm.embed([[5]], layer=layer)
    embeds = np.zeros((2, HIDDEN), "f")
    with pytest.raises(ValidationError, match=r"prompt_token_ids.*nothing beside prompt_embeds"):
        llm.generate({"prompt_embeds": embeds, "prompt_token_ids": [5]})
    for field in ({"prompt_logprobs": 1}, {"repetition_penalty": 1.5}):
        with pytest.raises(ValidationError, match=next(iter(field))):
            llm.generate({"prompt_embeds": embeds}, SamplingParams(**field))


def test_without_the_switches_both_are_refused_by_their_names(llm: LLM) -> None:
    asked = replace(llm.config.asked, enable_embeddings=False, enable_prompt_embeds=False)
    off = replace(llm.config, asked=asked)
    inputs = InputProcessor(off, llm.model_config, None)
    with pytest.raises(ValidationError, match="enable_embeddings=False"):
        inputs.prepare([5], PoolingParams(), "r")
    with pytest.raises(ValidationError, match="enable_prompt_embeds=False"):
        inputs.prepare({"prompt_embeds": np.zeros((2, HIDDEN), "f")}, GREEDY, "r")
    assert not {"pooling", "prompt_embeds"} & {
        feature.name for feature in make_features(Facts(9, 1))
    }


def test_one_program_has_them_and_none_is_added(llm: LLM) -> None:
    table = llm.client.engine.runner.programs
    having = [s for s in table.wanted if {"pooling", "prompt_embeds"} & s.features]
    assert having == table.wanted[:1] and len(table.wanted) <= MOST_PROGRAMS


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 192, "num_pages": 80},
        {"max_num_batched_tokens": 16, "block_size": 16},
        {"overlap": False, "max_num_seqs": 1},
        {"enable_prefix_caching": False},
    ],
)
def test_chunks_and_batches_change_no_vector(
    make_llm: Any, model_folder: Any, model: Any, settings: dict[str, Any]
) -> None:
    llm = make_llm(model_folder(CASE), **(SWITCHES | settings))
    client, many = llm.client, prompts(6) * 3
    for index, prompt in enumerate(many):
        client.add(client.prepare(prompt, GREEDY, f"g{index}"))
        client.add(client.prepare(prompt, PoolingParams("mean", False, 2), f"e{index}"))
    done = {}
    while client.has_work:
        done |= {output.request_id: output for output in client.outputs() if output.finished}
    for index, prompt in enumerate(many):
        assert close(np.array(done[f"e{index}"].embedding), expected(model, prompt, "mean", 2))


@pytest.mark.slow
def test_a_prompt_that_lost_its_pages_is_pooled_from_its_start(
    make_llm: Any, model_folder: Any, model: Any
) -> None:
    few = {"num_pages": 26, "max_num_seqs": 6, "max_num_batched_tokens": 10}
    client, prompt = make_llm(model_folder(CASE), **(SWITCHES | few)).client, prompts(7)[3]
    growing = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    for index in range(5):
        client.add(client.prepare([5 + index] * 8, growing, f"g{index}"))
    for _ in range(4):
        client.outputs()
    client.add(client.prepare(prompt, PoolingParams("mean", False), "e"))
    while client.has_work:
        for output in client.outputs():
            if output.request_id == "e":
                assert output.metrics.num_preemptions
                assert close(np.array(output.embedding), expected(model, prompt, "mean", -1))
                prompt = []
    assert not prompt, "it has come"


@pytest.mark.slow
def test_embeds_that_lost_their_pages_go_on_from_what_they_have(
    make_llm: Any, model_folder: Any, model: Any
) -> None:
    llm = make_llm(model_folder(CASE), **(SWITCHES | {"num_pages": 26, "max_num_seqs": 4}))
    table = model.get_input_embeddings().weight.detach().numpy()
    long = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    many = [prompts(9 + i)[2] for i in range(4)]
    alone = [llm.generate(prompt, long, use_tqdm=False)[0].outputs[0].token_ids for prompt in many]
    given = [{"prompt_embeds": table[prompt]} for prompt in many]
    outputs = llm.generate(given, long, use_tqdm=False)
    assert any(output.metrics.num_preemptions for output in outputs)
    assert [output.outputs[0].token_ids for output in outputs] == alone


@pytest.mark.slow
@pytest.mark.parametrize("case", ["gemma3", "olmo2", "phi3", "qwen3_moe"])
def test_each_family_gives_its_hidden_states(make_llm: Any, model_folder: Any, case: str) -> None:
    llm, family = make_llm(model_folder(case), **SWITCHES), oracle.load(model_folder(case))
    for layer in range(llm.model_config.num_layers + 1):
        found = vectors(llm, prompts(8), "mean", False, layer=layer)
        for one, prompt in zip(found, prompts(8), strict=True):
            assert close(one, expected(family, prompt, "mean", layer)), (layer, len(prompt))
    embeds = 0.5 * np.random.default_rng(0).normal(size=(50, HIDDEN)).astype("f")
    with torch.no_grad():
        out = family(inputs_embeds=torch.tensor(embeds)[None], output_hidden_states=True)
    (found,) = vectors(llm, {"prompt_embeds": embeds}, "last", False)
    assert close(found, out.hidden_states[-1][0, -1].numpy())


def test_a_request_whose_time_is_over_has_no_vector(llm: LLM) -> None:
    late = llm.embed(prompts(9), use_tqdm=False, timeout=1e-9)
    assert [(one.finished, one.outputs.hidden_size) for one in late] == [(False, 0)] * len(LENGTHS)
    assert [one.prompt_token_ids for one in late] == prompts(9)
    while llm.client.has_work:
        llm.client.outputs()
    (in_time,) = llm.embed([prompts(9)[0]], use_tqdm=False, timeout=60.0)
    assert in_time.finished and in_time.outputs.hidden_size == HIDDEN
    with pytest.raises(ValidationError, match="timeout"):
        llm.embed([[5]], use_tqdm=False, timeout=0.0)
