"""Log-probabilities of the sampled tokens and of the most likely ones beside them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxserve.boundary.reports import LOGPROBS, TokenLogprobs
from jaxserve.execution.features.feature import Chunk, Feature, Need, Rows, SpecialRow, TakenStep
from jaxserve.execution.layout import array, arrays
from jaxserve.params.sampling_params import MAX_LOGPROB_TOKEN_IDS
from jaxserve.request.request import Request
from jaxserve.sampling.logprobs import score

if TYPE_CHECKING:
    from jaxserve.execution.step_shape import StepShape

PASSES = 5.0  # over [M, V]: maximum, sum of exponentials, rank, blocks of the top-k


@arrays
class LogprobInputs:
    """The log-probabilities that each special row asks for.

    Attributes:
        named: ids of tokens; 0 where there are fewer.
        of_kept: 1: the most likely tokens are taken from those that the row may get.
    """

    named: Any = array("M", MAX_LOGPROB_TOKEN_IDS)
    of_kept: Any = array("M")


@arrays
class LogprobOutputs:
    """Of each special row; see `jaxserve.sampling.logprobs.LogprobRows`.

    Attributes:
        named: of the tokens asked for by their ids.
    """

    sampled: Any = array("M", dtype="float32")
    rank: Any = array("M")
    top_ids: Any = array("M", "K")
    top_logprobs: Any = array("M", "K", dtype="float32")
    named: Any = array("M", MAX_LOGPROB_TOKEN_IDS, dtype="float32")


def scored_token(values: Any, row: int, token: int, count: int) -> TokenLogprobs:
    """The token itself, then the `count` most likely ones (-1: all there are).

    Args:
        values: outputs with the fields of `LogprobRows`.
        row: index of the token in them.
        token: id of the token.
        count: number of tokens beside it.
    """
    top = values.top_ids.shape[1] if count == -1 else count
    return TokenLogprobs(
        [token, *values.top_ids[row, :top].tolist()],
        [float(values.sampled[row]), *values.top_logprobs[row, :top].tolist()],
        [int(values.rank[row]), *range(1, top + 1)],
    )


class Logprobs(Feature):
    """Reports on the raw logits, whatever the tokens were drawn from.

    The report of a beam has only tokens that may follow it: the search continues with them.
    """

    name = LOGPROBS
    inputs = LogprobInputs
    outputs = LogprobOutputs

    def need(self, request: Request) -> Need:
        return Need.ALWAYS if request.params.needs_logprobs else Need.NEVER

    def pack(self, inputs: LogprobInputs, rows: list[SpecialRow], chunks: list[Chunk]) -> None:
        for place, request, _ in rows:
            ids = request.params.logprob_token_ids or ()
            inputs.named[place, : len(ids)] = ids
            inputs.of_kept[place] = request.is_beam

    def after(
        self, inputs: LogprobInputs, rows: Rows, logits: jax.Array, tokens: jax.Array
    ) -> LogprobOutputs:
        assert rows.adjusted is not None
        kept = (inputs.of_kept[:, None] == 0) | ~jnp.isneginf(rows.adjusted)
        scored = score(logits, tokens, self.facts.num_logprobs, kept)
        known = jnp.take_along_axis(logits, tokens[:, None], axis=1)
        named = jnp.take_along_axis(logits, inputs.named, axis=1)
        return LogprobOutputs(*scored, scored.sampled[:, None] + (named - known))

    def took(self, step: TakenStep) -> dict[str, TokenLogprobs] | None:
        seen, values = step.seen, step.outputs.get(self.name)
        if values is None:
            return None
        return {
            request.request_id: _told(
                values, step.special[seen.samples[entry]], request, seen.tokens[entry]
            )
            for entry, request in enumerate(seen.requests)
            if request.params.needs_logprobs
        }

    def cost(self, shape: StepShape) -> float:
        return shape.num_special * (PASSES * self.facts.vocab_size + 2 * self.facts.num_logprobs)


def _told(values: LogprobOutputs, place: int, request: Request, token: int) -> TokenLogprobs:
    """The report on a token that a request got."""
    named = request.params.logprob_token_ids or ()
    count = 0 if named else request.params.logprobs
    assert count is not None
    ids, logprobs, ranks = scored_token(values, place, token, count)
    for column, asked in enumerate(named):
        if asked not in ids:
            ids.append(asked)
            logprobs.append(float(values.named[place, column]))
            ranks.append(None)
    return TokenLogprobs(ids, logprobs, ranks)
