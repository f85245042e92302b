"""8-bit linear layers: how the weights are kept, and what they cost the bundled model."""

from __future__ import annotations

import numpy as np
import pytest
from flax import nnx
from tokenizers import Tokenizer

from checkpoints.tiny.corpus import encode_conversation
from checkpoints.tiny.tasks import TASKS, held_out_pairs
from jaxserve import EngineConfig
from jaxserve.errors import ValidationError
from jaxserve.models import Llama, ModelConfig, load_model
from jaxserve.models.layers import LinearForm
from jaxserve.parallel import make_mesh
from pallas_kernels import native
from pallas_kernels.linear import stored_dtype
from tests.checkpoints.tiny.bundled import FOLDER
from tests.jaxserve.models.dense import empty_cache, run
from tests.tiny_models import make_case

CONFIG = ModelConfig.from_folder(FOLDER)


def load(form: LinearForm, folder=FOLDER) -> Llama:
    return load_model(folder, ModelConfig.from_folder(folder), mesh=make_mesh(1), form=form)


def logits_of(model: Llama, tokens: np.ndarray) -> np.ndarray:
    return np.asarray(run(model, tokens, empty_cache(model.config, len(tokens)), 0)[0], np.float64)


@pytest.fixture(scope="module")
def text() -> np.ndarray:
    """Held-out questions and answers of every task, one after the other."""
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    ids: list[int] = []
    for name, task in TASKS.items():
        if not task.memorised:
            ids += encode_conversation(tokenizer, held_out_pairs(name, 1)).ids
    return np.array(ids[:240])


@pytest.fixture(scope="module")
def exact(text) -> np.ndarray:
    return logits_of(load(LinearForm()), text)


def loss(logits: np.ndarray, tokens: np.ndarray) -> float:
    """Mean cross-entropy of each next token, in nats."""
    top = logits.max(-1, keepdims=True)
    logprobs = logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))
    return -float(np.mean(logprobs[np.arange(len(tokens) - 1), tokens[1:]]))


@pytest.mark.parametrize("backend", ["xla", "native"])
def test_perplexity_of_the_bundled_model_changes_by_less_than_two_percent(backend, text, exact):
    if backend == "native" and not native.availability().available:
        pytest.skip(f"native kernels: {native.availability().reason}")
    found = logits_of(load(LinearForm(backend, "int8")), text)
    assert np.abs(found - exact).max() <= 0.05 * np.abs(exact).max()
    assert abs(loss(found, text) - loss(exact, text)) <= 0.02


@pytest.mark.parametrize(("backend", "zero"), [("xla", 0), ("native", 128)])
def test_only_linear_weights_are_rounded(tmp_path, backend, zero):
    """Every weight is what its integers and scales say, within half a step."""
    folder = make_case(tmp_path, "qwen3_tied_biases")
    plain = dict(nnx.to_flat_state(nnx.state(load(LinearForm(), folder))))
    rounded = dict(nnx.to_flat_state(nnx.state(load(LinearForm(backend, "int8"), folder))))
    plain["lm_head", "weight"] = plain["embedding",]  # tied: a rounded copy beside the table
    assert rounded.keys() - plain.keys() == {
        (*place[:-1], "scale") for place, value in rounded.items() if value[...].itemsize == 1
    }
    for place, value in plain.items():
        found, want = np.asarray(rounded[place][...]), np.asarray(value[...])
        if found.itemsize != 1:
            np.testing.assert_array_equal(found, want)
            continue
        assert found.dtype == stored_dtype(backend)
        found = found.astype(int) - zero
        scale = np.asarray(rounded[*place[:-1], "scale"][...])[..., None]
        assert np.abs(found).max() == 127
        assert (np.abs(found * scale - want) <= 0.501 * scale).all()


def test_other_quantizations_are_refused_by_name():
    with pytest.raises(ValidationError, match=r"quantization='fp3'.*one of int8"):
        EngineConfig(model="m", quantization="fp3")
