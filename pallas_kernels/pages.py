"""The contents of the page pool: element types, numbers as bits, and scales of 8-bit pages."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.errors import KernelError

FLOAT_DTYPES = tuple(jnp.dtype(name) for name in ("float32", "float16", "bfloat16"))
QUANTIZED_DTYPES = tuple(jnp.dtype(name) for name in ("int8", "float8_e4m3fn"))
BFLOAT16_BITS = jnp.dtype("uint16")
FLOAT8_BITS = jnp.dtype("uint8")
POOL_DTYPES = (*FLOAT_DTYPES, BFLOAT16_BITS, *QUANTIZED_DTYPES, FLOAT8_BITS)
POOL_DTYPES_TEXT = (
    "float32, float16, bfloat16, int8, float8_e4m3fn, uint16 (bfloat16 bits) "
    "or uint8 (float8_e4m3fn bits)"
)
# how the scales of tokens are stored: a type, or its bits on the CPU
SCALE_DTYPES = (jnp.dtype("bfloat16"), BFLOAT16_BITS)
SCALES_TEXT = "float32[], or bfloat16{}: by page, KV head and token"
# the largest magnitude of a stored element: a scale maps the largest value to it
LARGEST = {"int8": 127.0, "float8_e4m3fn": 448.0}


def storage_dtype(dtype: DTypeLike, platform: str) -> np.dtype:
    """The element type of a page pool that holds keys and values of `dtype`.

    On CPU bfloat16 and float8_e4m3fn are stored as their bits: XLA:CPU may scatter into such
    arrays by converting the whole pool to float32 and back.

    Args:
        dtype: float32, float16, bfloat16, int8 or float8_e4m3fn.
        platform: JAX platform name: "cpu", "gpu", "cuda" or "tpu".

    Raises:
        KernelError: dtype is none of these.
    """
    wanted = jnp.dtype(dtype)
    if wanted not in FLOAT_DTYPES + QUANTIZED_DTYPES:
        raise KernelError(
            "dtype", wanted, "pages hold float32, float16, bfloat16, int8 or float8_e4m3fn"
        )
    if platform == "cpu" and wanted == jnp.bfloat16:
        return BFLOAT16_BITS
    if platform == "cpu" and wanted == jnp.float8_e4m3fn:
        return FLOAT8_BITS
    return wanted


def value_dtype(pool_dtype: DTypeLike) -> np.dtype:
    """The type of the numbers in a pool of that element type: what its bits stand for."""
    pool_dtype = jnp.dtype(pool_dtype)
    if pool_dtype == BFLOAT16_BITS:
        return jnp.dtype("bfloat16")
    if pool_dtype == FLOAT8_BITS:
        return jnp.dtype("float8_e4m3fn")
    return pool_dtype


def is_quantized(pool_dtype: DTypeLike) -> bool:
    """Whether elements of a pool of that type need a scale."""
    return value_dtype(pool_dtype) in QUANTIZED_DTYPES


def scales_shape(pool_shape: tuple[int, ...]) -> tuple[int, ...]:
    """[NP, KVH, page_size] for a pool [NP, page_size, 2, KVH, D]: a scale a token and head.

    The tokens of a head lie side by side, as attention reads them.
    """
    pages, page_size, _, kv_heads, _ = pool_shape
    return pages, kv_heads, page_size


def whole_heads(kv_pages: jax.Array, head_dim: int) -> jax.Array:  # [NP, page_size, 2, KVH, D]
    """A pool whose heads may be several rows, as one with a row a head."""
    *of_token, rows, width = kv_pages.shape
    return kv_pages.reshape(*of_token, rows * width // head_dim, head_dim)


def is_scale(scale: jax.Array, whole: tuple[int, ...]) -> bool:
    """Whether an array is one scale, or the scales of tokens of that shape."""
    if scale.shape == ():
        return scale.dtype == jnp.float32
    return scale.shape == whole and scale.dtype in SCALE_DTYPES


def compute_dtype(pool_dtype: DTypeLike, query_dtype: DTypeLike) -> np.dtype:
    """The type in which attention multiplies: that of the pages, or the query's for 8-bit pages.

    Every int8 and e4m3 number is a bfloat16 and a float16 number too, so nothing is lost; scales
    are applied to the float32 scores and weights.
    """
    return jnp.dtype(query_dtype) if is_quantized(pool_dtype) else value_dtype(pool_dtype)


def as_values(stored: jax.Array) -> jax.Array:
    """Stored elements as numbers, not scaled; free of cost, any shape."""
    wanted = value_dtype(stored.dtype)
    return stored if stored.dtype == wanted else lax.bitcast_convert_type(stored, wanted)


def as_stored(values: jax.Array, pool_dtype: DTypeLike) -> jax.Array:
    """Numbers of `value_dtype(pool_dtype)` as elements of a pool of that type."""
    pool_dtype = jnp.dtype(pool_dtype)
    return values if values.dtype == pool_dtype else lax.bitcast_convert_type(values, pool_dtype)


def quantized(values: jax.Array, scale: jax.Array, pool_dtype: DTypeLike) -> jax.Array:
    """Values over a scale that broadcasts against them, rounded to int8 or e4m3.

    Values beyond the type's range become its largest number; a scale of 0 stands for values that
    are all 0. The result is in the pool's own element type.
    """
    wanted = value_dtype(pool_dtype)
    largest = LARGEST[wanted.name]
    scale = scale.astype(jnp.float32)
    # the product with the inverse, into which a compiler may turn a quotient or not
    scaled = values.astype(jnp.float32) * (1.0 / jnp.where(scale > 0.0, scale, 1.0))
    scaled = jnp.clip(scaled, -largest, largest)
    rounded = jnp.round(scaled) if wanted == jnp.int8 else scaled
    return as_stored(rounded.astype(wanted), pool_dtype)


def row_scales(values: jax.Array, pool_dtype: DTypeLike) -> jax.Array:
    """bfloat16[...] for values [..., D]: the smallest scales that hold each row in 8 bits.

    Rounded up, so that no value of a row is cut off; NaN or infinite where a row is not finite.
    """
    # the product and not the quotient, into which XLA would turn it at its own choice
    factor = jnp.float32(1.0 / LARGEST[value_dtype(pool_dtype).name])
    exact = jnp.abs(values.astype(jnp.float32)).max(axis=-1) * factor
    bits = lax.bitcast_convert_type(exact, jnp.uint32)
    raised = lax.bitcast_convert_type((bits + 0xFFFF) & jnp.uint32(0xFFFF0000), jnp.float32)
    return jnp.where(jnp.isfinite(exact), raised, exact).astype(jnp.bfloat16)


def gather_pages(kv_pages: jax.Array, page_ids: jax.Array) -> jax.Array:
    """The named pages as numbers, not scaled: `page_ids.shape + kv_pages.shape[1:]`."""
    return as_values(kv_pages.at[page_ids].get(mode="clip"))


def read_page(kv_pages: jax.Array, page_id: jax.Array) -> jax.Array:
    """One page as numbers, not scaled: rows [page_size * 2 * KVH, D], or of parts of heads.

    Read as rows: where a loop gathers a page at a time, XLA for a TPU brings the whole pool into
    another order before.
    """
    size = math.prod(kv_pages.shape[1:-1])
    rows = kv_pages.reshape(-1, kv_pages.shape[-1])
    return as_values(lax.dynamic_slice_in_dim(rows, page_id * size, size))


def scales_of_pages(
    scale: jax.Array,  # bfloat16 or its bits [NP, KVH, page_size]
    page_ids: jax.Array,  # int32[..]
) -> jax.Array:  # float32[.., KVH, page_size]
    """The scales of the named pages.

    Taken as rows of KVH * page_size numbers: a TPU's memory is filled by rows of 128, and XLA
    would bring all scales into another order to take a page of fewer.
    """
    rows = scale.reshape(scale.shape[0], -1).at[page_ids].get(mode="clip")
    return as_values(rows).astype(jnp.float32).reshape(*page_ids.shape, *scale.shape[1:])


def token_scales(
    scale: jax.Array | None,  # float32[], or bfloat16 or its bits [NP, KVH, page_size], or None
    page_ids: jax.Array,  # int32[..., pages]
) -> jax.Array | None:  # float32[] or float32[..., KVH, pages * page_size] or None
    """The scale of each KV head and token of the named pages, or the one of the whole pool."""
    if scale is None or scale.ndim == 0:
        return scale
    of_pages = scales_of_pages(scale, page_ids).swapaxes(-3, -2)  # [..., KVH, pages, page_size]
    return of_pages.reshape(*of_pages.shape[:-2], -1)
