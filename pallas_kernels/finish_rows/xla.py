"""Rows of a product in plain XLA."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.quantized_matmul import Rounding, Rows

ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
}


def finish_rows(
    product: jax.Array,  # [S, M, N]
    *,
    dtype: np.dtype,
    gate: str | None,
    rounding: Rounding | None,
) -> Rows:  # [M, N], or [M, N / 2] with a gate
    """As `pallas_kernels.finish_rows.finish_rows`."""
    rows = product[0] if len(product) == 1 else product.sum(axis=0, dtype=jnp.float32)
    rows = rows.astype(dtype)
    if gate is not None:
        active = ACTIVATIONS[gate](rows[:, ::2].astype(jnp.float32)).astype(dtype)
        rows = active * rows[:, 1::2]
    return rows if rounding is None else rounding.of(rows)
