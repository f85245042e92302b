"""The softmax's parts that the kernels of all targets share: base 2, bounded and masked."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.paged_attention.options import Scores

LOG2E = math.log2(math.e)
MASKED = -1e30  # below every score and finite: exp2(MASKED - MASKED) is 1, not NaN


def base2_scores(scores: jax.Array, k_scale: Any, options: Scores) -> jax.Array:
    """Products of queries and stored keys as scores in base 2, scaled and capped.

    Args:
        scores: float32, of any shape.
        k_scale: one number, the scale of all keys.
        options: scale and bound of the scores.
    """
    if options.soft_cap is None:
        return scores * (k_scale * (options.scale * LOG2E))
    bounded = jnp.tanh(scores * (k_scale * (options.scale / options.soft_cap)))
    return bounded * (options.soft_cap * LOG2E)
