"""kept_threshold: the public function, its checks and the explicit choice of a backend."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.backends import resolve
from pallas_kernels.errors import KernelError, check_array


def kept_threshold(
    weights: jax.Array,  # float32[R, V]
    top_k: jax.Array,  # int32[R]
    top_p: jax.Array,  # float32[R]
    min_p: jax.Array,  # float32[R]
    *,
    backend: str,
    interpret: Any = None,
) -> jax.Array:  # float32[R]
    """A bound a row: a token may be sampled where weight >= bound.

    min_p keeps tokens with at least min_p times the largest weight. top_k keeps every token with
    at least the k-th largest weight, ties included. top_p renormalises over what is left and keeps
    the smallest set of tokens, ties at its border included, that holds at least top_p; never less
    than one token. A row's result depends on that row alone; but on a GPU few rows are summed in
    another order than many, which may move a border of top_p within the bound below.

    The bound is one of those that keep these tokens. top_k and min_p are exact; the set of top_p is
    that of float64 sums unless the mass at its border is within 1e-6 of top_p.

    Args:
        weights: probabilities relative to the row's most likely token, 0 to 1.
        top_k: 0 is off.
        top_p: 1 is off.
        min_p: 0 is off, at most 1.
        backend: "xla" (any device), "triton" (NVIDIA GPUs) or "reference".
        interpret: None compiles; True runs the kernel of "triton" in Pallas' interpreter.

    Returns:
        The bounds; at most 0 where a row keeps everything.

    Raises:
        KernelError: a shape, a type or the backend is not supported; names it.
    """
    if weights.ndim != 2 or 0 in weights.shape:
        raise KernelError("weights.shape", weights.shape, "[rows, tokens], at least one of each")
    rows = weights.shape[:1]
    for name, array, shape, dtype in (
        ("weights", weights, weights.shape, jnp.float32),
        ("top_k", top_k, rows, jnp.int32),
        ("top_p", top_p, rows, jnp.float32),
        ("min_p", min_p, rows, jnp.float32),
    ):
        check_array(name, array, dtype, shape)
    chosen = resolve("threshold", backend)
    of_kernel = chosen.options(interpret=interpret)
    return chosen.load().kept_threshold(weights, top_k, top_p, min_p, **of_kernel)
