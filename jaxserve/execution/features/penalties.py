"""Presence, frequency and repetition penalties, by the tokens that a sequence holds already."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax

from jaxserve.execution.features.feature import Feature, Need, Rows
from jaxserve.execution.layout import array, arrays
from jaxserve.request.request import Request
from jaxserve.sampling.penalties import apply_penalties, token_counts

if TYPE_CHECKING:
    from jaxserve.execution.step_shape import StepShape

PASSES = 6.0  # over [M, V]: both tables of counts written and read, the logits


@arrays
class PenaltyRow:
    """A row's penalties; 0, 0 and 1 are off."""

    presence: Any = array(dtype="float32")
    frequency: Any = array(dtype="float32")
    repetition: Any = array(dtype="float32")


class Penalties(Feature):
    """Counts the tokens of the device's history, so no other state has to follow it."""

    name = "penalties"
    row = PenaltyRow

    def need(self, request: Request) -> Need:
        return Need.ALWAYS if request.params.has_penalties else Need.NEVER

    def row_of(self, request: Request) -> PenaltyRow:
        params = request.params
        return PenaltyRow(
            params.presence_penalty, params.frequency_penalty, params.repetition_penalty
        )

    def logits(self, inputs: Any, rows: Rows, logits: jax.Array) -> jax.Array:
        row = rows.values[self.name]
        seen = rows.history[rows.slot]
        counts = token_counts(seen, rows.prompt_len, rows.position + 1, logits.shape[1])
        return apply_penalties(logits, counts, row.presence, row.frequency, row.repetition)

    def cost(self, shape: StepShape) -> float:
        return PASSES * shape.num_special * self.facts.vocab_size
