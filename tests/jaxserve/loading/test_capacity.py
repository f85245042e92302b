"""Sums of memory by config.json, against the weights themselves and the rules of thumb."""

from __future__ import annotations

import math
from dataclasses import replace

import jax
import pytest

from checkpoints import bundled_model_path
from checkpoints.quantized import Encoding
from jaxserve.config.engine_config import EngineConfig
from jaxserve.errors import ValidationError
from jaxserve.loading import engine_plan
from jaxserve.loading.capacity import (
    Rows,
    numbers_of,
    require_room,
    room_of,
    rule_of_thumb,
    weight_bytes,
    weights_at_most,
)
from jaxserve.loading.engine_build import load_engine
from jaxserve.models.config_reader import model_config_of, read_model_config
from jaxserve.models.known_shapes import HUB_IDS, SHAPES, shape_of
from jaxserve.models.linear import LinearForm
from jaxserve.models.quant_array import WeightFormat
from jaxserve.models.weights import abstract_model
from jaxserve.parallel.mesh import make_mesh
from pallas_kernels.backends.mosaic_tpu import LENGTH_MULTIPLE
from tests.tiny_models import CASES

# the numbers of all but the last are counted for other tests too, and kept
QUICK = ("llama-125m", "llama-3-8b", "llama-3-70b", "qwen3-moe-3b")


def config_of(name: str):
    return model_config_of(SHAPES[name])


def test_llama_3_8b_is_as_large_as_it_is():
    """8.03 B parameters: 16.1 GB in bfloat16, 8.0 GB with all in 8 bits, 5.7 GB as AWQ."""
    config = config_of("llama-3-8b")
    total = numbers_of(config).total
    assert f"{total / 1e9:.2f}" == "8.03"
    assert f"{weight_bytes(config, 'bfloat16', '').total / 1e9:.1f}" == "16.1"
    assert f"{total / 1e9:.1f}" == "8.0"
    stored = weight_bytes(config, "bfloat16", "awq", in_file=True)
    assert f"{stored.total / 1e9:.1f}" == "5.7"


def test_the_rule_of_thumb_holds_up_to_twelve_bits():
    config = config_of("llama-3-70b")
    rule = rule_of_thumb(numbers_of(config).total)
    assert rule == pytest.approx(105e9, rel=0.01)
    assert weight_bytes(config, "bfloat16", "").total > rule
    assert weight_bytes(config, "bfloat16", "int8").total < rule


@pytest.mark.parametrize("quantization", ["", "int8", "int4", "fp8"])
@pytest.mark.parametrize(
    ("shape", "platform"),
    [
        ("llama-125m", "gpu"),
        pytest.param("qwen3-moe-3b", "gpu", marks=pytest.mark.slow),
        pytest.param("qwen3-moe-3b", "tpu", marks=pytest.mark.slow),
    ],
)
def test_the_sums_are_those_of_the_arrays(quantization, shape, platform):
    config = config_of(shape)
    experts = "mosaic_tpu" if platform == "tpu" else "triton"
    form = LinearForm(backend="gpu", quantization=quantization or None, experts=experts)
    model = abstract_model(config, make_mesh(1), "bfloat16", form)
    from flax import nnx

    leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
    held = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    sums = weight_bytes(config, "bfloat16", quantization, platform=platform)
    assert sums.total == pytest.approx(held, rel=0.002)


@pytest.mark.parametrize(
    ("inputs", "devices", "filled"), [(768, 1, True), (768, 2, False), (1408, 1, False)]
)
def test_scales_are_filled_up_where_no_piece_needs_the_words(inputs, devices, filled):
    """As `WeightFormat.kept_groups` has them: 6 groups of two halves of 768 inputs, 11 of 1,408."""
    rows = Rows(inputs, experts=True, divided=True, numbers=inputs)
    assert rows.fills_scales("tpu", devices) is filled
    form = WeightFormat(Encoding("int4", group=128), native=False, experts=True, parts=devices)
    kept = replace(form, words=LENGTH_MULTIPLE).kept_groups(inputs)
    assert (kept > inputs // 128) is filled


@pytest.mark.parametrize(
    ("inputs", "experts", "platform", "devices", "filled"),
    [
        (768, True, "tpu", 1, 1024),
        (768, True, "tpu", 2, 2 * 512),
        (768, True, "gpu", 2, 2 * 512),
        (768, False, "tpu", 1, 768),
        (1408, True, "gpu", 1, 1536),
        (1408, True, "cpu", 1, 1408),
        (4096, True, "tpu", 8, 4096),
    ],
)
def test_rows_of_four_bits_are_filled_up(inputs, experts, platform, devices, filled):
    """Of a hundred rows whose inputs devices divide."""
    rows = Rows(inputs, experts, divided=True, numbers=100 * inputs)
    assert rows.filled(platform, devices) == 100 * (filled - inputs)


def test_what_fills_up_rows_is_of_experts_and_of_four_bits():
    config = config_of("qwen3-30b-a3b")
    plain, tpu = (weight_bytes(config, "bfloat16", "int4", platform=p) for p in ("", "tpu"))
    # 768 inputs of one of three matrices of an expert become 1,024
    assert tpu.experts / plain.experts == pytest.approx(1 + 1 / 9, rel=1e-6)
    assert tpu.total - plain.total == tpu.experts - plain.experts
    for quantization in ("", "int8", "fp8"):
        plain, tpu = (
            weight_bytes(config, "bfloat16", quantization, platform=p) for p in ("", "tpu")
        )
        assert plain == tpu


@pytest.mark.slow
@pytest.mark.parametrize("case", sorted(CASES))
def test_every_family_is_counted(case, model_folder):
    config = read_model_config(model_folder(case))
    numbers = numbers_of(config)
    assert min(numbers.linear, numbers.embedding, numbers.other) > 0
    assert bool(numbers.head) != config.tie_word_embeddings or config.head is not None


@pytest.mark.parametrize(
    "shape",
    [*QUICK, *(pytest.param(n, marks=pytest.mark.slow) for n in SHAPES if n not in QUICK)],
)
def test_the_quick_bound_is_one(shape):
    config = config_of(shape)
    assert weights_at_most(config) > weight_bytes(config, "float32", "").total * 0.99


def test_names_of_the_hub_lead_to_shapes():
    assert shape_of("meta-llama/Meta-Llama-3-70B") is SHAPES["llama-3-70b"]
    assert shape_of("llama-3-8b") is SHAPES["llama-3-8b"] and shape_of("nobody/none") is None
    assert set(HUB_IDS.values()) <= set(SHAPES)


def room(config, quantization="", devices=1, memory=85_100_068_864):
    return room_of(
        config,
        "bfloat16",
        quantization,
        memory=memory,
        share=0.9,
        devices=devices,
        token_bytes=327_680,
    )


def test_what_cannot_fit_is_refused_with_the_sum():
    config = config_of("llama-3-70b")
    with pytest.raises(ValidationError) as told:
        require_room(config, "some/model", "bfloat16", "", room(config))
    text = str(told.value)
    for part in ("70.55 B", "141.11 GB", "85.10 GB", "76.59 GB", "int8 71.63 GB", "awq 41.10 GB"):
        assert part in text
    assert "at least 2 devices" in text and "jaxserve plan" in text and "some/model" in text
    require_room(config, "some/model", "bfloat16", "", room(config, devices=4))
    fits = room(config, "awq")
    require_room(config, "some/model", "bfloat16", "awq", fits)
    assert fits.tokens == (int(0.9 * 85_100_068_864) - fits.weights) // 327_680
    assert "tokens" in fits.lines()[-1]


def test_a_server_refuses_before_it_fetches_weights(monkeypatch):
    """The device is said to be too small; the folder has weights, which are not looked at."""
    folder = bundled_model_path()
    monkeypatch.setattr(engine_plan, "device_limit", lambda device: 50_000)

    def never(*_):
        raise AssertionError("weights are looked at")

    monkeypatch.setattr(engine_plan, "_as_weights_say", never)
    monkeypatch.setattr(engine_plan, "backends_for", never)
    with pytest.raises(ValidationError, match=r"model='.*B parameters as .* are"):
        load_engine(EngineConfig(model=str(folder)), shown=False)


def test_a_context_that_does_not_fit_is_told_line_by_line(monkeypatch, caplog):
    folder = bundled_model_path()
    config = read_model_config(folder)
    weights = weight_bytes(config, "float32", "").total
    monkeypatch.setattr(engine_plan, "device_limit", lambda device: int(weights / 0.9) + 9000)
    monkeypatch.setattr(engine_plan, "_as_weights_say", lambda *_: (_ for _ in ()).throw(KeyError))
    with pytest.raises(KeyError):
        load_engine(EngineConfig(model=str(folder)), shown=False)
    assert "fit beside the weights" in caplog.text and "keys and values" in caplog.text
