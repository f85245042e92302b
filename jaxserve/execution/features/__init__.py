"""The features of a step, one a file; the order here is the order in which logits are adjusted."""

from __future__ import annotations

from jaxserve.execution.features.bias import Bias
from jaxserve.execution.features.feature import (
    Facts,
    Feature,
    Need,
    Region,
    Rows,
    SpecialRow,
)
from jaxserve.execution.features.logprobs import Logprobs
from jaxserve.execution.features.mask import Mask
from jaxserve.execution.features.penalties import Penalties
from jaxserve.execution.features.prompt_scores import PromptScores
from jaxserve.execution.features.sampling import Sampling, threshold_on
from jaxserve.sampling.sampler import PORTABLE, Threshold

KINDS: tuple[type[Feature], ...] = (Sampling, Bias, Mask, Penalties, Logprobs, PromptScores)
FAST = frozenset({Sampling.name})  # what every program contains
FULL = frozenset(kind.name for kind in KINDS)
FULL_DECODE = frozenset(kind.name for kind in KINDS if not kind.of_region)

__all__ = [
    "FAST",
    "FULL",
    "FULL_DECODE",
    "KINDS",
    "Facts",
    "Feature",
    "Need",
    "Region",
    "Rows",
    "SpecialRow",
    "make_features",
    "threshold_on",
]


def make_features(threshold: Threshold = PORTABLE) -> tuple[Feature, ...]:
    """One of each kind; they remember what they need of the requests in the slots.

    Args:
        threshold: the search of the sampling filters, see `threshold_on`.
    """
    return (Sampling(threshold), *(kind() for kind in KINDS[1:]))
