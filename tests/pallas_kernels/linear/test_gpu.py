"""Linear layers as a GPU gets them: products that round themselves, and products in parts."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from jax.sharding import AbstractMesh

from pallas_kernels import KernelError
from pallas_kernels.linear import gpu, linear, linear_in_parts
from tests.pallas_kernels.linear.checks import at_boundaries, check, layers
from tests.pallas_kernels.lowering import H200
from tests.pallas_kernels.quantized_matmul.lowering import abstract_weight
from tests.pallas_kernels.strategies import examples

RNG = np.random.default_rng(0)


@pytest.mark.slow
@at_boundaries
@examples(4)
@given(layer=layers(("bfloat16", "float32", "float16")))
def test_linear(layer):
    check(layer, "gpu", slack=2)  # gate, product and sum are rounded one after the other


def products(backend: str, **options) -> list[str]:
    """The types of the products in a layer's trace."""
    x, weight = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((16, 64), (32, 64)))
    run = functools.partial(linear, backend=backend, **options)
    traced = jax.make_jaxpr(run)(x, weight)
    return [str(e.outvars[0].aval.dtype) for e in traced.eqns if e.primitive.name == "dot_general"]


@pytest.mark.parametrize("gated", [False, True])
def test_a_product_rounds_its_own_result_on_a_gpu_alone(gated):
    assert products("gpu", gated=gated) == ["bfloat16"]
    assert products("xla", gated=gated) == ["float32"], "as XLA:CPU likes it"
    assert products("gpu", out_dtype="float32") == ["float32"], "logits stay as they are summed"


def test_sums_that_are_not_finished_stay_float32():
    bias = jnp.zeros(32, jnp.bfloat16)
    assert products("gpu", bias=bias) == ["float32"]


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs", "parts"),
    [
        # of Llama-3-8B: qkv, output, down, lm_head
        (16, 6144, 4096, 8), (16, 4096, 4096, 4), (16, 4096, 14336, 4), (16, 128256, 4096, 1),
        (256, 4096, 4096, 1), (2304, 6144, 4096, 1), (16, 4096, 4000, 1),
    ],
)  # fmt: skip
def test_parts_are_chosen_for_the_gpu(rows, outputs, inputs, parts):
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=H200)):
        chosen = gpu.number_of_parts(rows, outputs, inputs, 2)
    assert chosen == parts
    assert inputs % chosen == 0
    assert gpu.number_of_parts(rows, outputs, inputs, 2) == 1, "a CPU has nothing to fill"


def test_the_parts_are_the_product():
    x, weight = (jnp.asarray(RNG.integers(-9, 9, s), jnp.bfloat16) for s in ((5, 1024), (96, 1024)))
    with jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=H200)):
        traced = jax.jit(functools.partial(linear_in_parts, backend="gpu")).trace(x, weight)
    parts = traced.lower(lowering_platforms=("cpu",)).compile()(x, weight)
    assert parts.dtype == jnp.float32
    assert parts.shape[0] > 1
    wanted = np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T
    np.testing.assert_array_equal(np.asarray(parts, np.float64).sum(axis=0), wanted)


def test_what_follows_the_sum_leaves_it_whole():
    x, weight = jnp.ones((2, 64), jnp.bfloat16), jnp.ones((8, 64), jnp.bfloat16)
    out = linear_in_parts(x, weight, bias=jnp.ones(8, jnp.bfloat16), backend="gpu")
    assert (out.shape, out.dtype) == ((1, 2, 8), jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(out, float), 65.0)


def test_other_backends_have_no_parts():
    with pytest.raises(KernelError, match="backend='xla'"):
        linear_in_parts(jnp.ones((2, 64)), jnp.ones((8, 64)), backend="xla")


@pytest.mark.parametrize("rows", [16, 512])
def test_many_rows_multiply_a_4_bit_weight_that_is_dequantised_in_its_turn(rows):
    """Without the barrier XLA dequantises the weights of all layers in one kernel."""
    x = jax.ShapeDtypeStruct((rows, 512), jnp.bfloat16)
    run = functools.partial(linear_in_parts, matmul=("triton", "xla"), backend="gpu")
    traced = str(jax.make_jaxpr(run)(x, abstract_weight(256, 512, "int4 128")))
    assert ("optimization_barrier" in traced) == (rows == 512)
    assert ("pallas_call" in traced) == (rows == 16)
