"""Log-probabilities of the prompt's own tokens: `prompt_logprobs`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxserve.boundary.prompt_spans import NO_ID
from jaxserve.boundary.reports import PROMPT_SCORES, TokenLogprobs
from jaxserve.execution.features.feature import (
    NO_OPTIONS,
    Chunk,
    Facts,
    Feature,
    Region,
    SpecialRow,
    TakenStep,
)
from jaxserve.execution.features.logprobs import scored_token
from jaxserve.execution.layout import array, arrays
from jaxserve.request.request import Request, RequestState
from jaxserve.sampling.logprobs import LogprobRows, score

if TYPE_CHECKING:
    from jaxserve.execution.step_shape import StepShape

PASSES = 6.0  # over [C, V]: the logits written, and what log-probabilities take
BLOCK = 64  # logits of so many region tokens are held at once


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

    name = PROMPT_SCORES
    inputs = PromptScoreInputs
    outputs = PromptScoreOutputs

    def __init__(self, facts: Facts, options: Mapping[str, Any] = NO_OPTIONS) -> None:
        super().__init__(facts, options)
        self._scored: dict[str, list[TokenLogprobs | None]] = {}  # by sequence, until reported

    def needed_by_chunk(self, chunk: Chunk) -> bool:
        return scores_prompt(chunk.request, chunk.start)

    def took(self, step: TakenStep) -> dict[str, list[TokenLogprobs | None]] | None:
        values: Any = step.outputs.get(self.name)
        if values is None and not self._scored:
            return None
        counts = Counter(request.request_id for request in step.seen.requests)
        begin = 0
        for chunk in step.chunks if values is not None else ():
            request = chunk.request
            num_seen = counts[request.request_id]
            # a request that was aborted while the step ran gets no report
            is_live = num_seen > 0 or request.state is not RequestState.FINISHED
            if is_live and scores_prompt(request, chunk.start, num_seen):
                self._take(chunk, begin, values)
            begin += chunk.length
        return {name: self._scored.pop(name) for name in counts if name in self._scored}

    def ended(self, sequence_id: str) -> None:
        self._scored.pop(sequence_id, None)

    def pack(self, inputs: PromptScoreInputs, rows: list[SpecialRow], chunks: list[Chunk]) -> None:
        begin = 0
        for request, start, length in chunks:
            following = request.prefill_tokens[start + 1 : start + length + 1]
            inputs.target[begin : begin + len(following)] = following
            begin += length

    def region(self, inputs: PromptScoreInputs, region: Region) -> PromptScoreOutputs:
        hidden, count = region.hidden, region.hidden.shape[0]
        block = min(BLOCK, count)
        padding = -count % block
        hidden = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(-1, block, hidden.shape[1])
        targets = jnp.pad(inputs.target, (0, padding)).reshape(-1, block)

        def one_block(operands: tuple[jax.Array, jax.Array]) -> LogprobRows:
            rows, wanted = operands
            return score(region.logits_of(rows), wanted, self.facts.num_logprobs)

        scored = lax.map(one_block, (hidden, targets))
        return PromptScoreOutputs(*(x.reshape(-1, *x.shape[2:])[:count] for x in scored))

    def _take(self, chunk: Chunk, begin: int, values: PromptScoreOutputs) -> None:
        """Keep the scores of a chunk's tokens; its first one is region token `begin`."""
        request = chunk.request
        most = request.params.prompt_logprobs
        assert most is not None
        scored = self._scored.setdefault(request.request_id, [])
        for offset in range(chunk.length):
            position = chunk.start + offset + 1  # the logits of one token score the next
            # a prompt that is prefilled again after a preemption has been scored before
            if position >= request.num_prompt or position - 1 < len(scored):
                continue
            token = request.prompt_token_ids[position]
            has_id = token != NO_ID
            scored.append(scored_token(values, begin + offset, token, most) if has_id else None)

    def cost(self, shape: StepShape) -> float:
        return shape.num_prefill * (PASSES * self.facts.vocab_size + 2 * self.facts.num_logprobs)


def scores_prompt(request: Request, start: int, num_new: int = 0) -> bool:
    """Whether a chunk that begins at `start` yields prompt logprobs that are still wanted.

    They are reported with the first token, so a request that recomputes more than its prompt after
    a preemption wants none.

    Args:
        request: the one that the chunk belongs to.
        start: position of the chunk's first token.
        num_new: output tokens that the host saw together with this chunk.
    """
    wanted = request.params.prompt_logprobs is not None
    return wanted and len(request.output_token_ids) == num_new and start < request.num_prompt - 1
