"""Two models compared: against transformers' logits, and a model with itself."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from jaxserve.config.engine_config import EngineConfig
from jaxserve.errors import ValidationError
from jaxserve.evaluation.comparison import compare, forward
from jaxserve.loading.engine_build import load_bare
from tests.jaxserve import oracle
from tests.tiny_models import VOCAB_SIZE

TOKENS = oracle.prompts(2, VOCAB_SIZE, 40, seed=3)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["llama_gqa", "gemma3", "qwen3_moe"])
def test_the_plain_forward_is_that_of_transformers(case: str, model_folder: Any) -> None:
    folder = model_folder(case)
    run, reference = forward(load_bare(EngineConfig(model=str(folder)))[0]), oracle.load(folder)
    for tokens in TOKENS:
        seen = run(np.array(tokens, np.int32))
        assert (
            np.abs(np.asarray(seen.logprobs) - oracle.logprobs(reference, tokens).numpy()).max()
            < 2e-4
        )
        with torch.no_grad():
            states = reference(torch.tensor([tokens]), output_hidden_states=True).hidden_states
        # the last of transformers' is normed
        for layer in range(len(seen.layers) - 1):
            assert np.allclose(seen.layers[layer], states[layer + 1][0], atol=2e-4, rtol=2e-4)


@pytest.mark.slow
def test_a_model_is_as_itself_and_rounding_shows(model_folder: Any) -> None:
    folder = str(model_folder("llama_gqa"))
    plain = load_bare(EngineConfig(model=folder))[0]
    rounded = load_bare(EngineConfig(model=folder, quantization="int8"))[0]
    same = compare(plain, plain, TOKENS, use_tqdm=False)
    assert same.kl_max == 0 and same.top1_agreement == 1 and same.layer_errors == [0.0] * 3
    other = compare(plain, rounded, TOKENS, use_tqdm=False)
    assert 0 < other.kl_mean < 0.2 and other.top1_agreement > 0.7
    assert all(0 < error < 1 for error in other.layer_errors)
    # by hand
    total = 0.0
    for tokens in TOKENS:
        a, b = (
            np.asarray(forward(m)(np.array(tokens)).logprobs, np.float64) for m in (plain, rounded)
        )
        total += (np.exp(a) * (a - b)).sum()
    assert other.kl_mean == pytest.approx(total / other.positions, rel=1e-3)
    with pytest.raises(ValidationError, match="text"):
        compare(plain, plain, [])
