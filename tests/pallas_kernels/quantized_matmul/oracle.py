"""quantized_matmul in NumPy and float64, from the definition of the stored formats."""

from __future__ import annotations

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from pallas_kernels.quantized_matmul import (
    Fp8Weight,
    Int4Weight,
    Int8Weight,
    QuantizedWeight,
    quantize_fp8,
    quantize_int4,
    quantize_int8,
)

# relative to the largest element of the result, for a result in this type
TOLERANCE = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 8e-3}
SCALE_TYPES = ("float16", "bfloat16")  # of 4-bit weights, where a kind names one


def unpacked(packed: np.ndarray, inputs: int) -> np.ndarray:
    """[N, inputs] of 0..15: input 256 b + 64 i + j is nibble i of word 64 b + j."""
    out = np.empty((packed.shape[0], inputs), np.int64)
    for k in range(inputs):
        block, within = divmod(k, 256)
        nibble, word = divmod(within, 64)
        out[:, k] = (packed[:, 64 * block + word] >> (4 * nibble)) & 15
    return out


def dense(weight: QuantizedWeight, inputs: int) -> np.ndarray:
    """The float64 matrix [N, inputs] that a weight stands for."""
    if isinstance(weight, Int4Weight):
        scales = np.asarray(weight.scales, np.float64)
        zeros = 8 if weight.zeros is None else np.asarray(weight.zeros, np.int64)
        group = inputs // scales.shape[0]
        spread = np.repeat(scales, group, axis=0).T
        offsets = np.repeat(np.broadcast_to(zeros, scales.shape), group, axis=0).T
        return (unpacked(np.asarray(weight.packed), inputs) - offsets) * spread
    values, scale = np.asarray(weight.values, np.float64), np.asarray(weight.scale, np.float64)
    if scale.ndim == 2:
        return values * np.repeat(scale, inputs // len(scale), axis=0).T
    return values * scale.reshape(-1, 1)


def product(x: np.ndarray, weight: QuantizedWeight) -> np.ndarray:
    """float64[M, N] of x as it is."""
    return np.asarray(x, np.float64) @ dense(weight, x.shape[1]).T


def integer_product(x: np.ndarray, weight: Int8Weight) -> tuple[np.ndarray, np.ndarray]:
    """The int32 sums [M, N] of W8A8 and the float32 scales [M] of the rows of x."""
    wide = np.asarray(x, np.float32)
    highest = np.abs(wide).max(axis=1)
    factor = np.divide(np.float32(127), highest, out=np.ones_like(highest), where=highest > 0)
    rows = np.rint(wide * factor[:, None]).astype(np.int32)
    scale = highest * np.float32(1 / 127)
    return rows @ np.asarray(weight.values, np.int32).T, scale


def fp8_product(x: np.ndarray, weight: Fp8Weight) -> np.ndarray:
    """float64[M, N] of x rounded to float8_e4m3fn, each row with a scale of its own."""
    wide = np.asarray(x, np.float32)
    highest = np.abs(wide).max(axis=1, keepdims=True)
    factor = np.divide(np.float32(448), highest, out=np.ones_like(highest), where=highest > 0)
    rounded = np.clip(wide * factor, -448, 448).astype(ml_dtypes.float8_e4m3fn)
    return product(rounded, weight) * (highest.astype(np.float64) / 448)


def relative_error(got: jnp.ndarray, want: np.ndarray) -> float:
    """The largest difference over the largest magnitude; infinite when something is not finite."""
    got = np.asarray(got, np.float64)
    if got.shape != want.shape or not np.isfinite(got).all():
        return np.inf
    return float(np.abs(got - want).max() / max(np.abs(want).max(), 1e-30))


def random_weight(
    rng: np.random.Generator, outputs: int, inputs: int, kind: str
) -> QuantizedWeight:
    """A random weight: "int8", "fp8", "fp8 tensor", "fp8 128" (with scales by group), or
    "int4 GROUP" with or without " zeros", and one of SCALE_TYPES."""
    matrix = rng.standard_normal((outputs, inputs)).astype(np.float32)
    # channels and groups of very different size: a scale at the wrong place is a large error
    matrix *= np.exp(rng.uniform(-2, 2, (outputs, 1)))
    matrix *= np.repeat(np.exp(rng.uniform(-1, 1, (1, inputs // 32))), 32, axis=1)
    name, *options = kind.split()
    if name == "int8":
        return quantize_int8(jnp.asarray(matrix))
    if options == ["128"] and name == "fp8":
        rows = quantize_fp8(jnp.asarray(matrix.reshape(-1, 128)))
        return Fp8Weight(rows.values.reshape(matrix.shape), rows.scale.reshape(outputs, -1).T)
    if name == "fp8":
        return quantize_fp8(jnp.asarray(matrix), per_tensor=bool(options))
    group = None if options[0] == "row" else int(options[0])
    # a mean away from zero, on either side: zero points of every size
    away = np.where(np.arange(outputs) % 2, 0.5, -0.5)[:, None]
    shifted = matrix + away * np.abs(matrix).max(axis=1, keepdims=True)
    asymmetric = "zeros" in options
    weight = quantize_int4(
        jnp.asarray(shifted if asymmetric else matrix), group, asymmetric=asymmetric
    )
    scale_type = next((one for one in options if one in SCALE_TYPES), "float32")
    return weight._replace(scales=weight.scales.astype(scale_type))


def weight_of_any_bits(
    rng: np.random.Generator, outputs: int, inputs: int, kind: str
) -> QuantizedWeight:
    """A weight of any numbers that its format has, with random scales; kinds as above."""
    weight = random_weight(rng, outputs, inputs, kind)
    scales = lambda like: jnp.asarray(rng.uniform(0.5, 2.0, like.shape), like.dtype)  # noqa: E731
    if isinstance(weight, Int4Weight):
        packed = rng.integers(0, 2**16, weight.packed.shape).astype(np.uint16)
        zeros = weight.zeros
        if zeros is not None:
            zeros = jnp.asarray(rng.integers(0, 17, zeros.shape), jnp.uint8)
        return Int4Weight(jnp.asarray(packed), scales(weight.scales), zeros)
    if isinstance(weight, Int8Weight):
        values = jnp.asarray(rng.integers(-127, 128, weight.values.shape), jnp.int8)
        return Int8Weight(values, scales(weight.scale))
    bits = rng.integers(0, 256, weight.values.shape).astype(np.uint8)
    bits[(bits & 0x7F) == 0x7F] = 0  # NaN
    return Fp8Weight(jnp.asarray(bits.view(ml_dtypes.float8_e4m3fn)), scales(weight.scale))


def random_rows(rng: np.random.Generator, rows: int, inputs: int, dtype: str) -> jnp.ndarray:
    """Activations of very different size by row."""
    x = rng.standard_normal((rows, inputs)) * np.exp(rng.uniform(-2, 2, (rows, 1)))
    return jnp.asarray(x, dtype)


def rows_agree(got: jnp.ndarray, want: np.ndarray, bound: float) -> bool:
    """Whether every row of a result is right to `bound`, relative to the row's largest element."""
    got = np.asarray(got)
    return all(relative_error(got[row], want[row]) <= bound for row in range(len(want)))


def rows_fit(x: jnp.ndarray, got: jnp.ndarray, weight: QuantizedWeight, bound: float) -> bool:
    """Whether a result is the product of x and the weight, row by row."""
    return rows_agree(got, product(x, weight), bound)


KINDS = (
    "int8",
    "fp8",
    "fp8 tensor",
    "fp8 128",
    "int4 32",
    "int4 64 zeros bfloat16",
    "int4 128",
    "int4 128 zeros",
    "int4 row float16",
    "int4 row zeros",
)
