"""What engines do with images of each family, against transformers in float32."""

from __future__ import annotations

import json
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import LLM, BeamSearchParams, SamplingParams
from jaxserve.params.structured_outputs_params import StructuredOutputsParams
from pallas_kernels import quantize_fp8, quantize_int4
from pallas_kernels.quantized_matmul import dequantize
from tests.fake_devices import said
from tests.image_models import save_tokenizer
from tests.jaxserve.images import Oracle, make_image
from tests.jaxserve.test_images import GREEDY, IMAGE, asked, check, prompt
from tests.jaxserve.test_whole_images import apart

pytestmark = pytest.mark.slow

CASES = ("llava", "llava_next", "gemma3_images", "qwen2_vl", "qwen2_5_vl")


def given(case: str, seed: int) -> list[tuple[list[int], list[Any]]]:
    return apart(seed) if case == "gemma3_images" else asked(seed)


class Served(NamedTuple):
    """A family's engine of few pages and small steps, and what transformers has of it."""

    case: str
    llm: LLM
    oracle: Oracle


@pytest.fixture(scope="module", params=CASES)
def served(request: pytest.FixtureRequest, make_llm: Any, model_folder: Any) -> Served:
    folder = save_tokenizer(model_folder(request.param, seed=2))
    # as many as one request of the whole context needs, of layers with a window too
    pages = 47 if request.param == "gemma3_images" else 33
    few = {"num_pages": pages, "max_num_seqs": 4, "max_num_batched_tokens": 16}
    llm = make_llm(folder, skip_tokenizer_init=False, max_model_len=256, **few)
    return Served(request.param, llm, Oracle(folder))


def test_a_request_that_lost_its_pages_goes_on_from_its_images(served: Served) -> None:
    prompts = [one for one in given(served.case, 4) if one[1]]
    params = GREEDY.clone()
    params.max_tokens = 40
    outputs = served.llm.generate([prompt(*one) for one in prompts], params, use_tqdm=False)
    assert any(output.metrics.num_preemptions for output in outputs)
    found = [output.outputs[0].token_ids for output in outputs]
    assert found == [served.oracle.greedy(*one, 40)[0] for one in prompts]
    assert served.llm.stats().page_usage == 0


def test_several_completions_and_beams_share_a_prompt(served: Served) -> None:
    llm, oracle = served.llm, served.oracle
    tokens, images = given(served.case, 3)[2]
    params = GREEDY.clone()
    params.n = 3
    (output,) = llm.generate(prompt(tokens, images), params, use_tqdm=False)
    wanted, _ = oracle.greedy(tokens, images, GREEDY.max_tokens)
    assert [one.token_ids for one in output.outputs] == [wanted] * 3
    search = BeamSearchParams(beam_width=3, max_tokens=6, ignore_eos=True)
    (found,) = llm.beam_search(prompt(tokens, images), search, use_tqdm=False)
    continuations = [one.tokens[-6:] for one in found.sequences]
    scores = [oracle.logprob(tokens, images, one) for one in continuations]
    assert len({*map(tuple, continuations)}) == 3
    assert np.abs(np.subtract([one.cum_logprob for one in found.sequences], scores)).max() < 1e-3
    assert max(scores) >= oracle.logprob(tokens, images, wanted[:6]) - 1e-6


def test_a_constrained_answer_is_the_likelier_one(served: Served) -> None:
    llm, tokenizer = served.llm, served.llm.get_tokenizer()
    words = {word: tokenizer.encode(word) for word in ("yes", "no", "maybe")}
    params = SamplingParams(
        temperature=0.0, max_tokens=9, structured_outputs=StructuredOutputsParams(choice=[*words])
    )
    for tokens, images in given(served.case, 5)[:3]:
        (output,) = llm.generate(prompt(tokens, images), params, use_tqdm=False)
        firsts = {
            word: served.oracle.logprob(tokens, images, ids[:1]) for word, ids in words.items()
        }
        likelier = words[max(firsts, key=firsts.__getitem__)]
        assert output.outputs[0].token_ids[: len(likelier)] == likelier


@pytest.mark.parametrize(
    ("case", "quantization", "sizes"),
    [
        ("llava", "int4", {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32}),
        ("gemma3_images", "fp8", {}),
        ("qwen2_5_vl", "fp8", {}),
    ],
)
def test_a_quantised_language_model_reads_what_a_whole_encoder_made(
    make_llm: Any, model_folder: Any, case: str, quantization: str, sizes: dict[str, int]
) -> None:
    folder = model_folder(case, **sizes)
    llm = make_llm(folder, quantization=quantization, linear_backend="xla")
    oracle = Oracle(folder)
    define = {"int4": quantize_int4, "fp8": quantize_fp8}[quantization]

    def rounded(weight: np.ndarray) -> np.ndarray:  # [out, in]
        return np.asarray(dequantize(define(jnp.asarray(weight)), weight.shape[1]))

    oracle.change_weights(rounded)
    check(llm, oracle, given(case, 7))


def test_rounded_activations_read_what_a_whole_encoder_made(
    make_llm: Any, model_folder: Any
) -> None:
    folder = model_folder("llava")
    llm = make_llm(folder, quantization="int8", enable_prompt_embeds=True)
    image, tokens = make_image(60, 40, 5), [5, 6, IMAGE, 7]
    (found,) = llm.generate(prompt(tokens, [image]), GREEDY, use_tqdm=False)
    rows = Oracle(folder).rows(image)
    spans = {"prompt_token_ids": [5, 6, *[0] * len(rows), 7], "prompt_embeds": [(2, rows)]}
    (wanted,) = llm.generate(spans, GREEDY, use_tqdm=False)
    assert found.outputs[0].token_ids == wanted.outputs[0].token_ids


@pytest.mark.parametrize("case", [one for one in CASES if one != "qwen2_vl"])
def test_two_devices(model_folder: Any, case: str) -> None:
    folder = model_folder(case)
    code = f"""
from jaxserve import LLM, SamplingParams
from tests.jaxserve.test_image_features import given
from tests.jaxserve.test_images import prompt
llm = LLM(
    model={str(folder)!r}, tensor_parallel_size=2, skip_tokenizer_init=True, max_model_len=256,
    max_num_seqs=2, max_num_batched_tokens=32, block_size=8, num_pages=80, compile_ahead=2,
    compile_in_background=False,
)
params = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
outputs = llm.generate([prompt(*one) for one in given({case!r}, 6)], params, use_tqdm=False)
print([output.outputs[0].token_ids for output in outputs])
"""
    lines = said(2, "-c", code)
    oracle = Oracle(folder)
    wanted = [oracle.greedy(*one, 9)[0] for one in given(case, 6)]
    assert json.loads(lines[-1]) == wanted
