"""Greedy continuations through the whole engine equal transformers', for every family and option.

The requests share steps: prompts are longer than the prefill region, there are more requests than
slots, and pages are so few that some requests are preempted. Options that do not meet in the
engine share a model; models/test_parity.py has the logits of each option alone.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest

from jaxserve import SamplingParams
from tests.jaxserve import oracle
from tests.tiny_models import CASES, VOCAB_SIZE

NUM_TOKENS = 128
LONGEST_PROMPT = 50

QUICK = (("llama_gqa",),)
# cases of one family whose options are in one model; models/test_parity.py has the logits of all
MORE = (
    ("llama_mha", "llama_gelu", "llama_rope_linear"),
    ("llama_head_dim", "llama_biases", "llama_gelu_tanh", "llama_rope_llama3"),
    ("llama_rope_dynamic",),
    ("mistral_window",),
    ("qwen2_window", "qwen2_yarn"),
    ("qwen3_tied_biases",),
    ("olmo2_biases",),
    ("phi3_longrope",),
    ("gemma2",),
    ("gemma3_biases",),
    ("gemma3_images",),
    ("qwen3_moe",),
    ("mixtral",),
)
# transformers' `generate` computes Phi-3's cache again when a request grows beyond the original
# length: here all of them stay within it, or begin beyond it
ORIGINAL_LENGTH = {"phi3_longrope": 256, "phi4_mini": 2}
# its context is factor times the original length: long enough for prompt and output
LONG_DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0}}


def options_of(cases: tuple[str, ...]) -> dict[str, Any]:
    """The options of every case, in a model of two layers."""
    options: dict[str, Any] = {"num_hidden_layers": 2}
    for case in cases:
        options |= CASES[case][1]
    if "llama_rope_dynamic" in cases:
        options |= LONG_DYNAMIC
    for case in ORIGINAL_LENGTH.keys() & set(cases):
        options["original_max_position_embeddings"] = ORIGINAL_LENGTH[case]
    if "layer_types" in options:
        options["layer_types"] = options["layer_types"][:2]
    return options


def test_every_case_is_in_one_model_of_its_family() -> None:
    chosen = list(chain(*QUICK, *MORE))
    assert len(set(chosen)) == len(chosen) and {CASES[case][0] for case in chosen} == {
        family for family, _ in CASES.values()
    }
    for cases in (*QUICK, *MORE):
        assert len({CASES[case][0] for case in cases}) == 1, cases
        named = [option for case in cases for option in CASES[case][1]]
        assert len(named) == len(set(named)), f"{cases}: an option of one hides another's"


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases",
    [*QUICK, *(pytest.param(cases, marks=pytest.mark.slow) for cases in MORE)],
    ids=" ".join,
)
def test_greedy_tokens_equal_transformers(cases, model_folder, make_llm) -> None:
    folder = model_folder(cases[0], **options_of(cases))
    prompts = oracle.prompts(4, VOCAB_SIZE, LONGEST_PROMPT)
    model = oracle.load(folder)
    expected = [oracle.greedy(model, prompt, NUM_TOKENS) for prompt in prompts]
    llm = make_llm(folder, num_pages=46)
    outputs = llm.generate(
        prompts,
        SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True),
        use_tqdm=False,
    )
    for output, prompt, tokens in zip(outputs, prompts, expected):
        assert output.prompt_token_ids == prompt
        assert output.outputs[0].token_ids == tokens
        assert output.outputs[0].finish_reason == "length"
    if llm.client.engine.scheduler.pages.groups.num_full:  # else windows need few pages
        assert llm.stats().num_preemptions > 0, "the test means to preempt"
    assert llm.stats().page_usage == 0.0


@pytest.mark.slow
def test_an_attention_window_is_that_of_a_config(model_folder, make_llm) -> None:
    """`attention_window` gives the tokens of transformers' window of that size."""
    prompts = oracle.prompts(2, VOCAB_SIZE, LONGEST_PROMPT)
    windowed = oracle.load(model_folder("mistral_window", sliding_window=13))
    expected = [oracle.greedy(windowed, prompt, 24) for prompt in prompts]
    llm = make_llm(model_folder("mistral", sliding_window=None), attention_window=13)
    sampling = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    assert [output.outputs[0].token_ids for output in outputs] == expected
