"""The tokens that top-k, top-p and min-p keep, found without sorting the vocabulary."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from pallas_kernels import blocks

CANDIDATES = 64  # most likely tokens that are looked at before the whole vocabulary is
ONE_BITS = 0x3F800000  # float32 1.0
SEARCH_STEPS = 30  # halvings that leave one of the float32 patterns from 0.0 to 1.0


def kept_threshold(
    weights: jax.Array,  # float32[R, V]
    top_k: jax.Array,  # int32[R]
    top_p: jax.Array,  # float32[R]
    min_p: jax.Array,  # float32[R]
) -> jax.Array:  # float32[R]
    """The bounds of `pallas_kernels.kept_threshold`, on any device.

    Where a border lies among the CANDIDATES largest weights it is read off; otherwise it is found
    by bisection over the whole row: on a CPU only in rows that need it, elsewhere in all, two loops
    of SEARCH_STEPS reads. Sums are float32.
    """
    best, _ = blocks.top_k(weights, min(CANDIDATES, weights.shape[1]))
    floor = jnp.maximum(min_p, _kth_largest(weights, best, top_k))
    return jnp.maximum(floor, _mass_border(weights, best, floor, top_p))


def _kth_largest(weights: jax.Array, best: jax.Array, top_k: jax.Array) -> jax.Array:
    """The top_k-th largest weight a row, 0 where top_k is off: float32[R]; best [R, N] sorted."""
    num_tokens, num_best = weights.shape[1], best.shape[1]
    is_on = (top_k > 0) & (top_k < num_tokens)
    place = jnp.clip(top_k - 1, 0, num_best - 1)
    kth = jnp.take_along_axis(best, place[:, None], axis=-1)[:, 0]
    kth = jnp.where(is_on, kth, 0.0)
    if num_best == num_tokens:
        return kth
    target = top_k.astype(jnp.float32)
    return _search(weights, target, kth, is_on & (top_k > num_best), by_mass=False)


def _mass_border(
    weights: jax.Array, best: jax.Array, floor: jax.Array, top_p: jax.Array
) -> jax.Array:
    """Largest bound a row such that the weights from it up hold top_p of those from floor up.

    float32[R], 0 where top_p is off; best [R, N] holds the largest weights, sorted.
    """
    is_on = top_p < 1.0
    total = jnp.sum(jnp.where(weights >= floor[:, None], weights, 0.0), axis=-1)
    target = top_p * total
    mass = jnp.cumsum(jnp.where(best >= floor[:, None], best, 0.0), axis=-1)
    place = blocks.first(mass >= target[:, None])
    num_best = best.shape[1]
    border = jnp.take_along_axis(best, jnp.minimum(place, num_best - 1)[:, None], axis=-1)[:, 0]
    border = jnp.where(is_on, border, 0.0)
    if num_best == weights.shape[1]:
        return border
    return _search(weights, target, border, is_on & (place == num_best), by_mass=True)


def _search(
    weights: jax.Array, target: jax.Array, known: jax.Array, is_open: jax.Array, *, by_mass: bool
) -> jax.Array:
    """`known`, but for open rows the largest bound that enough tokens reach: float32[R].

    Enough tokens are `target` of them or, by mass, tokens with weights that sum to `target`.
    """
    return jax.lax.platform_dependent(
        weights,
        target,
        known,
        is_open,
        cpu=partial(_search_open_rows, by_mass=by_mass),
        tpu=partial(_search_if_open, by_mass=by_mass),
        default=partial(_search_all_rows, by_mass=by_mass),
    )


def _search_if_open(
    weights: jax.Array, target: jax.Array, known: jax.Array, is_open: jax.Array, *, by_mass: bool
) -> jax.Array:
    """All rows together if one needs it: a TPU decides that itself, without the host."""
    return jax.lax.cond(
        jnp.any(is_open),
        lambda: _search_all_rows(weights, target, known, is_open, by_mass=by_mass),
        lambda: known,
    )


def _search_all_rows(
    weights: jax.Array, target: jax.Array, known: jax.Array, is_open: jax.Array, *, by_mass: bool
) -> jax.Array:
    """All rows together, whether they need it or not."""
    low = jnp.zeros(weights.shape[0], jnp.int32)
    high = jnp.full(weights.shape[0], ONE_BITS, jnp.int32)

    def halve(_: int, ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return _halve(weights, target, *ends, by_mass=by_mass)

    low, _ = jax.lax.fori_loop(0, SEARCH_STEPS, halve, (low, high))
    return jnp.where(is_open, _float(low), known)


def _search_open_rows(
    weights: jax.Array, target: jax.Array, known: jax.Array, is_open: jax.Array, *, by_mass: bool
) -> jax.Array:
    """Row by row, so that a row stays in the core's cache, and only if one needs it."""

    def one_row(row: tuple[jax.Array, ...]) -> jax.Array:
        row_weights, row_target, row_known, row_is_open = row
        halve = partial(_halve, row_weights, row_target, by_mass=by_mass)
        ends = (jnp.int32(0), jnp.where(row_is_open, ONE_BITS, 0))
        low, _ = jax.lax.while_loop(lambda ends: ends[0] < ends[1], lambda ends: halve(*ends), ends)
        return jnp.where(row_is_open, _float(low), row_known)

    return jax.lax.cond(
        jnp.any(is_open),
        lambda: jax.lax.map(one_row, (weights, target, known, is_open)),
        lambda: known,
    )


def _halve(
    weights: jax.Array, target: jax.Array, low: jax.Array, high: jax.Array, *, by_mass: bool
) -> tuple[jax.Array, jax.Array]:
    """One step of the bisection on the bits of the bound, monotone for floats from 0 up.

    weights [..., V], the others [...]; the bound sought is in low .. high.
    """
    middle = high - (high - low) // 2
    reached = weights >= _float(middle)[..., None]
    total = jnp.sum(jnp.where(reached, weights if by_mass else 1.0, 0.0), axis=-1)
    is_enough = total >= target
    return jnp.where(is_enough, middle, low), jnp.where(is_enough, high, middle - 1)


def _float(bits: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
