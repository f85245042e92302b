"""Prompts with images, against transformers in float32."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.errors import ValidationError
from jaxserve.execution.encoder import Encoder
from tests.jaxserve.images import Oracle, make_image
from tests.tiny_models import VOCAB_SIZE

pytestmark = pytest.mark.slow  # each starts an engine, or takes seconds

IMAGE, PLACES = VOCAB_SIZE - 1, 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, logprobs=0)
SIZES = ((28, 28), (61, 40), (33, 97), (200, 28), (7, 11))
CASES = ("llava", "llava_full", "llava_mistral")


@pytest.fixture(scope="module")
def oracle(model_folder: Any) -> Oracle:
    return Oracle(model_folder("llava"))


@pytest.fixture(scope="module")
def llm(make_llm: Any, model_folder: Any) -> LLM:
    return make_llm(model_folder("llava"))


def asked(seed: int = 0) -> list[tuple[list[int], list[Any]]]:
    """Prompts and their images: none, one or several, anywhere."""
    rng = np.random.default_rng(seed)
    made = []
    for index, count in enumerate((1, 0, 2, 3, 1, 0, 1)):
        tokens = rng.integers(3, IMAGE, int(rng.integers(4, 40))).tolist()
        for _ in range(count):
            tokens.insert(int(rng.integers(0, len(tokens))), IMAGE)
        sizes = [SIZES[(index + place) % len(SIZES)] for place in range(count)]
        made.append((tokens, [make_image(*size, seed) for size in sizes]))
    return made


def prompt(tokens: list[int], images: list[Any]) -> dict[str, Any]:
    given = {"prompt_token_ids": tokens}
    return given | {"multi_modal_data": {"image": images}} if images else given


def encoder(llm: LLM) -> Encoder:
    (found,) = (one for one in llm.client.engine.runner.features if one.name == "images")
    return found.encoder


def check(llm: LLM, oracle: Oracle, given: list[tuple[list[int], list[Any]]]) -> list[Any]:
    outputs = llm.generate([prompt(*one) for one in given], GREEDY, use_tqdm=False)
    for output, (tokens, images) in zip(outputs, given, strict=True):
        (found,) = output.outputs
        wanted, scores = oracle.greedy(tokens, images, GREEDY.max_tokens)
        assert found.token_ids == wanted
        ours = [step[one].logprob for step, one in zip(found.logprobs, found.token_ids)]
        assert np.abs(np.subtract(ours, scores)).max() < 1e-4
        places = sum(oracle.places(image) - 1 for image in images)
        assert len(output.prompt_token_ids) == len(tokens) + places
    assert llm.stats().page_usage == 0
    return outputs


def test_tokens_and_logprobs_are_those_of_transformers(llm: LLM, oracle: Oracle) -> None:
    assert oracle.places(make_image(9, 9)) == PLACES
    given = asked()
    check(llm, oracle, given)
    outputs = check(llm, oracle, given)  # once more with what the prefix cache has of it
    assert all(output.num_cached_tokens for output in outputs if len(output.prompt_token_ids) > 9)


@pytest.mark.parametrize("case", CASES[1:])
def test_options_of_the_family(make_llm: Any, model_folder: Any, case: str) -> None:
    folder = model_folder(case)
    check(make_llm(folder), Oracle(folder), asked(1))


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 192, "max_encoder_patches": 1},
        {"max_num_batched_tokens": 7, "block_size": 16, "num_pages": 30},
        {"overlap": False, "max_num_seqs": 1, "encoder_cache_bytes": 0},
        {"enable_prefix_caching": False, "max_encoder_patches": 3 * PLACES},
    ],
)
def test_chunks_batches_and_caches_change_nothing(
    make_llm: Any, model_folder: Any, oracle: Oracle, settings: dict[str, Any]
) -> None:
    check(make_llm(model_folder("llava"), **settings), oracle, asked(2) * 2)


def test_an_image_is_encoded_once_and_a_text_before_others_is_found(
    llm: LLM, oracle: Oracle
) -> None:
    text, encoded = [*range(3, 35)], encoder(llm).num_encoded
    one, other = make_image(50, 60, 7), make_image(50, 60, 8)
    given = [([*text, IMAGE, 5], [image]) for image in (one, other, one, one)]
    for each in given[:2]:
        (output,) = check(llm, oracle, [each])
    assert output.num_cached_tokens == 32  # all of the text, four pages
    assert encoder(llm).num_encoded == encoded + 2
    (output,) = check(llm, oracle, [given[2]])
    assert output.num_cached_tokens == 48  # the image too
    check(llm, oracle, [([IMAGE, *text, IMAGE], [one, one])])
    assert encoder(llm).num_encoded == encoded + 2
    llm.reset_mm_cache()
    check(llm, oracle, [given[2]])
    assert encoder(llm).num_encoded == encoded + 3
    told = llm.memory_report()
    assert told["mm_cache_queries"] - told["mm_cache_hits"] == encoded + 3


def test_text_goes_on_while_an_image_is_encoded_and_what_was_aborted_is_not(
    llm: LLM, monkeypatch: Any
) -> None:
    client, entered, go = llm.client, threading.Event(), threading.Event()
    launch, begun = encoder(llm)._launch, encoder(llm).num_encoded

    def slow(arrays: list[np.ndarray]) -> list[np.ndarray]:
        entered.set()
        assert go.wait(60)
        return launch(arrays)

    def add(name: str, given: Any, params: SamplingParams = GREEDY) -> None:
        client.add(client.prepare(given, params, name))

    monkeypatch.setattr(encoder(llm), "_launch", slow)
    add("image", prompt([5, IMAGE], [make_image(30, 31, 9)]))
    assert entered.wait(60)
    two = GREEDY.clone()
    two.n = 2
    add("gone", prompt([5, IMAGE], [make_image(30, 32, 9)]), two)
    add("text", [5, 6, 7])
    done: list[str] = []
    while client.has_work:
        done += [output.request_id for output in client.outputs() if output.finished]
        if done == ["text"] and not go.is_set():
            client.abort("gone")
            go.set()
    assert done == ["text", "image"]
    assert encoder(llm).num_encoded == begun + 1


def test_arrays_are_images(llm: LLM, oracle: Oracle) -> None:
    image = make_image(40, 30)
    for given in (np.array(image), [np.array(image)], image):
        (output,) = llm.generate(
            {"prompt_token_ids": [5, IMAGE, 6], "multi_modal_data": {"image": given}},
            GREEDY,
            use_tqdm=False,
        )
        assert output.outputs[0].token_ids == oracle.greedy([5, IMAGE, 6], [image], 9)[0]


@pytest.mark.parametrize(
    ("tokens", "given", "told"),
    [
        ([5], [make_image(9, 9)], r"1 images.*: 0"),
        ([IMAGE] * 9, [make_image(9, 9)] * 9, r"9 images.*at most 8 \(limit_mm_per_prompt\)"),
        ([IMAGE] * 8 + [5] * 64, [make_image(9, 9)] * 8, "maximum context length"),
        ([IMAGE], np.zeros((3, 9, 9, 3), np.uint8), r"uint8\[3, 9, 9, 3\]"),
        ([IMAGE], np.zeros((9, 9, 3), np.float32), r"float32\[9, 9, 3\]"),
        ([IMAGE], np.zeros((1, 100_000, 3), np.uint8), "100000 x 1 pixels.*factor"),
        ([IMAGE], "https://host/name.png", "str"),
    ],
)
def test_what_is_refused(llm: LLM, tokens: list[int], given: Any, told: str) -> None:
    with pytest.raises(ValidationError, match=f"(?s){told}"):
        llm.generate({"prompt_token_ids": tokens, "multi_modal_data": {"image": given}}, GREEDY)


def test_other_data_and_models_of_text(make_llm: Any, model_folder: Any, llm: LLM) -> None:
    given = prompt([IMAGE], [make_image(9, 9)])
    with pytest.raises(ValidationError, match=r"multi_modal_data=.*key image"):
        llm.generate(given | {"multi_modal_data": {"video": [1]}}, GREEDY)
    with pytest.raises(ValidationError, match="reads text alone"):
        make_llm(model_folder("llama_gqa")).generate(given, GREEDY)
    off = make_llm(model_folder("llava"), limit_mm_per_prompt={"image": 0})
    with pytest.raises(ValidationError, match="at most 0"):
        off.generate(given, GREEDY)
    assert "images" not in {one.name for one in off.client.engine.runner.features}
