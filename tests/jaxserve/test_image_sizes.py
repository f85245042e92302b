"""Models that read images in sizes of their own, against transformers in float32."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve import LLM
from jaxserve.errors import ValidationError
from tests.image_models import save_tokenizer
from tests.jaxserve.images import Oracle, make_image
from tests.jaxserve.test_images import GREEDY, IMAGE, asked, check, encoder, prompt

pytestmark = pytest.mark.slow

CASES = ("qwen2_vl", "qwen2_5_vl", "llava_next")


@pytest.fixture(scope="module")
def oracles(model_folder: Any) -> dict[str, Oracle]:
    return {case: Oracle(model_folder(case)) for case in CASES}


@pytest.mark.parametrize("case", CASES)
def test_tokens_and_logprobs_are_those_of_transformers(
    make_llm: Any, model_folder: Any, oracles: dict[str, Oracle], case: str
) -> None:
    llm, oracle, given = make_llm(model_folder(case), max_model_len=320), oracles[case], asked()
    assert len({oracle.places(image) for _, images in given for image in images}) > 2
    check(llm, oracle, given)
    made = encoder(llm).num_encoded
    outputs = check(llm, oracle, given)  # once more with what the prefix cache has of it
    assert all(output.num_cached_tokens for output in outputs if len(output.prompt_token_ids) > 9)
    assert encoder(llm).num_encoded == made
    given = [([5, 6, IMAGE, 7], [make_image(*size)]) for size in ((16, 32), (32, 16))]
    check(llm, oracle, given)  # of equal length but in tiles
    params = GREEDY.clone()
    params.n = 2
    (output,) = llm.generate(prompt(*asked(3)[2]), params, use_tqdm=False)
    wanted, _ = oracle.greedy(*asked(3)[2], GREEDY.max_tokens)
    assert [one.token_ids for one in output.outputs] == [wanted] * 2


@pytest.mark.parametrize(
    ("case", "settings"),
    [
        ("qwen2_5_vl", {"max_num_batched_tokens": 7, "block_size": 16, "num_pages": 34}),
        ("qwen2_5_vl", {"enable_prefix_caching": False, "max_encoder_patches": 100}),
        ("llava_next", {"max_num_batched_tokens": 7, "block_size": 16, "max_encoder_patches": 48}),
    ],
)
def test_chunks_batches_and_caches_change_nothing(
    make_llm: Any,
    model_folder: Any,
    oracles: dict[str, Oracle],
    case: str,
    settings: dict[str, Any],
) -> None:
    llm = make_llm(model_folder(case), max_model_len=320, **settings)
    check(llm, oracles[case], asked(2) * 2)


def test_messages_and_images_that_are_made_smaller(make_llm: Any, model_folder: Any) -> None:
    folder = save_tokenizer(model_folder("qwen2_vl", seed=1))
    llm: LLM = make_llm(folder, skip_tokenizer_init=False, max_encoder_patches=40)
    oracle = Oracle(folder)
    oracle.bound(40 * 16)
    images = [make_image(64, 24), make_image(24, 64)]
    assert [oracle.places(one) for one in images] == [5, 5]
    content = [{"type": "image", "image": images[0]}, {"type": "text", "text": "A and B"}]
    turns = [
        {"role": "user", "content": content},
        {"role": "assistant", "content": [{"type": "text", "text": "C"}]},
        {"role": "user", "content": [{"type": "image", "image": images[1]}]},
    ]
    (output,) = llm.chat(turns, GREEDY, use_tqdm=False)
    text = "USER: <image>\nA and B ASSISTANT: C USER: <image>\nASSISTANT:"
    tokens = llm.get_tokenizer().encode(text)
    assert output.outputs[0].token_ids == oracle.greedy(tokens, images, GREEDY.max_tokens)[0]
    fewer = {"max_pixels": 20 * 16}
    (output,) = llm.chat(turns, GREEDY, use_tqdm=False, mm_processor_kwargs=fewer)
    oracle.bound(20 * 16)
    assert output.outputs[0].token_ids == oracle.greedy(tokens, images, GREEDY.max_tokens)[0]
    tight = make_llm(
        model_folder("qwen2_vl"), max_encoder_patches=15, mm_processor_kwargs={"max_pixels": 8 * 16}
    )
    with pytest.raises(ValidationError, match="max_encoder_patches"):
        tight.generate(prompt([IMAGE], [make_image(8, 200)]), GREEDY)
    given = prompt([5, IMAGE], [images[0]])
    for own, bound in ({}, 8), ({"max_pixels": 12 * 16}, 12):
        oracle.bound(bound * 16)
        (output,) = tight.generate(given | {"mm_processor_kwargs": own}, GREEDY, use_tqdm=False)
        assert len(output.prompt_token_ids) == 1 + oracle.places(images[0])
    for own in ({"min_pixels": 16 * 16}, {"min_pixels": 9 * 16}, {"num_crops": 4}):
        with pytest.raises(ValidationError, match="mm_processor_kwargs"):
            tight.generate(given | {"mm_processor_kwargs": own}, GREEDY)
