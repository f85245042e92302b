"""Engines with an 8-bit KV cache: how far off they are, and that nothing but the tokens decides."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

from checkpoints import bundled_model_path
from checkpoints.tiny.docstrings import load_docstrings
from jaxserve import LLM, BeamSearchParams, SamplingParams
from jaxserve.errors import ValidationError
from tests.jaxserve import oracle
from tests.pallas_kernels.strategies import SEEDS, examples
from tests.quantized_models import CASES, quantize_folder
from tests.tiny_models import VOCAB_SIZE

SIZES: dict[str, Any] = {"max_model_len": 96, "max_num_seqs": 3}
ROOMY = {**SIZES, "num_pages": 200, "overlap": False, "max_num_batched_tokens": 64}
# few tokens of a prompt a step, and pages for hardly more than one request
TIGHT = {**SIZES, "num_pages": 14, "overlap": True, "max_num_batched_tokens": 11}
XLA = {"decode_backend": "xla", "prefill_backend": "xla"}
# largest difference of a position's log-probabilities in units of their spread over the vocabulary:
# of the middle position. These models' attention is sharp, and e4m3 has 3 bits of mantissa.
ERRORS = {"int8": 0.06, "fp8_e4m3": 0.35}


def scored(llm: LLM) -> np.ndarray:  # [positions, V]
    """Log-probabilities of every token at every position of prompts, in chunks, and behind."""
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=-1, prompt_logprobs=-1)
    rows = []
    for output in llm.generate(oracle.prompts(3, VOCAB_SIZE, 90, seed=5), params, use_tqdm=False):
        for position in [*(output.prompt_logprobs or [])[1:], *(output.outputs[0].logprobs or [])]:
            rows.append([position[token].logprob for token in sorted(position)])
    return np.array(rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kv_cache_dtype", "settings"),
    [("int8", {}), ("int8", XLA), ("fp8", XLA)],
)
def test_log_probabilities_are_nearly_those_of_a_float32_cache(
    kv_cache_dtype, settings, model_folder, make_llm
) -> None:
    folder = model_folder("llama_gqa", num_hidden_layers=2)
    wanted, got = (
        scored(make_llm(folder, kv_cache_dtype=name, max_logprobs=-1, **settings))
        for name in ("auto", kv_cache_dtype)
    )
    errors = np.abs(got - wanted).max(axis=1) / wanted.std(axis=1)
    limit = ERRORS["int8" if kv_cache_dtype == "int8" else "fp8_e4m3"]
    assert limit / 4 < np.median(errors) <= limit and errors.max() <= 3 * limit


@pytest.mark.slow
def test_scales_of_the_checkpoint_are_used(model_folder, make_llm, tmp_path) -> None:
    """Values are stored over 2^-10, where e4m3 would lose them otherwise, and come back."""
    folder = shutil.copytree(model_folder("llama_gqa", num_hidden_layers=2), tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    for layer in range(2):
        name = f"model.layers.{layer}.self_attn.v_proj.weight"
        tensors[name] = tensors[name] * np.float32(2.0**-12)
        name = f"model.layers.{layer}.self_attn.o_proj.weight"
        tensors[name] = tensors[name] * np.float32(2.0**12)
    save_file(tensors, folder / "model.safetensors")
    wanted, lost = (
        scored(make_llm(folder, kv_cache_dtype=k, max_logprobs=-1)) for k in ("auto", "fp8")
    )
    for layer in range(2):
        for kind, scale in (("k", 1.0), ("v", 2.0**-12)):
            tensors[f"model.layers.{layer}.self_attn.{kind}_scale"] = np.array([scale], np.float32)
    save_file(tensors, folder / "model.safetensors")
    got = scored(make_llm(folder, kv_cache_dtype="fp8", max_logprobs=-1))
    errors = [
        np.median(np.abs(found - wanted).max(axis=1) / wanted.std(axis=1)) for found in (got, lost)
    ]
    assert errors[0] <= ERRORS["fp8_e4m3"] < errors[1]


PARAMS = (
    {"temperature": 0.0},
    {"temperature": 0.7, "seed": 3},
    {"temperature": 0.9, "seed": 4, "n": 3},  # forks copy their last page with its scales
)


@pytest.mark.slow
@pytest.mark.parametrize(("kv_cache_dtype", "settings"), [("int8", {}), ("fp8_e4m3", XLA)])
def test_chunks_overlap_and_preemption_change_no_token(
    kv_cache_dtype, settings, model_folder, make_llm
) -> None:
    folder = model_folder("llama_gqa", num_hidden_layers=1)
    roomy, tight = (
        make_llm(folder, kv_cache_dtype=kv_cache_dtype, **settings, **sizes)
        for sizes in (ROOMY, TIGHT)
    )

    @examples(4)
    @given(seed=SEEDS, longest=st.sampled_from((7, 30, 60)))
    def check(seed: int, longest: int) -> None:
        prompts = oracle.prompts(6, VOCAB_SIZE, longest, seed=seed)
        params = [
            SamplingParams(max_tokens=20, ignore_eos=True, **PARAMS[i % len(PARAMS)])
            for i in range(len(prompts))
        ]
        wanted, got = (
            [
                [completion.token_ids for completion in output.outputs]
                for output in llm.generate(prompts, params, use_tqdm=False)
            ]
            for llm in (roomy, tight)
        )
        assert got == wanted

    check()
    assert tight.client.engine.stats().num_preemptions > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kv_cache_dtype", "settings"), [("int8", {}), ("int8", XLA), ("fp8_e4m3", {})]
)
def test_pages_that_are_found_again_change_neither_tokens_nor_beams(
    kv_cache_dtype, settings, model_folder, make_llm
) -> None:
    """Whoever computed an 8-bit page: another request, an earlier turn, a beam."""
    folder = model_folder("llama_gqa", num_hidden_layers=2)
    sizes = {**SIZES, "max_num_seqs": 6, "max_logprobs": 64, "num_pages": 60}
    found, plain = (
        make_llm(
            folder,
            kv_cache_dtype=kv_cache_dtype,
            enable_prefix_caching=caching,
            **settings,
            **sizes,
        )
        for caching in (True, False)
    )
    begin = oracle.prompts(1, VOCAB_SIZE, 1, seed=8)[0] * 27  # 3 pages and a part
    prompts = [begin + tail for tail in oracle.prompts(5, VOCAB_SIZE, 20, seed=9)]
    params = [
        SamplingParams(max_tokens=20, ignore_eos=True, **PARAMS[i % len(PARAMS)]) for i in range(5)
    ]
    wanted = plain.generate(prompts, params, use_tqdm=False)
    for run in range(2):
        outputs = found.generate(prompts, params, use_tqdm=False)
        assert run == 0 or all(output.num_cached_tokens >= 24 for output in outputs)
        for output, other in zip(outputs, wanted, strict=True):
            assert [one.token_ids for one in output.outputs] == [
                one.token_ids for one in other.outputs
            ]
    # another turn: its prompt is in pages that decode steps have written
    turns = [
        [*prompt, *output.outputs[0].token_ids, 5]
        for prompt, output in zip(prompts, wanted, strict=True)
    ]
    again, fresh = (llm.generate(turns, params[0], use_tqdm=False) for llm in (found, plain))
    assert all(output.num_cached_tokens >= 40 for output in again)
    assert [o.outputs[0].token_ids for o in again] == [o.outputs[0].token_ids for o in fresh]
    search = BeamSearchParams(4, 20, ignore_eos=True)
    beams = plain.beam_search(prompts, search)
    for _ in range(2):
        for output, other in zip(found.beam_search(prompts, search), beams, strict=True):
            assert [s.tokens for s in output.sequences] == [s.tokens for s in other.sequences]
            assert [s.cum_logprob for s in output.sequences] == pytest.approx(
                [s.cum_logprob for s in other.sequences], abs=1e-3
            )
    found.client.engine.scheduler.check_integrity()


def test_an_unknown_kv_cache_dtype_is_refused(model_folder) -> None:
    with pytest.raises(ValidationError, match=r"kv_cache_dtype='int4'.*auto, int8, fp8_e4m3, fp8"):
        LLM(str(model_folder("llama_gqa")), kv_cache_dtype="int4")


@pytest.fixture(scope="module")
def perplexity(tmp_path_factory) -> Callable[..., float]:
    """(quantization, kv_cache_dtype) -> of the bundled model on what it was not trained on."""
    texts = [item.document for item in load_docstrings() if item.held_out]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)

    @cache
    def measure(quantization: str | None, kv_cache_dtype: str) -> float:
        folder = bundled_model_path()
        if quantization == "awq":
            config, pack = CASES["awq"]
            folder, _ = quantize_folder(
                folder, tmp_path_factory.mktemp("awq"), config, lambda _: pack
            )
        llm = LLM(
            str(folder),
            tokenizer=str(bundled_model_path()),
            quantization=quantization,
            kv_cache_dtype=kv_cache_dtype,
            compile_ahead=2,
            compile_in_background=False,
        )
        losses = []
        for output in llm.generate(texts, params, use_tqdm=False):
            tokens = output.prompt_token_ids or []
            for token, position in zip(tokens[1:], (output.prompt_logprobs or [])[1:]):
                losses.append(-position[token].logprob)
        llm.close()
        return math.exp(sum(losses) / len(losses))

    return measure


@pytest.mark.slow
@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8_e4m3"])
@pytest.mark.parametrize(
    ("quantization", "most"),
    [(None, 1.005), ("int8", 1.005), ("int4", 1.06), ("awq", 1.04), ("fp8", 1.006)],
)
def test_perplexity_of_the_bundled_model(perplexity, quantization, most, kv_cache_dtype) -> None:
    assert perplexity(quantization, kv_cache_dtype) <= most * perplexity(None, "auto")
