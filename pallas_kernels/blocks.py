"""Rows of the vocabulary cut into blocks: maxima and top-k that read the vocabulary once."""

from __future__ import annotations

import jax
import jax.numpy as jnp

BLOCK = 128  # tokens a block: a multiple of every backend's vector width


def split(x: jax.Array, fill: float) -> jax.Array:
    """x [R, V] as [R, ceil(V / BLOCK), BLOCK], the last block filled up with `fill`."""
    missing = -x.shape[1] % BLOCK
    if missing:
        x = jnp.pad(x, ((0, 0), (0, missing)), constant_values=fill)
    return x.reshape(x.shape[0], -1, BLOCK)


def take(blocks: jax.Array, index: jax.Array) -> jax.Array:
    """Blocks `index` int32[R, N] of each row of blocks [R, NB, BLOCK]: [R, N, BLOCK]."""
    return jnp.take_along_axis(blocks, index[:, :, None], axis=1, mode="clip")


def first(mask: jax.Array) -> jax.Array:
    """Index of the first True of each row of mask [R, N], N where there is none: int32[R]."""
    index = jax.lax.broadcasted_iota(jnp.int32, mask.shape, 1)
    return jnp.min(jnp.where(mask, index, mask.shape[1]), axis=-1)


def argmax(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Index int32[R] (the lowest of equals) and value float32[R] of each row's maximum, x [R, V].

    Max reductions vectorise where `jnp.argmax` does not: XLA:CPU takes 7 ms for `jnp.argmax` of
    [16, 128256] and 0.5 ms for this. A NaN in a row gives its last index.
    """
    blocks = split(x, -jnp.inf)
    block_max = jnp.max(blocks, axis=-1)
    largest = jnp.max(block_max, axis=-1, keepdims=True)
    block = jnp.minimum(first(block_max == largest), blocks.shape[1] - 1)
    inside = first(take(blocks, block[:, None])[:, 0] == largest)
    return jnp.minimum(block * BLOCK + inside, x.shape[1] - 1), largest[:, 0]


def top_k(x: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """The k largest values of each row of x [R, V] and their indices, as `lax.top_k` gives them.

    They lie in the k blocks with the largest maxima, so only those are searched: every block left
    out has k blocks before it that hold something larger, or as large at a lower index.
    """
    blocks = split(x, -jnp.inf)
    if k == 0 or blocks.shape[1] <= k:
        values, index = jax.lax.top_k(x, k)
        return values, index.astype(jnp.int32)
    _, chosen = jax.lax.top_k(jnp.max(blocks, axis=-1), k)
    # In order of index, so that the lower of two equal tokens stays first.
    chosen = jnp.sort(chosen.astype(jnp.int32), axis=-1)
    values, place = jax.lax.top_k(take(blocks, chosen).reshape(x.shape[0], -1), k)
    block = jnp.take_along_axis(chosen, place // BLOCK, axis=-1)
    return values, (block * BLOCK + place % BLOCK).astype(jnp.int32)
