"""Models that classify, of every family, against transformers in float32, and their heads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification

from jaxserve.errors import UnsupportedModelError
from jaxserve.models import load_model
from jaxserve.models.config_reader import model_config_of, read_model_config
from jaxserve.models.registry import FAMILIES
from jaxserve.parallel import make_mesh
from tests.jaxserve.models.dense import empty_cache, run
from tests.tiny_models import CASES, VOCAB_SIZE, make_case

CONTEXT, LABELS = 40, 3
# a case of each family that transformers has a classifier of
FAMILY_CASES = (
    "llama_biases",
    "mistral_window",
    "qwen2",
    "qwen3",
    "olmo2",
    "phi3",
    "gemma2",
    "gemma3",
    "qwen3_moe",
    "mixtral",
)
QUICK = ("qwen3",)


@pytest.mark.parametrize(
    "case", [c if c in QUICK else pytest.param(c, marks=pytest.mark.slow) for c in FAMILY_CASES]
)
def test_scores_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    folder = make_case(tmp_path, case, classifies=True, num_labels=LABELS)
    config = read_model_config(folder)
    model = load_model(folder, config, mesh=make_mesh(1))
    oracle = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    tokens = np.random.default_rng(0).integers(3, VOCAB_SIZE, CONTEXT)
    with torch.no_grad():
        expected = oracle(torch.tensor(tokens)[None]).logits[0].numpy()
    scores, _ = run(model, tokens, empty_cache(config, CONTEXT), 0)
    found = np.asarray(scores[-1])
    assert found.shape == (LABELS,) and config.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    assert np.abs(found - expected).max() <= 1e-5 * np.abs(expected).max()


def test_every_family_that_generates_has_one_that_classifies() -> None:
    names = {family.architecture for family in FAMILIES}
    made = {name.partition("For")[0] for name in names if name.endswith("SequenceClassification")}
    assert made == {"Gemma3Text"} | {
        name.partition("For")[0]
        for name in names
        if name.endswith("CausalLM") and name != "Gemma3ForCausalLM"
    }
    assert {CASES[case][0] for case in FAMILY_CASES} == {
        family for family, _ in CASES.values() if family != "gemma3_images"
    }


CONFIG = {
    "architectures": ["LlamaForSequenceClassification"],
    "vocab_size": 9,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}


@pytest.mark.parametrize(
    ("given", "labels", "activation"),
    [
        ({}, ("LABEL_0", "LABEL_1"), "softmax"),
        ({"num_labels": 1}, ("LABEL_0",), "sigmoid"),
        ({"id2label": {"0": "bad", "1": "good"}}, ("bad", "good"), "softmax"),
        ({"id2label": {0: "bad"}}, ("bad",), "sigmoid"),
        ({"id2label": {"0": "a"}, "num_labels": 2}, ("LABEL_0", "LABEL_1"), "softmax"),
        ({"problem_type": "regression"}, ("LABEL_0", "LABEL_1"), "none"),
        ({"problem_type": "multi_label_classification"}, ("LABEL_0", "LABEL_1"), "sigmoid"),
        ({"problem_type": "single_label_classification", "num_labels": 1}, ("LABEL_0",), "sigmoid"),
        (
            {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
            ("LABEL_0", "LABEL_1"),
            "none",
        ),
        (
            {
                "num_labels": 1,
                "sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid",
            },
            ("LABEL_0",),
            "sigmoid",
        ),
        (
            {"classifier_from_token": ["no", "yes"], "is_original_qwen3_reranker": True},
            ("LABEL_0",),
            "sigmoid",
        ),
        (
            {"classifier_from_token": ["a", "b"], "method": "no_post_processing"},
            ("LABEL_0", "LABEL_1"),
            "softmax",
        ),
    ],
)
def test_labels_and_activation(given: dict[str, Any], labels: tuple[str, ...], activation: str):
    head = model_config_of(CONFIG | given).head
    assert head is not None
    assert (head.labels, head.activation) == (labels, activation)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"num_labels": 0}, "num_labels"),
        ({"id2label": ["a"]}, "id2label"),
        ({"problem_type": "other"}, "problem_type"),
        ({"use_sep_token": True}, "use_sep_token"),
        ({"method": "no_post_processing"}, "classifier_from_token"),
        ({"classifier_from_token": ["a"]}, "method"),
        ({"classifier_from_token": [1], "method": "no_post_processing"}, "classifier_from_token"),
        ({"classifier_from_token": ["a"], "method": "from_2_way_softmax"}, "classifier_from_token"),
        (
            {"sentence_transformers": {"activation_fn": "os.system"}},
            "sentence_transformers.activation_fn",
        ),
    ],
)
def test_other_heads_are_refused(given: dict[str, Any], field: str) -> None:
    with pytest.raises(UnsupportedModelError) as caught:
        model_config_of(CONFIG | given)
    assert caught.value.field == field


def test_a_config_that_names_no_architecture_generates() -> None:
    config = {k: v for k, v in CONFIG.items() if k != "architectures"} | {"model_type": "llama"}
    assert model_config_of(json.loads(json.dumps(config))).head is None
