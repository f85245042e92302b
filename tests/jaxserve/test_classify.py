"""`LLM.classify` and `LLM.score` by a head of labels, against transformers in float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from jaxserve import LLM, PoolingParams
from jaxserve.errors import ValidationError
from tests.tiny_models import VOCAB_SIZE

pytestmark = pytest.mark.slow  # each starts an engine

LENGTHS = (1, 7, 33, 100, 8, 64, 2)  # chunks are of 32 tokens, pages of 8
LABELS = 3


def prompts(seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(3, VOCAB_SIZE, length).tolist() for length in LENGTHS]


@torch.no_grad()
def logits(oracle: Any, prompt: list[int]) -> np.ndarray:
    return oracle(torch.tensor([prompt])).logits[0].numpy()


@pytest.fixture(scope="module")
def folder(model_folder: Callable[..., Path]) -> Path:
    return model_folder("llama_gqa", classifies=True, num_labels=LABELS)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    return AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def llm(make_llm: Callable[..., LLM], folder: Path) -> LLM:
    return make_llm(folder)


def softmax(scores: np.ndarray) -> np.ndarray:
    powers = np.exp(scores.astype(np.float64) - scores.max())
    return powers / powers.sum()


def test_probabilities_are_those_of_transformers(llm: LLM, oracle: Any) -> None:
    for found, prompt in zip(llm.classify(prompts(), use_tqdm=False), prompts(), strict=True):
        assert found.outputs.num_classes == LABELS and found.prompt_token_ids == prompt
        np.testing.assert_allclose(
            found.outputs.probs, softmax(logits(oracle, prompt)), atol=2e-5, rtol=1e-4
        )


def test_scores_come_as_they_are(llm: LLM, oracle: Any) -> None:
    """Of `encode` too; each prompt with its own parameters."""
    asked = [PoolingParams(use_activation=i % 2 == 0) for i in range(len(LENGTHS))]
    found = llm.encode(prompts(), asked, pooling_task="classify", use_tqdm=False)
    for one, params, prompt in zip(found, asked, prompts(), strict=True):
        wanted = logits(oracle, prompt)
        wanted = softmax(wanted) if params.use_activation else wanted
        np.testing.assert_allclose(one.outputs.data, wanted, atol=2e-5, rtol=1e-4)


def test_a_model_that_classifies_does_nothing_else(llm: LLM) -> None:
    for call, field in (
        (lambda: llm.generate([[5]]), "params"),
        (lambda: llm.embed([[5]]), "task"),
        (lambda: llm.encode([[5]], pooling_task="embed"), "task"),
        (lambda: llm.score("a", "b"), "model"),
        (lambda: llm.classify([[5]], pooling_params=PoolingParams(dimensions=2)), "dimensions"),
        (lambda: llm.classify([[5]], pooling_params=[PoolingParams()] * 2), "pooling_params"),
    ):
        with pytest.raises(ValidationError) as caught:
            call()
        assert caught.value.field == field
    assert not llm.client.has_work


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of single words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<unk>", "no", "yes", "Query", "Document", ":", *"abcdefgh"]
    backend = Tokenizer(models.WordLevel({n: i for i, n in enumerate(names)}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    folder = tmp_path_factory.mktemp("words")
    PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>").save_pretrained(folder)
    return folder


TEMPLATE = (
    "{% for m in messages %}{{ m.role | capitalize }} : {{ m.content }} {% endfor %}"
    "{{ instruction | default('') }}"
)


@pytest.mark.parametrize("tied", [False, True])
def test_a_head_of_two_tokens(
    make_llm: Callable[..., LLM], model_folder: Callable[..., Path], words: Path, tied: bool
) -> None:
    """As an original Qwen3 reranker: the score is P(yes) of the next token being yes or no."""
    folder = model_folder("qwen3", tie_word_embeddings=tied)
    oracle = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    llm = make_llm(
        folder,
        tokenizer=str(words),
        skip_tokenizer_init=False,
        runner="pooling",
        hf_overrides={
            "architectures": ["Qwen3ForSequenceClassification"],
            "classifier_from_token": ["no", "yes"],
            "is_original_qwen3_reranker": True,
        },
    )
    encode = llm.get_tokenizer().encode
    plain = llm.score("a b ", ["c d", "e"], use_tqdm=False)
    more = {"chat_template_kwargs": {"instruction": "h"}, "max_tokens_per_doc": 1}
    asked = PoolingParams(extra_kwargs=more)
    templated = llm.score(
        "a b", "c d", pooling_params=asked, chat_template=TEMPLATE, use_tqdm=False
    )
    texts = ["a b c d", "a b e", "Query : a b Document : c h"]
    for found, text in zip([*plain, *templated], texts, strict=True):
        assert found.prompt_token_ids == encode(text)
        with torch.no_grad():
            last = oracle(torch.tensor([encode(text)])).logits[0, -1].double().numpy()
        assert found.outputs.score == pytest.approx(softmax(last[1:3])[1], rel=1e-4, abs=1e-6)
    raw = llm.encode("a b", PoolingParams(use_activation=False), use_tqdm=False)[0].outputs.data
    with torch.no_grad():
        last = oracle(torch.tensor([encode("a b")])).logits[0, -1].numpy()
    assert raw.tolist() == pytest.approx([last[2] - last[1]], rel=1e-4, abs=1e-4)


def test_a_token_that_the_tokenizer_has_not_is_refused(
    make_llm: Callable[..., LLM], model_folder: Callable[..., Path], words: Path
) -> None:
    overrides = {
        "architectures": ["Qwen3ForSequenceClassification"],
        "classifier_from_token": ["maybe"],
        "method": "no_post_processing",
    }
    with pytest.raises(ValidationError, match="classifier_from_token"):
        make_llm(model_folder("qwen3"), tokenizer=str(words), hf_overrides=overrides)


def test_embeddings_may_be_cut(make_llm: Callable[..., LLM], model_folder: Any) -> None:
    folder = model_folder("llama_gqa")
    llm = make_llm(folder, runner="pooling", hf_overrides={"matryoshka_dimensions": [4, 8]})
    (whole,) = llm.embed([5, 6], normalize=False, use_tqdm=False)
    (cut,) = llm.embed([5, 6], pooling_params=PoolingParams(dimensions=4), use_tqdm=False)
    wanted = np.array(whole.outputs.embedding[:4])
    np.testing.assert_allclose(cut.outputs.embedding, wanted / np.linalg.norm(wanted), rtol=1e-5)
    with pytest.raises(ValidationError, match="one of 4, 8"):
        llm.embed([5, 6], pooling_params=PoolingParams(dimensions=5))
    (kept,) = llm.embed([5, 6, 7], tokenization_kwargs={"truncate_prompt_tokens": 2})
    assert kept.prompt_token_ids == [6, 7]
