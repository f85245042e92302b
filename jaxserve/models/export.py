"""The tensors that a parameter of a model is made of: weight maps the other way."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxserve.models.sources import Source, Stack


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
    for name, count, first, order, copies in source.parts:
        part = rows[::copies, done : done + count]
        if order is not None:
            heads = part.reshape(len(part), count // len(order), len(order), *tail)
            natural = np.empty_like(heads)
            natural[:, :, list(order)] = heads
            part = natural.reshape(part.shape)
        found[name][first : first + len(part) * count] = part.reshape(len(part) * count, *tail)
        done += count
    return found
