"""How features take part in the model: their hooks, and what they keep and set aside."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxserve.execution.features import Feature, Tokens, overrides
from jaxserve.execution.features.traced import FeatureError, traced
from jaxserve.execution.step_inputs import Blob, BlobLayout, contained
from jaxserve.models.protocol import Hooks


class ComputeTokens(NamedTuple):
    """The T = B * Q + C tokens of a step, int32[T] each: decode rows, then the region."""

    tokens: jax.Array
    positions: jax.Array
    slots: jax.Array
    prompt_lens: jax.Array


class HookedFeatures:
    """The features of a program while it is traced.

    Args:
        features: of the engine.
        layout: of the program's blob.
        given: the blob, traced.
        compute: the tokens.
        buffers: of the features that have some, by their names.
        state: likewise what they have kept.

    Attributes:
        aside: arrays that features have set aside, by "feature.name".
        kept: what each feature's hooks have kept, by its name.
    """

    def __init__(
        self,
        features: Sequence[Feature],
        layout: BlobLayout,
        given: Blob,
        compute: ComputeTokens,
        buffers: dict[str, Any],
        state: dict[str, Any],
    ):
        self.aside: dict[str, jax.Array] = {}
        self.kept: dict[str, dict[str, jax.Array]] = {}
        self._state = state
        values = _values(layout, given)
        self._parts: list[tuple[Feature, Tokens]] = []
        for feature in contained(features, layout.shape):
            name = feature.name

            def tap(key: str, value: jax.Array, prefix: str = name) -> None:
                self.aside[f"{prefix}.{key}"] = value

            view = Tokens(
                compute.tokens,
                compute.positions,
                compute.slots,
                values.get(name),
                given.features.get(name),
                buffers.get(name),
                state.get(name),
                tap,
                self.kept.setdefault(name, {}),
            )
            self._parts.append((feature, view))

    def positions(self, positions: jax.Array) -> jax.Array:
        """What the model takes for the tokens' positions, of int32[1, T]."""
        for feature, tokens in self._parts:
            found = traced(feature, "positions", tokens, positions)
            if found.dtype != positions.dtype or found.shape[1:] != positions.shape[1:]:
                wanted = f"int32[axes, {positions.shape[1]}]"
                wrong = f"gives {found.dtype}{[*found.shape]}, it must be {wanted}"
                raise FeatureError(feature.name, "positions", wrong)
            positions = found
        return positions

    def last_seen(self, positions: jax.Array) -> jax.Array | None:
        """The last position that tokens of the region attend to, of their own, int32[C]; None:
        their own."""
        last = None
        for feature, tokens in self._parts:
            if overrides(feature, "ahead"):
                last = positions + traced(feature, "ahead", tokens, like=positions)
        return last

    def hooks(self) -> Hooks:
        """What the model calls; None where no feature has a hook."""
        return Hooks(*map(self._hook, ("embed", "linear", "layer", "operand")))

    def see_last(self, hidden: jax.Array, logits: jax.Array) -> None:
        """Show the last hidden states [T, E] and the raw logits float32[R, V] of the samples."""
        for feature, tokens in self._parts:
            if overrides(feature, "see_last"):
                traced(feature, "see_last", tokens, hidden, logits)

    def kept_of(self, samples: Callable[[jax.Array], jax.Array]) -> dict[str, dict[str, jax.Array]]:
        """What hooks of features that adjust have kept, of the tokens that are sampled behind.

        Args:
            samples: of an array [T, ...] those rows, [R, ...].
        """
        return {
            feature.name: {key: samples(x) for key, x in tokens.kept.items()}
            for feature, tokens in self._parts
            if overrides(feature, "adjust")
        }

    def _hook(self, kind: str) -> Callable[..., jax.Array] | None:
        """Calls one of the hooks of all features; each changes the last array that is given."""
        having = [(feature, view) for feature, view in self._parts if overrides(feature, kind)]

        def hook(*given: Any) -> jax.Array:
            *facts, x = given
            for feature, tokens in having:
                x = traced(feature, kind, tokens, *facts, x, like=x)
            return x

        return hook if having else None

    def next_state(self, hidden: jax.Array, adjusted: dict[str, Any]) -> dict[str, Any]:
        """What features keep for the next step; those that the program lacks keep what they had.

        Args:
            hidden: [T, E] last hidden states.
            adjusted: what `adjust` has made of states, by features' names.
        """
        kept = self._state | {name: adjusted[name] for name in adjusted if name in self._state}
        for feature, tokens in self._parts:
            if feature.name in kept and overrides(feature, "next_state"):
                state = kept[feature.name]
                kept[feature.name] = traced(feature, "next_state", tokens, hidden, like=state)
        return kept


def _values(layout: BlobLayout, given: Blob) -> dict[str, Any]:
    """By a feature's name its `token_row` of every token."""
    shape = layout.shape
    if not layout.token_table.width:
        return {}
    table = jnp.repeat(given.token_rows[: shape.num_decode], shape.num_queries, axis=0)
    if shape.num_prefill:
        # region tokens without a lane carry lane N
        lanes = jnp.minimum(given.step.token_lane, shape.num_lanes - 1)
        table = jnp.concatenate([table, given.token_rows[shape.num_decode :][lanes]])
    return layout.token_table.read(table)
