"""Passes optional operands of the kernels to C++: an absent one is an empty array or a zero."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def optional(array: jax.Array | None) -> jax.Array:
    """float32 operand, or float32[0] for None."""
    return jnp.zeros((0,), jnp.float32) if array is None else array.astype(jnp.float32)


def given_scale(scale: jax.Array | None) -> jax.Array:
    """Scale or scales of 8-bit pages as they are, or float32[0] for None."""
    return jnp.zeros((0,), jnp.float32) if scale is None else scale


def score_attributes(
    scale: float, soft_cap: float | None, window: int | None
) -> dict[str, np.float32 | np.int64]:
    """The attributes `scale`, `soft_cap` and `window`, with 0 for None."""
    return {
        "scale": np.float32(scale),
        "soft_cap": np.float32(soft_cap or 0.0),
        "window": np.int64(window or 0),
    }
