"""The engine's demands on every family, and sharding rules on a module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from checkpoints.quantized import Encoding
from jaxserve.models import Model, load_model
from jaxserve.models.config_reader import read_model_config
from jaxserve.models.linear import LinearForm, Projection
from jaxserve.models.norms import OffsetRMSNorm, RMSNorm
from jaxserve.models.protocol import Rotation, TokenRows
from jaxserve.models.quant_array import QuantArray, WeightFormat
from jaxserve.models.registry import FAMILIES
from jaxserve.models.weights import abstract_model
from jaxserve.parallel import make_mesh
from pallas_kernels import native
from tests.jaxserve.models.dense import empty_cache, run
from tests.tiny_models import VOCAB_SIZE

TOKENS = np.arange(3, 40)
# one of each module
CASES = ("llama_gqa", "olmo2", "phi4_mini", "gemma3", "qwen3_moe")
FUSED = LinearForm("gpu", residual_norm="xla")


def load(folder: Path, form: LinearForm = LinearForm()) -> Model:  # noqa: B008
    return load_model(folder, read_model_config(folder), mesh=make_mesh(1), form=form)


def values_of(cache: None, layer: int, qkv: jax.Array, rotation: Rotation, dtype: str):
    """An attention that gives each head its own value, so that it needs no cache."""
    q, _, v = rotation.split(qkv)
    return jnp.repeat(v, q.shape[1] // v.shape[1], axis=1) + layer, cache


def forward(model: Model, *stops: int) -> np.ndarray:
    """Logits, the layers run up to each of `stops` and then to the end."""
    rows = TokenRows(jnp.arange(len(TOKENS))[None])
    x, start = model.embed(jnp.asarray(TOKENS)), 0
    for stop in (*stops, None):
        x, _ = model.layers(x, rows, None, values_of, start, stop)
        start = stop or 0
    return np.asarray(model.logits(x))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "form"),
    [
        ("llama_gqa", LinearForm()),
        ("llama_gqa", FUSED),
        pytest.param("gemma3", LinearForm(), marks=pytest.mark.slow),
        pytest.param("gemma3", FUSED, marks=pytest.mark.slow),
        pytest.param("qwen3_moe", FUSED, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_layers_may_run_in_parts(
    model_folder: Callable[..., Path], case: str, form: LinearForm
) -> None:
    model = load(model_folder(case), form)
    whole = forward(model)
    for stops in ((1,), (2,), (1, 2), (1, 1)):
        np.testing.assert_allclose(forward(model, *stops), whole, rtol=0, atol=1e-5 * whole.max())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "quantization", "between"),
    [
        ("llama_gqa", "int8", "xla"),
        ("llama_gqa", "fp8", "triton"),
        ("gemma3", "int8", "triton"),
        ("gemma3", "fp8", "xla"),
    ],
)
def test_rows_are_rounded_alike_between_the_layers(
    model_folder: Callable[..., Path], case: str, quantization: str, between: str
) -> None:
    """By the norms and the activation, or by each product for itself."""
    # Hopper's kernels take no float32: XLA multiplies what is rounded to e4m3
    form = LinearForm("gpu", quantization, matmul=("mosaic_gpu", "xla"))
    fused = replace(form, residual_norm=between, interpret=True)
    folder = model_folder(case)
    exact, apart, together = (forward(load(folder, one)) for one in (LinearForm(), form, fused))
    rounding = np.std(apart - exact)
    assert rounding > 1e-3 * np.std(exact)
    # a number between two steps may fall to either side
    assert np.std(together - apart) < 0.05 * rounding


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["xla", "native"])
@pytest.mark.parametrize(
    "case", [c if c == "qwen3_moe" else pytest.param(c, marks=pytest.mark.slow) for c in CASES]
)
def test_every_family_in_8_bits(model_folder: Callable[..., Path], case: str, backend: str) -> None:
    if backend == "native" and not native.availability().available:
        pytest.skip(f"native kernels: {native.availability().reason}")
    folder, tokens = model_folder(case), np.arange(3, 11)
    exact, rounded = load(folder), load(folder, LinearForm(backend, "int8"))
    quantized = [
        place
        for place, variable in nnx.to_flat_state(nnx.state(rounded))
        if isinstance(variable.get_value(), QuantArray)
    ]
    dense_mlps = rounded.config.num_layers
    assert len(quantized) == 4 * dense_mlps + 1, "each projection, each expert's, and the head"
    want, found = (
        np.asarray(run(model, tokens, empty_cache(model.config, len(tokens)), 0)[0])
        for model in (exact, rounded)
    )
    error = np.std(found - want) / np.std(want)
    assert 1e-4 < error < 0.1
    assert found.shape == (len(tokens), VOCAB_SIZE)


@pytest.mark.parametrize("form", [LinearForm(), LinearForm("xla", "int8")], ids=str)
def test_an_abstract_module_is_the_loaded_one(
    model_folder: Callable[..., Path], form: LinearForm
) -> None:
    folder = model_folder("llama_biases")
    model, mesh = load(folder, form), make_mesh(1)
    abstract = abstract_model(model.config, mesh, "float32", form)
    graphs = [nnx.split(m) for m in (model, abstract)]
    assert graphs[0][0] == graphs[1][0]
    found, want = (jax.tree.leaves(state) for _, state in graphs)
    for array, shape in zip(found, want, strict=True):
        assert isinstance(shape, jax.ShapeDtypeStruct)
        assert (array.shape, array.dtype) == (shape.shape, shape.dtype)
        assert array.sharding.is_equivalent_to(shape.sharding, array.ndim)


def test_families_have_names_of_their_own() -> None:
    assert len({family.architecture for family in FAMILIES}) == len(FAMILIES)
    by_task: dict[str, list[str]] = {}
    for family in FAMILIES:
        task = family.architecture.partition("For")[2]
        by_task.setdefault(task, []).append(family.model_type)
    assert all(len(set(types)) == len(types) for types in by_task.values())


@pytest.mark.parametrize("kind", [RMSNorm, OffsetRMSNorm])
def test_a_product_of_a_tpu_norms_its_rows_itself(kind: type[RMSNorm]) -> None:
    """Also where the factor is 1 + weight."""
    size, dtype = 256, jnp.bfloat16
    format = WeightFormat(Encoding("int8", activations="int8"), native=False)

    def primitives(form: LinearForm) -> list[str]:
        made = Projection(
            size, (size,), axes=("hidden", "hidden"), bias=False, dtype=dtype, form=form
        )
        weight: Any = QuantArray.empty((size, size), format)
        made.weight.set_value(weight)
        norm, rows = kind(size, 1e-5, dtype), TokenRows(jnp.zeros((1, 16), jnp.int32))
        x = jax.ShapeDtypeStruct((16, size), dtype)
        traced = jax.make_jaxpr(lambda x: rows.apply("out", 0, made, x, norm=norm))(x)
        return [str(step.primitive) for step in traced.eqns]

    assert "rsqrt" not in primitives(LinearForm("xla", matmul=("mosaic_tpu", "xla")))
    assert "rsqrt" in primitives(LinearForm("xla"))
