"""Reports of an operator's own features become plain data where they are made."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.boundary.reports import plain
from jaxserve.engine.features import EngineFeatures
from jaxserve.execution.features import Feature
from jaxserve.execution.features.traced import FeatureError
from tests.jaxserve.execution.engine_facts import FACTS


@pytest.mark.parametrize(
    ("told", "found"),
    [
        (None, None),
        ([1, 0.5, "a", True, None], [1, 0.5, "a", True, None]),
        ({"a": (1, np.float32(0.5))}, {"a": [1, 0.5]}),
        (np.arange(4).reshape(2, 2), [[0, 1], [2, 3]]),
        (jnp.ones((1, 2), jnp.bfloat16), [[1.0, 1.0]]),
        (np.array(["a"]), ["a"]),
        (np.bool_(True), True),
    ],
)
def test_what_json_has(told: Any, found: Any) -> None:
    made = plain(told)
    assert made == found and repr(made) == repr(found)


@pytest.mark.parametrize(
    "told",
    [object(), {1: 2}, {"a": {1, 2}}, b"a", np.array([object()]), np.ones(1, complex), 1j],
    ids=range(7),
)
def test_what_json_does_not_have(told: Any) -> None:
    with pytest.raises(TypeError, match="is nothing that JSON has"):
        plain(told)


def test_what_no_message_holds() -> None:
    assert plain([-(2**63), 2**64 - 1]) == [-(2**63), 2**64 - 1]
    for number in (2**64, -(2**63) - 1):
        with pytest.raises(TypeError, match="has more than 64 bits"):
            plain([number])
    with pytest.raises(UnicodeEncodeError):
        plain({"a": "half of a pair: \ud800"})


class Tells(Feature):
    name = "tells"

    def took(self, step: Any) -> Any:
        told = self.options["told"]
        return told if isinstance(told, list) else {"r": told}


class Step:
    """As much of a step as is asked for."""

    outputs: Any = None
    result, step = property(lambda self: self), property(lambda self: self)
    needs = special = plan = None


def took(told: Any) -> Any:
    features = [Tells(FACTS, {"told": told})]
    side = EngineFeatures(features, [], None, *[lambda *a: None] * 3)
    step: Any = Step()
    return side.took(step, step, step)


def test_it_is_made_plain_before_it_leaves_the_engine() -> None:
    assert took(np.arange(2)) == {"tells": {"r": [0, 1]}}


def test_what_is_told_is_by_sequence() -> None:
    with pytest.raises(FeatureError, match="TypeError: list, not a mapping by sequence ids"):
        took([1])


def test_another_type_is_an_error_with_the_feature_and_the_type() -> None:
    told = r"`took` of feature tells: TypeError: \{1, 2\} \(set\) is nothing that JSON has"
    with pytest.raises(FeatureError, match=told):
        took({1, 2})
