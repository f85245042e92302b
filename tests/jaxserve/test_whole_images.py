"""Gemma 3, whose tokens of an image attend to all of it, against transformers in float32."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from jaxserve import LLM
from jaxserve.errors import ValidationError
from jaxserve.models import vision
from jaxserve.models.gemma3.config import VISION_DEFAULTS
from pallas_kernels import Backends
from tests.image_models import save_tokenizer
from tests.jaxserve.images import Oracle, make_image
from tests.jaxserve.test_images import GREEDY, IMAGE, asked, check, encoder, prompt

pytestmark = pytest.mark.slow

CASE, PLACES = "gemma3_images", 9


def apart(seed: int = 0) -> list[tuple[list[int], list[Any]]]:
    """Prompts with images of which no two are neighbours: transformers takes those for one."""
    return [
        ([one for token in tokens for one in ([token, 7] if token == IMAGE else [token])], images)
        for tokens, images in asked(seed)
    ]


@pytest.fixture(scope="module")
def oracle(model_folder: Any) -> Oracle:
    return Oracle(model_folder(CASE))


@pytest.fixture(scope="module")
def llm(make_llm: Any, model_folder: Any) -> LLM:
    return make_llm(model_folder(CASE))


def test_tokens_and_logprobs_are_those_of_transformers(llm: LLM, oracle: Oracle) -> None:
    given = apart()
    check(llm, oracle, given)
    made = encoder(llm).num_encoded
    outputs = check(llm, oracle, given)  # once more with what the prefix cache has of it
    assert all(output.num_cached_tokens for output in outputs if len(output.prompt_token_ids) > 9)
    assert encoder(llm).num_encoded == made
    # pages are of 8 tokens: what is found of the image ends inside it
    tokens, image = [5, 6, 7, 8, IMAGE], make_image(30, 40)
    check(llm, oracle, [(tokens, [image])])
    (output,) = check(llm, oracle, [([*tokens, 9, 10], [image])])
    assert output.num_cached_tokens == 8
    params = GREEDY.clone()
    params.n = 2
    (output,) = llm.generate(prompt(*given[2]), params, use_tqdm=False)
    wanted, _ = oracle.greedy(*given[2], GREEDY.max_tokens)
    assert [one.token_ids for one in output.outputs] == [wanted] * 2


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": PLACES + 3, "block_size": 16, "num_pages": 60},
        {"enable_prefix_caching": False, "prefill_backend": "xla", "decode_backend": "xla"},
    ],
)
def test_chunks_and_backends_change_nothing(
    make_llm: Any, model_folder: Any, oracle: Oracle, settings: dict[str, Any]
) -> None:
    check(make_llm(model_folder(CASE), **settings), oracle, apart(2) * 2)


def test_a_kernel_whose_rows_cannot_look_ahead_computes_the_other_steps(
    make_llm: Any, model_folder: Any, oracle: Oracle, monkeypatch: Any
) -> None:
    monkeypatch.setattr(Backends, "sees_ahead", property(lambda self: False))
    llm = make_llm(model_folder(CASE))
    check(llm, oracle, apart(3))


def test_text_and_messages_have_an_image_framed(model_folder: Any, make_llm: Any) -> None:
    folder = save_tokenizer(model_folder(CASE, seed=1), begins=True)
    llm: LLM = make_llm(folder, skip_tokenizer_init=False)
    tokenizer, image = llm.get_tokenizer(), make_image(50, 20)
    framed = "a\n\n<begin><image><end>\n\nb"
    (output,) = llm.generate(
        {"prompt": "a<begin>b", "multi_modal_data": {"image": image}}, GREEDY, use_tqdm=False
    )
    wanted = Oracle(folder).greedy(tokenizer.encode(framed), [image], GREEDY.max_tokens)[0]
    assert output.outputs[0].token_ids == wanted
    content = [{"type": "image", "image": image}, {"type": "text", "text": "<begin>"}]
    (output,) = llm.chat([{"role": "user", "content": content}], GREEDY, use_tqdm=False)
    assert output.prompt.count("\n\n<begin><image><end>\n\n") == 1
    assert output.prompt_token_ids.count(tokenizer.convert_tokens_to_ids(["<begin>"])[0]) == 1


def test_steps_without_room_for_an_image_are_refused(make_llm: Any, model_folder: Any) -> None:
    with pytest.raises(ValidationError, match=r"max_num_batched_tokens=11.*9 tokens"):
        make_llm(model_folder(CASE), max_num_batched_tokens=11, limit_mm_per_prompt=1)
    with pytest.raises(ValidationError, match=r"prefill_chunk=8.*9 tokens"):
        make_llm(model_folder(CASE), prefill_chunk=8, limit_mm_per_prompt=1)


def test_a_head_at_a_time_attends_as_all_do(monkeypatch: Any) -> None:
    config = vision.VisionConfig.from_hf(
        {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 8}, VISION_DEFAULTS
    )
    graph, state = nnx.split(vision.VisionAttention(config, "float32"))
    leaves, tree = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(0), len(leaves) + 1)
    leaves = [jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves)]
    attention, x = nnx.merge(graph, tree.unflatten(leaves)), jax.random.normal(keys[-1], (2, 9, 32))
    wanted = attention(x)
    monkeypatch.setattr(vision, "MOST_SCORES", 0)
    assert np.abs(attention(x) - wanted).max() < 1e-4
