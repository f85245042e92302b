"""Weights of each kind with keys and values of each: how far off log-probabilities are."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from scipy.special import log_softmax

from jaxserve.models import Model, load_model
from jaxserve.models.config_reader import read_model_config
from jaxserve.models.linear import LinearForm
from jaxserve.parallel import make_mesh
from tests.jaxserve.models import dense
from tests.jaxserve.models.paged import paged_logits
from tests.quantized_models import CASES, quantize_folder
from tests.tiny_models import VOCAB_SIZE

SIZES = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 1}
TOKENS = np.random.default_rng(0).integers(3, VOCAB_SIZE, 45)
# largest difference of a position's log-probabilities in units of their spread over the vocabulary,
# of the middle position: what each kind of weights costs, and each kind of keys and values. With
# random weights there is no structure that would survive 4 bits.
WEIGHTS = {"none": 0.0, "int8": 0.13, "int4": 1.5, "awq": 1.2, "fp8": 0.33}
KEYS_AND_VALUES = {"int8": 0.1, "fp8_e4m3": 0.25}
QUICK = (("none", "int8"),)


def load(folder: Path, quantization: str | None = None) -> Model:
    config, form = read_model_config(folder), LinearForm("xla", quantization)
    return load_model(folder, config, mesh=make_mesh(1), dtype="float32", form=form)


@pytest.fixture(scope="module")
def scored(model_folder, tmp_path_factory) -> Callable[[str, str], np.ndarray]:
    """(weights, keys and values) -> log-probabilities [T, V]."""
    base = model_folder("llama_biases", **SIZES)

    @cache
    def model(weights: str) -> Model:
        if weights != "awq":
            return load(base, None if weights == "none" else weights)
        config, pack = CASES["awq"]
        stored, _ = quantize_folder(base, tmp_path_factory.mktemp("awq"), config, lambda _: pack)
        return load(stored)

    @cache
    def run(weights: str, kept: str) -> np.ndarray:
        ours = model(weights)
        if kept == "floats":
            logits, _ = dense.run(ours, TOKENS, dense.empty_cache(ours.config, len(TOKENS)), 0)
        else:
            logits = paged_logits(ours, TOKENS, kept)
        return log_softmax(np.asarray(logits), axis=-1)

    return run


def middle_error(found: np.ndarray, wanted: np.ndarray) -> float:
    return float(np.median(np.abs(found - wanted).max(axis=1) / wanted.std(axis=1)))


@pytest.mark.parametrize(
    ("weights", "kept"),
    [
        pair if pair in QUICK else pytest.param(*pair, marks=pytest.mark.slow)
        for pair in itertools.product(WEIGHTS, KEYS_AND_VALUES)
    ],
)
def test_log_probabilities_are_nearly_those_of_floats(scored, weights: str, kept: str) -> None:
    found, limit = scored(weights, kept), KEYS_AND_VALUES[kept]
    assert limit / 8 < middle_error(found, scored(weights, "floats")) <= limit
    assert middle_error(found, scored("none", "floats")) <= WEIGHTS[weights] + limit
