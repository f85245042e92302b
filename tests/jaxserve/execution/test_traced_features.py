"""Mistakes in the traced half of a feature are told by the names of feature and method."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.execution.features import Feature, Need, make_features
from jaxserve.execution.features.traced import FeatureError, traced
from jaxserve.execution.layout import array, arrays
from jaxserve.execution.model_hooks import ComputeTokens, HookedFeatures
from jaxserve.execution.sample_rows import SampleFacts, sample_rows
from jaxserve.execution.step_inputs import BlobLayout
from jaxserve.execution.step_shape import StepShape
from tests.jaxserve.execution.engine_facts import FACTS, PAGE_SIZE

X = jnp.zeros((4, 3), jnp.bfloat16)


class Raises(Feature):
    name = "mine"
    special = False

    def layer(self, tokens: Any, layer: int, x: jax.Array) -> jax.Array:
        return x + jnp.zeros((4, 2))


class Narrow(Raises):
    def layer(self, tokens: Any, layer: int, x: jax.Array) -> jax.Array:
        return x[0]


class Wide(Raises):
    def layer(self, tokens: Any, layer: int, x: jax.Array) -> jax.Array:
        return x.astype(jnp.float32)


class Forgets(Raises):
    def layer(self, tokens: Any, layer: int, x: jax.Array) -> Any: ...


class Misplaced(Raises):
    def positions(self, tokens: Any, positions: jax.Array) -> jax.Array:
        return positions + jnp.zeros((2, 3), jnp.int32)


def hooked(feature: Feature) -> HookedFeatures:
    shape = StepShape(4, 0, 0, frozenset({"mine"}), 0)
    layout = BlobLayout(shape, [feature], FACTS, PAGE_SIZE)
    blob = layout.views(np.zeros(layout.size, np.int32))
    compute = ComputeTokens(*[jnp.zeros(4, jnp.int32)] * 4)
    return HookedFeatures([feature], layout, blob, compute, {}, {})


class OnePosition(Raises):
    def positions(self, tokens: Any, positions: jax.Array) -> jax.Array:
        return positions[:, :1]


class Fractions(Raises):
    def positions(self, tokens: Any, positions: jax.Array) -> jax.Array:
        return positions / 2


@pytest.mark.parametrize(
    ("kind", "told"), [(OnePosition, r"int32\[1, 1\]"), (Fractions, r"float32\[1, 4\]")]
)
def test_positions_are_whole_numbers_of_all_tokens(kind: type[Feature], told: str) -> None:
    wanted = rf"`positions` of feature mine: gives {told}, it must be int32\[axes, 4\]"
    with pytest.raises(FeatureError, match=wanted):
        hooked(kind(FACTS)).positions(jnp.zeros((1, 4), jnp.int32))


def test_positions() -> None:
    with pytest.raises(FeatureError, match=r"`positions` of feature mine: TypeError"):
        hooked(Misplaced(FACTS)).positions(jnp.zeros((1, 4), jnp.int32))


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (Raises, r"TypeError: .*shapes.*\(4, 3\).*\(4, 2\)"),
        (Narrow, r"gives bfloat16\[3\], it must be bfloat16\[4, 3\]"),
        (Wide, r"gives float32\[4, 3\], it must be bfloat16\[4, 3\]"),
        (Forgets, r"gives None, it must be bfloat16\[4, 3\]"),
    ],
)
def test_a_hook_of_the_model(kind: type[Feature], told: str) -> None:
    hooks = hooked(kind(FACTS)).hooks()
    assert hooks.layer is not None
    with pytest.raises(FeatureError, match=f"`layer` of feature mine: {told}"):
        hooks.layer(0, X)


@arrays
class Value:
    """A number a row."""

    value: Any = array("M", dtype="float32")


class Reports(Feature):
    name = "mine"
    outputs = Value

    def need(self, request: Any) -> Need:
        return Need.ALWAYS

    def after(self, inputs: Any, rows: Any, logits: Any, tokens: Any) -> Any:
        return Value(logits.mean())


class Bare(Reports):
    def after(self, inputs: Any, rows: Any, logits: Any, tokens: Any) -> Any:
        return logits.mean(axis=1)


class Adjusts(Feature):
    name = "mine"
    row = Value

    def logits(self, inputs: Any, rows: Any, logits: Any) -> Any:
        return logits[:, :-1]


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        (Reports, r"`after` of feature mine: gives Value\(value='float32\[\]'\), it must be "),
        (Bare, r"`after` of feature mine: gives float32\[2\], it must be Value"),
        (Adjusts, r"`logits` of feature mine: gives float32\[2, \d+\], it must be float32\[2, "),
    ],
)
def test_what_works_on_rows(kind: type[Feature], told: str) -> None:
    features = [*make_features(FACTS), kind(FACTS)]
    names = frozenset({"sampling", "mine"})
    shape = StepShape(2, 0, 0, names, 2)
    layout = BlobLayout(shape, features, FACTS, PAGE_SIZE)
    blob = layout.views(np.zeros(layout.size, np.int32))
    zeros = jnp.zeros(2, jnp.int32)
    known = SampleFacts(zeros, zeros, zeros, jnp.zeros((3, 8), jnp.int32))
    logits = jnp.zeros((2, FACTS.vocab_size))
    with pytest.raises(FeatureError, match=told):
        jax.eval_shape(lambda: sample_rows(features, layout, blob, known, logits))


def test_the_error_has_the_cause() -> None:
    with pytest.raises(FeatureError) as caught:
        traced(Raises(FACTS), "layer", None, 0, X, like=X)
    assert isinstance(caught.value.__cause__, TypeError)
