"""Rows of a product in plain XLA."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.quantized_matmul import Rounding, Rows


def finish_rows(
    product: jax.Array,  # [S, M, N]
    *,
    dtype: np.dtype,
    gated: bool,
    rounding: Rounding | None,
) -> Rows:  # [M, N], or [M, N / 2] when gated
    """As `pallas_kernels.finish_rows.finish_rows`."""
    rows = product[0] if len(product) == 1 else product.sum(axis=0, dtype=jnp.float32)
    rows = rows.astype(dtype)
    if gated:
        gate = jax.nn.silu(rows[:, ::2].astype(jnp.float32)).astype(dtype)
        rows = gate * rows[:, 1::2]
    return rows if rounding is None else rounding.of(rows)
