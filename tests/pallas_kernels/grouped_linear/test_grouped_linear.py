"""Grouped linear layers against float64 NumPy, group by group."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import native, quantize_fp8, quantize_int4, quantize_int8
from pallas_kernels.backends import OPERATIONS
from pallas_kernels.errors import KernelError
from pallas_kernels.grouped_linear import experts_rounding, grouped_linear, linear_in_blocks
from pallas_kernels.grouped_linear.blocks import blocks_of
from pallas_kernels.grouped_linear.layer import Layer
from pallas_kernels.grouped_linear.xla import block_rows, in_blocks
from pallas_kernels.linear import NativeWeight, as_stored_weight, stored_dtype
from pallas_kernels.native.weights import pack_native
from pallas_kernels.quantized_matmul import Fp8Weight, Int4Weight, Int8Weight, dequantize
from pallas_kernels.quantized_matmul.formats import unpack_int4

# those that take any shape; that of a TPU has a file of its own
BACKENDS = [name for name in OPERATIONS["grouped_linear"] if name != "mosaic_tpu"]
TOLERANCE = {"bfloat16": 2e-2, "float32": 3e-6}
ROWS, INPUTS, OUTPUTS = 45, 40, 36
# by name the rows of each group; those behind them are in none
SIZES = {
    "uneven": (1, 0, 23, 9, 4, 0),
    "one has all": (0, 0, ROWS, 0, 0, 0),
    "nothing": (0, 0, 0, 0, 0, 0),
    "full": (8, 8, 8, 8, 8, 5),
}


def operands(dtype: str) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(0)
    x, weight = rng.normal(size=(ROWS, INPUTS)), rng.normal(size=(6, OUTPUTS, INPUTS))
    return jnp.asarray(x, dtype), jnp.asarray(weight, dtype)


def expected(x: np.ndarray, weight: np.ndarray, sizes: tuple[int, ...], gated: bool) -> np.ndarray:
    out, begin = np.zeros((ROWS, OUTPUTS)), 0
    for matrix, size in zip(np.asarray(weight, np.float64), sizes):
        out[begin : begin + size] = np.asarray(x, np.float64)[begin : begin + size] @ matrix.T
        begin += size
    return out[:, ::2] / (1 + np.exp(-out[:, ::2])) * out[:, 1::2] if gated else out


def grouped(*operands: Any, backend: str, **options: Any) -> jax.Array:
    """grouped_linear, interpreted where it is a kernel of a GPU."""
    interpret = True if backend == "triton" else None
    return grouped_linear(*operands, backend=backend, interpret=interpret, **options)


def skip_without(backend: str) -> None:
    if backend == "native" and not native.availability().available:
        pytest.skip(f"native kernels: {native.availability().reason}")


@pytest.mark.usefixtures("poison_outside")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_every_row_meets_the_weight_of_its_group(backend: str, dtype: str) -> None:
    skip_without(backend)
    x, weight = operands(dtype)
    for gated in (False, True):
        run = jax.jit(lambda s, g=gated: grouped(x, weight, s, gated=g, backend=backend))
        for name, sizes in SIZES.items():
            found = np.asarray(run(jnp.asarray(sizes, jnp.int32)), np.float64)
            want = expected(x, weight, sizes, gated)
            atol = TOLERANCE[dtype] * max(np.abs(want).max(), 1)
            np.testing.assert_allclose(found, want, rtol=0, atol=atol, err_msg=name)
            assert not found[sum(sizes) :].any(), f"{name}: rows of no group"


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_8_bit_weights(backend: str) -> None:
    skip_without(backend)
    x, weight = operands("float32")
    rounded = [quantize_int8(matrix) for matrix in weight]
    values = jnp.stack([r.values for r in rounded])
    scale = jnp.stack([r.scale for r in rounded])
    sizes = SIZES["uneven"]
    found = grouped(
        x,
        as_stored_weight(values, stored_dtype(backend)),
        jnp.asarray(sizes, jnp.int32),
        scale=scale,
        backend=backend,
    )
    whole = np.asarray(values, np.float64) * np.asarray(scale)[:, :, None]
    want = expected(x, whole, sizes, False)
    # a row of x is rounded to 8 bits
    np.testing.assert_allclose(found, want, rtol=0, atol=0.02 * np.abs(want).max())


@pytest.mark.usefixtures("poison_outside")
@pytest.mark.parametrize(
    ("kind", "backend"),
    [
        ("int4", "xla"),
        ("fp8", "xla"),
        ("native", "native"),
        ("int4", "triton"),
        pytest.param("fp8", "triton", marks=pytest.mark.slow),
    ],
)
def test_weights_of_few_bits(kind: str, backend: str) -> None:
    skip_without(backend)
    x, weight = operands("float32")
    if kind == "fp8":
        each = [quantize_fp8(matrix) for matrix in weight]
        given: Any = Fp8Weight(*(jnp.stack(arrays) for arrays in zip(*each)))
    else:
        each = [quantize_int4(matrix, group=None) for matrix in weight]
        if kind == "int4":
            each = [w._replace(scales=w.scales.astype(jnp.float16)) for w in each]
        by_group = 1 if backend == "native" else 0
        scales = jnp.stack([w.scales for w in each], axis=by_group)
        if kind == "int4":
            given = Int4Weight(jnp.stack([w.packed for w in each]), scales)
        else:
            nibbles = [np.asarray(unpack_int4(w.packed, INPUTS), np.uint8) for w in each]
            blocks = [pack_native(elements, True) for elements in nibbles]
            given = NativeWeight(jnp.asarray(np.stack(blocks)), scales)
    whole = np.stack([np.asarray(dequantize(w, INPUTS), np.float64) for w in each])
    run = jax.jit(lambda s: grouped(x, given, s, backend=backend))
    for name, sizes in SIZES.items():
        found = run(jnp.asarray(sizes, jnp.int32))
        want = expected(x, whole, sizes, False)
        atol = 1e-5 * max(np.abs(want).max(), 1)
        np.testing.assert_allclose(found, want, rtol=0, atol=atol, err_msg=name)


@pytest.mark.slow
@pytest.mark.usefixtures("poison_outside")
@pytest.mark.parametrize("backend", ["xla", "triton", "reference"])
@pytest.mark.parametrize("gated", [False, True])
def test_e4m3_with_scales_by_group(backend: str, gated: bool) -> None:
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.normal(size=(ROWS, 256)), jnp.float32)
    values = jnp.asarray(rng.normal(size=(6, OUTPUTS, 256)) * 9, jnp.float8_e4m3fn)
    scale = rng.uniform(0.1, 9, (6, 2, OUTPUTS))
    whole = np.asarray(values, np.float64) * np.repeat(scale.swapaxes(1, 2), 128, axis=2)
    weight = Fp8Weight(values, jnp.asarray(scale, jnp.float32))
    sizes = SIZES["uneven"]
    found = grouped(x, weight, jnp.asarray(sizes, jnp.int32), gated=gated, backend=backend)
    want = expected(x, whole, sizes, gated)
    np.testing.assert_allclose(found, want, rtol=0, atol=2e-5 * np.abs(want).max())


@pytest.mark.usefixtures("poison_outside")
def test_rows_may_be_rounded_before() -> None:
    x, weight = operands("bfloat16")
    each = [quantize_int8(matrix.astype(jnp.float32)) for matrix in weight]
    values, scale = (jnp.stack(arrays) for arrays in zip(*each))
    sizes = jnp.asarray(SIZES["uneven"], jnp.int32)
    blocks = blocks_of(jnp.arange(ROWS, dtype=jnp.int32), sizes)
    options = {"scale": scale, "sources": 1, "weights": jnp.ones((ROWS, 1)), "backend": "triton"}
    rounding = experts_rounding(scale, "float")
    assert rounding is not None and experts_rounding(None, "fp8") is None
    first, second = (
        linear_in_blocks(rows, values, blocks, interpret=True, **options)
        for rows in (x, rounding.of(x))
    )
    live = sum(SIZES["uneven"])
    assert second.dtype == jnp.float32
    np.testing.assert_array_equal(np.asarray(first)[:live], np.asarray(second)[:live])


def test_as_many_blocks_as_any_sizes_need() -> None:
    """What a GPU runs: a fixed number of blocks."""
    x, weight = operands("float32")
    layer = Layer(weight, None, "float", gated=False, out_dtype=jnp.dtype("float32"))
    run = jax.jit(lambda s: in_blocks(x, s, layer, is_counted=False))
    for name, sizes in SIZES.items():
        want = expected(x, weight, sizes, False)
        found = run(jnp.asarray(sizes, jnp.int32))
        np.testing.assert_allclose(found, want, rtol=0, atol=1e-4, err_msg=name)
    for rows in range(40):
        block = block_rows(rows, 6)
        for lone in range(6):  # groups of one row, the rest in one group
            needed = lone + -(-(rows - lone) // block) if rows >= lone else 0
            assert needed <= rows // block + min(rows, 6)


def test_a_gpu_knows_the_number_of_blocks_beforehand() -> None:
    x, weight = operands("float32")
    sizes = jnp.zeros(6, jnp.int32)
    traced = jax.jit(lambda s: grouped_linear(x, weight, s, backend="xla")).trace(sizes)
    bounds = {}
    for platform in ("cuda", "cpu"):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        (bound,) = re.findall(r"compare +LT, %iterArg\w*, %(\w+)", text)
        bounds[platform] = "constant" if bound.startswith("c") else "computed"
    assert bounds == {"cuda": "constant", "cpu": "computed"}


def test_blocks_are_as_large_as_groups_need() -> None:
    assert [block_rows(rows, 128) for rows in (8, 512, 4096, 10**6)] == [8, 8, 64, 128]


@pytest.mark.parametrize(
    ("experts", "dtype", "covered"),
    [(128, "int8", True), (129, "int8", False), (257, "int8", True), (129, "bfloat16", True)],
)
def test_triton_refuses_tables_that_it_would_count_wrongly(
    experts: int, dtype: str, covered: bool
) -> None:
    """Elements are counted in 32 bits with a sign up to 2 ** 32 bytes."""
    weight = jax.ShapeDtypeStruct((experts, 4096, 4096), dtype)
    assert (OPERATIONS["grouped_linear"]["triton"].covers(weight) is None) == covered
    scale = None if dtype == "bfloat16" else jnp.ones((experts, 4096))

    def product(weight: jax.Array) -> jax.Array:
        x, sizes = jnp.ones((3, 4096), "bfloat16"), jnp.ones(experts, jnp.int32)
        return grouped_linear(x, weight, sizes, scale=scale, backend="triton")

    if covered:
        jax.eval_shape(product, weight)
        return
    with pytest.raises(KernelError, match=r"weight\.shape"):
        jax.eval_shape(product, weight)


def int4_weight(words: int = 64, groups: int = 1) -> Int4Weight:
    """Of six groups of 8 outputs."""
    return Int4Weight(jnp.zeros((6, 8, words), jnp.uint16), jnp.ones((6, groups, 8)))


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"x": jnp.zeros((2, 3, 4))}, "x.shape"),
        ({"weight": jnp.zeros((6, OUTPUTS, 3))}, "weight.shape"),
        ({"weight": jnp.zeros((6, OUTPUTS, INPUTS), jnp.float16)}, "weight.dtype"),
        ({"sizes": jnp.zeros(5, jnp.int32)}, "sizes"),
        ({"scale": jnp.ones((6, OUTPUTS))}, "scale"),
        ({"out_dtype": "int8"}, "out_dtype"),
        ({"backend": "gpu"}, "backend"),
    ],
)
def test_refusals_name_the_operand(changes: dict[str, object], field: str) -> None:
    x, weight = operands("float32")
    given = {"x": x, "weight": weight, "sizes": jnp.zeros(6, jnp.int32), "backend": "xla"}
    with pytest.raises(KernelError) as caught:
        grouped_linear(**given | changes)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("weight", "field"),
    [
        (int4_weight(words=32), "weight.packed"),
        (int4_weight(groups=3), "weight.scales"),
        (int4_weight(words=128, groups=2), "weight.scales"),
        (int4_weight()._replace(zeros=jnp.zeros((6, 2, 8), jnp.uint8)), "weight.zeros"),
        (Int8Weight(jnp.zeros((6, 8, 4), jnp.int8), jnp.ones((6, 8))), "weight.values"),
        (Int8Weight(jnp.zeros((6, 8, INPUTS), jnp.int8), jnp.ones((8, 6))), "weight.scale"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_by_name(weight: Any, field: str) -> None:
    """A kernel would read beside them."""
    x, sizes = jnp.zeros((4, INPUTS)), jnp.zeros(6, jnp.int32)
    with pytest.raises(KernelError) as caught:
        grouped_linear(x, weight, sizes, backend="triton", interpret=True)
    assert caught.value.field == field
