"""Log-probabilities of chosen tokens and of the most likely ones."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import blocks


class LogprobRows(NamedTuple):
    """Log-probabilities of R rows.

    Attributes:
        sampled: float32[R], of the chosen token.
        rank: int32[R], 1 plus the number of tokens that are more likely than the chosen one.
        top_ids: int32[R, K], the K most likely tokens, most likely first, ties by lower id.
        top_logprobs: float32[R, K], theirs.
    """

    sampled: jax.Array
    rank: jax.Array
    top_ids: jax.Array
    top_logprobs: jax.Array


def log_normalizer(logits: jax.Array) -> jax.Array:
    """Log of the sum of the exponentials of float32[..., V]: float32[..., 1]; -inf entries add 0.

    The engine's log-probabilities and those of the functional form are both of it, so that they
    can have the same bits.
    """
    largest = lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    centre = jnp.where(jnp.isfinite(largest), largest, 0.0)
    return centre + jnp.log(jnp.sum(jnp.exp(logits - centre), axis=-1, keepdims=True))


def score(
    logits: jax.Array, targets: jax.Array, k: int, kept: jax.Array | None = None
) -> LogprobRows:
    """Log-softmax of the logits at the targets and at the k largest.

    Args:
        logits: float32[R, V]; -inf entries have log-probability -inf.
        targets: int32[R], token ids in 0 .. V - 1; what is said of others means nothing.
        k: how many of the most likely tokens to return (static, 0 .. V).
        kept: bool[R, V], tokens that may be among the most likely ones; others come last, with
            log-probability -inf. None: all.
    """
    norm = log_normalizer(logits)
    chosen = jnp.take_along_axis(logits, targets[:, None], axis=-1, mode="clip")
    rank = 1 + jnp.sum(logits > chosen, axis=-1, dtype=jnp.int32)
    top, top_ids = blocks.top_k(logits if kept is None else jnp.where(kept, logits, -jnp.inf), k)
    return LogprobRows((chosen - norm)[:, 0], rank, top_ids, top - norm)
