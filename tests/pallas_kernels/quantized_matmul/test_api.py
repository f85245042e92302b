"""quantized_matmul on any device, and what every backend refuses."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given

from pallas_kernels import KernelError
from pallas_kernels.backends import OPERATIONS
from pallas_kernels.quantized_matmul import Int4Weight, Int8Weight, quantized_matmul
from tests.pallas_kernels.quantized_matmul import oracle
from tests.pallas_kernels.quantized_matmul.checks import VALUES, Product, check
from tests.pallas_kernels.strategies import examples

# output channels beyond whole blocks of 256, one row and several, each type of x
PRODUCTS = [
    ("xla", Product(7, 300, 384, "int8", "bfloat16")),
    ("xla", Product(1, 300, 384, "fp8 tensor", "float32")),
    ("xla", Product(2, 300, 384, "int4 64 zeros", "float16")),
    ("xla", Product(7, 300, 384, "int4 row", "bfloat16")),
    ("xla", Product(7, 40, 320, "int8", "float32", "int8")),
    ("xla", Product(5, 40, 320, "fp8", "bfloat16", "fp8")),
    ("reference", Product(2, 40, 384, "int4 64 zeros", "bfloat16")),
    ("reference", Product(7, 40, 320, "int8", "bfloat16", "int8")),
    ("reference", Product(5, 40, 320, "fp8", "float16", "fp8")),
]
MORE = [
    *(("xla", Product(7, 300, 384, kind, "bfloat16")) for kind in oracle.KINDS),
    *(("xla", Product(1, 300, 384, kind, "float32")) for kind in oracle.KINDS),
    *(("reference", Product(2, 40, 384, kind, "float16")) for kind in oracle.KINDS),
    ("xla", Product(1, 40, 320, "int8", "float16", "int8")),
]


@pytest.mark.parametrize(
    ("backend", "product"),
    [*PRODUCTS, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)],
    ids=str,
)
@examples(4)
@given(values=VALUES)
def test_every_format(backend, product, values):
    # weights with scales by group are rounded to the type of x by XLA; all other products are exact
    grouped = product.kind.startswith("int4") or product.kind == "fp8 128"
    rounds = backend == "xla" and grouped and product.dtype != "float32"
    bound = oracle.TOLERANCE[product.dtype] if rounds else 1e-5
    check(product, values, bound, backend=backend)


def test_the_result_has_the_type_of_x():
    assert call(dtype="float16").dtype == "float16"


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


@pytest.mark.parametrize(
    ("backend", "kind", "tuning", "allowed"),
    [
        # a multiprocessor's shared memory, the columns of wgmma, and the float32 sums of parts
        ("mosaic_gpu", "int8", {"stages": 9}, "at most 6 with tiles of 64 rows"),
        ("mosaic_gpu", "int4 128", {"stages": 4, "splits": 2}, "at most 3 with tiles of 64 rows"),
        ("mosaic_gpu", "int8", {"tile_m": 512}, "at most 256 for these operands"),
        ("mosaic_gpu", "int8", {"splits": 0}, "at least 1"),
        ("triton", "int8", {"tile_k": 96}, "a power of two, at least 16"),
        ("mosaic_tpu", "int8", {"tile_n": 64}, "a multiple of 128"),
    ],
)
def test_a_tuning_that_no_kernel_could_have_is_refused(backend, kind, tuning, allowed):
    (field, value), *_ = tuning.items()
    with pytest.raises(KernelError) as caught:
        call(kind, rows=300, backend=backend, tuning=OPERATIONS["matmul"][backend].tuning(**tuning))
    assert (caught.value.field, caught.value.value) == (f"tuning.{field}", value)
    assert caught.value.allowed == allowed
