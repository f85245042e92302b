"""Exact scores, the functional form with its transformations, and weights that are replaced."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.errors import ValidationError
from jaxserve.functional import forward, token_logprobs, unembed
from tests.jaxserve import oracle

pytestmark = pytest.mark.slow

CASE, LAYERS = "llama_gqa", 2
PROMPTS = [[5, 6, 7, 8, 12, 40], [9, 10, 11, 3, 3, 3]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=0)


@pytest.fixture(scope="module")
def folder(model_folder):
    return model_folder(CASE, num_hidden_layers=LAYERS)


@pytest.fixture(scope="module")
def llm(folder, make_llm) -> LLM:
    return make_llm(folder)


def test_the_functional_form_is_that_of_transformers(llm, folder) -> None:
    ids = np.array(PROMPTS)
    found = forward(llm.params, ids, llm.model_config)
    model = oracle.load(folder)
    for row, tokens in zip(jax.nn.log_softmax(found), PROMPTS, strict=True):
        np.testing.assert_allclose(row, oracle.logprobs(model, tokens), atol=2e-4)


def test_scores_are_the_functional_forms(llm) -> None:
    found = llm.loglikelihood(PROMPTS)
    wanted = token_logprobs(llm.params, np.array(PROMPTS), llm.model_config)
    for one, row, tokens in zip(found, wanted, PROMPTS, strict=True):
        np.testing.assert_allclose(one.logprobs, row, atol=1e-4)
        assert one.token_ids == tokens[1:] and one.total == pytest.approx(
            float(row.sum()), abs=1e-3
        )
    (part,) = llm.loglikelihood([(PROMPTS[0][:4], PROMPTS[0][4:])])
    np.testing.assert_allclose(part.logprobs, found[0].logprobs[3:], atol=1e-5)
    (output,) = llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False)
    (likely,) = llm.loglikelihood([(PROMPTS[0], output.outputs[0].token_ids)])
    assert likely.is_greedy and not found[0].is_greedy
    for wrong in ("text", [([], [1])], [([1], [])], [(1, 2, 3)], [("a", "b")], 5):
        with pytest.raises(ValidationError):
            llm.loglikelihood(wrong)  # type: ignore[arg-type]


def test_it_can_be_transformed(llm) -> None:
    ids, config = jnp.array(PROMPTS), llm.model_config

    def loss(params: Any, tokens: Any) -> Any:
        return -token_logprobs(params, tokens, config).mean()

    params = jax.tree.map(jnp.copy, llm.params)
    each = jax.vmap(jax.grad(loss), in_axes=(None, 0))(params, ids)
    whole = jax.grad(loss)(params, ids)
    mean = jax.tree.map(lambda x: x.mean(0), each)
    for one, other in zip(jax.tree.leaves(mean), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5, rtol=1e-3)
    optimizer = optax.sgd(0.5)
    state, losses = optimizer.init(params), []
    step = jax.jit(jax.value_and_grad(loss))
    for _ in range(3):
        value, grads = step(params, ids)
        updates, state = optimizer.update(grads, state)
        params = optax.apply_updates(params, updates)
        losses.append(float(value))
    assert losses == sorted(losses, reverse=True)
    stream = jnp.ones((2, 3, config.hidden_size))
    assert unembed(params, stream, config).shape == (2, 3, config.vocab_size)
    for wrong in ({}, {"embedding": 3}, {**llm.params, "norm": {}}):
        with pytest.raises(ValidationError, match="params"):
            forward(wrong, ids, config)
    with pytest.raises(ValidationError, match="tokens"):
        forward(llm.params, jnp.ones(3), config)
    with pytest.raises(ValidationError, match="stream"):
        unembed(params, jnp.ones(3), config)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_deterministic_engine_and_the_functional_form_have_the_same_bits(
    folder, make_llm, dtype
) -> None:
    llm = make_llm(folder, deterministic=True, dtype=dtype)
    config, score = llm.model_config, partial(token_logprobs, kernels="native")
    asked = SamplingParams(
        max_tokens=12, ignore_eos=True, logprobs=0, prompt_logprobs=0, seed=1, temperature=1.0
    )
    rows, told = [], []
    for output in llm.generate(PROMPTS, asked, use_tqdm=False):
        own = output.outputs[0].token_ids
        rows.append([*output.prompt_token_ids, *own])
        places = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
        told.append([place[t].logprob for place, t in zip(places, rows[-1][1:], strict=True)])
    ids, wanted = jnp.array(rows), np.array(told, np.float32)
    params = jax.tree.map(jnp.copy, llm.params)
    np.testing.assert_array_equal(score(params, ids, config), wanted)
    by_row = jax.vmap(lambda row: score(params, row, config))(ids)
    np.testing.assert_array_equal(by_row, wanted)

    @jax.jit
    def step(params: Any) -> Any:
        def loss(params: Any, kernels: str | None) -> Any:
            found = token_logprobs(params, ids, config, kernels=kernels)
            return -found.mean(), found

        return jax.grad(loss, has_aux=True)(params, "native"), jax.grad(loss, has_aux=True)(
            params, None
        )

    (grads, found), (plain, _) = step(params)
    np.testing.assert_array_equal(found, wanted)
    bound = 1e-4 if dtype == "float32" else 0.1
    for one, other in zip(jax.tree.leaves(grads), jax.tree.leaves(plain), strict=True):
        wide, like = (np.asarray(x, np.float32) for x in (one, other))
        assert np.abs(wide - like).max() <= bound * max(np.abs(like).max(), 1e-3)
    half = jax.tree.map(lambda x: x.astype(jnp.float16), params)
    for given, kernels in ((params, "xla"), (half, "native")):
        with pytest.raises(ValidationError, match="kernels"):
            forward(given, ids, config, kernels=kernels)


def test_weights_are_replaced_without_compiling(folder, make_llm, model_folder) -> None:
    llm = make_llm(folder)
    before = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    calls = [program.call for program in llm.client.engine.runner.programs.programs]
    rng = np.random.default_rng(0)
    changed = jax.tree.map(
        lambda x: np.asarray(x) + 0.05 * rng.normal(size=x.shape).astype(np.float32), llm.params
    )
    assert llm.update_weights(changed) == 1
    after = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [o.weights_version for o in (*before, *after)] == [0, 0, 1, 1]
    assert after[0].num_cached_tokens == 0, "the prefix cache forgot what the others computed"
    for output in after:
        own = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        logprobs = token_logprobs(changed, np.array(own), llm.model_config)
        told = [p[t].logprob for p, t in zip(output.outputs[0].logprobs, own[-5:], strict=True)]
        np.testing.assert_allclose(told, logprobs[-5:], atol=1e-3)
    assert [o.outputs[0].token_ids for o in after] != [o.outputs[0].token_ids for o in before]
    with pytest.raises(ValidationError, match="level"):
        llm.sleep(level=2)
    llm.sleep(level=1)
    llm.wake_up()
    again = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in again] == [o.outputs[0].token_ids for o in after]
    assert llm.update_weights(folder) == 2
    back = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in back] == [o.outputs[0].token_ids for o in before]
    assert [program.call for program in llm.client.engine.runner.programs.programs] == calls

    pruned = {name: part for name, part in llm.params.items() if name != "norm"}
    cut = {**llm.params, "embedding": llm.params["embedding"][:5]}
    wrong: list[tuple[Any, str]] = [
        (pruned, "missing: norm"),
        ({**llm.params, "more": {"x": np.zeros(3)}}, r"unknown: more\.x"),
        (cut, "wrong: embedding is float32"),
        ({**llm.params, "embedding": np.zeros(llm.params["embedding"].shape, np.int32)}, "int32"),
        (5, "int"),
        (model_folder("qwen3"), "weights of this model"),
        (model_folder(CASE, num_hidden_layers=1), "num_layers"),
        ("no/such/folder", "weights|model"),
    ]
    for given, why in wrong:
        with pytest.raises(ValidationError, match=why):
            llm.update_weights(given)
    kept = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [o.outputs[0].token_ids for o in kept] == [o.outputs[0].token_ids for o in before]
    assert kept[0].weights_version == 2
