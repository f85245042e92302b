"""Routing for NVIDIA GPUs, by Pallas' Triton backend: one thread block for all tokens.

Nothing is sorted. Which tokens chose an expert is a matrix of zeros and ones; its product with a
strict lower triangle of ones says for each token how many before it chose the same expert, so every
choice knows its place in its expert's blocks. Ones and zeros are exact in bfloat16 and their sums
in float32.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels import interpreter
from pallas_kernels.compat import result_like
from pallas_kernels.grouped_linear.blocks import Blocks, Sizes, block_size, most_blocks
from pallas_kernels.route.coverage import RouteShape

LOWEST, TAKEN = -3e38, -3.3e38  # below every score, and finite
WARPS = 8


def _kernel(
    scores_ref: Any,  # float32[T, E]
    live_ref: Any,  # int32[T]
    weights_ref: Any,  # float32[T, choices]
    rows_ref: Any,  # int32[B * R]
    groups_ref: Any,  # int32[B]
    counts_ref: Any,  # int32[B]
    *,
    sides: tuple[int, int],
    choices: int,
    size: int,
    normalized: bool,
) -> None:
    tokens, experts = scores_ref.shape
    blocks = groups_ref.shape[0]
    token, expert = (jnp.arange(side) for side in sides)
    is_token, is_expert = token < tokens, expert < experts
    by_token = functools.partial(lax.broadcast_in_dim, shape=sides, broadcast_dimensions=[0])
    by_expert = functools.partial(lax.broadcast_in_dim, shape=sides, broadcast_dimensions=[1])
    # a place outside reads the last inside
    index = (by_token(jnp.minimum(token, tokens - 1)), by_expert(jnp.minimum(expert, experts - 1)))
    scores = plt.load(scores_ref.at[index])
    scores = jnp.where(is_expert[None, :], jnp.maximum(scores, LOWEST), LOWEST)
    lives = plt.load(live_ref.at[token], mask=is_token, other=0) > 0
    exponentials = jnp.exp(scores - by_token(scores.max(axis=1)))

    def best_of(left: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The best expert [T] of what is left, and where it stands [T, E]."""
        is_best = left == by_token(left.max(axis=1))
        best = jnp.where(is_best, by_expert(expert), sides[1]).min(axis=1)
        return best, by_expert(expert) == by_token(best)

    def without(left: jax.Array, chosen: jax.Array) -> jax.Array:
        return jnp.where(chosen, TAKEN, left)

    # experts are found twice: loops keep the program short, and their finds would not fit
    left = lax.fori_loop(0, choices, lambda _, left: without(left, best_of(left)[1]), scores)
    taken = left == TAKEN
    total = jnp.where(taken, exponentials, 0.0) if normalized else exponentials
    total = total.sum(axis=1)

    ones = (taken & lives[:, None]).astype(jnp.bfloat16)
    square = (sides[0], sides[0])
    earlier = (
        lax.broadcast_in_dim(token, square, [0]) > lax.broadcast_in_dim(token, square, [1])
    ).astype(jnp.bfloat16)
    before = lax.dot_general(
        earlier, ones, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
    ).astype(jnp.int32)
    sizes = ones.astype(jnp.float32).sum(axis=0).astype(jnp.int32)  # [E]
    needed = (sizes + (size - 1)) >> (size.bit_length() - 1)
    square = (sides[1], sides[1])
    is_lower = lax.broadcast_in_dim(expert, square, [0]) < lax.broadcast_in_dim(expert, square, [1])
    first = jnp.where(is_lower, lax.broadcast_in_dim(needed, square, [0]), 0).sum(axis=0)

    place = by_expert(first * size) + before

    def store(choice: jax.Array, left: jax.Array) -> jax.Array:
        best, chosen = best_of(left)
        part = jnp.where(chosen, exponentials, 0.0).sum(axis=1) / total
        plt.store(weights_ref.at[token, jnp.full_like(token, choice)], part, mask=is_token)
        own = jnp.where(chosen, place, 0).sum(axis=1)
        # scores that are no numbers have no best one
        mask = is_token & lives & (best < experts)
        # an interpreter puts back what a mask leaves out: beyond the end it does no harm
        own = jnp.where(mask, own, rows_ref.shape[0])
        plt.store(rows_ref.at[own], token * choices + choice, mask=mask)
        return without(left, chosen)

    lax.fori_loop(0, choices, store, scores)
    for block in range(-(-tokens // size)):
        mask = block < needed
        own = jnp.where(mask, first + block, blocks)
        plt.store(groups_ref.at[own], expert, mask=mask)
        plt.store(counts_ref.at[own], jnp.minimum(sizes - block * size, size), mask=mask)
    every = jnp.arange(pl.next_power_of_2(blocks))
    is_unused = (every >= needed.sum()) & (every < blocks)
    plt.store(counts_ref.at[every], jnp.zeros_like(every), mask=is_unused)


def route(
    scores: jax.Array,  # float32[T, E]
    live: jax.Array,  # bool[T]
    *,
    choices: int,
    normalized: bool,
    sizes: Sizes,
    interpret: Any = None,
) -> tuple[jax.Array, Blocks]:
    """As `pallas_kernels.route`; rows of places without a choice are not written."""
    tokens, experts = scores.shape
    size = block_size(tokens * choices, experts, sizes)
    blocks = most_blocks(tokens * choices, experts, size)
    result = functools.partial(result_like, scores)
    covered = RouteShape(tokens, experts)
    weights, rows, *of_block = pl.pallas_call(
        functools.partial(
            _kernel, sides=covered.sides, choices=choices, size=size, normalized=normalized
        ),
        out_shape=[
            result((tokens, choices), jnp.float32),
            result((blocks * size,), jnp.int32),
            result((blocks,), jnp.int32),
            result((blocks,), jnp.int32),
        ],
        compiler_params=plt.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=interpreter.is_used_by_triton(interpret),
        name="route",
    )(scores, live.astype(jnp.int32))
    return weights, Blocks(rows.reshape(blocks, size), *of_block)
