"""Which parts of sampling a compiled step contains."""

from __future__ import annotations

from enum import IntEnum

from jaxserve.sampling_params import SamplingParams


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


def variant_of(params: SamplingParams) -> Variant:
    """The smallest variant that serves a request."""
    if params.prompt_logprobs is not None:
        return Variant.SCORED
    if params.needs_bias:
        return Variant.MASKED
    if params.has_penalties or params.needs_logprobs:
        return Variant.RICH
    if params.is_greedy:
        return Variant.GREEDY
    return Variant.FILTERED if params.needs_filters else Variant.PLAIN
