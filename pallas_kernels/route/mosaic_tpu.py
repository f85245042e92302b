"""Routing for TPUs in Pallas Mosaic: one kernel for all tokens, whose scores stay in its memory.

Experts lie along sublanes and tokens along lanes. Nothing is sorted and nothing is scattered: which
tokens chose an expert is a matrix of zeros and ones, whose product with a strict triangle of ones
says how many before a token chose the same expert, so every choice knows its block and its place
there. The table of rows is the product of two such matrices, of blocks and of places. All are whole
numbers below 2 ** 24, exact in float32; those that are multiplied in bfloat16 are at most 256.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import interpreter
from pallas_kernels.compat import result_like
from pallas_kernels.grouped_linear.blocks import Blocks, Sizes, block_size, most_blocks

LOWEST, TAKEN = -3e38, -3.3e38  # below every score, and finite
LANES = 128


def _kernel(
    scores_ref: Any,  # float32[E, T]
    live_ref: Any,  # int32[1, T]
    weights_ref: Any,  # float32[choices, T]
    rows_ref: Any,  # int32[B, R]
    groups_ref: Any,  # int32[1, B]
    counts_ref: Any,  # int32[1, B]
    *,
    normalized: bool,
) -> None:
    (experts, tokens), choices = scores_ref.shape, weights_ref.shape[0]
    blocks, size = rows_ref.shape

    def index(rows: int, columns: int, axis: int) -> jax.Array:
        """float32[rows, columns] of the index along an axis."""
        return lax.broadcasted_iota(jnp.int32, (rows, columns), axis).astype(jnp.float32)

    def sum_of(mask: jax.Array, values: jax.Array, axis: int = 0) -> jax.Array:
        return jnp.where(mask, values, 0.0).sum(axis=axis, keepdims=True)

    def counted(left: jax.Array, right: jax.Array) -> jax.Array:
        """The product of masks or of numbers up to 256."""
        halves = (side.astype(jnp.float32).astype(jnp.bfloat16) for side in (left, right))
        return jnp.dot(*halves, preferred_element_type=jnp.float32)

    expert = index(experts, tokens, 0)
    given = scores_ref[...]
    left = jnp.where(given > LOWEST, given, LOWEST)  # what is no number is chosen last
    exponentials = jnp.exp(left - left.max(axis=0, keepdims=True))
    chosen = []
    for _ in range(choices):
        is_best = left == left.max(axis=0, keepdims=True)
        best = jnp.where(is_best, expert, float(experts)).min(axis=0, keepdims=True)
        chosen.append(expert == best)
        left = jnp.where(chosen[-1], TAKEN, left)
    taken = left == TAKEN
    every = jnp.where(taken, exponentials, 0.0) if normalized else exponentials
    total = every.sum(axis=0, keepdims=True)

    lives = live_ref[...] > 0
    counts = taken & lives  # [E, T]
    before = counted(counts, index(tokens, tokens, 0) < index(tokens, tokens, 1))
    sizes = sum_of(counts, jnp.ones_like(before), axis=1)  # [E, 1]
    needed = jnp.floor((sizes + (size - 1)) * (1.0 / size))
    earlier = index(experts, experts, 1) < index(experts, experts, 0)
    first = counted(earlier, jnp.broadcast_to(needed, (experts, LANES)))[:, :1]
    place = first * size + before

    token = index(1, tokens, 1)
    rows = jnp.zeros((blocks, size), jnp.float32)
    for choice, mask in enumerate(chosen):
        weights_ref[choice : choice + 1, :] = sum_of(mask, exponentials) / total
        own = jnp.where(lives, sum_of(mask, place), -float(size))  # [1, T]; -size: in no block
        of_block = jnp.floor(own * (1.0 / size))
        in_block = index(blocks, tokens, 0) == of_block
        in_place = index(size, tokens, 0) == own - of_block * size
        rows += lax.dot_general(
            in_block.astype(jnp.float32),
            jnp.where(in_place, token * choices + choice, 0.0),
            (((1,), (1,)), ((), ())),
            precision=lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
    rows_ref[...] = rows.astype(jnp.int32)

    block, group = index(experts, blocks, 1), index(experts, blocks, 0)
    owns = (block >= first) & (block < first + needed)
    held = jnp.clip(sizes - (block - first) * size, 0.0, float(size))
    counts_ref[...] = sum_of(owns, held).astype(jnp.int32)
    # blocks without rows name the last matrix that is read
    last = jnp.where(needed > 0.0, group, 0.0).max()
    of_used = sum_of(owns, group)
    groups_ref[...] = jnp.where(sum_of(owns, held) > 0.0, of_used, last).astype(jnp.int32)


def route(
    scores: jax.Array,  # float32[T, E]
    live: jax.Array,  # bool[T]
    *,
    choices: int,
    normalized: bool,
    sizes: Sizes,
    interpret: Any = None,
) -> tuple[jax.Array, Blocks]:
    """As `pallas_kernels.route`."""
    tokens, experts = scores.shape
    size = block_size(tokens * choices, experts, sizes)
    blocks = most_blocks(tokens * choices, experts, size)
    result = functools.partial(result_like, scores)
    weights, rows, groups, counts = pl.pallas_call(
        functools.partial(_kernel, normalized=normalized),
        out_shape=[
            result((choices, tokens), jnp.float32),
            result((blocks, size), jnp.int32),
            result((1, blocks), jnp.int32),
            result((1, blocks), jnp.int32),
        ],
        interpret=interpreter.of_call(interpret),
        name="route",
    )(scores.T, live.astype(jnp.int32)[None])
    return weights.T, Blocks(rows, groups[0], counts[0])
