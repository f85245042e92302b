"""Routing in plain XLA, on any device: a sort of all choices by expert."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.grouped_linear.blocks import Blocks, Sizes, blocks_of


def route(
    scores: jax.Array,  # float32[T, E]
    live: jax.Array,  # bool[T]
    *,
    choices: int,
    normalized: bool,
    sizes: Sizes,
) -> tuple[jax.Array, Blocks]:
    """As `pallas_kernels.route`."""
    groups = scores.shape[1]
    weights, experts = jax.lax.top_k(jax.nn.softmax(scores, axis=-1), choices)
    if normalized:
        weights = weights / weights.sum(-1, keepdims=True)
    flat = jnp.where(live[:, None], experts, groups).reshape(-1)
    counts = jnp.bincount(flat, length=groups + 1)[:-1].astype(jnp.int32)
    return weights, blocks_of(jnp.argsort(flat).astype(jnp.int32), counts, sizes)
