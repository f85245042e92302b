"""States of the features that an engine was given while it serves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from jaxserve.execution.device_state import DeviceState
from jaxserve.execution.features import Feature


class OnDemandStates:
    """What `on_demand` features keep on the device, apart from the state of all programs.

    Programs that were compiled before do not know these arrays, so they are joined to the device
    state for the calls of those that do.

    Args:
        sharding: of all arrays.
    """

    def __init__(self, sharding: NamedSharding):
        self._sharding = sharding
        self._shapes: dict[str, Any] = {}
        self._states: dict[str, Any] = {}

    def add(self, features: Sequence[Feature]) -> None:
        """Take further features; their states begin as zeros."""
        for feature in features:
            shapes = feature.state()
            if shapes is not None:
                self._shapes[feature.name] = shapes
                self._states[feature.name] = self._zeros(shapes)

    def put(self, name: str, tree: Any) -> None:
        """Replace a feature's state.

        Raises:
            ValueError: other shapes or types than the feature has declared.
        """
        shapes = jax.tree.map(lambda x: (x.shape, jnp.dtype(x.dtype)), self._shapes[name])
        given = jax.tree.map(lambda x: (x.shape, jnp.dtype(x.dtype)), tree)
        if shapes != given:
            raise ValueError(f"the state of {name} is {shapes}, not {given}")
        self._states[name] = jax.device_put(tree, self._sharding)

    def join(self, state: DeviceState, names: frozenset[str]) -> DeviceState:
        """A device state with those of features; they are donated with it."""
        mine = {name: self._states.pop(name) for name in names & self._states.keys()}
        return state._replace(features=state.features | mine)

    def split(self, state: DeviceState) -> DeviceState:
        """Keep what a program has made of them; the rest of the device state."""
        rest = dict(state.features)
        self._states |= {name: rest.pop(name) for name in self._shapes if name in rest}
        return state._replace(features=rest)

    def drop(self) -> None:
        """Give back their memory."""
        for leaf in jax.tree.leaves(self._states):
            leaf.delete()
        self._states = {}

    def close(self) -> None:
        """Let go of them."""
        self._states = {}

    def make(self) -> None:
        """Have them as zeros again."""
        self._states = {name: self._zeros(shapes) for name, shapes in self._shapes.items()}

    def _zeros(self, shapes: Any) -> Any:
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
        return jax.device_put(zeros, self._sharding)
