"""A model's layers run one at a time, each with parameters of its own: what calibration needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.models.config import ModelConfig
from jaxserve.models.linear import PLAIN_LINEAR
from jaxserve.models.plain_forward import causal_attend
from jaxserve.models.protocol import AtLayer, Hooks, TokenRows
from jaxserve.models.registry import family_of
from jaxserve.models.sources import Place, Source, Stack


class Arrays:
    """Tensors in memory, read as those of a checkpoint are."""

    def __init__(self, tensors: Mapping[str, np.ndarray]):
        self.tensors = dict(tensors)

    def read_into(self, name: str, index: tuple[slice, ...], out: np.ndarray) -> None:
        """As `SafetensorsReader.read_into`."""
        out[...] = self.tensors[name][index].reshape(out.shape)


class LayerRun:
    """The model's layers in float32, one at a time, each with parameters of its own."""

    def __init__(self, config: ModelConfig):
        self.config = config
        family = family_of(config)
        self.source: Callable[..., Source | Stack] = family.source
        model = nnx.eval_shape(lambda: family.model(config, "float32", PLAIN_LINEAR))
        self._graph, state = nnx.split(model)
        self.flat = nnx.to_flat_state(state)
        self._run = jax.jit(self._traced, static_argnums=0)

    def places(self, layer: int | None) -> list[tuple[Place, Any]]:
        """Places and abstract parameters of a layer, or those outside the layers."""
        if layer is None:
            return [item for item in self.flat if item[0][0] != "blocks"]
        return [item for item in self.flat if item[0][:2] == ("blocks", layer)]

    def parameters(self, layer: int, tensors: Mapping[str, np.ndarray]) -> list[Any]:
        """A layer's parameters of its tensors."""
        arrays: Any = Arrays(tensors)
        made = []
        for place, variable in self.places(layer):
            shape = variable.get_value().shape
            whole = (slice(None),) * len(shape)
            is_matrix = variable.get_metadata("fill") is None
            source = self.source(place, self.config)
            made.append(source.read(arrays, shape, whole, np.dtype(np.float32), is_matrix))
        return made

    def embed(self, rows: np.ndarray) -> np.ndarray:
        """Rows [T, E] of the token table -> what enters the first layer."""
        filled = [
            (place, v.replace(jnp.asarray(rows)) if place == ("embedding",) else v)
            for place, v in self.flat
        ]
        model: Any = nnx.merge(self._graph, nnx.from_flat_state(filled))
        return np.asarray(model.embed(jnp.arange(len(rows))), np.float32)

    def __call__(
        self, layer: int, parameters: list[Any], x: np.ndarray
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """x [T, E] -> what leaves the layer, and what enters each projection [T, in]."""
        out, seen = self._run(layer, parameters, x)
        return np.asarray(out), {name: np.asarray(value) for name, value in seen.items()}

    def _traced(self, layer: int, parameters: list[Any], x: Any) -> tuple[Any, dict[str, Any]]:
        own = iter(parameters)
        filled = [
            (place, v.replace(next(own)) if place[:2] == ("blocks", layer) else v)
            for place, v in self.flat
        ]
        model: Any = nnx.merge(self._graph, nnx.from_flat_state(filled))
        seen: dict[str, Any] = {}

        def keep(name: str, layer: int, x: Any, y: Any) -> Any:
            seen[name] = x
            return y

        rows = TokenRows(jnp.arange(len(x))[None], hooks=Hooks(linear=keep))
        at = AtLayer(layer, rows, model.angles(rows)[layer], causal_attend(self.config))
        out, _ = model.blocks[layer](x, None, at)
        return out, seen
