"""The sparse MLP against every expert on every token, and what it does with rows and loads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AbstractMesh

from checkpoints.quantized import Encoding
from jaxserve.models.config_reader import model_config_of
from jaxserve.models.linear import LinearForm
from jaxserve.models.moe import MoeConfig, SparseMLP, uncovered_experts
from jaxserve.models.protocol import TokenRows
from jaxserve.models.quant_array import QuantArray, WeightFormat
from jaxserve.models.weights import abstract_model
from jaxserve.parallel.stages import Stage
from pallas_kernels import native
from pallas_kernels.backends import OPERATIONS
from pallas_kernels.errors import KernelError

TOKENS = 37
FORMS = {
    "xla": LinearForm(),
    "native": LinearForm("native"),
    "triton": LinearForm(experts="triton", route=("triton", "xla"), interpret=True),
    "mosaic_tpu": LinearForm(experts="mosaic_tpu", route=("mosaic_tpu", "xla"), interpret=True),
}
SIZES = {"mosaic_tpu": (128, 128)}  # hidden and inner, whole lanes; others: (32, 24)
SETTINGS = {
    "architectures": ["MixtralForCausalLM"],
    "vocab_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_local_experts": 7,
    "num_experts_per_tok": 3,
}


def make(backend: str, **changes: object) -> SparseMLP:
    hidden, inner = SIZES.get(backend, (32, 24))
    config = model_config_of(SETTINGS | {"hidden_size": hidden, "intermediate_size": inner})
    assert isinstance(config, MoeConfig)
    mlp = SparseMLP(replace(config, **changes), "float32", FORMS[backend])
    graph, state = nnx.split(mlp)
    keys = iter(jax.random.split(jax.random.key(0), 8))
    drawn = jax.tree.map(lambda x: 0.5 * jax.random.normal(next(keys), x.shape, x.dtype), state)
    return nnx.merge(graph, drawn)


def dense(mlp: SparseMLP, x: jax.Array) -> np.ndarray:
    """Every expert on every token in float64, weighted by the router: [T, E]."""
    weights, experts = (np.asarray(array) for array in mlp.route(x))
    up, down = (np.asarray(part.weight[...], np.float64) for part in (mlp.gate_up, mlp.down))
    both = np.einsum("te,xie->xti", np.asarray(x, np.float64), up)
    gate, value = both[..., ::2], both[..., 1::2]
    if mlp.config.hidden_act == "relu":
        inner = np.maximum(gate, 0) * value
    else:
        inner = gate / (1 + np.exp(-gate)) * value
    outs = np.einsum("xti,xei->xte", inner, down)
    of_token = np.zeros((mlp.config.num_experts, len(x)))
    np.put_along_axis(of_token, experts.T, weights.T, axis=0)
    return np.einsum("xte,xt->te", outs, of_token)


def inputs(mlp: SparseMLP) -> tuple[jax.Array, TokenRows]:
    return jax.random.normal(jax.random.key(1), (TOKENS, mlp.config.hidden_size)), TokenRows(
        jnp.zeros((1, TOKENS), jnp.int32)
    )


@pytest.mark.slow
@pytest.mark.parametrize("backend", FORMS)
@pytest.mark.parametrize("changes", [{}, {"normalized": False, "hidden_act": "relu"}])
def test_equals_every_expert_on_every_token(backend: str, changes: dict[str, object]) -> None:
    if backend == "native" and not native.availability().available:
        pytest.skip(f"native kernels: {native.availability().reason}")
    mlp = make(backend, **changes)
    x, rows = inputs(mlp)
    want = dense(mlp, x)
    np.testing.assert_allclose(mlp(x, rows, 0), want, atol=3e-6 * np.abs(want).max())
    np.testing.assert_allclose(mlp.product(x, rows, 0)[0], mlp(x, rows, 0))
    np.testing.assert_allclose(
        mlp(x, rows, 0, residual=x), np.asarray(x) + want, atol=3e-6 * np.abs(want).max()
    )


@pytest.mark.slow
def test_experts_that_the_kernel_does_not_cover_run_on_plain_xla(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mlp = make("triton")
    x, rows = inputs(mlp)

    def num_kernels() -> int:
        return str(jax.make_jaxpr(lambda x: mlp(x, rows, 0))(x)).count("pallas_call[")

    assert num_kernels() == 3, "routing and two products"
    of_triton = OPERATIONS["grouped_linear"]["triton"]
    wide = mlp.gate_up.weight[...].shape

    def covers(weight: jax.Array) -> KernelError | None:
        return KernelError("weight.shape", wide, "others") if weight.shape == wide else None

    known = OPERATIONS["grouped_linear"]
    monkeypatch.setitem(known, "triton", replace(of_triton, covers=covers))
    assert num_kernels() == 0


@pytest.mark.parametrize(
    ("inner", "quantization", "devices", "told"),
    [
        (256, None, 1, None),
        (256, None, 2, None),
        (192, None, 1, "for mosaic_tpu, of the part that a device has, weight.shape="),
        (256, None, 4, "weight.shape=(7, 128, 64)"),
        (256, "int8", 2, None),
        (256, "fp8", 2, None),
        (256, "int8", 4, "weight.shape=(7, 128, 64)"),
        (192, "int4", 1, None),  # rows are filled up
    ],
)
def test_experts_that_no_kernel_multiplies_are_told(
    inner: int, quantization: str | None, devices: int, told: str | None
) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": inner, "num_key_value_heads": 4}
    config = model_config_of(SETTINGS | sizes | {"num_attention_heads": 4})
    form = replace(FORMS["mosaic_tpu"], quantization=quantization)
    mesh: Any = AbstractMesh((1, devices), ("data", "model"))
    found = uncovered_experts(abstract_model(config, mesh, "bfloat16", form))
    assert found is None if told is None else told in str(found)


@pytest.mark.parametrize("quantization", [None, "int8", "int4", "fp8"])
def test_native_kernels_multiply_all_experts(quantization: str | None) -> None:
    config = model_config_of(SETTINGS | {"hidden_size": 128, "intermediate_size": 128})
    form = replace(FORMS["native"], quantization=quantization)
    mesh: Any = AbstractMesh((1, 1), ("data", "model"))
    assert uncovered_experts(abstract_model(config, mesh, "bfloat16", form)) is None


def test_experts_of_8_bits_by_group_are_told() -> None:
    mlp = make("mosaic_tpu")
    grouped = WeightFormat(Encoding("fp8", group=128), native=False, experts=True)
    shape = mlp.down.weight.get_value().shape
    mlp.down.weight.set_value(QuantArray.empty((*shape[:2], 128), grouped))
    told = mlp.down.refusal_of_part("mosaic_tpu")
    assert told is not None and "by group" in str(told)


def test_a_stage_is_asked_for_the_experts_of_its_own_layers() -> None:
    config = model_config_of(
        SETTINGS | {"hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2}
    )
    mesh: Any = AbstractMesh((1, 1), ("data", "model"))
    form = replace(FORMS["mosaic_tpu"], quantization=None)
    found = [
        uncovered_experts(
            abstract_model(config, mesh, "bfloat16", form, stage=Stage(mesh, *part, 2))
        )
        for part in ((0, 1), (1, 2))
    ]
    whole = uncovered_experts(abstract_model(config, mesh, "bfloat16", form))
    assert found == [whole, whole] and whole is not None


@pytest.mark.slow
def test_no_token_is_dropped_when_all_go_to_the_same_experts() -> None:
    mlp = make("xla")
    x, rows = inputs(mlp)
    x = jnp.abs(x)
    router = mlp.router.weight[...]
    bias = jnp.zeros_like(router).at[jnp.array([1, 4, 5])].set(9.0)
    mlp.router.weight.set_value(router + bias)
    _, experts = mlp.route(x)
    assert set(np.asarray(experts).ravel()) == {1, 4, 5}
    want = dense(mlp, x)
    np.testing.assert_allclose(mlp(x, rows, 0), want, atol=3e-6 * np.abs(want).max())


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["xla", "triton"])
def test_rows_without_a_token_go_to_no_expert(backend: str) -> None:
    mlp = make(backend)
    x, rows = inputs(mlp)
    live = jnp.array([[0, 5], [20, 22]], jnp.int32)
    found = np.asarray(jax.jit(lambda x, live: mlp(x, rows._replace(live=live), 0))(x, live))
    used = np.r_[0:5, 20:22]
    assert not np.delete(found, used, axis=0).any()
    want = dense(mlp, x[used])
    np.testing.assert_allclose(found[used], want, atol=3e-6 * np.abs(want).max())
