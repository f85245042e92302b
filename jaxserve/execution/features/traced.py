"""Calls traced methods of features; errors name the feature and the method."""

from __future__ import annotations

from typing import Any

import jax

from jaxserve.execution.features.feature import Feature


class FeatureError(RuntimeError):
    """A method of a feature has raised, or returned a wrong value; names both.

    Args:
        feature: name of the feature.
        method: name of the method.
        wrong: the exception, or what is wrong, in words.
    """

    def __init__(self, feature: str, method: str, wrong: Exception | str):
        if isinstance(wrong, Exception):
            wrong = f"{type(wrong).__name__}: {wrong}"
        super().__init__(f"`{method}` of feature {feature}: {wrong}")


def traced(feature: Feature, method: str, *given: Any, like: Any = None) -> Any:
    """Call a traced method of a feature and check its result.

    Args:
        feature: has the method.
        method: name of the method.
        given: arguments of the call.
        like: a pytree of arrays with the shapes and types of the result; None: any result.

    Raises:
        FeatureError: the method raises, or returns something else.
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
