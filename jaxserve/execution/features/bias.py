"""Values added to the logits of some tokens: `logit_bias`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxserve.execution.features.feature import Chunk, Facts, Feature, Need, Rows, SpecialRow
from jaxserve.execution.layout import array, arrays
from jaxserve.request import Request
from jaxserve.sampling_rules import MAX_BIAS_ENTRIES

if TYPE_CHECKING:
    from jaxserve.execution.shapes import StepShape


@arrays
class BiasInputs:
    """Triples of the step; unused ones name a row that does not exist."""

    row: Any = array(MAX_BIAS_ENTRIES)
    token: Any = array(MAX_BIAS_ENTRIES)
    value: Any = array(MAX_BIAS_ENTRIES, dtype="float32")


class Bias(Feature):
    """A step has room for a number of values; the scheduler sees that its rows need no more."""

    name = "bias"
    place = 10
    inputs = BiasInputs

    def __init__(self) -> None:
        self._entries: dict[int, tuple[np.ndarray, np.ndarray]] = {}  # by slot: tokens, values

    def need(self, request: Request) -> Need:
        return Need.ALWAYS if request.params.logit_bias else Need.NEVER

    def bind(self, request: Request, slot: int, facts: Facts) -> None:
        bias = request.params.logit_bias or {}
        tokens = np.fromiter(bias.keys(), np.int32, len(bias))
        self._entries[slot] = tokens, np.fromiter(bias.values(), np.float32, len(bias))

    def pack(
        self, inputs: BiasInputs, rows: list[SpecialRow], chunks: list[Chunk], facts: Facts
    ) -> None:
        inputs.row[:] = np.iinfo(np.int32).max
        begin = 0
        for place, _, slot in rows:
            tokens, values = self._entries[slot]
            end = begin + len(tokens)
            inputs.row[begin:end] = place
            inputs.token[begin:end] = tokens
            inputs.value[begin:end] = values
            begin = end

    def logits(self, inputs: BiasInputs, rows: Rows, logits: jax.Array) -> jax.Array:
        return logits.at[inputs.row, inputs.token].add(inputs.value, mode="drop")

    def cost(self, shape: StepShape, facts: Facts) -> float:
        return 2.0 * shape.num_special * facts.vocab_size
