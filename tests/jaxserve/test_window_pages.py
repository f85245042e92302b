"""Engines that keep only the pages of windows give the tokens of those that keep all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.errors import ValidationError
from jaxserve.jobs.kv_calibration import calibrate
from jaxserve.memory.page_groups import PageGroups
from tests.jaxserve.test_engine import essence, random_workload

pytestmark = pytest.mark.slow

# case, settings, groups, layers a page
CASES: dict[str, tuple[str, dict[str, Any], PageGroups, int]] = {
    "mistral": ("mistral_window", {}, PageGroups(0, 1, 17), 3),
    "llama": ("llama_gqa", {"attention_window": 20}, PageGroups(0, 1, 20), 3),
    "gemma2": ("gemma2", {}, PageGroups(1, 2, 17), 1),
    "gemma3": ("gemma3", {}, PageGroups(1, 2, 17), 1),
}
SIZES = {"max_num_seqs": 4, "num_pages": 27}  # fewer pages than all slots can use


def groups_of(llm: LLM) -> PageGroups:
    return replace(llm.client.engine.scheduler.pages.groups, ahead=0)


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_an_engine_that_keeps_all(name, model_folder, make_llm) -> None:
    case, settings, groups, layers = CASES[name]
    folder = model_folder(case)
    all_kept = make_llm(folder, keep_window_only=False, **SIZES, **settings)
    assert groups_of(all_kept) == PageGroups()
    prompts, params = random_workload(12, seed=3)
    for one in params[::4]:
        one.n = 3 if one.prompt_logprobs is None else 1
    expected = all_kept.generate(prompts, params, use_tqdm=False)
    # a page of three groups holds a third of the layers
    sizes = SIZES | {"num_pages": SIZES["num_pages"] * groups.num_groups}
    variants: list[dict[str, Any]] = [{}]
    if name in ("llama", "gemma2"):
        variants += [{"overlap": False}, {"enable_prefix_caching": False}]
    for variant in variants:
        llm = make_llm(folder, **sizes, **settings, **variant)
        assert groups_of(llm) == groups
        cache = llm.client.engine.runner.state_shape().cache
        assert cache.groups.layers_per_page == layers
        assert cache.page_bytes(1) == llm.client.page_bytes
        found = llm.generate(prompts, params, use_tqdm=False)
        assert [essence(one) for one in found] == [essence(one) for one in expected]
        longest = max(
            range(12), key=lambda n: len(prompts[n]) * (params[n].prompt_logprobs is None)
        )
        for _ in range(2):  # what the first time has left is found the second time
            (again,) = llm.generate(prompts[longest], params[longest], use_tqdm=False)
            assert essence(again) == essence(expected[longest])
        most = (len(prompts[longest]) - 1) // 8 * 8
        assert again.num_cached_tokens == most * variant.get("enable_prefix_caching", True)
        llm.client.engine.scheduler.check_integrity()
    with pytest.raises(ValidationError, match="keep_window_only"):
        calibrate(llm, [3] * 300, 40)


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_the_pool_holds_longer_sequences_and_more_of_them(name, model_folder, make_llm) -> None:
    case, settings, groups, _ = CASES[name]
    greedy = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    prompts = [[(7 * place + n) % 90 + 3 for place in range(70)] for n in range(4)]
    outcomes = []
    for keep in (True, False):
        # a page of three groups holds a third of the layers
        pages = 1 + 24 * (groups.num_groups if keep else 1)
        llm = make_llm(
            model_folder(case),
            num_pages=pages,
            max_num_seqs=4,
            max_model_len=136,
            keep_window_only=keep,
            **settings,
        )
        found = llm.generate(prompts, greedy, use_tqdm=False)
        running = max(step.num_running for step in llm.client.history.snapshot())
        outcomes.append((found, running, llm.stats().num_preemptions))
    (found, running, preempted), (expected, fewer, more) = outcomes
    assert [essence(one) for one in found] == [essence(one) for one in expected]
    assert running > fewer
    assert preempted <= more


@pytest.mark.parametrize(("keep", "longest"), [(True, 512), (False, 19 * 8)])
def test_an_open_context_is_what_the_pool_holds(
    keep: bool, longest: int, model_folder, make_llm
) -> None:
    folder = model_folder("mistral_window", max_position_embeddings=512)
    settings = {"max_model_len": None, "num_pages": 20, "keep_window_only": keep}
    llm = make_llm(folder, compile_ahead=1, **settings)
    assert llm.config.scheduler.max_model_len == longest
    greedy = SamplingParams(temperature=0.0, max_tokens=1)
    (found,) = llm.generate([[5] * (longest - 1)], greedy, use_tqdm=False)
    assert len(found.outputs[0].token_ids) == 1


def test_a_pool_without_a_page_for_each_group_is_refused(model_folder, make_llm) -> None:
    folder = model_folder("gemma2")
    with pytest.raises(ValidationError, match=r"num_pages=3 .*enough for 4 pages, which a token"):
        make_llm(folder, max_model_len=None, num_pages=3)
