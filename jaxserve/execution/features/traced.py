"""Calls of features whose mistakes are told by the names of feature and method."""

from __future__ import annotations

from typing import Any

import jax

from jaxserve.execution.features.feature import Feature


class FeatureError(RuntimeError):
    """A method of a feature has raised, or gives what it may not; names both.

    Args:
        feature: its name.
        method: its name.
        wrong: what it has raised, or what is wrong in words.
    """

    def __init__(self, feature: str, method: str, wrong: Exception | str):
        if isinstance(wrong, Exception):
            wrong = f"{type(wrong).__name__}: {wrong}"
        super().__init__(f"`{method}` of feature {feature}: {wrong}")


def traced(feature: Feature, method: str, *given: Any, like: Any = None) -> Any:
    """What a traced method of a feature gives.

    Args:
        feature: whose method it is.
        method: its name.
        given: its arguments.
        like: a pytree of arrays whose shapes and types it must give; None: it may give anything.

    Raises:
        FeatureError: it raises, or gives something else.
    """
    try:
        found = getattr(feature, method)(*given)
        kinds, wanted = (jax.tree.map(_kind, tree) for tree in (found, like))
    except Exception as error:
        raise FeatureError(feature.name, method, error) from error
    if like is not None and kinds != wanted:
        raise FeatureError(feature.name, method, f"gives {kinds}, it must be {wanted}")
    return found


def _kind(array: Any) -> str:
    return f"{array.dtype}{[*array.shape]}"
