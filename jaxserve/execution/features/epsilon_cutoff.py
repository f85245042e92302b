"""Tokens less likely than a fixed probability are not sampled: `epsilon_cutoff`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxserve.execution.features.feature import Feature, Need, Rows
from jaxserve.execution.features.sampling import Sampling
from jaxserve.execution.layout import array, arrays
from jaxserve.request.request import Request

if TYPE_CHECKING:
    from jaxserve.execution.step_shape import StepShape

PASSES = 4.0  # over [M, V]: maximum, sum of exponentials, the comparison


@arrays
class EpsilonRow:
    """The least probability of a row's tokens; 0 is off."""

    epsilon: Any = array(dtype="float32")


class EpsilonCutoff(Feature):
    """Truncation at a probability (Hewitt et al. 2022); the most likely token is always kept."""

    name = "epsilon_cutoff"
    row = EpsilonRow

    def need(self, request: Request) -> Need:
        wanted = request.params.epsilon_cutoff > 0.0 and not request.params.is_greedy
        return Need.ALWAYS if wanted else Need.NEVER

    def row_of(self, request: Request) -> EpsilonRow:
        return EpsilonRow(request.params.epsilon_cutoff)

    def logits(self, inputs: Any, rows: Rows, logits: jax.Array) -> jax.Array:
        temperature = jnp.maximum(rows.values[Sampling.name].temperature, 1e-5)
        probabilities = jax.nn.softmax(logits / temperature[:, None], axis=-1)
        best = logits == jnp.max(logits, axis=-1, keepdims=True)
        kept = best | (probabilities >= rows.values[self.name].epsilon[:, None])
        return jnp.where(kept, logits, -jnp.inf)

    def cost(self, shape: StepShape) -> float:
        return PASSES * shape.num_special * self.facts.vocab_size
