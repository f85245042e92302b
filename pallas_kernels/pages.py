"""What the page pool holds: element types, and bfloat16 kept as its bits."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from pallas_kernels.errors import KernelError

FLOAT_DTYPES = tuple(jnp.dtype(name) for name in ("float32", "float16", "bfloat16"))
BFLOAT16_BITS = jnp.dtype("uint16")
POOL_DTYPES = (*FLOAT_DTYPES, BFLOAT16_BITS)


def storage_dtype(dtype: DTypeLike, platform: str) -> np.dtype:
    """The element type of a page pool that holds keys and values of `dtype`.

    On CPU bfloat16 is stored as its bits in uint16: XLA:CPU may scatter into a bfloat16 array by
    converting the whole pool to float32 and back.

    Args:
        dtype: float32, float16 or bfloat16.
        platform: JAX platform name: "cpu", "gpu", "cuda" or "tpu".

    Raises:
        KernelError: dtype is none of the three.
    """
    wanted = jnp.dtype(dtype)
    if wanted not in FLOAT_DTYPES:
        raise KernelError("dtype", wanted, "keys and values are float32, float16 or bfloat16")
    if platform == "cpu" and wanted == jnp.bfloat16:
        return BFLOAT16_BITS
    return wanted


def value_dtype(kv_pages: jax.Array) -> np.dtype:
    """The floating-point type of the keys and values in a pool (bfloat16 for a uint16 pool)."""
    return jnp.dtype("bfloat16") if kv_pages.dtype == BFLOAT16_BITS else jnp.dtype(kv_pages.dtype)


def as_values(stored: jax.Array) -> jax.Array:
    """Stored elements as floating-point numbers; free of cost, any shape."""
    if stored.dtype == BFLOAT16_BITS:
        return lax.bitcast_convert_type(stored, jnp.bfloat16)
    return stored


def gather_pages(kv_pages: jax.Array, page_ids: jax.Array) -> jax.Array:
    """The named pages as floating-point numbers: `page_ids.shape + kv_pages.shape[1:]`."""
    return as_values(kv_pages.at[page_ids].get(mode="clip"))
