"""Hidden states of prompts, pooled, or the scores of labels of them: `LLM.embed`, `classify`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxserve.boundary.messages import AddGroup
from jaxserve.boundary.reports import POOLING
from jaxserve.errors import ValidationError
from jaxserve.execution.features.feature import (
    NO_OPTIONS,
    NUM_LIMBS,
    Chunk,
    Facts,
    Feature,
    Region,
    SpecialRow,
    TakenStep,
    Tokens,
)
from jaxserve.execution.layout import array, arrays
from jaxserve.params.pooling_params import PoolingParams
from jaxserve.request.request import Request, RequestState

if TYPE_CHECKING:
    from jaxserve.execution.step_shape import StepShape

MEAN, ONE = 2, 1  # how a token counts: as one of all, or as the only one
NORMED = -1  # the last layer's output behind the final norm
UNITS = (2.0**12, 1.0, 2.0**-12, 2.0**-24)  # of limbs
SHORTEST = 1e-12  # a shorter vector is divided by this instead of its length


@arrays
class PoolingRow:
    """The layer to pool: 0 the input of the first layer, i the output of the i-th, or NORMED."""

    layer: Any = array()


@arrays
class PoolingInputs:
    """Of each region token: its lane, and how its hidden state counts: MEAN, ONE or 0, not."""

    lane: Any = array("C")
    counts: Any = array("C")


@arrays
class PoolingOutputs:
    """Of each lane: the sum of the hidden states that count, or the scores of that sum.

    Of a deterministic engine the sum is [NUM_LIMBS * E], see `limbs`.
    """

    total: Any = array("N", "P", dtype="float32")


def limbs(x: jax.Array, wide: jax.Array) -> jax.Array:
    """float32[C, E] in numbers whose sums have the same bits in any order: [C, NUM_LIMBS * E].

    A wide row is cut into integers in units of 2^12, 1, 2^-12 and 2^-24 (Demmel and Nguyen, "Fast
    Reproducible Floating-Point Summation", 2013, with fixed units): up to 4,096 of them add up
    exactly in float32, below 2^24 in magnitude. Of other rows the first limb is the row itself.

    Args:
        x: the rows.
        wide: bool[C, 1], which of them are cut.
    """
    found, rest = [], x
    for unit in UNITS:
        whole = jnp.round(rest / unit)
        found.append(jnp.where(wide, whole, x if unit == UNITS[0] else 0.0))
        rest = rest - whole * unit
    return jnp.concatenate(found, axis=1)


def joined(total: np.ndarray, is_wide: bool) -> np.ndarray:
    """The float32[E] whose limbs' sums are float64[NUM_LIMBS * E]."""
    parts = np.asarray(total, np.float64).reshape(NUM_LIMBS, -1)
    if not is_wide:
        return parts[0].astype(np.float32)
    units = np.array(UNITS)[::-1, None]
    return (parts[::-1] * units).cumsum(axis=0)[-1].astype(np.float32)


class Pooling(Feature):
    """Sums hidden states of a chunk's tokens; the engine's side adds up the chunks of a prompt.

    A head of labels is linear: the scores of a sum are the sum of the scores.
    Being of the region alone it lies in the largest program and costs the others nothing.
    """

    name = POOLING
    setting = "enable_embeddings"
    token_row = PoolingRow
    inputs = PoolingInputs
    outputs = PoolingOutputs

    def __init__(self, facts: Facts, options: Mapping[str, Any] = NO_OPTIONS) -> None:
        super().__init__(facts, options)
        self._totals: dict[str, np.ndarray] = {}  # by sequence: of its chunks so far

    def took(self, step: TakenStep) -> dict[str, list[float]] | None:
        values = step.outputs.get(self.name)
        if values is None and not self._totals:
            return None
        ended = {request.request_id for request in step.seen.requests}
        if values is not None:
            for lane, (request, start, _) in enumerate(step.chunks):
                name, total = request.request_id, values.total[lane]
                if self._has_limbs:
                    total = total.astype(np.float64)
                # a request that was aborted while the step ran gets no report
                is_live = name in ended or request.state is not RequestState.FINISHED
                if request.asked.pooling is not None and is_live:
                    if start and name in self._totals:
                        total = self._totals[name] + total
                    self._totals[name] = total  # from the start again after a preemption
        return {
            one.request_id: self._vector(self._totals.pop(one.request_id), asked, one.num_prompt)
            for one in step.seen.requests
            if (asked := one.asked.pooling) is not None
        }

    def ended(self, sequence_id: str) -> None:
        self._totals.pop(sequence_id, None)

    def begins(self, asked: AddGroup) -> None:
        pooling = asked.pooling
        if self.facts.deterministic and self._is_scored and pooling and pooling.pooling == "mean":
            allowed = "last or cls: a deterministic engine has no scores of a mean"
            raise ValidationError("pooling", pooling.pooling, allowed)

    def needed_by_chunk(self, chunk: Chunk) -> bool:
        return chunk.request.asked.pooling is not None

    def token_row_of(self, request: Request) -> PoolingRow:
        pooling = request.asked.pooling
        layer = None if pooling is None else pooling.layer
        return PoolingRow(NORMED if layer is None else layer)

    def cache_key(self, request: Request) -> str:
        return ""

    def pack(self, inputs: PoolingInputs, rows: list[SpecialRow], chunks: list[Chunk]) -> None:
        begin = 0
        for lane, (request, start, length) in enumerate(chunks):
            inputs.lane[begin : begin + length] = lane
            pooling = request.asked.pooling
            if pooling is not None:
                positions = np.arange(start, start + length)
                counts = {
                    "mean": np.full(length, MEAN),
                    "last": ONE * (positions == request.num_prompt - 1),
                    "cls": ONE * (positions == 0),
                }
                inputs.counts[begin : begin + length] = counts[pooling.pooling]
            begin += length

    def embed(self, tokens: Tokens, x: jax.Array) -> jax.Array:
        tokens.kept["layer"] = tokens.values.layer
        tokens.kept["chosen"] = x
        return x

    def layer(self, tokens: Tokens, layer: int, x: jax.Array) -> jax.Array:
        wanted = tokens.values.layer == layer + 1
        tokens.kept["chosen"] = jnp.where(wanted[:, None], x, tokens.kept["chosen"])
        return x

    def region(self, inputs: PoolingInputs, region: Region) -> PoolingOutputs:
        is_normed = region.kept["layer"] == NORMED
        chosen = jnp.where(is_normed[:, None], region.hidden, region.kept["chosen"])
        # rows without a token may hold anything, and 0 * NaN is NaN
        counts = inputs.counts > 0
        chosen = jnp.where(counts[:, None], chosen, 0).astype(jnp.float32)
        if self._has_limbs:
            chosen = limbs(chosen, inputs.counts[:, None] == MEAN)
        lanes = jnp.arange(region.num_lanes)
        belongs = (inputs.lane == lanes[:, None]).astype(jnp.float32)
        total = jnp.matmul(belongs, chosen, precision=lax.Precision.HIGHEST)
        return PoolingOutputs(region.scores_of(total) if self._is_scored else total)

    @property
    def _is_scored(self) -> bool:
        return self.facts.model is not None and self.facts.model.head is not None

    @property
    def _has_limbs(self) -> bool:
        return self.facts.deterministic and not self._is_scored

    def cost(self, shape: StepShape) -> float:
        return 2.0 * shape.num_prefill * self.facts.hidden_size

    def _vector(self, total: np.ndarray, asked: PoolingParams, num_prompt: int) -> list[float]:
        """The vector of a prompt from the sum of its chunks' sums."""
        if self._has_limbs:
            total = joined(total, asked.pooling == "mean")
        if asked.pooling == "mean":
            total = total / np.float32(num_prompt)
        head = None if self.facts.model is None else self.facts.model.head
        if head is None:
            total = total[: asked.dimensions]
            if asked.use_activation is not False:
                total = total / np.maximum(np.linalg.norm(total), np.float32(SHORTEST))
        elif asked.use_activation is not False:
            total = _probabilities(total, head.activation)
        vector: list[float] = total.tolist()
        return vector


def _probabilities(scores: np.ndarray, activation: str) -> np.ndarray:
    """float32[L] -> float32[L], by the activation of a `Head`."""
    if activation == "none":
        return scores
    if activation == "sigmoid":
        # neither branch's exponential can overflow
        small = np.exp(-np.abs(scores))
        return np.where(scores >= 0, np.float32(1), small) / (np.float32(1) + small)
    powers = np.exp(scores - scores.max())
    return powers / powers.sum()
