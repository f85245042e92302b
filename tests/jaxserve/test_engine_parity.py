"""Greedy continuations through the whole engine equal transformers', for every family and option.

The requests share steps: prompts are longer than the prefill region, there are more requests than
slots, and pages are so few that some requests are preempted.
"""

from __future__ import annotations

import pytest

from jaxserve import SamplingParams
from tests.jaxserve import oracle
from tests.tiny_models import CASES, VOCAB_SIZE

NUM_TOKENS = 128
OVERRIDES = {
    "llama_gqa": {"num_hidden_layers": 2},  # of the quick suite
    # its context is factor times the original length: long enough for prompt and output
    "llama_rope_dynamic": {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0}
    },
}
LONGEST_PROMPT = 50


QUICK = ("llama_gqa",)


@pytest.mark.parametrize(
    "case",
    [case if case in QUICK else pytest.param(case, marks=pytest.mark.slow) for case in CASES],
)
def test_greedy_tokens_equal_transformers(case, model_folder, make_llm) -> None:
    folder = model_folder(case, **OVERRIDES.get(case, {}))
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
    assert llm.stats().num_preemptions > 0, "the test means to preempt"
    assert llm.stats().page_usage == 0.0
