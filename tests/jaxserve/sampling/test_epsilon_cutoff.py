"""epsilon_cutoff: what is less likely than a probability is never drawn."""

from __future__ import annotations

import pytest
import torch
from transformers import EpsilonLogitsWarper, TemperatureLogitsWarper

from jaxserve import SamplingParams
from jaxserve.errors import ValidationError
from tests.jaxserve import oracle


@pytest.mark.slow
def test_only_tokens_that_transformers_keeps_are_drawn(model_folder, make_llm) -> None:
    folder = model_folder("llama_gqa", num_hidden_layers=1)
    llm, reference = make_llm(folder, max_num_seqs=8), oracle.load(folder)
    prompt, temperature, epsilon = [3, 4, 5], 1.5, 0.02
    scores = TemperatureLogitsWarper(temperature)(None, oracle.logprobs(reference, prompt)[-1:])
    kept = torch.isfinite(EpsilonLogitsWarper(epsilon)(None, scores))[0]
    assert 1 < kept.sum() < 40

    def drawn(cutoff: float) -> set[int]:
        params = SamplingParams(
            n=100, seed=1, temperature=temperature, max_tokens=1, epsilon_cutoff=cutoff
        )
        (output,) = llm.generate([prompt], params, use_tqdm=False)
        return {one.token_ids[0] for one in output.outputs}

    found = drawn(epsilon)
    assert all(kept[token] for token in found) and len(found) > 1
    assert not all(kept[token] for token in drawn(0.0)), "others are drawn without"
    assert drawn(1.0) == {int(scores.argmax())}, "the most likely one is left"


def test_a_probability_is_wanted() -> None:
    with pytest.raises(ValidationError, match=r"epsilon_cutoff=1\.5"):
        SamplingParams(epsilon_cutoff=1.5)
