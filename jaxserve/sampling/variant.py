"""Which parts of sampling a compiled step contains."""

from __future__ import annotations

from enum import IntEnum


class Variant(IntEnum):
    """Static variants of the sampler, each a superset of the one before.

    A batch runs on the largest variant that one of its requests needs; the others' tokens are the
    same as on their own variant, because the extra parts are exact no-ops for them.
    """

    GREEDY = 0  # the most likely token
    PLAIN = 1  # and temperature
    FILTERED = 2  # and top_k, top_p, min_p
    RICH = 3  # and penalties, and log-probabilities of the sampled tokens
    MASKED = 4  # and a dense additive bias: logit_bias, masks
    SCORED = 5  # and log-probabilities of prompt tokens
