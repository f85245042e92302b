"""The list of features, in their order, and the sets of features that programs contain."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from jaxserve.execution.features.bias import Bias
from jaxserve.execution.features.epsilon_cutoff import EpsilonCutoff
from jaxserve.execution.features.feature import (
    Buffer,
    Chunk,
    Facts,
    Feature,
    Host,
    Need,
    NewestTokens,
    Region,
    Rows,
    SpecialRow,
    TakenStep,
    Tokens,
    of_region,
    overrides,
)
from jaxserve.execution.features.image_positions import ImagePositions
from jaxserve.execution.features.image_sight import ImageSight
from jaxserve.execution.features.images import Images
from jaxserve.execution.features.logprobs import Logprobs
from jaxserve.execution.features.mask import Mask
from jaxserve.execution.features.penalties import Penalties
from jaxserve.execution.features.pooling import Pooling
from jaxserve.execution.features.prompt_embeds import PromptEmbeds
from jaxserve.execution.features.prompt_scores import PromptScores
from jaxserve.execution.features.sampling import Sampling, draws_on

# in the order in which they adjust logits and report: masked logits are -inf behind the mask
_ALL: tuple[type[Feature], ...] = (
    *(Sampling, Bias, Mask, Penalties, EpsilonCutoff, Logprobs, PromptScores),
    *(
        PromptEmbeds,
        Images,
        ImagePositions,
        ImageSight,
        Pooling,
    ),  # features that read embeddings come behind those that replace them
)
KINDS = tuple(kind for kind in _ALL if kind.setting is None)  # of every engine
OPTIONAL_KINDS = tuple(kind for kind in _ALL if kind.setting is not None)
ALL_NAMES = tuple(kind.name for kind in _ALL)


class FeatureSets(NamedTuple):
    """Names of the features that programs contain.

    Attributes:
        fast: those of every program.
        full_decode: those of the largest decode program: all but features of the prefill region.
        full: all features.
    """

    fast: frozenset[str]
    full_decode: frozenset[str]
    full: frozenset[str]


def feature_sets(features: Iterable[Feature | type[Feature]]) -> FeatureSets:
    """The sets of an engine with these features."""
    every = [*features]
    return FeatureSets(
        frozenset(f.name for f in every if not (f.special or of_region(f))),
        frozenset(f.name for f in every if not of_region(f)),
        frozenset(f.name for f in every),
    )


FAST, FULL_DECODE, FULL = feature_sets(KINDS)

__all__ = [
    "ALL_NAMES",
    "FAST",
    "FULL",
    "FULL_DECODE",
    "KINDS",
    "OPTIONAL_KINDS",
    "Buffer",
    "Chunk",
    "Facts",
    "Feature",
    "FeatureSets",
    "Host",
    "Need",
    "NewestTokens",
    "Region",
    "Rows",
    "SpecialRow",
    "TakenStep",
    "Tokens",
    "draws_on",
    "feature_sets",
    "make_features",
    "of_region",
    "overrides",
]


def make_features(
    facts: Facts, value_of: Callable[[str], Any] = lambda setting: None
) -> tuple[Feature, ...]:
    """One feature of each kind; each remembers what it needs of the requests in the slots.

    Args:
        facts: sizes of the engine and its model.
        value_of: value of a setting that a kind needs, by its name, see `Feature.setting`.
    """
    given = {kind.setting: value_of(kind.setting) for kind in OPTIONAL_KINDS if kind.setting}
    asked = (kind for kind in _ALL if kind.setting is None or given[kind.setting])
    wanted = (kind for kind in asked if kind.suits(facts))
    return tuple(
        kind(facts, {k: v for k, v in given.items() if k == kind.setting}) for kind in wanted
    )
