"""The tensors of a Hugging Face checkpoint, made of a loaded model: weight maps the other way."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from flax import nnx

from jaxserve.errors import ValidationError
from jaxserve.models.protocol import Model
from jaxserve.models.quant_array import QuantArray
from jaxserve.models.registry import family_of
from jaxserve.models.sources import Source, Stack


def hf_tensors(model: Model) -> Iterator[tuple[str, np.ndarray]]:
    """Name and value of every tensor, parameter by parameter.

    Raises:
        ValidationError: a weight is quantised: its tensors would be another checkpoint's.
    """
    family = family_of(model.config)
    _, state = nnx.split(model)
    for place, variable in nnx.to_flat_state(state):
        value = variable.get_value()
        if isinstance(value, QuantArray):
            name = ".".join(map(str, place))
            raise ValidationError("model", name, "weights that are not quantised")
        source = family.source(place, model.config)
        is_matrix = variable.get_metadata("fill") is None
        yield from tensors_of(source, np.asarray(value), is_matrix).items()


def tensors_of(source: Source | Stack, value: Any, is_matrix: bool) -> dict[str, np.ndarray]:
    """The tensors that `source.read` makes a parameter of."""
    if isinstance(source, Stack):
        found: dict[str, np.ndarray] = {}
        for one, expert in zip(source.sources, value, strict=True):
            found |= tensors_of(one, expert, is_matrix)
        return found
    tail = value.shape[-1:] if is_matrix else ()
    units = value.shape[0] // source.indices
    rows = value.reshape(units, sum(part.rows for part in source.parts), *tail)
    totals = source.tensors(value.shape, is_matrix)
    found = {name: np.empty(shape, value.dtype) for name, shape in totals.items()}
    done = 0
    for name, count, first, order in source.parts:
        part = rows[:, done : done + count]
        if order is not None:
            heads = part.reshape(units, count // len(order), len(order), *tail)
            natural = np.empty_like(heads)
            natural[:, :, list(order)] = heads
            part = natural.reshape(part.shape)
        found[name][first : first + units * count] = part.reshape(units * count, *tail)
        done += count
    return found
