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
from jaxserve.models import Model, load_model
from jaxserve.models.config_reader import read_model_config
from jaxserve.models.linear import LinearForm
from jaxserve.models.quant_array import QuantArray
from jaxserve.parallel import make_mesh
from pallas_kernels import native
from pallas_kernels.linear import stored_dtype
from tests.checkpoints.tiny.bundled import FOLDER
from tests.jaxserve.models.dense import empty_cache, run
from tests.tiny_models import make_case

CONFIG = read_model_config(FOLDER)


def load(form: LinearForm, folder=FOLDER) -> Model:
    return load_model(folder, read_model_config(folder), mesh=make_mesh(1), form=form)


def logits_of(model: Model, tokens: np.ndarray) -> np.ndarray:
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


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["xla", "native"])
def test_perplexity_of_the_bundled_model_changes_by_less_than_two_percent(backend, text, exact):
    if backend == "native" and not native.availability().available:
        pytest.skip(f"native kernels: {native.availability().reason}")
    found = logits_of(load(LinearForm(backend, "int8")), text)
    assert np.abs(found - exact).max() <= 0.05 * np.abs(exact).max()
    assert abs(loss(found, text) - loss(exact, text)) <= 0.02


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["xla", "native"])
@pytest.mark.parametrize(("quantization", "most"), [("int4", 0.1), ("fp8", 0.02)])
def test_what_fewer_bits_cost_the_bundled_model(backend, quantization, most, text, exact):
    if backend == "native" and not native.availability().available:
        pytest.skip(f"native kernels: {native.availability().reason}")
    found = logits_of(load(LinearForm(backend, quantization)), text)
    assert abs(loss(found, text) - loss(exact, text)) <= most


@pytest.mark.parametrize(("backend", "zero"), [("xla", 0), ("native", 128)])
def test_only_linear_weights_are_rounded(tmp_path, backend, zero):
    """Every weight is what its integers and scales say, within half a step."""
    folder = make_case(tmp_path, "qwen3_tied_biases")
    plain = dict(nnx.to_flat_state(nnx.state(load(LinearForm(), folder))))
    rounded = dict(nnx.to_flat_state(nnx.state(load(LinearForm(backend, "int8"), folder))))
    plain["lm_head", "weight"] = plain["embedding",]  # tied: a rounded copy beside the table
    assert rounded.keys() == plain.keys()
    for place, value in plain.items():
        found, want = rounded[place].get_value(), np.asarray(value[...])
        if not isinstance(found, QuantArray):
            np.testing.assert_array_equal(found, want)
            continue
        assert found.values.dtype == stored_dtype(backend)
        integers = np.asarray(found.values).astype(int) - zero
        scale = np.asarray(found.scale).reshape(*found.shape[:-1], 1)
        assert np.abs(integers).max() == 127
        assert (np.abs(integers * scale - want) <= 0.501 * scale).all()
        np.testing.assert_allclose(found.dequantize(), integers * scale, rtol=1e-6)


def test_other_quantizations_are_refused_by_name():
    with pytest.raises(ValidationError, match=r"quantization='fp3'.*one of int8"):
        EngineConfig(model="m", quantization="fp3")


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "zero"), [("xla", 0), ("native", 128)])
def test_dummy_weights_are_made_in_8_bits_of_the_same_numbers(tmp_path, backend, zero):
    folder = make_case(tmp_path, "qwen3_tied_biases")
    config, mesh = read_model_config(folder), make_mesh(1)
    plain, rounded = (
        load_model(folder, config, mesh=mesh, load_format="dummy", dtype="float32", form=form)
        for form in (LinearForm(), LinearForm(backend, "int8"))
    )
    for name in ("qkv", "output"):
        want = np.asarray(getattr(plain.blocks[0].attention, name).weight[...])
        found = getattr(rounded.blocks[0].attention, name).weight.get_value()
        numbers = np.asarray(found.values).astype(np.float32) - zero
        scaled = numbers * np.asarray(found.scale).reshape(*found.shape[:-1], 1)
        np.testing.assert_allclose(scaled, want, atol=float(found.scale.max()))
        assert abs(scaled.std() - 0.02) < 0.001
    head = rounded.lm_head.weight.get_value()
    scaled = (np.asarray(head.values).astype(np.float32) - zero) * np.asarray(head.scale).reshape(
        -1, 1
    )
    np.testing.assert_allclose(scaled, np.asarray(plain.embedding[...]), atol=0.001)
