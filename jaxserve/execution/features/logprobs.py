"""Log-probabilities of the sampled tokens and of the most likely ones beside them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax

from jaxserve.execution.features.feature import Facts, Feature, Need, Rows
from jaxserve.execution.layout import array
from jaxserve.request import Request
from jaxserve.sampling.logprobs import LogprobRows, score

if TYPE_CHECKING:
    from jaxserve.execution.shapes import StepShape

PASSES = 5.0  # over [M, V]: maximum, sum of exponentials, rank, blocks of the top-k


@dataclass(frozen=True, slots=True)
class LogprobOutputs:
    """Of each special row; see `jaxserve.sampling.logprobs.LogprobRows`."""

    sampled: Any = array("M", dtype="float32")
    rank: Any = array("M")
    top_ids: Any = array("M", "K")
    top_logprobs: Any = array("M", "K", dtype="float32")


class Logprobs(Feature):
    """Reports on the raw logits, whatever the tokens were drawn from."""

    name = "logprobs"
    outputs = LogprobOutputs

    def need(self, request: Request) -> Need:
        return Need.ALWAYS if request.params.needs_logprobs else Need.NEVER

    def after(
        self, inputs: Any, rows: Rows, logits: jax.Array, tokens: jax.Array, facts: Facts
    ) -> LogprobRows:
        return score(logits, tokens, facts.num_logprobs)

    def cost(self, shape: StepShape, facts: Facts) -> float:
        return shape.num_special * (PASSES * facts.vocab_size + 2 * facts.num_logprobs)
