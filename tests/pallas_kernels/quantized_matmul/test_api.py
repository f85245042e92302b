"""quantized_matmul on any device, and what every backend refuses."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import KernelError
from pallas_kernels.quantized_matmul import Int4Weight, Int8Weight, quantized_matmul
from tests.pallas_kernels.quantized_matmul import oracle

QUICK = ("int8", "fp8 tensor", "int4 64 zeros")
KINDS = [
    pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow) for kind in oracle.KINDS
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_every_format(backend, kind):
    """Output channels beyond whole blocks, one row and several, each type of x."""
    rng = np.random.default_rng(len(kind))
    weight = oracle.random_weight(rng, 300, 384, kind)
    for rows, dtype in ((1, "float32"), (7, "bfloat16"), (2, "float16")):
        x = oracle.random_rows(rng, rows, 384, dtype)
        got = quantized_matmul(x, weight, backend=backend, out_dtype="float32")
        assert got.dtype == jnp.float32
        # 4-bit weights are rounded to bfloat16 by XLA; all other products are exact
        exact = backend == "reference" or not kind.startswith("int4")
        bound = 1e-5 if exact or dtype == "float32" else oracle.TOLERANCE[dtype]
        assert oracle.rows_fit(x, got, weight, bound)
    rounded = jax.eval_shape(lambda x: quantized_matmul(x, weight, backend=backend), x)
    assert rounded.dtype == x.dtype


@pytest.mark.parametrize("rows", [7, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_int8_activations_are_exact(backend, rows):
    rng = np.random.default_rng(rows)
    weight = oracle.random_weight(rng, 40, 320, "int8")
    x = oracle.random_rows(rng, rows, 320, "float32").at[0].set(0.0)
    # unit scales show the integer sums themselves
    plain = Int8Weight(weight.values, jnp.ones_like(weight.scale))
    got = quantized_matmul(x, plain, activations="int8", backend=backend)
    sums, row_scale = oracle.integer_product(x, weight)
    np.testing.assert_array_equal(got, sums.astype(np.float32) * row_scale[:, None])
    scaled = quantized_matmul(x, weight, activations="int8", backend=backend)
    assert oracle.relative_error(scaled, oracle.product(x, weight)) < 0.02


@pytest.mark.parametrize("backend", ["reference", "xla"])
def test_fp8_activations(backend):
    rng = np.random.default_rng(0)
    weight = oracle.random_weight(rng, 40, 320, "fp8")
    x = oracle.random_rows(rng, 5, 320, "bfloat16").at[0].set(0.0)
    got = quantized_matmul(x, weight, activations="fp8", backend=backend, out_dtype="float32")
    want = oracle.product(x, weight)
    assert oracle.relative_error(got, want) < 0.05
    assert not np.asarray(got)[0].any()


def test_a_weight_passes_through_jit_as_a_pytree():
    rng = np.random.default_rng(0)
    weight = oracle.random_weight(rng, 16, 256, "int4 64 zeros")
    x = oracle.random_rows(rng, 2, 256, "float32")
    got = jax.jit(lambda x, w: quantized_matmul(x, w, backend="xla"))(x, weight)
    assert oracle.rows_fit(x, got, weight, 1e-5)


def call(kind="int8", dtype="bfloat16", rows=4, inputs=256, weight=None, **options):
    made = weight or oracle.random_weight(np.random.default_rng(0), 128, 256, kind)
    options.setdefault("backend", "xla")
    x = jax.ShapeDtypeStruct((rows, inputs), dtype)
    return jax.eval_shape(lambda x: quantized_matmul(x, made, **options), x)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"backend": "cuda"}, "backend"),
        ({"dtype": "int32"}, "x.dtype"),
        ({"rows": 0}, "x.shape"),
        ({"inputs": 128}, "weight.values"),
        ({"kind": "int4 64", "inputs": 320}, "weight.packed"),
        ({"out_dtype": "int8"}, "out_dtype"),
        ({"activations": "int4"}, "activations"),
        ({"activations": "int8", "kind": "fp8"}, "activations"),
        ({"activations": "fp8", "kind": "int8"}, "activations"),
        ({"interpret": True}, "interpret"),
        ({"weight": Int8Weight(jnp.zeros((8, 256), jnp.int8), jnp.zeros(9))}, "weight.scale"),
        (
            {"weight": Int4Weight(jnp.zeros((8, 64), jnp.uint16), jnp.zeros((16, 8)))},
            "weight.scales",
        ),
        ({"backend": "mosaic_gpu", "dtype": "float32"}, "x.dtype"),
        ({"backend": "triton", "kind": "fp8", "activations": "fp8"}, "activations"),
        ({"backend": "mosaic_tpu", "dtype": "float16"}, "x.dtype"),
    ],
    ids=str,
)
def test_refusals_name_the_field(options, field):
    with pytest.raises(KernelError) as caught:
        call(**options)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("backend", "outputs", "inputs", "kind", "field"),
    [
        ("mosaic_gpu", 128, 192, "int8", "inputs"),
        ("mosaic_gpu", 128, 128, "int4 64", "inputs"),
        ("mosaic_gpu", 96, 256, "int8", "outputs"),
        ("mosaic_gpu", 136, 256, "int8", "outputs"),
        ("mosaic_tpu", 200, 256, "int8", "outputs"),
    ],
)
def test_uncovered_shapes_are_refused_with_the_shape(backend, outputs, inputs, kind, field):
    weight = oracle.random_weight(np.random.default_rng(0), outputs, inputs, kind)
    x = jnp.zeros((2, inputs), jnp.bfloat16)
    with pytest.raises(KernelError, match=rf"{backend} backend.*\[{outputs}, {inputs}\]") as caught:
        quantized_matmul(x, weight, backend=backend)
    assert caught.value.field == field
