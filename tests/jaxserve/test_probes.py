"""Captures and interventions in mixed batches, against the functional form."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.errors import ValidationError
from jaxserve.functional import forward, forward_with
from jaxserve.params.probes import Capture, ablate_head, add_vector, patch

pytestmark = pytest.mark.slow

CASE, LAYERS = "llama_gqa", 2
LONG = [*range(3, 50)]  # more than one chunk
PROMPTS = [[5, 6, 7, 8], LONG, [9, 10, 11]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
EVERY = ["embedding", "layers.*", "hidden", "logits"]


@pytest.fixture(scope="module")
def llm(model_folder, make_llm) -> LLM:
    return make_llm(model_folder(CASE, num_hidden_layers=LAYERS))


def generate(llm: LLM, prompts: list[list[int]] = PROMPTS, **given: Any) -> list[Any]:
    return llm.generate(prompts, GREEDY, use_tqdm=False, **given)


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_what_is_captured_is_what_the_functional_form_has(llm) -> None:
    before = generate(llm)
    outputs = generate(llm, capture=EVERY)
    assert tokens(outputs) == tokens(before)
    for output in outputs:
        own = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        assert set(output.captured) == set(llm.sites())
        logits, wanted = forward_with(
            llm.params, jnp.array(own[:-1]), llm.model_config, capture=EVERY
        )
        for site, shape in llm.sites().items():
            found = output.captured[site]
            if site == "logits":
                assert found.shape == (5, *shape)
                expected = logits[len(output.prompt_token_ids) - 1 :]
            else:
                assert found.shape == (len(own) - 1, *shape), site
                expected = wanted[site]
            np.testing.assert_allclose(found, expected, atol=2e-4, rtol=1e-4, err_msg=site)


def test_each_request_has_what_it_asked_for(llm) -> None:
    wanted = [Capture("layers.1.residual", dtype="float16"), None, Capture(["hidden"], device=True)]
    first, second, third = generate(llm, capture=wanted)
    assert second.captured is None
    assert first.captured["layers.1.residual"].dtype == np.float16
    assert isinstance(third.captured["hidden"], jax.Array)
    whole = generate(llm, capture=["hidden"])[2].captured["hidden"]
    np.testing.assert_allclose(third.captured["hidden"], whole, atol=1e-4)
    again = generate(llm, capture=["hidden"])[2].captured["hidden"]
    np.testing.assert_array_equal(again, whole, "the prefix cache leaves nothing out")


def test_memory_is_bounded_before_anything_runs(llm) -> None:
    steps = llm.stats().num_steps
    with pytest.raises(ValidationError, match="max_bytes=1000"):
        generate(llm, capture=Capture(EVERY, max_bytes=1000))
    with pytest.raises(ValidationError, match="nothing_like_it"):
        generate(llm, capture=["nothing_like_it"])
    with pytest.raises(ValidationError, match="one a prompt"):
        generate(llm, capture=[Capture(["hidden"])] * 2 + [None, None])
    with pytest.raises(ValidationError, match="interventions"):
        generate(llm, interventions=[[add_vector("layers.0.residual", [1.0])], [], []])
    with pytest.raises(ValidationError, match="at most 64"):
        generate(llm, interventions=[ablate_head(0, 0)] * 65)
    assert llm.stats().num_steps == steps


def test_an_intervention_reaches_its_request_and_no_other(llm) -> None:
    before = generate(llm)
    rng = np.random.default_rng(0)
    vector = 5 * rng.normal(size=llm.model_config.hidden_size)
    for change in (
        add_vector("layers.0.residual", vector),
        add_vector("layers.1.residual", vector, 2.0),
        ablate_head(0, 1),
        ablate_head(1, 2),
        patch("layers.1.mlp.output", vector),
        patch("embedding", vector, start=1, stop=2),
    ):
        nothing = add_vector(change.site, np.zeros(llm.sites()[change.site]))
        found, idle = (
            generate(llm, capture=["logits"], interventions=[[], [one], []])
            for one in (change, nothing)
        )
        assert tokens(idle) == tokens(before) and tokens(found)[::2] == tokens(before)[::2]
        mine, its = ([o.captured["logits"] for o in outputs] for outputs in (found, idle))
        for place in (0, 2):
            np.testing.assert_array_equal(mine[place], its[place], str(change))
        assert np.abs(mine[1][0] - its[1][0]).max() > 1e-3, change
        again = generate(llm)  # its keys and values are found by no one else
        assert tokens(again) == tokens(before)


def test_interventions_are_what_they_say(llm) -> None:
    size, site = llm.model_config.hidden_size, "layers.0.residual"
    vector = np.arange(size, dtype=np.float32)
    plain, changed = generate(
        llm,
        [LONG, LONG],
        capture=[site, "layers.1.attention.heads"],
        interventions=[
            [],
            [add_vector(site, vector, 0.5, start=40, stop=48), ablate_head(1, 3, start=3)],
        ],
    )
    gap = changed.captured[site] - plain.captured[site]
    np.testing.assert_allclose(gap[40:47], np.tile(0.5 * vector, (7, 1)), atol=1e-3)
    np.testing.assert_array_equal(gap[:40], 0)
    heads = changed.captured["layers.1.attention.heads"]
    assert (heads[3:, 3] == 0).all() and (heads[:3, 3] != 0).any()


def test_a_patch_of_all_positions_gives_the_other_run(llm) -> None:
    site = "layers.1.residual"
    other, mine = [9, 10, 11, 12], [5, 6, 7, 8]
    one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    (wanted,) = llm.generate([other], one, capture=[site, "logits"], use_tqdm=False)
    (patched,) = llm.generate(
        [mine],
        one,
        capture=["logits"],
        interventions=[patch(site, wanted.captured[site])],
        use_tqdm=False,
    )
    np.testing.assert_allclose(
        patched.captured["logits"], wanted.captured["logits"], atol=1e-5, rtol=1e-5
    )


def test_programs_without_probes_stay_as_they_are(model_folder, make_llm) -> None:
    llm = make_llm(model_folder(CASE, num_hidden_layers=LAYERS))
    runner = llm.client.engine.runner
    before = runner.programs.programs
    generate(llm, capture=["layers.*.residual"], interventions=[ablate_head(0, 0)])
    after = runner.programs.programs
    assert [one.call for one in after[: len(before)]] == [one.call for one in before]
    assert len(after) == len(before) + 2
    dispatched = []
    dispatch = runner.dispatch

    def noted(plan: Any, packed: Any) -> Any:
        dispatched.append(packed.program)
        return dispatch(plan, packed)

    runner.dispatch = noted
    generate(llm)
    assert {id(one) for one in dispatched} <= {id(one) for one in before}
    generate(llm, capture=["layers.0.residual"], interventions=[ablate_head(1, 1)])
    assert len(runner.programs.programs) == len(after), "fewer sites, another layer: no other ones"


def test_attention_weights_follow_from_what_was_captured(llm) -> None:
    (output,) = generate(llm, [LONG], capture=["layers.*.attention.weights", "hidden"])
    ids = jnp.array([*LONG, *output.outputs[0].token_ids[:-1]])
    _, wanted = forward_with(
        llm.params, ids, llm.model_config, capture=["layers.*.attention.weights"]
    )
    assert set(output.captured) == {*wanted, "hidden"}
    for site, weights in wanted.items():
        found = output.captured[site]  # [tokens, heads, tokens]
        np.testing.assert_allclose(found, weights.swapaxes(0, 1), atol=1e-5, err_msg=site)
    with pytest.raises(ValidationError, match="max_bytes"):
        generate(llm, [LONG], capture=Capture("layers.0.attention.weights", max_bytes=2000))


def test_attention_weights_are_in_the_functional_form(llm) -> None:
    ids = jnp.array(LONG)
    logits, found = forward_with(
        llm.params, ids, llm.model_config, capture=["layers.*.attention.weights"]
    )
    weights = found["layers.1.attention.weights"]
    assert weights.shape == (llm.model_config.num_heads, len(LONG), len(LONG))
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-5)
    assert (np.triu(weights[0], 1) == 0).all()
    np.testing.assert_array_equal(logits, forward(llm.params, ids, llm.model_config))
