"""Values added to the logits of some tokens: `logit_bias`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxserve.execution.features.feature import (
    NO_OPTIONS,
    Chunk,
    Facts,
    Feature,
    Need,
    Rows,
    SpecialRow,
)
from jaxserve.execution.layout import array, arrays
from jaxserve.params.sampling_rules import MAX_BIAS_ENTRIES
from jaxserve.request.request import Request
from jaxserve.scheduling.turns import Turns

if TYPE_CHECKING:
    from jaxserve.execution.step_shape import StepShape


@arrays
class BiasInputs:
    """Triples of the step; unused ones name a row that does not exist."""

    row: Any = array(MAX_BIAS_ENTRIES)
    token: Any = array(MAX_BIAS_ENTRIES)
    value: Any = array(MAX_BIAS_ENTRIES, dtype="float32")


def num_values(request: Request) -> int:
    """Values that each sampling row of a request brings along."""
    return len(request.params.logit_bias or ())


class Bias(Feature):
    """A step has room for a number of values; requests take turns where that is too little."""

    name = "bias"
    inputs = BiasInputs

    def __init__(self, facts: Facts, options: Mapping[str, Any] = NO_OPTIONS) -> None:
        super().__init__(facts, options)
        self.resource = Turns(MAX_BIAS_ENTRIES, num_values)
        self._entries: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # by slot: tokens, values

    def need(self, request: Request) -> Need:
        return Need.ALWAYS if request.params.logit_bias else Need.NEVER

    def bind(self, request: Request, slot: int) -> None:
        bias = request.params.logit_bias or {}
        tokens = np.fromiter(bias.keys(), np.int32, len(bias))
        self._entries[slot] = tokens, np.fromiter(bias.values(), np.float32, len(bias))

    def pack(self, inputs: BiasInputs, rows: list[SpecialRow], chunks: list[Chunk]) -> None:
        inputs.row[:] = np.iinfo(np.int32).max
        inputs.token[:] = np.arange(
            len(inputs.token)
        )  # no place of those that are dropped is twice
        begin = 0
        for place, _, slot in rows:
            tokens, values = self._entries[slot]
            end = begin + len(tokens)
            inputs.row[begin:end] = place
            inputs.token[begin:end] = tokens
            inputs.value[begin:end] = values
            begin = end

    def logits(self, inputs: BiasInputs, rows: Rows, logits: jax.Array) -> jax.Array:
        # each place has one bias, so a GPU needs no atomics
        places = logits.at[inputs.row, inputs.token]
        return places.add(inputs.value, mode="drop", unique_indices=True)

    def cost(self, shape: StepShape) -> float:
        return 2.0 * shape.num_special * self.facts.vocab_size
