"""Engines that keep only the pages of windows give the tokens of those that keep all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.memory.page_groups import PageGroups
from tests.jaxserve.test_engine import essence, random_workload

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
# case, settings, groups, layers a page
CASES: dict[str, tuple[str, dict[str, Any], PageGroups, int]] = {
    "mistral": ("mistral_window", {}, PageGroups(0, 1, 17), 3),
    "llama": ("llama_gqa", {"attention_window": 20}, PageGroups(0, 1, 20), 3),
    "gemma2": ("gemma2", {}, PageGroups(1, 2, 17), 1),
    "gemma3": ("gemma3", {}, PageGroups(1, 2, 17), 1),
}


def held(llm: LLM) -> int:
    return llm.stats().pages.num_active


@pytest.mark.parametrize(
    "name", ["gemma3", *(pytest.param(n, marks=pytest.mark.slow) for n in CASES)]
)
def test_tokens_are_those_of_an_engine_that_keeps_all(name, model_folder, make_llm) -> None:
    case, settings, groups, layers = CASES[name]
    folder = model_folder(case)
    pages = 40 * groups.num_groups  # fewer than all slots can use
    all_kept = make_llm(folder, num_pages=60, max_num_seqs=4, keep_window_only=False, **settings)
    assert all_kept.client.engine.scheduler.pages.groups == PageGroups()
    prompts, params = random_workload(12, seed=3)
    params = [
        replace(p, n=3) if p.prompt_logprobs is None and i % 4 == 1 else p
        for i, p in enumerate(params)
    ]
    expected = all_kept.generate(prompts, params, use_tqdm=False)
    variants: list[dict[str, Any]] = [{}]
    if name == "gemma2":
        variants += [{"overlap": False}, {"enable_prefix_caching": False}]
    for variant in variants:
        llm = make_llm(folder, num_pages=pages, max_num_seqs=4, **settings, **variant)
        assert llm.client.engine.scheduler.pages.groups == groups
        cache = llm.client.engine.runner.state_shape().cache
        assert cache.groups.layers_per_page == layers
        for _ in range(2):  # then what the first time has left is found
            found = llm.generate(prompts, params, use_tqdm=False)
            assert [essence(one) for one in found] == [essence(one) for one in expected]
        hits = sum(one.num_cached_tokens for one in found)
        assert (hits > 0) == variant.get("enable_prefix_caching", True)
        llm.client.engine.scheduler.check_integrity()
