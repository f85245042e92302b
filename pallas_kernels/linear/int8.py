"""Symmetric 8-bit integers by row, for weights once and for activations at every step."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

LARGEST = 127.0


class Int8Rows(NamedTuple):
    """A matrix [R, K] of which row r is `values[r] * scale[r]`."""

    values: jax.Array  # int8[R, K]
    scale: jax.Array  # float32[R]


def quantize_rows(x: jax.Array) -> Int8Rows:
    """Rounds every row of x [..., K] to the integers -127 .. 127 times the row's own scale.

    Dynamic quantisation by token and by output channel: Dettmers et al., "LLM.int8()" (2022),
    without the outlier decomposition. A row of zeros has the scale 0.
    """
    wide = x.astype(jnp.float32)
    scale = jnp.max(jnp.abs(wide), axis=-1) / LARGEST
    inverse = jnp.where(scale > 0.0, 1.0 / scale, 0.0)
    values = jnp.round(wide * inverse[..., None]).astype(jnp.int8)
    return Int8Rows(values, scale)
