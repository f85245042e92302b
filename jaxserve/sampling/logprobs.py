"""Log-probabilities of chosen tokens and of the most likely ones."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import blocks

LIMB, LIMBS = 2.0**12, 3  # bits of an exponential that are added as one integer


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


@jax.custom_jvp
def log_normalizer(logits: jax.Array) -> jax.Array:
    """Log of the sum of the exponentials of float32[..., V]: float32[..., 1]; -inf entries add 0.

    The same bits in every program, whatever rows are beside one: XLA:CPU adds floats in an order
    that follows the number of rows, so exponentials are cut into integers, whose sum has no order.
    Each loses less than 2^-36 by it, beside a sum of 1 or more; V is below 2^19.
    """
    assert logits.shape[-1] < 2**19, "sums of more would not fit an int32"
    largest = jnp.max(logits, axis=-1, keepdims=True)
    centre = jnp.where(jnp.isfinite(largest), largest, 0.0)
    rest, limbs = jnp.exp(logits - centre), []  # [..., V], up to 1
    for _ in range(LIMBS):
        rest = rest * LIMB
        whole = jnp.floor(rest)
        rest = rest - whole  # exact: both have the bits of a float32
        limbs.append(whole.astype(jnp.int32))
    # together: XLA:CPU would compute the exponentials again for each sum
    zeros = (jnp.int32(0),) * LIMBS
    sums = lax.reduce(tuple(limbs), zeros, _added, (logits.ndim - 1,))
    total = jnp.zeros_like(centre)
    for number, limb in reversed([*enumerate(sums, start=1)]):  # the smallest first
        total += limb[..., None].astype(jnp.float32) * LIMB**-number
    # of NaN and infinite logits nothing is known
    return jnp.where(largest < jnp.inf, centre + jnp.log(total), largest)


def _added(one: tuple[jax.Array, ...], other: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    return tuple(a + b for a, b in zip(one, other, strict=True))


@log_normalizer.defjvp
def _of_tangent(
    primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    (logits,), (tangent,) = primals, tangents
    norm = log_normalizer(logits)
    return norm, jnp.sum(jnp.exp(logits - norm) * tangent, axis=-1, keepdims=True)


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
