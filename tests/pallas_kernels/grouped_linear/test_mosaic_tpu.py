"""The grouped kernel of a TPU, interpreted, against float64 NumPy, group by group."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import quantize_fp8, quantize_int4, quantize_int8
from pallas_kernels.errors import KernelError
from pallas_kernels.grouped_linear import grouped_linear, refusal
from pallas_kernels.quantized_matmul import Fp8Weight, Int4Weight, Int8Weight, dequantize

ROWS, GROUPS = 70, 6
SIZES = [(1, 0, 23, 40, 4, 0), (0, 0, ROWS, 0, 0, 0), (0,) * GROUPS, (10, 10, 10, 10, 10, 19)]


def weight_of(
    kind: str, matrices: np.ndarray, fill: int = 0, **options: Any
) -> tuple[Any, np.ndarray]:
    """A weight of all groups, and the float32 matrices that it stands for; rows of 4 bits are
    `fill` words longer than they have to be."""
    if kind == "float":
        return jnp.asarray(matrices), matrices
    quantize = {"int8": quantize_int8, "fp8": quantize_fp8, "int4": quantize_int4}[kind]
    each: list[Any] = [quantize(jnp.asarray(matrix), **options) for matrix in matrices]
    whole = np.stack([dequantize(one, matrices.shape[2]) for one in each])
    if kind != "int4":
        form = {"int8": Int8Weight, "fp8": Fp8Weight}[kind]
        return form(*(jnp.stack(arrays) for arrays in zip(*each, strict=True))), whole
    packed, scales = (jnp.stack([one[i] for one in each]) for i in (0, 1))
    if fill:  # rows filled up with words, which meet no input
        words = jnp.full((*packed.shape[:2], fill), 0xFFFF, jnp.uint16)
        packed = jnp.concatenate([packed, words], axis=2)
    has_zeros = each[0].zeros is not None
    zeros = jnp.stack([one.zeros for one in each]) if has_zeros else None
    if fill:
        missing = 4 * packed.shape[2] * scales.shape[1] // matrices.shape[2] - scales.shape[1]
        scales = jnp.pad(scales, ((0, 0), (0, missing), (0, 0)), constant_values=jnp.nan)
    return Int4Weight(packed, scales, zeros), whole


@pytest.mark.parametrize(
    ("kind", "inputs", "outputs", "options"),
    [
        ("float", 256, 128, {}),
        pytest.param("int8", 384, 256, {}, marks=pytest.mark.slow),
        pytest.param("fp8", 256, 128, {}, marks=pytest.mark.slow),
        pytest.param("int4", 512, 128, {"group": None}, marks=pytest.mark.slow),
        pytest.param("int4", 2048, 128, {"group": 32}, marks=pytest.mark.slow),
        # a row that ends within a block of 256, as Qwen3-MoE's of 1,408
        pytest.param("int4", 1408, 256, {"group": 128, "asymmetric": True}, marks=pytest.mark.slow),
        ("int4", 768, 128, {"group": 128, "fill": 64}),
    ],
)
def test_every_row_meets_the_weight_of_its_group(
    kind: str, inputs: int, outputs: int, options: dict[str, Any]
) -> None:
    rng = np.random.default_rng(0)
    given = rng.normal(size=(ROWS, inputs)).astype(np.float32)
    matrices = rng.normal(size=(GROUPS, outputs, inputs)).astype(np.float32)
    weight, whole = weight_of(kind, matrices, **options)
    for sizes in SIZES:
        want, begin = np.zeros((ROWS, outputs)), 0
        for matrix, size in zip(np.asarray(whole, np.float64), sizes, strict=True):
            want[begin : begin + size] = given[begin : begin + size].astype(np.float64) @ matrix.T
            begin += size
        x = given.copy()
        x[begin:] = np.nan  # rows of no group
        for gated in (False, True):
            if gated:
                want = want[:, ::2] / (1 + np.exp(-want[:, ::2])) * want[:, 1::2]
            found = grouped_linear(
                jnp.asarray(x),
                weight,
                jnp.asarray(sizes, jnp.int32),
                gated=gated,
                backend="mosaic_tpu",
                interpret=True,
            )
            atol = 1e-5 * max(np.abs(want).max(), 1)
            np.testing.assert_allclose(found, want, rtol=0, atol=atol, err_msg=str(sizes))


@pytest.mark.slow
def test_rounded_rows_meet_8_bits() -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(ROWS, 256)), jnp.float32)
    weight, whole = weight_of("int8", rng.normal(size=(GROUPS, 128, 256)).astype(np.float32))
    sizes = jnp.asarray(SIZES[0], jnp.int32)
    kernel = {"backend": "mosaic_tpu", "interpret": True}
    found = grouped_linear(x, weight.values, sizes, scale=weight.scale, **kernel)
    want = grouped_linear(x, jnp.asarray(whole), sizes, backend="reference")
    np.testing.assert_allclose(found, want, rtol=0, atol=0.02 * np.abs(want).max())


@pytest.mark.parametrize(
    ("shape", "dtype", "covered"),
    [
        ((6, 256, 128), "bfloat16", True),
        ((6, 36, 128), "bfloat16", False),
        ((6, 256, 128), "uint16", True),
        ((6, 256, 64), "uint16", False),
        ((6, 256, 64), "int8", False),
        ((6, 256, 128), "float16", False),
    ],
)
def test_other_shapes_are_refused_by_name(
    shape: tuple[int, ...], dtype: str, covered: bool
) -> None:
    found = refusal(jnp.zeros(shape, dtype), "mosaic_tpu")
    assert (found is None) == covered
    assert covered or (isinstance(found, KernelError) and found.field.startswith("weight."))


def test_scales_of_8_bits_by_group_are_refused() -> None:
    """A weight of 8 bits has one scale an output there."""
    weight = Fp8Weight(jnp.zeros((2, 128, 256), jnp.float8_e4m3fn), jnp.ones((2, 2, 128)))
    found = refusal(weight, "mosaic_tpu")
    assert found is not None and found.field == "weight.scale" and refusal(weight, "xla") is None
    x, sizes = jnp.zeros((4, 256)), jnp.asarray([4, 0], jnp.int32)
    with pytest.raises(KernelError, match=r"weight\.scale=by group"):
        grouped_linear(x, weight, sizes, backend="mosaic_tpu", interpret=True)
