"""The features of a step: every file of this folder that declares one.

They are applied in the order of their `place`.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import NamedTuple

from jaxserve.execution.features.feature import (
    Chunk,
    Facts,
    Feature,
    Need,
    NewestTokens,
    Region,
    Rows,
    SpecialRow,
    Tokens,
)
from jaxserve.execution.features.sampling import Sampling, threshold_on
from jaxserve.sampling.sampler import PORTABLE, Threshold


def _kinds() -> tuple[type[Feature], ...]:
    """The features that the modules of this folder declare."""
    modules = [import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__)]
    found = [
        kind
        for module in modules
        for kind in vars(module).values()
        if isinstance(kind, type)
        and issubclass(kind, Feature)
        and kind is not Feature
        and kind.__module__ == module.__name__
    ]
    return tuple(sorted(found, key=lambda kind: kind.place))


_ALL = _kinds()
KINDS = tuple(kind for kind in _ALL if kind.setting is None)  # of every engine
OPTIONAL_KINDS = tuple(kind for kind in _ALL if kind.setting is not None)


class FeatureSets(NamedTuple):
    """Names of the features that programs contain.

    Attributes:
        fast: what every program contains.
        full_decode: what the largest decode program contains: everything but what works on the
            prefill region.
        full: everything.
    """

    fast: frozenset[str]
    full_decode: frozenset[str]
    full: frozenset[str]


def feature_sets(features: Iterable[Feature | type[Feature]]) -> FeatureSets:
    """The sets of an engine with these features."""
    every = [*features]
    return FeatureSets(
        frozenset(f.name for f in every if not (f.special or f.of_region)),
        frozenset(f.name for f in every if not f.of_region),
        frozenset(f.name for f in every),
    )


FAST, FULL_DECODE, FULL = feature_sets(KINDS)

__all__ = [
    "FAST",
    "FULL",
    "FULL_DECODE",
    "KINDS",
    "OPTIONAL_KINDS",
    "Chunk",
    "Facts",
    "Feature",
    "FeatureSets",
    "Need",
    "NewestTokens",
    "Region",
    "Rows",
    "SpecialRow",
    "Tokens",
    "feature_sets",
    "make_features",
    "threshold_on",
]


def make_features(
    threshold: Threshold = PORTABLE, is_on: Callable[[str], bool] = lambda setting: False
) -> tuple[Feature, ...]:
    """One of each kind; they remember what they need of the requests in the slots.

    Args:
        threshold: the search of the sampling filters, see `threshold_on`.
        is_on: whether a setting is, of those that some kinds need, see `Feature.setting`.
    """
    wanted = [kind for kind in _ALL if kind.setting is None or is_on(kind.setting)]
    return tuple(Sampling(threshold) if kind is Sampling else kind() for kind in wanted)
