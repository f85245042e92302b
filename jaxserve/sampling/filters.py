"""Which tokens top-k, top-p and min-p keep, without sorting the vocabulary."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxserve.sampling import blocks

CANDIDATES = 128  # most likely tokens that are looked at before the whole vocabulary is
SEARCH_STEPS = 31  # halvings that leave one of the 2**31 non-negative float32 patterns
INFINITY_BITS = 0x7F800000  # float32 +inf


def kept_threshold(
    z: jax.Array, weights: jax.Array, top_k: jax.Array, top_p: jax.Array, min_p: jax.Array
) -> jax.Array:
    """The least z that may be sampled: a token is kept where z >= threshold[row].

    min_p keeps tokens with p >= min_p * largest p. top_k keeps every token at least as likely as
    the k-th, ties included. top_p renormalises over what is left and keeps the smallest set of
    tokens, ties at its border included, that holds at least top_p; never less than one token.

    Where the border lies among the CANDIDATES most likely tokens it is read off; otherwise it is
    found by bisection over the whole row. A row's result depends on that row alone.

    Args:
        z: float32[R, V], logits over temperature, minus the row's maximum (so at most 0).
        weights: float32[R, V], exp(z).
        top_k: int32[R], 0 is off.
        top_p: float32[R], 1 is off.
        min_p: float32[R], 0 is off.

    Returns:
        float32[R], -inf where a row keeps everything.
    """
    size = z.shape[1]
    best, _ = blocks.top_k(z, min(CANDIDATES, size))
    floor = jnp.maximum(jnp.log(min_p), _kth_largest(z, best, top_k))
    left = jnp.where(z >= floor[:, None], weights, 0.0)
    target = top_p * jnp.sum(left, axis=-1)
    border = _mass_border(z, left, best, floor, target, needed=top_p < 1.0)
    return jnp.maximum(floor, border)


def _kth_largest(z: jax.Array, best: jax.Array, top_k: jax.Array) -> jax.Array:
    """The top_k-th largest z a row, -inf where top_k is off: float32[R]; best [R, N] sorted."""
    size, num_best = z.shape[1], best.shape[1]
    place = jnp.clip(top_k - 1, 0, num_best - 1)
    kth = jnp.take_along_axis(best, place[:, None], axis=-1)[:, 0]
    is_on = (top_k > 0) & (top_k < size)
    kth = jnp.where(is_on, kth, -jnp.inf)
    if num_best == size:
        return kth
    return _search(z, jnp.ones_like(z), top_k.astype(jnp.float32), kth, is_on & (top_k > num_best))


def _mass_border(
    z: jax.Array,
    weights: jax.Array,
    best: jax.Array,
    floor: jax.Array,
    target: jax.Array,
    *,
    needed: jax.Array,
) -> jax.Array:
    """Largest bound a row such that the weights of z >= bound reach target; -inf if not needed."""
    mass = jnp.cumsum(jnp.where(best >= floor[:, None], jnp.exp(best), 0.0), axis=-1)
    place = blocks.first(mass >= target[:, None])
    is_found = place < best.shape[1]
    place = jnp.minimum(place, best.shape[1] - 1)
    border = jnp.take_along_axis(best, place[:, None], axis=-1)[:, 0]
    border = jnp.where(needed, border, -jnp.inf)
    if best.shape[1] == z.shape[1]:
        return border
    return _search(z, weights, target, border, needed & ~is_found)


def _search(
    z: jax.Array, weights: jax.Array, target: jax.Array, known: jax.Array, is_open: jax.Array
) -> jax.Array:
    """`known`, but for open rows the largest bound <= 0 whose weights reach the target: [R].

    That is, the largest bound with sum(weights[z >= bound]) >= target, z and weights [R, V].
    """
    return jax.lax.platform_dependent(
        z, weights, target, known, is_open, cpu=_search_open_rows, default=_search_all_rows
    )


def _search_all_rows(
    z: jax.Array, weights: jax.Array, target: jax.Array, known: jax.Array, is_open: jax.Array
) -> jax.Array:
    """All rows together, always: an accelerator's queue never waits for a predicate."""
    low = jnp.zeros(z.shape[0], jnp.int32)
    high = jnp.full(z.shape[0], INFINITY_BITS, jnp.int32)

    def halve(_: int, ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        middle, bound = _middle(*ends)
        total = jnp.sum(jnp.where(z >= bound[:, None], weights, 0.0), axis=-1)
        return _half(*ends, middle, total >= target)

    _, high = jax.lax.fori_loop(0, SEARCH_STEPS, halve, (low, high))
    return jnp.where(is_open, _bound(high), known)


def _search_open_rows(
    z: jax.Array, weights: jax.Array, target: jax.Array, known: jax.Array, is_open: jax.Array
) -> jax.Array:
    """Row by row, so that a row stays in the core's cache, and only the rows that need it."""

    def one_row(row: tuple[jax.Array, ...]) -> jax.Array:
        row_z, row_weights, row_target, row_known, row_is_open = row

        def halve(ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            middle, bound = _middle(*ends)
            total = jnp.sum(jnp.where(row_z >= bound, row_weights, 0.0))
            return _half(*ends, middle, total >= row_target)

        ends = (jnp.int32(0), jnp.where(row_is_open, INFINITY_BITS, 0))
        _, high = jax.lax.while_loop(lambda ends: ends[0] < ends[1], halve, ends)
        return jnp.where(row_is_open, _bound(high), row_known)

    return jax.lax.cond(
        jnp.any(is_open),
        lambda: jax.lax.map(one_row, (z, weights, target, known, is_open)),
        lambda: known,
    )


def _middle(low: jax.Array, high: jax.Array) -> tuple[jax.Array, jax.Array]:
    middle = low + (high - low) // 2
    return middle, _bound(middle)


def _half(
    low: jax.Array, high: jax.Array, middle: jax.Array, is_enough: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return jnp.where(is_enough, low, middle + 1), jnp.where(is_enough, middle, high)


def _bound(bits: jax.Array) -> jax.Array:
    """The bound <= 0 with that magnitude: for non-negative floats the bit pattern is monotone."""
    return -jax.lax.bitcast_convert_type(bits, jnp.float32)
