"""Shared memory as TMA and wgmma of Hopper see it, and 8-bit numbers on their way into wgmma."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike

WGMMA_ROWS = 64  # the first dimension of wgmma: rows of a warpgroup
TILE_ROWS = 8  # rows of one shared memory tile, and the step of wgmma's second dimension
SWIZZLES = (128, 64, 32)  # bytes that TMA permutes, the widest first


def swizzle_bytes(columns: int, dtype: DTypeLike) -> int | None:
    """The widest swizzle with rows that divide so many elements; None where there is none."""
    size = columns * jnp.dtype(dtype).itemsize
    return next((swizzle for swizzle in SWIZZLES if size % swizzle == 0), None)


def swizzle_elements(columns: int, dtype: DTypeLike) -> int:
    """Elements of a row of a tile, for rows that a swizzle divides."""
    swizzle = swizzle_bytes(columns, dtype)
    assert swizzle is not None
    return swizzle // jnp.dtype(dtype).itemsize


def row_tiles(columns: int, dtype: DTypeLike) -> tuple[Any, ...]:
    """The layout that TMA and wgmma share for rows of so many elements.

    Plain rows where no swizzle divides them: 8-bit ones of 80, which wgmma does not read.
    """
    swizzle = swizzle_bytes(columns, dtype)
    if swizzle is None:
        return ()
    tile = (TILE_ROWS, swizzle // jnp.dtype(dtype).itemsize)
    return plgpu.TilingTransform(tile), plgpu.SwizzleTransform(swizzle)


def widened(stored: jax.Array, dtype: DTypeLike) -> jax.Array:
    """8-bit numbers in registers as 16-bit ones; exact, for both types hold all of them."""
    # the one 16-bit type that the hardware widens to
    narrow = jnp.bfloat16 if stored.dtype == jnp.int8 else jnp.float16
    held = stored.astype(narrow)
    return held if dtype == narrow else held.astype(jnp.float32).astype(dtype)
