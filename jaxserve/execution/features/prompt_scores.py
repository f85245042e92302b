"""Log-probabilities of the prompt's own tokens: `prompt_logprobs`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.execution.features.feature import Chunk, Facts, Feature, Region, SpecialRow
from jaxserve.execution.features.logprobs import scored_token
from jaxserve.execution.layout import array, arrays
from jaxserve.messages import TokenLogprobs
from jaxserve.request import Request
from jaxserve.sampling.logprobs import LogprobRows, score

if TYPE_CHECKING:
    from jaxserve.execution.shapes import StepShape

PASSES = 6.0  # over [C, V]: the logits written, and what log-probabilities take
BLOCK = 64  # region tokens whose logits are held at once


@arrays
class PromptScoreInputs:
    """The prompt token after each region token."""

    target: Any = array("C")


@arrays
class PromptScoreOutputs:
    """Of each region token's successor; see `jaxserve.sampling.logprobs.LogprobRows`."""

    sampled: Any = array("C", dtype="float32")
    rank: Any = array("C")
    top_ids: Any = array("C", "K")
    top_logprobs: Any = array("C", "K", dtype="float32")


class PromptScores(Feature):
    """Scores every token of the prefill region, a block at a time to bound the logits."""

    name = "prompt_scores"
    place = 100
    of_region = True
    inputs = PromptScoreInputs
    outputs = PromptScoreOutputs

    def needed_by_chunk(self, chunk: Chunk) -> bool:
        return scores_prompt(chunk.request, chunk.start)

    def pack(
        self, inputs: PromptScoreInputs, rows: list[SpecialRow], chunks: list[Chunk], facts: Facts
    ) -> None:
        begin = 0
        for request, start, length in chunks:
            following = request.prefill_tokens[start + 1 : start + length + 1]
            inputs.target[begin : begin + len(following)] = following
            begin += length

    def region(self, inputs: PromptScoreInputs, region: Region, facts: Facts) -> LogprobRows:
        hidden, count = region.hidden, region.hidden.shape[0]
        block = min(BLOCK, count)
        padding = -count % block
        hidden = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(-1, block, hidden.shape[1])
        targets = jnp.pad(inputs.target, (0, padding)).reshape(-1, block)

        def one_block(operands: tuple[jax.Array, jax.Array]) -> LogprobRows:
            rows, wanted = operands
            return score(region.logits_of(rows), wanted, facts.num_logprobs)

        scored = lax.map(one_block, (hidden, targets))
        return LogprobRows(*(x.reshape(-1, *x.shape[2:])[:count] for x in scored))

    @staticmethod
    def report(
        values: PromptScoreOutputs, place: int, request: Request, token: int
    ) -> TokenLogprobs:
        """What a request is told of a token of its prompt; host side."""
        assert request.params.prompt_logprobs is not None
        return scored_token(values, place, token, request.params.prompt_logprobs)

    def cost(self, shape: StepShape, facts: Facts) -> float:
        return shape.num_prefill * (PASSES * facts.vocab_size + 2 * facts.num_logprobs)


def scores_prompt(request: Request, start: int) -> bool:
    """Whether a chunk that begins at `start` yields prompt logprobs that are still wanted.

    They are reported with the first token, so a request that recomputes more than its prompt after
    a preemption wants none.
    """
    wanted = request.params.prompt_logprobs is not None and not request.output_token_ids
    return wanted and start < request.num_prompt - 1
