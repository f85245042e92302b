"""Which tokens top-k, top-p and min-p keep, without sorting the vocabulary."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

INFINITY_BITS = 0x7F800000  # float32 +inf
SEARCH_STEPS = 31  # halvings that leave one of the 2**31 non-negative float32 patterns


def kept_threshold(z: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array) -> jax.Array:
    """The least z that may be sampled: a token is kept where z >= threshold[row].

    min_p keeps tokens with p >= min_p * largest p. top_k keeps every token at least as likely as
    the k-th, ties included. top_p renormalises over what is left and keeps the smallest set of
    tokens, ties at its border included, that holds at least top_p; never less than one token.

    Args:
        z: float32[R, V], logits over temperature, minus the row's maximum (so at most 0).
        top_k: int32[R], 0 is off.
        top_p: float32[R], 1 is off.
        min_p: float32[R], 0 is off.

    Returns:
        float32[R], -inf where a row keeps everything.
    """
    floor = jnp.log(min_p)
    size = z.shape[-1]
    wanted = jnp.where((top_k <= 0) | (top_k >= size), size, top_k)
    kth = _search(lambda bound: jnp.sum(z >= bound, axis=-1, dtype=jnp.int32) >= wanted, z.shape[0])
    floor = jnp.maximum(floor, jnp.where(wanted == size, -jnp.inf, kth))
    weights = jnp.where(z >= floor[:, None], jnp.exp(z), 0.0)
    target = top_p * jnp.sum(weights, axis=-1)
    border = _search(
        lambda bound: jnp.sum(jnp.where(z >= bound, weights, 0.0), axis=-1) >= target, z.shape[0]
    )
    return jnp.maximum(floor, jnp.where(top_p < 1.0, border, -jnp.inf))


def _search(enough: Callable[[jax.Array], jax.Array], num_rows: int) -> jax.Array:
    """Largest bound <= 0 a row for which `enough` holds: float32[R].

    `enough` maps bounds [R, 1] to bool[R] and must stay true when a bound falls. Bisection of
    the integer image of -bound, which for non-negative floats is monotone.
    """

    def halve(_: int, ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = ends
        middle = low + (high - low) // 2
        bound = -jax.lax.bitcast_convert_type(middle, jnp.float32)
        holds = enough(bound[:, None])
        return jnp.where(holds, low, middle + 1), jnp.where(holds, middle, high)

    low = jnp.zeros(num_rows, jnp.int32)
    high = jnp.full(num_rows, INFINITY_BITS, jnp.int32)
    _, high = jax.lax.fori_loop(0, SEARCH_STEPS, halve, (low, high))
    return -jax.lax.bitcast_convert_type(high, jnp.float32)
