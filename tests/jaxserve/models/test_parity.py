"""Logits of every family and option against transformers in float32."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from jaxserve.models import Llama, ModelConfig, load_model
from jaxserve.parallel import make_mesh
from tests.jaxserve.models.dense import empty_cache, run
from tests.tiny_models import CASES, LONG, VOCAB_SIZE, make_case

TOLERANCE = 1e-5  # largest difference of logits over the largest logit
PROMPT_LENGTH = LONG + 32  # longer than the original context and every window
DECODE_STEPS = 6


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory):
    """case -> (our model, transformers' model), made once."""

    @cache
    def make(case: str) -> tuple[Llama, torch.nn.Module]:
        folder = make_case(tmp_path_factory.mktemp(case), case)
        oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        return load(folder), oracle

    return make


def load(folder: Path, dtype: str = "auto") -> Llama:
    return load_model(folder, ModelConfig.from_folder(folder), mesh=make_mesh(1), dtype=dtype)


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def random_tokens(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, count)


@torch.no_grad()
def oracle_steps(oracle: torch.nn.Module, chunks: list[np.ndarray]) -> list[np.ndarray]:
    """Logits [T, V] of each chunk, fed one after the other through transformers' KV cache."""
    past = DynamicCache(config=oracle.config)
    logits = []
    for chunk in chunks:
        out = oracle(torch.tensor(chunk)[None], past_key_values=past, use_cache=True)
        logits.append(out.logits[0].numpy())
    return logits


@pytest.mark.parametrize("case", CASES)
def test_prompt_and_decode(models, case: str) -> None:
    model, oracle = models(case)
    tokens = random_tokens(PROMPT_LENGTH + DECODE_STEPS)
    prompt, rest = tokens[:PROMPT_LENGTH], tokens[PROMPT_LENGTH:]
    expected = oracle_steps(oracle, [prompt, *rest[:, None]])

    cache = empty_cache(model.config, len(tokens))
    found, cache = run(model, prompt, cache, 0, PROMPT_LENGTH)
    assert relative_error(found, expected[0]) <= TOLERANCE
    for step, token in enumerate(rest):
        found, cache = run(model, token[None], cache, PROMPT_LENGTH + step, PROMPT_LENGTH)
        assert relative_error(found, expected[1 + step]) <= TOLERANCE
