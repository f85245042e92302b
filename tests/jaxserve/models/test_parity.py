"""Logits of every family and option against transformers in float32."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from jaxserve.models import Model, load_model
from jaxserve.models.config_reader import read_model_config
from jaxserve.models.linear import PLAIN_LINEAR, LinearForm
from jaxserve.parallel import make_mesh
from pallas_kernels import native
from tests.jaxserve.models.dense import empty_cache, run
from tests.tiny_models import CASES, LONG, VOCAB_SIZE, make_case

TOLERANCE = 1e-5  # largest difference of logits over the largest logit
PROMPT_LENGTH = LONG + 32  # longer than the original context and every window
DECODE_STEPS = 4
# of every cache, and few sizes of chunks: an operation is compiled for each
CONTEXT = PROMPT_LENGTH + DECODE_STEPS


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory):
    """case -> (our model, transformers' model), made once."""

    @cache
    def make(case: str) -> tuple[Model, torch.nn.Module]:
        folder = make_case(tmp_path_factory.mktemp(case), case)
        oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        return load(folder), oracle

    return make


def load(folder: Path, dtype: str = "auto", form: LinearForm = PLAIN_LINEAR) -> Model:
    config = read_model_config(folder)
    return load_model(folder, config, mesh=make_mesh(1), dtype=dtype, form=form)


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def random_tokens(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, count)


@torch.no_grad()
def oracle_steps(oracle: torch.nn.Module, chunks: list[np.ndarray]) -> list[np.ndarray]:
    """Logits [T, V] of each chunk, fed one after the other through transformers' KV cache."""
    # Dynamic frequencies of a longer call before would stay; a short one resets them.
    oracle(torch.tensor([[0]]))
    past = DynamicCache(config=oracle.config)
    logits = []
    for chunk in chunks:
        out = oracle(torch.tensor(chunk)[None], past_key_values=past, use_cache=True)
        logits.append(out.logits[0].numpy())
    return logits


QUICK = ("llama_gqa", "gemma3")


@pytest.mark.parametrize(
    "case", [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in CASES]
)
def test_prompt_and_decode(models, case: str) -> None:
    model, oracle = models(case)
    tokens = random_tokens(CONTEXT)
    prompt, rest = tokens[:PROMPT_LENGTH], tokens[PROMPT_LENGTH:]
    expected = oracle_steps(oracle, [prompt, *rest[:, None]])

    cache = empty_cache(model.config, CONTEXT)
    found, cache = run(model, prompt, cache, 0, PROMPT_LENGTH)
    assert relative_error(found, expected[0]) <= TOLERANCE
    for step, token in enumerate(rest):
        found, cache = run(model, token[None], cache, PROMPT_LENGTH + step, PROMPT_LENGTH)
        assert relative_error(found, expected[1 + step]) <= TOLERANCE


@pytest.mark.slow
def test_attention_window(tmp_path: Path) -> None:
    """A model without a window and a bound on it, against transformers' window of that size."""
    folder = make_case(tmp_path, "mistral")
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, sliding_window=13)
    tokens = random_tokens(48)
    (expected,) = oracle_steps(oracle.eval(), [tokens])
    bounded = replace(read_model_config(folder), attention_window=13)
    model = load_model(folder, bounded, mesh=make_mesh(1))
    found, _ = run(model, tokens, empty_cache(model.config, CONTEXT), 0)
    assert relative_error(found, expected) <= TOLERANCE
    whole, _ = run(load(folder), tokens, empty_cache(model.config, CONTEXT), 0)
    assert relative_error(whole, expected) > 0.01


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [pytest.param("llama_biases", marks=pytest.mark.slow), "qwen3_tied_biases"]
)
def test_native_linear_layers(models, tmp_path: Path, case: str) -> None:
    """The whole model on the C++ kernels of the CPU, in rows of every remainder."""
    state = native.availability()
    if not state.available:
        pytest.skip(f"native kernels: {state.reason}")
    _, oracle = models(case)
    model = load(make_case(tmp_path, case), form=LinearForm("native"))
    tokens = random_tokens(46)
    chunks = [tokens[:39], tokens[39:45], tokens[45:]]
    cache, start = empty_cache(model.config, CONTEXT), 0
    for chunk, expected in zip(chunks, oracle_steps(oracle, chunks)):
        found, cache = run(model, chunk, cache, start)
        assert relative_error(found, expected) <= TOLERANCE
        start += len(chunk)


@pytest.mark.parametrize(
    "case",
    [
        "llama_rope_dynamic",
        pytest.param("llama_gqa", marks=pytest.mark.slow),
        pytest.param("mistral_window", marks=pytest.mark.slow),
    ],
)
def test_prompt_in_chunks(models, case: str) -> None:
    """A prompt cut into chunks gives the logits of the whole prompt."""
    model, oracle = models(case)
    tokens = random_tokens(PROMPT_LENGTH, seed=1)
    (expected,) = oracle_steps(oracle, [tokens])
    cache, found = empty_cache(model.config, CONTEXT), []
    for start in range(0, len(tokens), 32):
        part, cache = run(model, tokens[start : start + 32], cache, start, len(tokens))
        found.append(part)
    assert relative_error(np.concatenate(found), expected) <= TOLERANCE


@pytest.mark.slow
def test_dynamic_rope_grows_while_decoding(models) -> None:
    """A prompt within the original context, decoded across its end, with and without lengths."""
    model, oracle = models("llama_rope_dynamic")
    prompt_length = LONG - 3
    tokens = random_tokens(prompt_length + 8, seed=2)
    chunks = [tokens[:32], *tokens[32:, None]]
    expected = np.concatenate(oracle_steps(oracle, chunks))
    for known_length in (prompt_length, None):
        cache, start, found = empty_cache(model.config, CONTEXT), 0, []
        for chunk in chunks:
            part, cache = run(model, chunk, cache, start, known_length)
            found.append(part)
            start += len(chunk)
        assert relative_error(np.concatenate(found), expected) <= TOLERANCE


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", ["llama_biases", pytest.param("qwen3", marks=pytest.mark.slow)])
def test_half_precision_is_as_close_as_torch(tmp_path: Path, case: str, dtype: str) -> None:
    """Against float32 on the same rounded weights, our RMS error is no larger than torch's."""
    folder = make_case(tmp_path, case, dtype=dtype)
    model = load(folder)
    assert model.embedding[...].dtype == dtype
    tokens = random_tokens(PROMPT_LENGTH)
    exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    half = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    with torch.no_grad():
        expected = exact(torch.tensor(tokens)[None]).logits[0].numpy()
        theirs = half(torch.tensor(tokens)[None]).logits[0].float().numpy()
    found, _ = run(model, tokens, empty_cache(model.config, len(tokens), dtype), 0)
    assert np.std(found - expected) <= 1.1 * np.std(theirs - expected)


def test_dtype_is_converted_on_load(tmp_path: Path) -> None:
    """A bfloat16 checkpoint in float32 gives transformers' float32 logits."""
    folder = make_case(tmp_path, "llama_gqa", dtype="bfloat16")
    model = load(folder, "float32")
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = random_tokens(PROMPT_LENGTH)
    (expected,) = oracle_steps(oracle, [tokens])
    found, _ = run(model, tokens, empty_cache(model.config, CONTEXT), 0)
    assert relative_error(found, expected) <= TOLERANCE
